#include "bench/bench_layer.h"

namespace uniep::tool {

std::vector<ResultTensor> tensors_of(Pass pass, const Problem& problem) {
  using enum ResultTensor;
  if (pass == Pass::kForward) return {kOut};
  if (problem.bias) return {kDx, kDprobs, kDw1, kDw2, kDb1, kDb2};
  if (problem.shared_experts > 0) {
    return {kDx, kDprobs, kDw1, kDw2, kDsharedProbs, kDsharedW1, kDsharedW2};
  }
  return {kDx, kDprobs, kDw1, kDw2};
}

int width_of(ResultTensor tensor) {
  using enum ResultTensor;
  return tensor == kDprobs || tensor == kDsharedProbs ? sizeof(float) : sizeof(bf16);
}

BenchResults::BenchResults(const BenchCase& bench, int rank, bool backward, BenchDevice& device) {
  const workload::ShapeSpec& s = bench.spec;
  const std::int64_t tokens = bench.tokens(rank);
  const std::int64_t experts = bench.local_experts();
  out = BenchTensor<bf16>(device, tokens * s.hidden);
  if (!backward) return;
  dx = BenchTensor<bf16>(device, tokens * s.hidden);
  dprobs = BenchTensor<float>(device, tokens * s.topk);
  dw1 = BenchTensor<bf16>(device, experts * bench.w1_rows() * s.hidden);
  dw2 = BenchTensor<bf16>(device, experts * s.hidden * s.intermediate);
  dshared_probs = BenchTensor<float>(device, tokens * s.shared_experts);
  dshared_w1 = BenchTensor<bf16>(device, s.shared_experts * bench.w1_rows() * s.hidden);
  dshared_w2 = BenchTensor<bf16>(device, s.shared_experts * s.hidden * s.intermediate);
  if (!s.bias) return;
  db1 = BenchTensor<bf16>(device, experts * bench.w1_rows());
  db2 = BenchTensor<bf16>(device, experts * s.hidden);
}

std::span<std::byte> BenchResults::bytes(ResultTensor tensor) const {
  switch (tensor) {
    case ResultTensor::kOut:
      return out.bytes();
    case ResultTensor::kDx:
      return dx.bytes();
    case ResultTensor::kDprobs:
      return dprobs.bytes();
    case ResultTensor::kDw1:
      return dw1.bytes();
    case ResultTensor::kDb1:
      return db1.bytes();
    case ResultTensor::kDb2:
      return db2.bytes();
    case ResultTensor::kDsharedProbs:
      return dshared_probs.bytes();
    case ResultTensor::kDsharedW1:
      return dshared_w1.bytes();
    case ResultTensor::kDsharedW2:
      return dshared_w2.bytes();
    case ResultTensor::kDw2:
      break;
  }
  return dw2.bytes();
}

BenchLayer::BenchLayer(const BenchCase& bench, bool backward, const Communicator& member,
                       BenchDevice& device, bool record_timeline)
    : bench_(bench),
      device_(device),
      rank_(member.rank()),
      backward_(backward),
      // Each pass is given its schedule: nothing is to be looked up.
      layer_(bench.problem, member,
             {.record_timeline = record_timeline, .schedule = default_schedule(member.backend())}),
      results_(bench, member.rank(), backward, device) {
  make_inputs();
  plan_ = layer_.plan(ids_.span());
}

BenchTensor<bf16> BenchLayer::input(workload::Tensor tensor, std::int64_t first,
                                    std::int64_t count) {
  BenchTensor<bf16> part(device_, count);
  if (bench_.layer) {
    device_.upload(part.bytes(), tensor_of(*bench_.layer, tensor).data() + first);
  } else {
    device_.fill(part.span(), workload::numbers_of(tensor, bench_.spec, bench_.seed),
                 static_cast<std::uint64_t>(first));
  }
  return part;
}

void BenchLayer::make_inputs() {
  using workload::Tensor;
  const workload::ShapeSpec& s = bench_.spec;
  const std::int64_t first = bench_.first_token(rank_), tokens = bench_.tokens(rank_);
  const std::int64_t of_w1 = bench_.local_experts() * bench_.w1_rows() * s.hidden;
  const std::int64_t of_w2 = bench_.local_experts() * s.hidden * s.intermediate;
  x_ = input(Tensor::kX, first * s.hidden, tokens * s.hidden);
  w1_ = input(Tensor::kW1, rank_ * of_w1, of_w1);
  w2_ = input(Tensor::kW2, rank_ * of_w2, of_w2);
  if (s.bias) {
    b1_ = input(Tensor::kB1, rank_ * of_w1 / s.hidden, of_w1 / s.hidden);
    b2_ = input(Tensor::kB2, rank_ * of_w2 / s.intermediate, of_w2 / s.intermediate);
  }
  shared_w1_ = input(Tensor::kSharedW1, 0, s.shared_experts * bench_.w1_rows() * s.hidden);
  shared_w2_ = input(Tensor::kSharedW2, 0, s.shared_experts * s.hidden * s.intermediate);
  if (backward_) dy_ = input(Tensor::kDy, first * s.hidden, tokens * s.hidden);

  ids_ = BenchTensor<std::int32_t>(device_, tokens * s.topk);
  probs_ = BenchTensor<float>(device_, tokens * s.topk);
  device_.upload(ids_.bytes(), bench_.routing.topk_ids.data() + first * s.topk);
  device_.upload(probs_.bytes(), bench_.routing.topk_probs.data() + first * s.topk);
  if (bench_.shared_probs.empty()) return;
  shared_probs_ = BenchTensor<float>(device_, tokens * s.shared_experts);
  device_.upload(shared_probs_.bytes(), bench_.shared_probs.data() + first * s.shared_experts);
}

void BenchLayer::forward(const Schedule& schedule, const BenchResults& results) {
  saved_ = layer_.forward(*plan_,
                          {.x = x_.span(),
                           .topk_probs = probs_.span(),
                           .w1 = w1_.span(),
                           .w2 = w2_.span(),
                           .out = results.out.span(),
                           .b1 = b1_.span(),
                           .b2 = b2_.span(),
                           .shared_w1 = shared_w1_.span(),
                           .shared_w2 = shared_w2_.span(),
                           .shared_probs = shared_probs_.span()},
                          schedule);
}

void BenchLayer::backward(const Schedule& schedule, const BenchResults& results) {
  layer_.backward(saved_,
                  {.dy = dy_.span(),
                   .w1 = w1_.span(),
                   .w2 = w2_.span(),
                   .dx = results.dx.span(),
                   .dprobs = results.dprobs.span(),
                   .dw1 = results.dw1.span(),
                   .dw2 = results.dw2.span(),
                   .x = x_.span(),
                   .b1 = b1_.span(),
                   .b2 = b2_.span(),
                   .db1 = results.db1.span(),
                   .db2 = results.db2.span(),
                   .shared_w1 = shared_w1_.span(),
                   .shared_w2 = shared_w2_.span(),
                   .dshared_probs = results.dshared_probs.span(),
                   .dshared_w1 = results.dshared_w1.span(),
                   .dshared_w2 = results.dshared_w2.span()},
                  schedule);
}

void BenchLayer::keep_baseline(const Schedule& schedule) {
  if (baseline_schedule_ == schedule) return;
  if (!baseline_) baseline_.emplace(bench_, rank_, backward_, device_);
  baseline_schedule_ = schedule;
  forward(schedule, *baseline_);
  if (backward_) backward(schedule, *baseline_);
  layer_.synchronize();
}

void BenchLayer::start(Pass pass, const Schedule& schedule) {
  if (pass == Pass::kForward) {
    forward(schedule, results_);
  } else {
    backward(schedule, results_);
  }
}

PassStats BenchLayer::run(Pass pass, const Schedule& schedule) {
  for (const ResultTensor tensor : tensors_of(pass, bench_.problem))
    device_.poison(results_.bytes(tensor));
  // On a GPU the pass that is measured follows another one that is not. Every pass ends with
  // waiting for all ranks, so the first takes up what the ranks' hosts are apart, and the second
  // is in the stream before it begins: it is timed as within a step of training, without start
  // skew and without the host. A barrier of the hosts would leave them tens of microseconds
  // apart, which early ranks would be charged for. On the CPU calls begin together of themselves.
  if (device_.runs_ahead()) start(pass, schedule);
  start(pass, schedule);
  layer_.synchronize();
  return layer_.last_pass();
}

std::int64_t BenchLayer::count_differing(Pass pass) {
  std::int64_t differing = 0;
  for (const ResultTensor tensor : tensors_of(pass, bench_.problem)) {
    differing +=
        device_.count_differing(results_.bytes(tensor), baseline_->bytes(tensor), width_of(tensor));
  }
  return differing;
}

std::int64_t BenchLayer::count_elements(Pass pass) const {
  std::int64_t elements = 0;
  for (const ResultTensor tensor : tensors_of(pass, bench_.problem)) {
    elements += static_cast<std::int64_t>(results_.bytes(tensor).size()) / width_of(tensor);
  }
  return elements;
}

}  // namespace uniep::tool
