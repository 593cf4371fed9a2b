#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "cuda/gpu_group.h"
#include "cuda/gpu_rank.h"

// Layers and steps in memory of the caller, which may move it between calls.

namespace uniep::testing {

/// A block whose contents can be moved on a stream, as PyTorch moves tensors.
class Movable {
 public:
  explicit Movable(std::int64_t bytes)
      : bytes_(bytes), here_(std::make_unique<DeviceMemory>(bytes)), there_(nullptr) {}

  /// To another address; what stays behind is spoilt.
  void move(cudaStream_t stream) {
    if (there_ == nullptr) there_ = std::make_unique<DeviceMemory>(bytes_);
    const auto bytes = static_cast<std::size_t>(bytes_);
    cuda::check_cuda(
        cudaMemcpyAsync(there_->data(), here_->data(), bytes, cudaMemcpyDeviceToDevice, stream),
        "move");
    cuda::check_cuda(cudaMemsetAsync(here_->data(), 0xff, bytes, stream), "spoil");
    std::swap(here_, there_);
  }
  /// So that `move` allocates nothing.
  void make_room() { there_ = std::make_unique<DeviceMemory>(bytes_); }

  std::span<std::byte> bytes() const { return {here_->data(), static_cast<std::size_t>(bytes_)}; }
  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(here_->data()), static_cast<std::size_t>(bytes_) / sizeof(T)};
  }

 private:
  std::int64_t bytes_;
  std::unique_ptr<DeviceMemory> here_, there_;
};

/// What a step keeps.
struct MovableStep {
  MovableStep(const MemoryNeeds& n, const Problem& p)
      : plan(n.plan),
        x_rows(n.rows * p.hidden * 2),
        h(n.rows * 2 * p.intermediate * 2),
        row_probs(n.rows * 4),
        forward_memory(n.forward_memory),
        backward_memory(n.backward_memory) {
    for (Movable* m : all()) m->make_room();
  }

  void move(cudaStream_t stream) {
    for (Movable* m : all()) m->move(stream);
  }
  StepMemory memory(bool with_backward_memory = true) const {
    StepMemory m{.plan = plan.bytes(),
                 .x_rows = x_rows.as<bf16>(),
                 .h = h.as<bf16>(),
                 .row_probs = row_probs.as<float>(),
                 .forward_memory = forward_memory.bytes()};
    if (with_backward_memory) m.backward_memory = backward_memory.bytes();
    return m;
  }
  std::array<Movable*, 6> all() {
    return {&plan, &x_rows, &h, &row_probs, &forward_memory, &backward_memory};
  }

  Movable plan, x_rows, h, row_probs, forward_memory, backward_memory;
};

/// The layer's memory of one rank.
struct LayerBlocks {
  explicit LayerBlocks(const MemoryNeeds& n)
      : needs(n), workspace(n.workspace), symmetric(n.symmetric) {}

  LayerMemory memory() const {
    return {.workspace = {workspace.data(), static_cast<std::size_t>(needs.workspace)},
            .symmetric = {symmetric.data(), static_cast<std::size_t>(needs.symmetric)}};
  }

  MemoryNeeds needs;
  DeviceMemory workspace, symmetric;
};

inline Problem problem_of(const LayerData& data, int ranks, std::int64_t capacity = 0) {
  Problem p = workload::Split(data, ranks).problem();
  p.capacity_rows = capacity;
  return p;
}

inline MemoryNeeds needs_of(const Problem& problem, int ranks) {
  return Layer::memory_needs(problem, Backend::kCuda, ranks);
}

/// Plan and forward of the tensors of `t`, in the memory of `kept`.
inline void forward(Layer& layer, const GpuRank& t, const MovableStep& kept,
                    const Schedule& schedule, std::optional<void*> stream = {},
                    std::int64_t* overflow = nullptr) {
  const CallOptions options{
      .schedule = schedule, .cuda_stream = stream, .memory = kept.memory(), .overflow = overflow};
  (void)layer.forward(layer.plan(t.topk_ids(), options), t.forward_args(), options);
}

inline void backward(Layer& layer, const GpuRank& t, const MovableStep& kept,
                     const Schedule& schedule, std::optional<void*> stream = {},
                     bool flagged = false) {
  const Saved saved = layer.restore(kept.memory(false), t.tokens(), flagged);
  layer.backward(saved, t.backward_args(),
                 {.schedule = schedule, .cuda_stream = stream, .memory = kept.memory()});
}

/// Rounds of a test that repeats its steps.
inline int rounds(int ranks) { return sharing(ranks) ? 2 : 8; }

}  // namespace uniep::testing
