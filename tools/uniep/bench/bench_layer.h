#pragma once

#include <optional>
#include <vector>

#include "bench/bench_case.h"
#include "bench/bench_device.h"
#include "bench/bench_sample.h"
#include "uniep/communicator.h"
#include "uniep/layer.h"

namespace uniep::tool {

/// The tensors that a direction of such a layer computes.
std::vector<ResultTensor> tensors_of(Pass pass, const Problem& problem);

/// Bytes of an element.
int width_of(ResultTensor tensor);

/// The results of a step on one rank.
struct BenchResults {
  BenchTensor<bf16> out, dx, dw1, dw2, db1, db2, dshared_w1, dshared_w2;
  BenchTensor<float> dprobs, dshared_probs;

  BenchResults(const BenchCase& bench, int rank, bool backward, BenchDevice& device);
  std::span<std::byte> bytes(ResultTensor tensor) const;
};

/// One rank's part of a layer: inputs, routing plan, results and those to compare with.
/// Everything is collective.
class BenchLayer {
 public:
  BenchLayer(const BenchCase& bench, bool backward, const Communicator& member, BenchDevice& device,
             bool record_timeline = false);

  const RoutingPlan& plan() const { return *plan_; }
  Layer& layer() { return layer_; }
  const BenchResults& results() const { return results_; }
  std::span<const bf16> w1() const { return w1_.span(); }
  std::span<const bf16> w2() const { return w2_.span(); }

  /// Computes what results are compared with; does nothing where that is there already.
  void keep_baseline(const Schedule& schedule);

  /// A forward pass for backward passes to come.
  void prepare_backward(const Schedule& schedule) { forward(schedule, results_); }

  /// Begins a direction, which on a GPU is not awaited.
  void start(Pass pass, const Schedule& schedule);

  /// Runs a direction on results that were overwritten with NaNs, so that what it forgets to write
  /// shows, and says how long it took.
  PassStats run(Pass pass, const Schedule& schedule);

  /// Elements of a direction's results on this rank that differ from the baseline in any bit.
  std::int64_t count_differing(Pass pass);
  std::int64_t count_elements(Pass pass) const;

 private:
  void make_inputs();
  BenchTensor<bf16> input(workload::Tensor tensor, std::int64_t first, std::int64_t count);
  void forward(const Schedule& schedule, const BenchResults& results);
  void backward(const Schedule& schedule, const BenchResults& results);

  const BenchCase& bench_;
  BenchDevice& device_;
  const int rank_;
  const bool backward_;
  Layer layer_;
  BenchTensor<bf16> x_, dy_, w1_, w2_, b1_, b2_, shared_w1_, shared_w2_;
  BenchTensor<float> probs_, shared_probs_;
  BenchTensor<std::int32_t> ids_;
  std::optional<RoutingPlan> plan_;
  Saved saved_;
  BenchResults results_;
  std::optional<BenchResults> baseline_;  // of ...
  std::optional<Schedule> baseline_schedule_;
};

}  // namespace uniep::tool
