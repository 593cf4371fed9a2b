#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/cuda/driver.h"
#include "base/env.h"
#include "base/layer_data.h"
#include "group/cuda/cuda_communicator.h"
#include "group/tcp_bootstrap.h"
#include "support/forked_ranks.h"
#include "workload/synthetic.h"

// Groups of processes with a GPU each, or with UNIEP_SHARE_DEVICE=1 on as many as there are. The
// parent never touches CUDA, which does not survive a fork.

namespace uniep::testing {

constexpr int kConnectLimitMs = 60000;

inline int devices() {
  static const int count =
      std::stoi(forked_ranks(1, [](int) { return std::to_string(cuda::device_count()); })[0]);
  return count;
}

/// Whether so many ranks have to share GPUs. Then a step takes a hundred times as long.
inline bool sharing(int ranks) { return devices() < ranks; }

/// Whether they may.
inline bool gpus_for(int ranks) { return devices() > 0 && (!sharing(ranks) || env_share_device()); }

inline std::string needs_gpus(int ranks) {
  return cat("needs ", ranks, " GPUs, or one and UNIEP_SHARE_DEVICE=1");
}

/// What each rank's body says, in a process with a GPU.
inline std::vector<std::string> gpu_processes(
    int ranks, const std::function<std::string(std::shared_ptr<cuda::CudaCommunicator>)>& body) {
  const int port = free_tcp_port();
  return forked_ranks(ranks, [&](int rank) {
    const ProcessEnvironment environment{rank, ranks, rank, "127.0.0.1", port};
    return body(std::make_shared<cuda::CudaCommunicator>(join_group(environment, kConnectLimitMs)));
  });
}

using Body = std::function<std::string(Communicator)>;

inline std::vector<std::string> on_gpus(int ranks, const Body& body) {
  return gpu_processes(ranks, [&](auto c) { return body(Communicator(std::move(c))); });
}

/// Batch number `seed` of a small layer: other inputs, routing and weights each time. Its `shared`
/// experts, if any, have a gate.
inline LayerData small_layer(int ranks, unsigned seed = 1, int shared = 0) {
  auto shape =
      workload::parse_shape("custom,tokens=300,hidden=264,intermediate=136,experts=8,topk=4");
  shape.shared_experts = shared;
  shape.shared_gate = shared > 0;
  return workload::make_layer(shape, ranks, seed, 0.5);
}

/// What `call` says went wrong; "late" where it took longer than the limit allows.
inline std::string failure_of(const std::function<void()>& call, std::chrono::milliseconds limit) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::string said = "no error";
  try {
    call();
  } catch (const Error& e) {
    said = e.what();
  }
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
  return took < limit ? said : cat("late, after ", took.count(), " ms: ", said);
}

/// The name of the first tensor of which any bit differs, or "".
inline std::string difference(const LayerResult& a, const LayerResult& b) {
  const auto differs = [](const auto& x, const auto& y) {
    return x.size() != y.size() || std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) != 0;
  };
  if (differs(a.out, b.out)) return "out";
  if (differs(a.dx, b.dx)) return "dx";
  if (differs(a.dprobs, b.dprobs)) return "dprobs";
  if (differs(a.dw1, b.dw1)) return "dw1";
  if (differs(a.dw2, b.dw2)) return "dw2";
  if (differs(a.main_dw1, b.main_dw1)) return "main_dw1";
  if (differs(a.main_dw2, b.main_dw2)) return "main_dw2";
  if (differs(a.dshared_probs, b.dshared_probs)) return "dshared_probs";
  if (differs(a.dshared_w1, b.dshared_w1)) return "dshared_w1";
  if (differs(a.dshared_w2, b.dshared_w2)) return "dshared_w2";
  if (differs(a.main_dshared_w1, b.main_dshared_w1)) return "main_dshared_w1";
  return differs(a.main_dshared_w2, b.main_dshared_w2) ? "main_dshared_w2" : "";
}

/// All of them said "same": what a rank says that found nothing else.
inline void expect_same(const std::vector<std::string>& said) {
  EXPECT_EQ(said, std::vector<std::string>(said.size(), "same"));
}

/// Tests at several numbers of ranks.
class OnGpus : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!gpus_for(ranks())) GTEST_SKIP() << needs_gpus(ranks());
  }
  static int ranks() { return GetParam(); }
};

/// "4_ranks", as the name of a test of them ends.
inline std::string ranks_name(const ::testing::TestParamInfo<int>& info) {
  return cat(info.param, info.param == 1 ? "_rank" : "_ranks");
}

}  // namespace uniep::testing
