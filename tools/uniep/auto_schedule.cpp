#include "auto_schedule.h"

#include <iostream>

#include "gatherer.h"
#include "tune_key.h"

namespace uniep::tool {
namespace {

/// Made when it is first asked, and kept: entries are read once, and the model is asked once.
tune::ScheduleBook& book_of(const tune::TuneKey& key, bool speaks) {
  static tune::ScheduleBook book = [&] {
    tune::TunedEntries cached = tune::TuneCache(tune::TuneCache::default_path()).load();
    tune::TunedEntries shipped = tune::shipped_entries();
    for (const auto* entries : {&cached, &shipped}) {
      for (const std::string& p : entries->problems) {
        if (speaks) std::cerr << "uniep: " << p << '\n';
      }
    }
    return tune::ScheduleBook(std::move(cached.entries), std::move(shipped.entries),
                              tune::shipped_profile_of(key.backend, key.device));
  }();
  return book;
}

}  // namespace

tune::ScheduleChoice look_up(Backend backend, const Problem& problem, int ranks,
                             std::int64_t tokens, double skew, Pass pass, bool speaks) {
  const tune::TuneKey key = tune_key(backend, problem, ranks, tokens, skew, pass);
  return book_of(key, speaks).choose(key, problem, this_place(backend));
}

tune::ScheduleChoice agree_on(const tune::ScheduleChoice& own, Bootstrap& bootstrap) {
  return Gatherer(bootstrap).gather_one(own)[0];
}

}  // namespace uniep::tool
