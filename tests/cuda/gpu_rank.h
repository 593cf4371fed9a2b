#pragma once

#include <optional>

#include "base/layer_data.h"
#include "cuda/device_memory.h"
#include "layer/arguments.h"
#include "uniep/layer.h"
#include "workload/split.h"

namespace uniep::testing {

/// A tensor in device memory; NaNs where nothing is said.
template <class T>
class DeviceTensor {
 public:
  explicit DeviceTensor(std::span<const T> values) : DeviceTensor(values.size()) { load(values); }
  explicit DeviceTensor(std::size_t count)
      : memory_(static_cast<std::int64_t>(count * sizeof(T)), kNan), count_(count) {}

  void load(std::span<const T> values) const {
    if (values.empty()) return;
    cuda::check_cuda(
        cudaMemcpy(memory_.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice),
        "upload");
  }
  void forget() const { memory_.fill(kNan); }

  std::span<T> span() const { return {reinterpret_cast<T*>(memory_.data()), count_}; }
  std::vector<T> to_host() const {
    return download(span().data(), static_cast<std::int64_t>(count_));
  }

 private:
  static constexpr int kNan = 0xff;  // every byte
  DeviceMemory memory_;
  std::size_t count_;
};

/// What a GpuRank has besides the layer's own options.
struct GpuRankOptions {
  std::int64_t capacity_rows = 0;
  bool main_grad = false;  ///< weight gradients are added to fp32 tensors of kMainGradStart
  Save save = Save::kRows;
  bool recompute_h = false;
  bool each = false;  ///< weights and gradients are given as a tensor for each expert
};

/// The parts of one tensor, of which each expert has one.
template <class T>
class PartOfEach {
 public:
  PartOfEach(std::span<T> tensor, std::int64_t experts) {
    const std::size_t size = tensor.size() / static_cast<std::size_t>(experts);
    for (std::size_t at = 0; at + size <= tensor.size() && size > 0; at += size) {
      parts_.push_back(tensor.subspan(at, size));
    }
  }
  ExpertMatrices<T> matrices() const { return ExpertMatrices<T>::one_each(parts_); }

 private:
  std::vector<std::span<T>> parts_;
};

/// One rank's part of a global layer, on this process' GPU: its tensors, its Layer, and the last
/// plan and saved.
class GpuRank {
 public:
  static constexpr float kMainGradStart = 1.5f;

  GpuRank(const LayerData& data, Communicator communicator, const LayerOptions& options = {},
          const GpuRankOptions& extra = {})
      : split_(data, communicator.size()),
        main_grad_(extra.main_grad),
        each_(extra.each),
        rank_(communicator.rank()),
        unused_(workload::make_result(data, {.ranks = communicator.size()})),
        f_(split_.forward_args(rank_, unused_)),
        b_(split_.backward_args(rank_, unused_)),
        ids_(split_.topk_ids(rank_)),
        x_(f_.x),
        probs_(f_.topk_probs),
        w1_(f_.w1.tensor()),
        w2_(f_.w2.tensor()),
        dy_(b_.dy),
        out_(f_.out.size()),
        dx_(b_.dx.size()),
        dprobs_(b_.dprobs.size()),
        shared_w1_(f_.shared_w1),
        shared_w2_(f_.shared_w2),
        shared_probs_(f_.shared_probs),
        dshared_probs_(b_.dshared_probs.size()),
        dshared_w1_(main_grad_ ? 0 : f_.shared_w1.size()),
        dshared_w2_(main_grad_ ? 0 : f_.shared_w2.size()),
        main_dshared_w1_(main_grad_start(f_.shared_w1.size())),
        main_dshared_w2_(main_grad_start(f_.shared_w2.size())),
        dw1_(main_grad_ ? 0 : f_.w1.size()),
        dw2_(main_grad_ ? 0 : f_.w2.size()),
        main_dw1_(main_grad_start(f_.w1.size())),
        main_dw2_(main_grad_start(f_.w2.size())),
        w1_each_(w1_.span(), data.num_experts / split_.ranks()),
        w2_each_(w2_.span(), data.num_experts / split_.ranks()),
        dw1_each_(dw1_.span(), data.num_experts / split_.ranks()),
        dw2_each_(dw2_.span(), data.num_experts / split_.ranks()),
        layer_(problem(split_, extra), std::move(communicator), options) {}

  /// Another batch of the same sizes, in the same memory; waits for the device.
  void load(const LayerData& data) {
    const workload::Split split(data, split_.ranks());
    const ForwardArgs f = split.forward_args(rank_, unused_);
    ids_.load(split.topk_ids(rank_));
    x_.load(f.x);
    probs_.load(f.topk_probs);
    w1_.load(f.w1.tensor());
    w2_.load(f.w2.tensor());
    shared_w1_.load(f.shared_w1);
    shared_w2_.load(f.shared_w2);
    shared_probs_.load(f.shared_probs);
    dy_.load(split.backward_args(rank_, unused_).dy);
    forget_results();
  }

  /// What a pass does not write shows; waits for the device.
  void forget_results() const {
    for (const auto* tensor : {&out_, &dx_, &dw1_, &dw2_, &dshared_w1_, &dshared_w2_}) {
      tensor->forget();
    }
    dprobs_.forget();
    dshared_probs_.forget();
    main_dw1_.load(main_grad_start(main_dw1_.span().size()));
    main_dw2_.load(main_grad_start(main_dw2_.span().size()));
    main_dshared_w1_.load(main_grad_start(main_dshared_w1_.span().size()));
    main_dshared_w2_.load(main_grad_start(main_dshared_w2_.span().size()));
    cuda::check_cuda(cudaDeviceSynchronize(), "forget results");
  }

