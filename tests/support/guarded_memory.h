#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "layout/workspace.h"
#include "uniep/layer.h"

namespace uniep::testing {

/// Memory of exactly so many bytes at the alignment that the CPU backend asks for, and no more,
/// full of garbage (NaNs); what is written behind its end is found when it goes.
class GuardedMemory {
 public:
  GuardedMemory() = default;
  explicit GuardedMemory(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)), block_(new (kAlign) std::byte[bytes_ + kGuard]) {
    spoil();
    std::fill_n(block_.get() + bytes_, kGuard, kGuardByte);
  }
  GuardedMemory(GuardedMemory&&) = default;
  GuardedMemory& operator=(GuardedMemory&&) = default;
  ~GuardedMemory() {
    if (block_ == nullptr) return;
    const std::span guard(block_.get() + bytes_, kGuard);
    EXPECT_TRUE(std::ranges::all_of(guard, [](std::byte b) { return b == kGuardByte; }))
        << "something wrote behind the end of " << bytes_ << " bytes";
  }

  void spoil() { std::fill_n(block_.get(), bytes_, std::byte{0xff}); }

  /// The same contents elsewhere; here they are spoiled.
  GuardedMemory move_away() {
    GuardedMemory other(static_cast<std::int64_t>(bytes_));
    std::memcpy(other.block_.get(), block_.get(), bytes_);
    spoil();
    return other;
  }

  std::byte* data() const { return block_.get(); }
  std::span<std::byte> bytes() const { return {block_.get(), bytes_}; }
  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(block_.get()), bytes_ / sizeof(T)};
  }

 private:
  static constexpr std::align_val_t kAlign{kCpuAlignment};
  static constexpr std::size_t kGuard = 64;
  static constexpr std::byte kGuardByte{0x5a};
  struct Free {
    void operator()(std::byte* block) const { ::operator delete[](block, kAlign); }
  };

  std::size_t bytes_ = 0;
  std::unique_ptr<std::byte[], Free> block_;
};

/// What a step's plan, forward and backward keep, in the caller's memory.
struct GuardedStep {
  GuardedStep(const MemoryNeeds& needs, const Problem& p)
      : plan(needs.plan),
        x_rows(kept(true, needs.rows_of_x * p.hidden)),
        h(kept(!choice_of(p).drops_h, needs.rows * halves(p) * p.intermediate)),
        row_probs(needs.rows * static_cast<std::int64_t>(sizeof(float))),
        forward_memory(needs.forward_memory),
        backward_memory(needs.backward_memory) {}

  static std::int64_t kept(bool is_kept, std::int64_t elements) {
    return is_kept ? elements * static_cast<std::int64_t>(sizeof(bf16)) : 0;
  }

  /// What is there now, elsewhere.
  void move() {
    for (GuardedMemory* m : {&plan, &x_rows, &h, &row_probs, &backward_memory}) *m = m->move_away();
  }

  StepMemory memory() const {
    return {.plan = plan.bytes(),
            .x_rows = x_rows.as<bf16>(),
            .h = h.as<bf16>(),
            .row_probs = row_probs.as<float>(),
            .forward_memory = forward_memory.bytes(),
            .backward_memory = backward_memory.bytes()};
  }
  /// What `Layer::restore` takes ahead of `backward` and `backward_data`.
  StepMemory saved() const {
    StepMemory m = memory();
    m.forward_memory = m.backward_memory = {};
    return m;
  }

  GuardedMemory plan, x_rows, h, row_probs, forward_memory, backward_memory;
};

/// The layers' memory of all ranks of a process, where it is the caller's.
class CallersGroupMemory {
 public:
  CallersGroupMemory(bool given, const Problem& problem, int ranks) {
    if (!given) return;
    const MemoryNeeds needs = Layer::memory_needs(problem, Backend::kCpu, ranks);
    for (int r = 0; r < ranks; ++r) {
      workspaces_.emplace_back(needs.workspace);
      symmetric_.emplace_back(needs.symmetric);
      peers_.push_back(symmetric_.back().data());
    }
  }

  LayerMemory of_rank(int rank) const {
    if (workspaces_.empty()) return {};
    const auto r = static_cast<std::size_t>(rank);
    return {
        .workspace = workspaces_[r].bytes(), .symmetric = symmetric_[r].bytes(), .peers = peers_};
  }

 private:
  std::vector<GuardedMemory> workspaces_, symmetric_;
  std::vector<std::byte*> peers_;
};

}  // namespace uniep::testing
