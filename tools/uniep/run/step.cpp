#include "run/step.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/check.h"
#include "common/interrupt.h"
#include "common/meeting.h"
#include "common/progress.h"
#include "group/communicator_impl.h"
#include "group/gatherer.h"
#include "layer/arguments.h"
#include "run/step_log.h"

namespace uniep::tool {
namespace {

using workload::Split;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

LayerOptions layer_options(const StepOptions& options, const std::optional<RowPool>& pool) {
  LayerOptions layer;
  layer.row_pool = pool;
  layer.record_timeline = options.record_timeline;
  layer.schedule = options.schedule;  // each call is given its own: nothing is to be looked up
  return layer;
}

/// One rank's part of all steps.
class RankRun {
 public:
  RankRun(const Split& split, const StepOptions& options, const Communicator& communicator,
          const Meeting& meeting, RankLog& log)
      : split_(split),
        options_(options),
        rank_(communicator.rank()),
        pool_(row_pool(layer_problem(split, options), options, communicator)),
        layer_(layer_problem(split, options), communicator, layer_options(options, pool_)),
        meeting_(meeting),
        log_(log) {}

  /// `measured` is false for the warm-up.
  void step(LayerResult& result, bool measured) {
    meeting_.all_here();
    const auto start = Clock::now();
    const RoutingPlan plan = layer_.plan(split_.topk_ids(rank_));
    if (measured) log_.plan_seconds.push_back(seconds_since(start));
    log_.note_routing(plan);

    const ForwardArgs forward = split_.forward_args(rank_, result);
    Saved saved;
    const auto run_forward = [&] {
      saved = layer_.forward(plan, forward, schedule_of(options_, Pass::kForward));
      return layer_.last_pass();
    };
    measure(run_forward, measured ? &log_.forward : nullptr);
    if (options_.passes == PassChoice::kForward) return;

    workload::clear_main_grad(split_, rank_, result);
    const BackwardArgs backward = split_.backward_args(rank_, result);
    if (!measures(options_.passes, Pass::kForward)) drop_timeline();
    const auto backward_pass = [&] { return run_backward(layer_, saved, backward, options_); };
    measure(backward_pass, measured ? &log_.backward : nullptr);
  }

  /// Overwrites this rank's part with NaNs, so that what a step forgets to write shows.
  void forget(LayerResult& result) const {
    constexpr bf16 kNan{0x7fff};
    std::ranges::fill(split_.forward_args(rank_, result).out, kNan);
    if (options_.passes == PassChoice::kForward) return;
    const BackwardArgs args = split_.backward_args(rank_, result);
    std::ranges::fill(args.dx, kNan);
    std::ranges::fill(args.dprobs, std::numeric_limits<float>::quiet_NaN());
    std::ranges::fill(args.dshared_probs, std::numeric_limits<float>::quiet_NaN());
    for (const WeightGrad& grad :
         {args.dw1, args.dw2, args.db1, args.db2, args.dshared_w1, args.dshared_w2}) {
      // Main gradients are added to: each step clears them.
      if (const auto* bf16s = std::get_if<ExpertMatrices<bf16>>(&grad)) {
        std::ranges::fill(bf16s->tensor(), kNan);
      }
    }
  }

  /// Only takes down what differs: a rank that threw here would leave the others waiting.
  void compare(LayerResult& first, LayerResult& again, int step) {
    if (log_.mismatch.empty()) {
      log_.mismatch = difference(split_, rank_, options_.passes, first, again, step);
    }
  }

  bool is_interrupted() { return log_.interrupted = meeting_.ask_leader(Interrupt::requested()); }

  void keep_timeline() { log_.timeline = layer_.take_timeline(); }
  void note_pool() { log_.pool = pool_use(pool_); }
  void drop_timeline() { layer_.take_timeline(); }

 private:
  /// Ranks begin together, so that none is charged for another's preparations.
  template <class Call>
  void measure(const Call& pass, PassLog* log) {
    meeting_.all_here();
    const auto start = Clock::now();
    const PassStats stats = pass();
    if (log == nullptr) return;
    log->seconds.push_back(seconds_since(start));
    log->stats.push_back(stats);
  }

