#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "base/cuda/driver.h"
#include "cuda/device_memory.h"
#include "cuda/host_visible.h"
#include "cuda/plan_kernels.h"
#include "support/random_routing.h"

namespace uniep::testing {

constexpr int kPlanLimitMs = 10'000;

/// CTAs of a launch that has the GPU to itself.
inline int one_per_sm() { return cuda::sms_to_hold(0); }

/// What one rank of an emulated group owns.
struct PlanRank {
  PlanRank(const Problem& p, int num_ranks, int on_device)
      : device(use(on_device)),
        exchange(PlanExchangeLayout(p, num_ranks).bytes, 0),
        scratch(cuda::PlanScratchLayout(p, num_ranks).bytes, 0),
        plan_memory(cuda::DevicePlanLayout(p, num_ranks).bytes),
        ids((p.max_tokens * p.topk + 8) * static_cast<std::int64_t>(sizeof(std::int32_t))) {
    cuda::check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
  }
  ~PlanRank() { cudaStreamDestroy(stream); }

  /// Makes it the thread's current device.
  static int use(int device) {
    cuda::check_cuda(cudaSetDevice(device), "choose a device");
    return device;
  }

  const int device;
  DeviceMemory exchange;
  DeviceMemory scratch;
  DeviceMemory plan_memory;
  DeviceMemory ids;
  cuda::HostVisible<cuda::PlanReport> report;
  cudaStream_t stream = nullptr;
};

/// Devices that reach one another's memory, the first ones: tests spread ranks over them.
inline int connected_devices() {
  static const int kCount = [] {
    int count = 0;
    cuda::check_cuda(cudaGetDeviceCount(&count), "count devices");
    for (int d = 0; d < count; ++d) {
      for (int peer = 0; peer < count; ++peer) {
        if (d == peer) continue;
        PlanRank::use(d);
        if (cudaDeviceEnablePeerAccess(peer, 0) != cudaSuccess) return 1;
      }
    }
    return count;
  }();
  return kCount;
}

inline void wait_for_all_devices() {
  for (int d = connected_devices() - 1; d >= 0; --d) {
    PlanRank::use(d);
    cuda::check_cuda(cudaDeviceSynchronize(), "run kernels");
  }
}

/// A group of ranks, on one GPU where there are no more: each has its own memory and stream, and
/// reaches the memory of all.
class PlanGroup {
 public:
  enum class Launch {
    kTogether,  ///< all ranks at once, on few CTAs each: they wait for one another
    kOneByOne   ///< on as many CTAs as fit; the host delivers what peers would have sent
  };

  PlanGroup(const Problem& problem, int num_ranks) : problem_(problem) {
    for (int r = 0; r < num_ranks; ++r) {
      ranks_.push_back(std::make_unique<PlanRank>(problem, num_ranks, r % connected_devices()));
      PlanRank::use(rank(r).device);
      cuda::check_cuda(cuda::prepare_plan(), "load the kernel");
    }
  }

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  PlanRank& rank(int r) const { return *ranks_[static_cast<std::size_t>(r)]; }
  const Problem& problem() const { return problem_; }
  cuda::DevicePlan plan(int r) const {
    return cuda::device_plan(rank(r).plan_memory.data(),
                             cuda::DevicePlanLayout(problem_, num_ranks()));
  }
  cuda::PlanScratch scratch(int r) const {
    return cuda::plan_scratch(rank(r).scratch.data(),
                              cuda::PlanScratchLayout(problem_, num_ranks()));
  }

  /// `shift`: by how many elements the ids' address is off a multiple of 16 bytes.
  cuda::PlanArgs args(int r, std::int64_t tokens, int shift, int limit_ms) const {
    cuda::PlanExchange exchange{PlanExchangeLayout(problem_, num_ranks())};
    for (int i = 0; i < num_ranks(); ++i) exchange.parts[i] = rank(i).exchange.data();
    return cuda::plan_args(problem_, r, num_ranks(), tokens, ids(r) + shift, exchange, scratch(r),
                           plan(r), rank(r).report.get(), limit_ms);
  }

