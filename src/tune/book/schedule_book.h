#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "schedule/constraints.h"
#include "tune/book/cache.h"
#include "tune/model/machine_profile.h"
#include "uniep/problem.h"

namespace uniep::tune {

/// Where a schedule came from.
enum class ChoiceOrigin { kGiven, kCache, kShipped, kModel, kDefault };
const char* name(ChoiceOrigin origin);

struct ScheduleChoice {
  Schedule schedule;
  ChoiceOrigin origin = ChoiceOrigin::kDefault;
};

/// Looks up schedules: what was tuned on this machine with this version of uniep, then with any
/// version, then what is shipped, then the same of plain experts for others with a gate, whose
/// products have the same sizes (key_of_plain_experts), then the cost model's pick among presets
/// and their neighbours where the machine has a profile, then the default. Nothing is measured. The
/// model is asked once for each situation; everything else is a search in memory.
class ScheduleBook {
 public:
  ScheduleBook(std::vector<TunedEntry> cached, std::vector<TunedEntry> shipped,
               std::optional<MachineProfile> profile);

  /// `problem` and `place` say what can run; an entry that cannot is passed over. Of the problem,
  /// what the key has not counts only for that: `max_tokens` is the key's `tokens`.
  ScheduleChoice choose(const TuneKey& key, const Problem& problem, const Place& place);

 private:
  /// All that a choice depends on.
  struct Situation {
    TuneKey key;
    int row_align;
    int max_workers;
    friend auto operator<=>(const Situation&, const Situation&) = default;
  };

  ScheduleChoice find(const TuneKey& key, const Problem& problem, const Place& place) const;
  /// The choice among what was tuned; nothing if no entry can run.
  std::optional<ScheduleChoice> find_tuned(const TuneKey& key, const Problem& problem,
                                           const Place& place) const;

  std::vector<TunedEntry> cached_;
  std::vector<TunedEntry> of_any_version_;  ///< the same, without the version that stored them
  std::vector<TunedEntry> shipped_;
  std::optional<MachineProfile> profile_;
  std::mutex mutex_;
  std::map<Situation, ScheduleChoice> chosen_;
};

/// All entries of tuned/*.json.
TunedEntries shipped_entries();

/// The shipped profile of a device, as `TuneKey::device` names it; nothing where there is none.
std::optional<MachineProfile> shipped_profile_of(Backend backend, std::string_view device);

/// The shipped profile as passes of this process run: without the SMs that UNIEP_SPARE_SMS leaves.
std::optional<MachineProfile> profile_of_passes(Backend backend, std::string_view device);

}  // namespace uniep::tune
