#include "tuning/tune_rank.h"

#include <algorithm>

#include "base/env.h"
#include "tune/book/auto_schedule.h"

namespace uniep::tool {

TuneRank::TuneRank(const BenchCase& bench, Pass pass, const Communicator& member,
                   BenchDevice& device, const Schedule& baseline, bool record_timeline)
    : pass_(pass),
      gatherer_(device.bootstrap(member),
                tune::limit_of_search_ms(env_timeout_ms(), member.rank())),
      layer_(bench, pass == Pass::kBackward, member, device, record_timeline) {
  layer_.keep_baseline(baseline);
  if (pass == Pass::kBackward) layer_.prepare_backward(baseline);
}

tune::Measurement TuneRank::measure(const Schedule& schedule) {
  return run(agree({.stop = false, .interrupted = false, .schedule = schedule}).schedule);
}

void TuneRank::finish(bool interrupted) {
  agree({.stop = true, .interrupted = interrupted, .schedule = {}});
}

bool TuneRank::follow() {
  for (;;) {
    const Order order = agree({});
    if (order.stop) return order.interrupted;
    run(order.schedule);
  }
}

tune::Measurement TuneRank::run(const Schedule& schedule) {
  struct OfRank {
    PassStats stats;
    std::int64_t differing;
  };
  OfRank own{layer_.run(pass_, schedule), 0};
  layer_.layer().take_timeline();  // the figures are in the statistics
  own.stats = layer_.layer().last_pass();
  own.differing = layer_.count_differing(pass_);
  tune::Measurement all;
  for (const OfRank& of_rank : gatherer_.gather_one(own)) {
    all.seconds = std::max(all.seconds, of_rank.stats.elapsed_s);
    all.differing += of_rank.differing;
    all.by_rank.push_back(of_rank.stats);
  }
  return all;
}

}  // namespace uniep::tool
