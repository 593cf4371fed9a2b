#pragma once

#include <optional>

#include "base/layer_data.h"
#include "cuda/device_memory.h"
#include "uniep/layer.h"
#include "workload/split.h"

namespace uniep::testing {

/// A tensor in device memory; NaNs where nothing is said.
template <class T>
class DeviceTensor {
 public:
  explicit DeviceTensor(std::span<const T> values) : DeviceTensor(values.size()) {
    cuda::check_cuda(
        cudaMemcpy(memory_.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice),
        "upload");
  }
  explicit DeviceTensor(std::size_t count)
      : memory_(static_cast<std::int64_t>(count * sizeof(T)), 0xff), count_(count) {}

  std::span<T> span() const { return {reinterpret_cast<T*>(memory_.data()), count_}; }
  std::vector<T> to_host() const {
    return download(span().data(), static_cast<std::int64_t>(count_));
  }

 private:
  DeviceMemory memory_;
  std::size_t count_;
};

/// One rank's part of a global layer, on this process' GPU: its tensors, its Layer, and the last
/// plan and saved.
class GpuRank {
 public:
  GpuRank(const LayerData& data, Communicator communicator, const LayerOptions& options = {})
      : split_(data, communicator.size()),
        rank_(communicator.rank()),
        unused_(workload::make_result(data, {})),
        f_(split_.forward_args(rank_, unused_)),
        b_(split_.backward_args(rank_, unused_)),
        ids_(split_.topk_ids(rank_)),
        x_(f_.x),
        probs_(f_.topk_probs),
        w1_(f_.w1),
        w2_(f_.w2),
        dy_(b_.dy),
        out_(f_.out.size()),
        dx_(b_.dx.size()),
        dprobs_(b_.dprobs.size()),
        dw1_(f_.w1.size()),
        dw2_(f_.w2.size()),
        layer_(split_.problem(), std::move(communicator), options) {}

  int rank() const { return rank_; }
  Layer& layer() { return layer_; }
  std::span<const std::int32_t> topk_ids() const { return ids_.span(); }
  const RoutingPlan& last_plan() const { return *plan_; }
  ForwardArgs forward_args() const {
    return {.x = x_.span(),
            .topk_probs = probs_.span(),
            .w1 = w1_.span(),
            .w2 = w2_.span(),
            .out = out_.span()};
  }

  void plan() { plan_ = layer_.plan(ids_.span()); }
  void forward(const Schedule& schedule) {
    saved_ = layer_.forward(*plan_, forward_args(), schedule);
  }
  void backward(const Schedule& schedule) {
    BackwardArgs args;
    args.dy = dy_.span();
    args.w1 = w1_.span();
    args.w2 = w2_.span();
    args.dx = dx_.span();
    args.dprobs = dprobs_.span();
    args.dw1 = dw1_.span();
    args.dw2 = dw2_.span();
    layer_.backward(saved_, args, schedule);
  }

  /// A whole step; this rank's parts of its results.
  LayerResult step(const Schedule& schedule) {
    plan();
    forward(schedule);
    backward(schedule);
    layer_.synchronize();
    LayerResult result;
    result.out = out_.to_host();
    result.dx = dx_.to_host();
    result.dprobs = dprobs_.to_host();
    result.dw1 = dw1_.to_host();
    result.dw2 = dw2_.to_host();
    return result;
  }

 private:
  const workload::Split split_;
  const int rank_;
  LayerResult unused_;  // gives f_ and b_ their sizes
  const ForwardArgs f_;
  const BackwardArgs b_;
  const DeviceTensor<std::int32_t> ids_;
  const DeviceTensor<bf16> x_;
  const DeviceTensor<float> probs_;
  const DeviceTensor<bf16> w1_, w2_, dy_, out_, dx_;
  const DeviceTensor<float> dprobs_;
  const DeviceTensor<bf16> dw1_, dw2_;
  Layer layer_;
  std::optional<RoutingPlan> plan_;
  Saved saved_;
};

}  // namespace uniep::testing