  /// A rank's plan, on poisoned memory, not awaited.
  void launch(const Routing& routing, int r, int ctas, int shift = 0, int limit_ms = kPlanLimitMs) {
    const auto index = static_cast<std::size_t>(r);
    PlanRank::use(rank(r).device);
    cuda::check_cuda(
        cuda::launch_plan(args(r, routing.tokens[index], shift, limit_ms), ctas, rank(r).stream),
        "launch plan");
  }

  /// Plans on all ranks, and waits for them.
  void run(const Routing& routing, Launch how, int ctas, int shift = 0) {
    ++epoch_;
    for (int r = 0; r < num_ranks(); ++r) {
      rank(r).plan_memory.fill(DeviceMemory::kPoison);
      upload(own_ids(routing, r), ids(r) + shift);
    }
    wait_for_all_devices();
    for (int r = 0; r < num_ranks(); ++r) {
      if (how == Launch::kOneByOne) deliver(routing, r);
      launch(routing, r, ctas, shift);
      if (how == Launch::kOneByOne) wait_for_all_devices();
    }
    wait_for_all_devices();
  }

  static std::vector<std::int32_t> own_ids(const Routing& routing, int r) {
    const auto count = [&](int rank) {
      const std::int64_t t = routing.tokens[static_cast<std::size_t>(rank)];
      // An impossible number of tokens comes without ids.
      return t < 0 || t > routing.problem.max_tokens ? 0 : t * routing.problem.topk;
    };
    std::int64_t begin = 0;
    for (int i = 0; i < r; ++i) begin += count(i);
    return {routing.ids.begin() + begin, routing.ids.begin() + begin + count(r)};
  }

  std::int32_t* ids(int r) const { return reinterpret_cast<std::int32_t*>(rank(r).ids.data()); }

 private:
  /// What the peers of rank `to` push in this plan.
  void deliver(const Routing& routing, int to) {
    const PlanExchangeLayout l(problem_, num_ranks());
    std::byte* base = rank(to).exchange.data();
    const std::int64_t half = epoch_ % 2 * num_ranks();
    std::vector<std::uint32_t> flags;
    for (int r = 0; r < num_ranks(); ++r) {
      flags.push_back((epoch_ - (r == to ? 1 : 0)) * PlanExchangeLayout::kParts);
      if (r == to) continue;
      upload(own_ids(routing, r),
             reinterpret_cast<std::int32_t*>(base + l.ids) + (half + r) * l.slots_per_rank);
      upload(std::vector<std::int64_t>{routing.tokens[static_cast<std::size_t>(r)]},
             reinterpret_cast<std::int64_t*>(base + l.tokens) + half + r);
    }
    upload(flags, reinterpret_cast<std::uint32_t*>(base + l.flags));
    wait_for_all_devices();
  }

  Problem problem_;
  std::vector<std::unique_ptr<PlanRank>> ranks_;
  std::uint32_t epoch_ = 0;
};

inline bool operator==(const Pull& a, const Pull& b) {
  return a.source == b.source && a.token == b.token && a.first_row == b.first_row &&
         a.num_rows == b.num_rows;
}

/// Device memory has the values that the host computed.
template <class T>
void expect_equal(const T* want, const T* device, std::int64_t count, const char* what) {
  const std::vector<T> got = download(device, count);
  for (std::int64_t i = 0; i < count; ++i) {
    ASSERT_TRUE(want[i] == got[static_cast<std::size_t>(i)])
        << what << "[" << i << "] of " << count << " differs";
  }
}

template <class T>
void expect_equal(std::span<const T> want, const T* device, const char* what) {
  expect_equal(want.data(), device, static_cast<std::int64_t>(want.size()), what);
}

/// "No device" is no failure, but a test that did not run.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!have_device()) GTEST_SKIP() << "there is no CUDA device";
  }
};

}  // namespace uniep::testing
