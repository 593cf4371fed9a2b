#include "run/step_log.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <variant>

#include "base/check.h"

namespace uniep::tool {
namespace {

template <class T>
bool same_bits(std::span<T> a, std::span<T> b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

bool same_bits(const WeightGrad& a, const WeightGrad& b) {
  if (const auto* bf16s = std::get_if<ExpertMatrices<bf16>>(&a)) {
    return same_bits(bf16s->tensor(), std::get<ExpertMatrices<bf16>>(b).tensor());
  }
  return same_bits(std::get<ExpertMatrices<float>>(a).tensor(),
                   std::get<ExpertMatrices<float>>(b).tensor());
}

PassRecord pass_record(Pass pass, const std::vector<RankLog>& logs, int repeat) {
  PassRecord record{pass, {}, {}};
  for (std::size_t step = 0; step < static_cast<std::size_t>(repeat); ++step) {
    double slowest = 0;
    std::vector<PassStats> stats;
    for (const RankLog& log : logs) {
      const PassLog& of_pass = pass == Pass::kForward ? log.forward : log.backward;
      stats.push_back(of_pass.stats.at(step));
      slowest = std::max(slowest, of_pass.seconds.at(step));
    }
    record.seconds.push_back(slowest);
    record.stats.push_back(std::move(stats));
  }
  return record;
}

PassLog nth(const std::vector<std::vector<double>>& seconds,
            const std::vector<std::vector<PassStats>>& stats, std::size_t rank) {
  return {.seconds = seconds[rank], .stats = stats[rank]};
}

}  // namespace

void RankLog::note_routing(const RoutingPlan& plan) {
  // Without shared experts, which every token goes to.
  const int routed = plan.problem().num_experts / plan.num_ranks();
  const auto rows = plan.tokens_per_expert().first(static_cast<std::size_t>(routed));
  rows_per_expert.assign(rows.begin(), rows.end());
  traffic = plan.traffic();
}

std::string difference(const workload::Split& split, int rank, PassChoice passes,
                       LayerResult& first, LayerResult& again, int step) {
  std::string found;
  const auto expect = [&](bool same, const char* tensor) {
    if (same || !found.empty()) return;
    found =
        cat("step ", step, " gave other bits than the first one in ", tensor, " on rank ", rank);
  };
  expect(same_bits(split.forward_args(rank, first).out, split.forward_args(rank, again).out),
         "out");
  if (passes == PassChoice::kForward) return found;
  const BackwardArgs a = split.backward_args(rank, first);
  const BackwardArgs b = split.backward_args(rank, again);
  expect(same_bits(a.dx, b.dx), "dx");
  expect(same_bits(a.dprobs, b.dprobs), "dprobs");
  expect(same_bits(a.dw1, b.dw1), "dw1");
  expect(same_bits(a.dw2, b.dw2), "dw2");
  expect(same_bits(a.db1, b.db1), "db1");
  expect(same_bits(a.db2, b.db2), "db2");
  expect(same_bits(a.dshared_probs, b.dshared_probs), "dshared_probs");
  expect(same_bits(a.dshared_w1, b.dshared_w1), "dshared_w1");
  expect(same_bits(a.dshared_w2, b.dshared_w2), "dshared_w2");
  return found;
}

std::vector<RankLog> gather_logs(Gatherer& gatherer, const RankLog& own) {
  const auto all = [&](const auto& values) { return gatherer.gather(std::span(values)); };
  const auto plan_seconds = all(own.plan_seconds);
  const auto forward_seconds = all(own.forward.seconds);
  const auto forward_stats = all(own.forward.stats);
  const auto backward_seconds = all(own.backward.seconds);
  const auto backward_stats = all(own.backward.stats);
  const auto timeline = all(own.timeline);
  const auto rows_per_expert = all(own.rows_per_expert);
  const auto traffic = gatherer.gather_one(own.traffic);
  const auto pool = gatherer.gather_one(own.pool);
  const auto mismatch = all(own.mismatch);
  const auto interrupted = gatherer.gather_one(own.interrupted ? 1 : 0);
  std::vector<RankLog> logs;
  for (std::size_t r = 0; r < traffic.size(); ++r) {
    logs.push_back({.plan_seconds = plan_seconds[r],
                    .forward = nth(forward_seconds, forward_stats, r),
                    .backward = nth(backward_seconds, backward_stats, r),
                    .timeline = timeline[r],
                    .rows_per_expert = rows_per_expert[r],
                    .traffic = traffic[r],
                    .pool = pool[r],
                    .mismatch = {mismatch[r].begin(), mismatch[r].end()},
                    .interrupted = interrupted[r] != 0});
  }
  return logs;
}

void combine_logs(std::vector<RankLog> logs, const StepOptions& options, StepReport& report) {
  for (const RankLog& log : logs) {
    require(log.mismatch.empty(), ErrorCode::kInternal, log.mismatch);
  }
  report.steps = static_cast<int>(logs.front().plan_seconds.size());
  report.interrupted = logs.front().interrupted;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (report.steps > 0 && measures(options.passes, pass)) {
      report.passes.push_back(pass_record(pass, logs, report.steps));
    }
  }
  report.plan_seconds.assign(static_cast<std::size_t>(report.steps), 0);
  std::vector<PoolUse> pools;
  for (RankLog& log : logs) {
    pools.push_back(log.pool);
    for (std::size_t i = 0; i < log.plan_seconds.size(); ++i) {
      report.plan_seconds[i] = std::max(report.plan_seconds[i], log.plan_seconds[i]);
    }
    report.rows_per_expert.insert(report.rows_per_expert.end(), log.rows_per_expert.begin(),
                                  log.rows_per_expert.end());
    report.traffic.push_back(log.traffic);
    report.timeline.push_back(std::move(log.timeline));
  }
  report.pool = fullest(pools);
}

}  // namespace uniep::tool