  const Split& split_;
  const StepOptions& options_;
  int rank_;
  const std::optional<RowPool> pool_;
  Layer layer_;
  const Meeting& meeting_;
  RankLog& log_;
};

/// All steps of a rank, as far as it is not interrupted: what the first computed goes to `result`,
/// the others' to `again`.
void run_rank(RankRun& run, const StepOptions& options, LayerResult& result, LayerResult& again,
              const std::function<void()>& advance) {
  for (int i = 0; i <= options.repeat; ++i) {
    run.drop_timeline();
    if (i > 1) run.forget(again);
    run.step(i == 0 ? result : again, i > 0);
    if (i > 0) run.compare(result, again, i);
    advance();
    if (run.is_interrupted()) break;
  }
  run.keep_timeline();
  run.note_pool();
}

template <class T>
std::span<const T> constant(std::span<T> s) {
  return s;
}

/// What two calls did together.
void add(PassStats& stats, const PassStats& more) {
  stats.elapsed_s += more.elapsed_s;
  stats.launches += more.launches;
  for (std::size_t i = 0; i < stats.stages.size(); ++i) {
    stats.stages[i].tasks += more.stages[i].tasks;
    stats.stages[i].busy_s += more.stages[i].busy_s;
    stats.stages[i].wait_s += more.stages[i].wait_s;
    stats.stages[i].link_s += more.stages[i].link_s;
  }
}

}  // namespace

std::string schedules_text(const Schedule& forward, const Schedule& backward,
                           const std::string& origin) {
  std::string text = to_string(forward);
  if (backward != forward) text += cat("; backward ", to_string(backward));
  return origin.empty() ? text : cat(text, " (", origin, ")");
}

std::string schedule_text(const StepOptions& options) {
  return schedules_text(options.schedule, schedule_of(options, Pass::kBackward),
                        options.schedule_origin);
}

Problem layer_problem(const Split& split, const StepOptions& options) {
  Problem problem = split.problem();
  problem.capacity_rows = options.capacity_rows;
  options.kept.apply_to(problem);
  return problem;
}

void complete_result(Gatherer& gatherer, const Split& split, int rank, bool backward,
                     LayerResult& result) {
  gatherer.complete(result.out, constant(split.forward_args(rank, result).out));
  if (!backward) return;
  const BackwardArgs b = split.backward_args(rank, result);
  gatherer.complete(result.dx, constant(b.dx));
  gatherer.complete(result.dprobs, constant(b.dprobs));
  const auto complete = [&](std::vector<bf16>& rounded, std::vector<float>& main,
                            const WeightGrad& own) {
    if (const auto* bf16s = std::get_if<ExpertMatrices<bf16>>(&own)) {
      gatherer.complete(rounded, constant(bf16s->tensor()));
    } else {
      gatherer.complete(main, constant(std::get<ExpertMatrices<float>>(own).tensor()));
    }
  };
  complete(result.dw1, result.main_dw1, b.dw1);
  complete(result.dw2, result.main_dw2, b.dw2);
  if (split.problem().bias) {
    complete(result.db1, result.main_db1, b.db1);
    complete(result.db2, result.main_db2, b.db2);
  }
  if (split.problem().shared_experts == 0) return;
  gatherer.complete(result.dshared_probs, constant(b.dshared_probs));
  complete(result.dshared_w1, result.main_dshared_w1, b.dshared_w1);
  complete(result.dshared_w2, result.main_dshared_w2, b.dshared_w2);
}

std::optional<RowPool> row_pool(const Problem& problem, const StepOptions& options,
                                const Communicator& member) {
  if (options.row_pool == 0) return std::nullopt;
  return RowPool(problem, member, {.bytes = options.row_pool});
}

PoolUse pool_use(const std::optional<RowPool>& pool) {
  if (!pool) return {};
  return {.pages = pool->pages(),
          .page_bytes = pool->page_bytes(),
          .most_held = pool->pages() - pool->fewest_free_pages()};
}

PoolUse fullest(const std::vector<PoolUse>& pools) {
  return *std::ranges::max_element(pools, {}, &PoolUse::most_held);
}

PassStats run_backward(Layer& layer, Saved& saved, const BackwardArgs& args,
                       const StepOptions& options) {
  const Schedule& schedule = schedule_of(options, Pass::kBackward);
  if (!options.defer_weights) {
    layer.backward(saved, args, schedule);
    layer.synchronize();
    return layer.last_pass();
  }
  layer.backward_data(saved, data_args(args), schedule);
  layer.synchronize();
  PassStats stats = layer.last_pass();
  layer.backward_weights(saved, weights_args(args), schedule);
  layer.synchronize();
  add(stats, layer.last_pass());
  return stats;
}

StepReport run_steps(const LayerData& layer, const StepOptions& options) {
  const Split split(layer, options.ranks);
  const workload::ResultTensors tensors{.backward = options.passes != PassChoice::kForward,
                                        .main_grad = options.main_grad,
                                        .ranks = options.ranks};
  StepReport report;
  report.result = workload::make_result(layer, tensors);
  LayerResult again = workload::make_result(layer, tensors);
  std::vector<RankLog> logs(static_cast<std::size_t>(options.ranks));
  ThreadMeeting together(options.ranks);
  Progress progress(cat("running ", options.ranks, options.ranks == 1 ? " rank" : " ranks"),
                    options.repeat + 1);

  run_ranks(Communicator::cpu_group(options.ranks, options.hosts), [&](Communicator& communicator) {
    const Leave leave(together.barrier());
    const Meeting meeting = together.of_rank(communicator.rank());
    RankRun run(split, options, communicator, meeting,
                logs[static_cast<std::size_t>(communicator.rank())]);
    run_rank(run, options, report.result, again, [&] {
      if (communicator.rank() == 0) progress.advance();
    });
  });
  combine_logs(std::move(logs), options, report);
  return report;
}

StepReport run_member_steps(const LayerData& layer, const StepOptions& options,
                            const Communicator& member) {
  const Split split(layer, member.size());
  const bool backward = options.passes != PassChoice::kForward;
  const workload::ResultTensors tensors{
      .backward = backward, .main_grad = options.main_grad, .ranks = member.size()};
  StepReport report;
  report.result = workload::make_result(layer, tensors);
  LayerResult again = workload::make_result(layer, tensors);
  Gatherer gatherer(member.impl()->bootstrap());
  RankLog log;
  {
    std::optional<Progress> progress;
    if (member.rank() == 0) {
      progress.emplace(cat("running ", member.size(), " processes"), options.repeat + 1);
    }
    const Meeting meeting = meeting_of(gatherer);
    RankRun run(split, options, member, meeting, log);
    run_rank(run, options, report.result, again, [&] {
      if (progress) progress->advance();
    });
  }
  combine_logs(gather_logs(gatherer, log), options, report);
  complete_result(gatherer, split, member.rank(), backward, report.result);
  return report;
}

}  // namespace uniep::tool
