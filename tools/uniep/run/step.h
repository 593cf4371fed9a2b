#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/layer_data.h"
#include "common/step_choices.h"
#include "uniep/layer.h"
#include "workload/split.h"
#include "workload/synthetic.h"

namespace uniep {
class Gatherer;
}

namespace uniep::tool {

struct StepOptions {
  int ranks = 1;
  int hosts = 1;  ///< that they are on
  Schedule schedule;
  std::optional<Schedule> backward_schedule{};  ///< where it is another than `schedule`
  std::string schedule_origin{};                ///< where they were looked up; empty: given
  std::int64_t capacity_rows = 0;               ///< Problem::capacity_rows
  KeptFlags kept{};                             ///< what forward keeps
  std::int64_t row_pool = 0;                    ///< in a row pool of so many bytes; 0: without
  std::string backend = "cpu";                  ///< for headers and files
  PassChoice passes = PassChoice::kBoth;
  bool main_grad = false;        ///< weight gradients as fp32 sums, from zeros
  bool defer_weights = false;    ///< and by a call of their own, backward_weights
  int repeat = 1;                ///< measured steps, after one that is not
  bool record_timeline = false;  ///< of the last step
};

/// The schedule of a direction.
inline const Schedule& schedule_of(const StepOptions& options, Pass pass) {
  const bool own = pass == Pass::kBackward && options.backward_schedule;
  return own ? *options.backward_schedule : options.schedule;
}

/// The words of reports: "launch=...; backward launch=... (ORIGIN)", as far as there is something
/// to say.
std::string schedules_text(const Schedule& forward, const Schedule& backward,
                           const std::string& origin);
std::string schedule_text(const StepOptions& options);

/// What the measured steps say about one direction.
struct PassRecord {
  Pass pass = Pass::kForward;
  std::vector<double> seconds;                ///< a step: wall time of the slowest rank
  std::vector<std::vector<PassStats>> stats;  ///< [step][rank]
};

/// How full a rank's row pool was.
struct PoolUse {
  std::int64_t pages = 0;  ///< 0: there was none
  std::int64_t page_bytes = 0;
  std::int64_t most_held = 0;  ///< pages that were held at a time
};

struct StepReport {
  LayerResult result;              ///< the same bits in every step
  int steps = 0;                   ///< that were measured
  bool interrupted = false;        ///< by a signal, so that these may be fewer than asked for
  std::vector<PassRecord> passes;  ///< those that were asked for
  std::vector<double> plan_seconds;
  std::vector<std::vector<TimelineEvent>> timeline;  ///< [rank]
  std::vector<std::int64_t> rows_per_expert;         ///< by global expert
  std::vector<Traffic> traffic;                      ///< [rank]
  PoolUse pool{};                                    ///< of the rank that held most
};

/// Runs a layer's step (plan, forward, backward) `repeat` times on as many ranks as asked for, all
/// of them threads of this process. A backward pass alone still needs its forward pass, which then
/// goes unmeasured. Ends after a step where an Interrupt was requested. Throws Error(kInternal)
/// where two steps differ by a bit.
StepReport run_steps(const LayerData& layer, const StepOptions& options);

/// `run_steps` for this process' CPU rank, together with the processes of the other ranks; the
/// report is the same on all of them.
StepReport run_member_steps(const LayerData& layer, const StepOptions& options,
                            const Communicator& member);

/// Collective: brings every rank's part of the result, of which each has computed its own, to all.
void complete_result(Gatherer& gatherer, const workload::Split& split, int rank, bool backward,
                     LayerResult& result);

/// The problem of the ranks' layers.
Problem layer_problem(const workload::Split& split, const StepOptions& options);

/// The pool of a rank, if the options have one; and what it says in the end.
std::optional<RowPool> row_pool(const Problem& problem, const StepOptions& options,
                                const Communicator& member);
PoolUse pool_use(const std::optional<RowPool>& pool);
/// The use of the pool that held most.
PoolUse fullest(const std::vector<PoolUse>& pools);

/// A backward pass in one call or in two, awaited, and what it did.
PassStats run_backward(Layer& layer, Saved& saved, const BackwardArgs& args,
                       const StepOptions& options);

/// Something that runs steps, such as `run_steps`.
using StepRunner = std::function<StepReport(const LayerData&, const StepOptions&)>;

}  // namespace uniep::tool
