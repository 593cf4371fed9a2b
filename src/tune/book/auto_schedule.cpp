#include "tune/book/auto_schedule.h"

#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "base/bytes.h"
#include "base/check.h"
#include "group/agreement.h"
#include "tune/book/tune_key.h"

namespace uniep::tune {
namespace {

std::shared_ptr<ScheduleBook> make_book(const std::string& path, const TuneKey& key) {
  TunedEntries cached = TuneCache(path).load();
  TunedEntries shipped = shipped_entries();
  for (const TunedEntries* entries : {&cached, &shipped}) {
    for (const std::string& problem : entries->problems) std::cerr << "uniep: " << problem << '\n';
  }
  return std::make_shared<ScheduleBook>(std::move(cached.entries), std::move(shipped.entries),
                                        profile_of_passes(key.backend, key.device));
}

/// A book of each cache file and device, since programs change the environment.
struct Books {
  using Name = std::tuple<std::string, Backend, std::string>;
  std::mutex mutex;
  std::map<Name, std::shared_ptr<ScheduleBook>> by_name;
};

Books& books() {
  static Books all;
  return all;
}

/// Kept as long as the process, or until caches are read again.
std::shared_ptr<ScheduleBook> book_for(const TuneKey& key) {
  const std::string path = TuneCache::default_path();
  const std::scoped_lock lock(books().mutex);
  std::shared_ptr<ScheduleBook>& book = books().by_name[{path, key.backend, key.device}];
  if (book == nullptr) book = make_book(path, key);
  return book;
}

ScheduleChoice look_up(Backend backend, const Problem& problem, const RankLayout& layout,
                       double skew, Pass pass) {
  const TuneKey key = tune_key(backend, problem, layout, problem.max_tokens, skew, pass);
  return book_for(key)->choose(key, problem, this_place(backend));
}

}  // namespace

void read_caches_again() {
  const std::scoped_lock lock(books().mutex);
  books().by_name.clear();
}

std::string origin_text(const LayerSchedules& s) {
  return cat("auto: forward ", name(s.forward.origin), ", backward ", name(s.backward.origin));
}

LayerSchedules look_up_schedules(Backend backend, const Problem& problem, const RankLayout& layout,
                                 double skew) {
  return {look_up(backend, problem, layout, skew, Pass::kForward),
          look_up(backend, problem, layout, skew, Pass::kBackward)};
}

int limit_of_search_ms(int limit_ms, int rank) {
  return limit_ms + (rank == 0 ? 0 : kLongestChoiceMs);
}

LayerSchedules agree_on_schedules(Bootstrap& bootstrap, int rank, int limit_ms, int choice_ms,
                                  const std::string& call,
                                  const std::function<LayerSchedules()>& choose) {
  // Only rank 0, and only while it chooses, is waited for as long as a choice may take.
  if (choice_ms > 0) agree(bootstrap, limit_ms, Stage::kPlan, call, [] {});
  std::string chosen;
  const auto choose_first = [&] {
    if (rank == 0) chosen = to_bytes(choose());
  };
  const int second_limit_ms = rank == 0 ? limit_ms : limit_ms + choice_ms;
  const auto agreed = from_bytes<LayerSchedules>(
      agree(bootstrap, second_limit_ms, Stage::kPlan, call, choose_first, chosen)[0]);
  ensure(agreed.has_value(), "rank 0 sent no schedules");
  return *agreed;
}

}  // namespace uniep::tune