  int rank() const { return rank_; }
  std::int64_t tokens() const { return split_.tokens(rank_).size(); }
  Layer& layer() { return layer_; }
  std::span<const std::int32_t> topk_ids() const { return ids_.span(); }
  const RoutingPlan& last_plan() const { return *plan_; }
  ForwardArgs forward_args() const {
    ForwardArgs args{.x = x_.span(),
                     .topk_probs = probs_.span(),
                     .w1 = w1_.span(),
                     .w2 = w2_.span(),
                     .out = out_.span(),
                     .shared_w1 = shared_w1_.span(),
                     .shared_w2 = shared_w2_.span(),
                     .shared_probs = shared_probs_.span()};
    if (each_) args.w1 = w1_each_.matrices(), args.w2 = w2_each_.matrices();
    return args;
  }

  void plan() { plan_ = layer_.plan(ids_.span()); }
  void forward(const Schedule& schedule) {
    saved_ = layer_.forward(*plan_, forward_args(), schedule);
  }
  void backward(const Schedule& schedule) { layer_.backward(saved_, backward_args(), schedule); }
  void backward_data(const Schedule& schedule) {
    layer_.backward_data(saved_, data_args(backward_args()), schedule);
  }
  void backward_weights(const Schedule& schedule) {
    layer_.backward_weights(saved_, weights_args(backward_args()), schedule);
  }
  BackwardArgs backward_args() const {
    BackwardArgs args;
    args.x = x_.span();
    args.dy = dy_.span();
    args.w1 = w1_.span();
    args.w2 = w2_.span();
    args.dx = dx_.span();
    args.dprobs = dprobs_.span();
    args.shared_w1 = shared_w1_.span();
    args.shared_w2 = shared_w2_.span();
    args.dshared_probs = dshared_probs_.span();
    if (main_grad_) {
      args.dw1 = main_dw1_.span();
      args.dw2 = main_dw2_.span();
      args.dshared_w1 = main_dshared_w1_.span();
      args.dshared_w2 = main_dshared_w2_.span();
    } else {
      args.dw1 = dw1_.span();
      args.dw2 = dw2_.span();
      args.dshared_w1 = dshared_w1_.span();
      args.dshared_w2 = dshared_w2_.span();
    }
    if (each_) {
      args.w1 = w1_each_.matrices();
      args.w2 = w2_each_.matrices();
      if (!main_grad_) args.dw1 = dw1_each_.matrices(), args.dw2 = dw2_each_.matrices();
    }
    return args;
  }

  /// A whole step; this rank's parts of its results.
  LayerResult step(const Schedule& schedule) {
    forget_results();
    plan();
    forward(schedule);
    backward(schedule);
    return result();
  }

  /// This rank's parts of the results, when all is done.
  LayerResult result() {
    layer_.synchronize();
    return tensors();
  }

  /// What the tensors of results hold.
  LayerResult tensors() const {
    LayerResult result;
    result.out = out_.to_host();
    result.dx = dx_.to_host();
    result.dprobs = dprobs_.to_host();
    result.dw1 = dw1_.to_host();
    result.dw2 = dw2_.to_host();
    result.main_dw1 = main_dw1_.to_host();
    result.main_dw2 = main_dw2_.to_host();
    result.dshared_probs = dshared_probs_.to_host();
    result.dshared_w1 = dshared_w1_.to_host();
    result.dshared_w2 = dshared_w2_.to_host();
    result.main_dshared_w1 = main_dshared_w1_.to_host();
    result.main_dshared_w2 = main_dshared_w2_.to_host();
    return result;
  }

 private:
  static Problem problem(const workload::Split& split, const GpuRankOptions& extra) {
    Problem p = split.problem();
    p.capacity_rows = extra.capacity_rows;
    p.save = extra.save;
    p.recompute_h = extra.recompute_h;
    return p;
  }
  std::vector<float> main_grad_start(std::size_t count) const {
    return std::vector<float>(main_grad_ ? count : 0, kMainGradStart);
  }

  const workload::Split split_;
  const bool main_grad_;
  const bool each_;
  const int rank_;
  LayerResult unused_;  // gives f_ and b_ their sizes
  const ForwardArgs f_;
  const BackwardArgs b_;
  const DeviceTensor<std::int32_t> ids_;
  const DeviceTensor<bf16> x_;
  const DeviceTensor<float> probs_;
  const DeviceTensor<bf16> w1_, w2_, dy_, out_, dx_;
  const DeviceTensor<float> dprobs_;
  const DeviceTensor<bf16> shared_w1_, shared_w2_;
  const DeviceTensor<float> shared_probs_, dshared_probs_;
  const DeviceTensor<bf16> dshared_w1_, dshared_w2_;
  const DeviceTensor<float> main_dshared_w1_, main_dshared_w2_;
  const DeviceTensor<bf16> dw1_, dw2_;
  const DeviceTensor<float> main_dw1_, main_dw2_;
  const PartOfEach<const bf16> w1_each_, w2_each_;
  const PartOfEach<bf16> dw1_each_, dw2_each_;
  Layer layer_;
  std::optional<RoutingPlan> plan_;
  Saved saved_;
};

}  // namespace uniep::testing
