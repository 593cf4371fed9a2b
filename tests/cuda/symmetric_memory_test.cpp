// One process per GPU. The parent never touches CUDA, which does not survive a fork.
#include "cuda/symmetric_memory.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <thread>

#include "comm/agreement.h"
#include "cuda/check.h"
#include "cuda/gpu_group.h"
#include "cuda/touch_memory.h"
#include "support/scoped_env.h"
#include "uniep/communicator.h"

namespace uniep::testing {
namespace {

using cuda::check_cuda;
using cuda::CudaCommunicator;
using cuda::SymmetricMemory;
using std::chrono::milliseconds;

using CommunicatorBody = std::function<std::string(CudaCommunicator&)>;

std::vector<std::string> on_communicators(int ranks, const CommunicatorBody& body) {
  return gpu_processes(ranks, [&](const auto& c) { return body(*c); });
}

/// The first element that differs from first + i; -1: none.
std::int64_t first_wrong(const void* device, std::int64_t count, std::uint32_t first,
                         std::uint32_t step) {
  std::vector<std::uint32_t> values(static_cast<std::size_t>(count));
  check_cuda(cudaMemcpy(values.data(), device, values.size() * 4, cudaMemcpyDeviceToHost), "copy");
  for (std::int64_t i = 0; i < count; ++i) {
    if (values[static_cast<std::size_t>(i)] != first + step * static_cast<std::uint32_t>(i)) {
      return i;
    }
  }
  return -1;
}

/// Every rank writes to its part of every rank's memory, and looks at what it was given.
std::string write_to_all(CudaCommunicator& c, std::int64_t part) {
  const auto memory = c.symmetric_memory(c.size() * part * 4, kConnectLimitMs);
  const std::int64_t dirty = first_wrong(memory->local(), c.size() * part, 0, 0);
  if (dirty >= 0) return cat("not zero at first: ", dirty);
  c.bootstrap().all_gather("", "looked", kConnectLimitMs);
  for (int peer = 0; peer < c.size(); ++peer) {
    auto* to = static_cast<std::uint32_t*>(memory->peer(peer)) + c.rank() * part;
    check_cuda(write_sequence(to, part, static_cast<std::uint32_t>(c.rank() * 1000 + peer)),
               "write to a peer");
  }
  c.bootstrap().all_gather("", "written", kConnectLimitMs);
  for (int from = 0; from < c.size(); ++from) {
    const auto* part_of = static_cast<const std::uint32_t*>(memory->local()) + from * part;
    const std::int64_t wrong =
        first_wrong(part_of, part, static_cast<std::uint32_t>(from * 1000 + c.rank()), 1);
    if (wrong >= 0) return cat("wrong from rank ", from, " at ", wrong);
  }
  return memory->kind();
}

class SymmetricMemoryKind : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (devices() < 2) GTEST_SKIP() << "needs two GPUs";
  }
  const ScopedEnv kind_{"UNIEP_SYMMETRIC_MEMORY", GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Kinds, SymmetricMemoryKind, ::testing::Values("nccl", "ipc", "auto"));

TEST_P(SymmetricMemoryKind, PeersWriteToEachOther) {
  const int ranks = std::min(devices(), 4);
  const auto said = on_communicators(ranks, [](CudaCommunicator& c) {
    std::string kinds;
    for (const std::int64_t part : {1, 1000, 1 << 24}) kinds += write_to_all(c, part) + " ";
    return kinds;
  });
  const std::string kind = std::string(GetParam()) == "auto" ? "nccl" : GetParam();
  EXPECT_EQ(said, std::vector<std::string>(static_cast<std::size_t>(ranks),
                                           cat(kind, " ", kind, " ", kind, " ")));
}

/// Memory is returned, also where ranks destroy their objects at different times.
TEST_P(SymmetricMemoryKind, MemoryIsFreed) {
  const auto said = on_communicators(2, [](CudaCommunicator& c) {
    std::size_t before = 0, after = 0, total = 0;
    { const auto warm_up = c.symmetric_memory(1 << 20, kConnectLimitMs); }
    check_cuda(cudaMemGetInfo(&before, &total), "ask for free memory");
    for (int i = 0; i < 4; ++i) {
      const auto memory = c.symmetric_memory(std::int64_t{4} << 30, kConnectLimitMs);
      if (c.rank() == i % 2) std::this_thread::sleep_for(milliseconds(100));
    }
    const auto small = c.symmetric_memory(1 << 20, kConnectLimitMs);  // by now all have let go
    check_cuda(cudaMemGetInfo(&after, &total), "ask for free memory");
    const bool freed = before < after + (std::size_t{1} << 30);
    return freed ? std::string("freed") : cat(before, " bytes were free, and now ", after);
  });
  EXPECT_EQ(said, std::vector<std::string>(2, "freed"));
}

TEST_P(SymmetricMemoryKind, AKilledPeerEndsTheOthersAtOnce) {
  const auto begin = std::chrono::steady_clock::now();
  const auto said = on_communicators(2, [](CudaCommunicator& c) -> std::string {
    const auto memory = c.symmetric_memory(1 << 20, kConnectLimitMs);
    if (c.rank() == 1) raise(SIGKILL);
    c.symmetric_memory(1 << 20, kConnectLimitMs);
    return "no error";
  });
  EXPECT_NE(said[0].find("rank 1 is gone"), std::string::npos) << said[0];
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(kConnectLimitMs / 2));
}

