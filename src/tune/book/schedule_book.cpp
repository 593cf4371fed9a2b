#include "tune/book/schedule_book.h"

#include <algorithm>

#include "base/check.h"
#include "base/env.h"
#include "tune/book/model_pick.h"
#include "tune/files/shipped_files.h"
#include "tune/model/cost_model.h"

namespace uniep::tune {

const char* name(ChoiceOrigin origin) {
  switch (origin) {
    case ChoiceOrigin::kGiven:
      return "given";
    case ChoiceOrigin::kCache:
      return "cache";
    case ChoiceOrigin::kShipped:
      return "shipped";
    case ChoiceOrigin::kModel:
      return "model";
    case ChoiceOrigin::kDefault:
      break;
  }
  return "default";
}

namespace {

/// A shipped schedule was found with a driver and a version that need not be this machine's.
TuneKey anywhere(TuneKey key) {
  key.driver.clear();
  key.library.clear();
  key.spare_sms = 0;
  return key;
}

TuneKey of_any_version(TuneKey key) {
  key.library.clear();
  return key;
}

/// What a user tuned under other versions of uniep counts too: else each release would forget it.
/// The latest is first, for of equals the first is found.
std::vector<TunedEntry> of_any_version(std::vector<TunedEntry> entries) {
  for (TunedEntry& e : entries) e.key = of_any_version(std::move(e.key));
  std::ranges::stable_sort(entries, std::ranges::greater{}, &TunedEntry::date);
  return entries;
}

}  // namespace

ScheduleBook::ScheduleBook(std::vector<TunedEntry> cached, std::vector<TunedEntry> shipped,
                           std::optional<MachineProfile> profile)
    : cached_(std::move(cached)),
      of_any_version_(of_any_version(cached_)),
      shipped_(std::move(shipped)),
      profile_(std::move(profile)) {
  for (TunedEntry& e : shipped_) e.key = anywhere(std::move(e.key));
}

ScheduleChoice ScheduleBook::choose(const TuneKey& key, const Problem& problem,
                                    const Place& place) {
  const std::scoped_lock lock(mutex_);
  const Situation situation{key, problem.row_align, place.max_workers};
  const auto known = chosen_.find(situation);
  if (known != chosen_.end()) return known->second;
  Problem of_bucket = problem;
  of_bucket.max_tokens = key.tokens;
  of_bucket.capacity_rows = 0;
  return chosen_.emplace(situation, find(key, of_bucket, place)).first->second;
}

std::optional<ScheduleChoice> ScheduleBook::find_tuned(const TuneKey& key, const Problem& problem,
                                                       const Place& place) const {
  const auto usable = [&](const TunedEntry* entry) {
    return entry != nullptr && !invalid_reason(entry->schedule, problem, place);
  };
  const TunedEntry* cached = find_entry(cached_, key);
  if (usable(cached)) return ScheduleChoice{cached->schedule, ChoiceOrigin::kCache};
  const TunedEntry* of_another_version = find_entry(of_any_version_, of_any_version(key));
  if (usable(of_another_version)) {
    return ScheduleChoice{of_another_version->schedule, ChoiceOrigin::kCache};
  }
  const TunedEntry* shipped = find_entry(shipped_, anywhere(key));
  if (usable(shipped)) return ScheduleChoice{shipped->schedule, ChoiceOrigin::kShipped};
  return std::nullopt;
}

ScheduleChoice ScheduleBook::find(const TuneKey& key, const Problem& problem,
                                  const Place& place) const {
  if (const auto tuned = find_tuned(key, problem, place)) return *tuned;
  if (const auto plain = key_of_plain_experts(key)) {
    if (const auto tuned = find_tuned(*plain, problem, place)) return *tuned;
  }
  const Schedule fallback = default_schedule_for(problem, place);
  if (profile_ && !invalid_reason(fallback, problem, place)) {
    return {quick_pick(problem, key, place, *profile_), ChoiceOrigin::kModel};
  }
  return {fallback, ChoiceOrigin::kDefault};
}

TunedEntries shipped_entries() {
  TunedEntries all;
  for (const ShippedFile& file : shipped_schedules()) {
    TunedEntries of_file = parse_tuned(file.text, cat("tuned/", file.name, ".json"));
    std::ranges::move(of_file.entries, std::back_inserter(all.entries));
    std::ranges::move(of_file.problems, std::back_inserter(all.problems));
  }
  return all;
}

std::optional<MachineProfile> shipped_profile_of(Backend backend, std::string_view device) {
  for (const ShippedFile& file : shipped_profiles()) {
    MachineProfile profile = shipped_profile(file.name);
    if (profile.backend == backend && device.starts_with(profile.device)) return profile;
  }
  return std::nullopt;
}

std::optional<MachineProfile> profile_of_passes(Backend backend, std::string_view device) {
  const std::optional<MachineProfile> shipped = shipped_profile_of(backend, device);
  if (!shipped || backend != Backend::kCuda) return shipped;
  return with_spare_workers(*shipped, env_spare_sms());
}

}  // namespace uniep::tune
