#pragma once

#include "bench/bench_layer.h"
#include "group/gatherer.h"
#include "tune/search/measurement.h"

namespace uniep::tool {

/// One rank's part in measuring schedules of a direction. Rank 0 leads: it names a schedule, all
/// run it together, and it learns the times of all.
class TuneRank {
 public:
  TuneRank(const BenchCase& bench, Pass pass, const Communicator& member, BenchDevice& device,
           const Schedule& baseline, bool record_timeline = false);

  /// Measures a schedule on all ranks. Called on rank 0.
  tune::Measurement measure(const Schedule& schedule);
  /// Lets the others go, and tells them whether it was interrupted: a signal need not have reached
  /// all of them. Called on rank 0.
  void finish(bool interrupted);
  /// Does what rank 0 says until it lets this rank go; returns what it told it then. Called on all
  /// other ranks.
  bool follow();

 private:
  struct Order {
    bool stop = false;
    bool interrupted = false;
    Schedule schedule;
  };
  Order agree(const Order& own) { return gatherer_.gather_one(own)[0]; }
  tune::Measurement run(const Schedule& schedule);

  Pass pass_;
  Gatherer gatherer_;
  BenchLayer layer_;
};

}  // namespace uniep::tool