TEST_P(SymmetricMemoryKind, AMissingPeerIsNamed) {
  const ProcessEvent named;
  const auto said = on_communicators(2, [&](CudaCommunicator& c) -> std::string {
    if (c.rank() == 1) {
      named.wait();
      return "stays away";
    }
    try {
      c.symmetric_memory(1 << 20, 300);
    } catch (const Error&) {
      named.tell();
      throw;
    }
    return "no error";
  });
  EXPECT_NE(said[0].find("wait expired after 300 ms (UNIEP_TIMEOUT_MS) in stage plan, peer 1"),
            std::string::npos)
      << said[0];
}

TEST_P(SymmetricMemoryKind, DisagreementIsAnErrorOnAllRanks) {
  const auto said = on_communicators(2, [](CudaCommunicator& c) -> std::string {
    c.symmetric_memory((1 << 20) + c.rank(), kConnectLimitMs);
    return "no error";
  });
  EXPECT_NE(said[0].find("ranks disagree"), std::string::npos) << said[0];
  EXPECT_EQ(said[0], said[1]);
}

TEST_P(SymmetricMemoryKind, TooMuchIsAnErrorOnAllRanks) {
  const auto said = on_communicators(2, [](CudaCommunicator& c) -> std::string {
    c.symmetric_memory(std::int64_t{1} << 40, kConnectLimitMs);
    return "no error";
  });
  EXPECT_NE(said[0].find("error 5: rank 0: cannot allocate"), std::string::npos) << said[0];
  EXPECT_EQ(said[0], said[1]);
}

/// Rank 1 agrees to everything and then does not come into NCCL, which itself would wait for ever.
std::vector<std::string> alone_in_nccl(int limit_ms, const std::function<void()>& instead) {
  const ScopedEnv kind("UNIEP_SYMMETRIC_MEMORY", "nccl");
  return on_communicators(2, [&](CudaCommunicator& c) -> std::string {
    if (c.rank() == 0) {
      c.symmetric_memory(1 << 20, limit_ms);
      return "no error";
    }
    for (const char* call :
         {"symmetric memory of 1048576 bytes (UNIEP_SYMMETRIC_MEMORY=nccl)", "nccl memory"}) {
      agree(c.bootstrap(), kConnectLimitMs, Stage::kPlan, call, [] {});
    }
    instead();
    return "stayed away";
  });
}

TEST(NcclMapping, APeerThatIsKilledMeanwhileEndsTheOthersAtOnce) {
  if (devices() < 2) GTEST_SKIP() << "needs two GPUs";
  const auto begin = std::chrono::steady_clock::now();
  const auto said = alone_in_nccl(kConnectLimitMs, [] {
    std::this_thread::sleep_for(milliseconds(500));
    raise(SIGKILL);
  });
  EXPECT_NE(said[0].find("rank 1 is gone"), std::string::npos) << said[0];
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(kConnectLimitMs / 2));
}

TEST(NcclMapping, APeerThatDoesNotComeIsATimeout) {
  if (devices() < 2) GTEST_SKIP() << "needs two GPUs";
  const auto begin = std::chrono::steady_clock::now();
  const auto said = alone_in_nccl(1000, [] { std::this_thread::sleep_for(milliseconds(5000)); });
  EXPECT_NE(said[0].find("error 3: "), std::string::npos) << said[0];
  EXPECT_NE(said[0].find("expired after"), std::string::npos) << said[0];
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(20000));
}

TEST(CudaCommunicator, RefusesTwoRanksOnOneGpu) {
  if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  const int port = free_tcp_port();
  const auto said = forked_ranks(2, [&](int rank) -> std::string {
    CudaCommunicator communicator({rank, 2, 0, "127.0.0.1", port}, kConnectLimitMs);
    return "no error";
  });
  for (const std::string& s : said) {
    EXPECT_NE(s.find("ranks 0 and 1 use the same GPU"), std::string::npos) << s;
  }
}

TEST(CudaCommunicator, AMissingDeviceIsAnErrorOnAllRanks) {
  if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  const int port = free_tcp_port();
  const auto said = forked_ranks(2, [&](int rank) -> std::string {
    CudaCommunicator communicator({rank, 2, rank == 0 ? 0 : 63, "127.0.0.1", port},
                                  kConnectLimitMs);
    return "no error";
  });
  EXPECT_NE(said[0].find("rank 1: there is no CUDA device 63"), std::string::npos) << said[0];
  EXPECT_EQ(said[0], said[1]);
}

TEST(SymmetricMemory, AGroupOfOneUsesItsOwnMemory) {
  if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  const auto said = on_communicators(1, [](CudaCommunicator& c) { return write_to_all(c, 1000); });
  EXPECT_EQ(said[0], "local");
}

/// For torchrun --no-python: every process runs this.
TEST(Launched, JoinsTheGroupOfTheEnvironment) {
  const auto environment = process_environment();
  if (!environment) GTEST_SKIP() << "run it under torchrun";
  Communicator communicator = Communicator::cuda_from_environment();
  EXPECT_EQ(communicator.size(), environment->size);
  const std::string kind =
      write_to_all(dynamic_cast<CudaCommunicator&>(*communicator.impl()), 1000);
  EXPECT_TRUE(kind == "nccl" || kind == "ipc") << kind;
}

}  // namespace
}  // namespace uniep::testing
