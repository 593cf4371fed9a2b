// One process per rank. The parent never touches CUDA, which does not survive a fork.
#include "group/cuda/symmetric_memory.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <thread>

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"
#include "cuda/gpu_group.h"
#include "cuda/touch_memory.h"
#include "group/agreement.h"
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
std::string write_to_all(CudaCommunicator& c, const SymmetricMemory& memory, std::int64_t part) {
  const std::int64_t dirty = first_wrong(memory.local(), c.size() * part, 0, 0);
  if (dirty >= 0) return cat("not zero at first: ", dirty);
  c.bootstrap().all_gather("", "looked", kConnectLimitMs);
  for (int peer = 0; peer < c.size(); ++peer) {
    auto* to = static_cast<std::uint32_t*>(memory.peer(peer)) + c.rank() * part;
    check_cuda(write_sequence(to, part, static_cast<std::uint32_t>(c.rank() * 1000 + peer)),
               "write to a peer");
  }
  c.bootstrap().all_gather("", "written", kConnectLimitMs);
  for (int from = 0; from < c.size(); ++from) {
    const auto* part_of = static_cast<const std::uint32_t*>(memory.local()) + from * part;
    const std::int64_t wrong =
        first_wrong(part_of, part, static_cast<std::uint32_t>(from * 1000 + c.rank()), 1);
    if (wrong >= 0) return cat("wrong from rank ", from, " at ", wrong);
  }
  return memory.kind();
}
std::string write_to_all(CudaCommunicator& c, std::int64_t part) {
  const auto memory = c.symmetric_memory(c.size() * part * 4, kConnectLimitMs);
  return write_to_all(c, *memory, part);
}

class SymmetricMemoryKind : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!gpus_for(2)) GTEST_SKIP() << needs_gpus(2);
    if (sharing(ranks_) && std::string(GetParam()) == "nccl") {
      GTEST_SKIP() << "NCCL needs a GPU for each rank";
    }
  }
  /// As many as have GPUs of their own, or else as share them.
  const int ranks_ = devices() < 2 ? 4 : std::min(devices(), 4);
  const ScopedEnv kind_{"UNIEP_SYMMETRIC_MEMORY", GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Kinds, SymmetricMemoryKind, ::testing::Values("nccl", "ipc", "auto"));

TEST_P(SymmetricMemoryKind, PeersWriteToEachOther) {
  const auto said = on_communicators(ranks_, [](CudaCommunicator& c) {
    std::string kinds;
    for (const std::int64_t part : {1, 1000, 1 << 24}) kinds += write_to_all(c, part) + " ";
    return kinds;
  });
  std::string kind = GetParam();
  if (kind == "auto") kind = sharing(ranks_) ? "ipc" : "nccl";
  EXPECT_EQ(said, std::vector<std::string>(static_cast<std::size_t>(ranks_),
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
  EXPECT_NE(said[0].find("rank 1 was lost: process "), std::string::npos) << said[0];
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
  EXPECT_NE(said[0].find(
                "wait expired after 300 ms (timeout_ms or UNIEP_TIMEOUT_MS) in stage plan, peer 1"),
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
  EXPECT_NE(said[0].find("rank 1 was lost: process "), std::string::npos) << said[0];
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

/// Two ranks on device 0; `share` is what each has in UNIEP_SHARE_DEVICE.
std::vector<std::string> two_on_one_gpu(const std::array<const char*, 2>& share,
                                        const CommunicatorBody& body) {
  const int port = free_tcp_port();
  return forked_ranks(2, [&](int rank) -> std::string {
    const ScopedEnv variable("UNIEP_SHARE_DEVICE", share[static_cast<std::size_t>(rank)]);
    CudaCommunicator communicator(
        join_group(ProcessEnvironment{rank, 2, 0, "127.0.0.1", port}, kConnectLimitMs));
    return body(communicator);
  });
}

TEST(CudaCommunicator, RefusesTwoRanksOnOneGpuAndSaysHowTheyMay) {
  if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  const auto said = two_on_one_gpu({"", ""}, [](CudaCommunicator&) { return "no error"; });
  for (const std::string& s : said) {
    EXPECT_NE(s.find("ranks 0 and 1 use the same GPU"), std::string::npos) << s;
    EXPECT_NE(s.find("UNIEP_SHARE_DEVICE=1, which is for tests"), std::string::npos) << s;
  }
}

TEST(CudaCommunicator, RanksThatDifferAboutSharingAllRefuse) {
  if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  const auto said = two_on_one_gpu({"1", ""}, [](CudaCommunicator&) { return "no error"; });
  EXPECT_NE(said[0].find("ranks disagree"), std::string::npos) << said[0];
  EXPECT_EQ(said[0], said[1]);
}

TEST(CudaCommunicator, TwoRanksMayShareAGpu) {
  if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  const ScopedEnv kind("UNIEP_SYMMETRIC_MEMORY", "auto");
  const auto said = two_on_one_gpu({"1", "1"}, [](CudaCommunicator& c) {
    return cat(c.gpus(), " GPU, ", write_to_all(c, 100'000));
  });
  EXPECT_EQ(said, std::vector<std::string>(2, "1 GPU, ipc"));
}

TEST(CudaCommunicator, RanksThatShareAGpuHaveNoNcclWindows) {
  if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  const ScopedEnv kind("UNIEP_SYMMETRIC_MEMORY", "nccl");
  const auto said = two_on_one_gpu({"1", "1"}, [](CudaCommunicator& c) {
    return failure_of([&] { c.symmetric_memory(1 << 20, kConnectLimitMs); },
                      milliseconds(kConnectLimitMs));
  });
  EXPECT_NE(said[0].find("rank 0: UNIEP_SYMMETRIC_MEMORY is 'nccl', and ranks share a GPU"),
            std::string::npos)
      << said[0];
  EXPECT_EQ(said[0], said[1]);
}

/// As torchrun sets LOCAL_RANK, whatever there is.
TEST(CudaCommunicator, MoreRanksThanGpusHaveThemInTurn) {
  if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  const ScopedEnv share("UNIEP_SHARE_DEVICE", "1");
  const int ranks = devices() + 1;
  const auto said = on_communicators(
      ranks, [](CudaCommunicator& c) { return cat(c.device(), " of ", c.gpus()); });
  for (int r = 0; r < ranks; ++r) {
    EXPECT_EQ(said[static_cast<std::size_t>(r)], cat(r % devices(), " of ", devices()));
  }
}

TEST(CudaCommunicator, AMissingDeviceIsAnErrorOnAllRanks) {
  if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  const ScopedEnv share("UNIEP_SHARE_DEVICE", "");
  const int port = free_tcp_port();
  const auto said = forked_ranks(2, [&](int rank) -> std::string {
    const ProcessEnvironment environment{rank, 2, rank == 0 ? 0 : 63, "127.0.0.1", port};
    CudaCommunicator communicator(join_group(environment, kConnectLimitMs));
    return "no error";
  });
  const char* const why =
      devices() > 1 ? "rank 1: there is no CUDA device 63" : "ranks 0 and 1 use the same GPU";
  EXPECT_NE(said[0].find(why), std::string::npos) << said[0];
  EXPECT_EQ(said[0], said[1]);
}

/// As `srun --gpus-per-task=1` does.
TEST(CudaCommunicator, ProcessesThatEachSeeOneGpuHaveOneEach) {
  if (devices() < 2) GTEST_SKIP() << "needs two GPUs";
  const char* const seen = std::getenv("CUDA_VISIBLE_DEVICES");
  if (seen != nullptr) GTEST_SKIP() << "CUDA_VISIBLE_DEVICES is " << seen;
  const ScopedEnv share("UNIEP_SHARE_DEVICE", "");
  const int port = free_tcp_port();
  const auto said = forked_ranks(2, [&](int rank) -> std::string {
    const ScopedEnv one("CUDA_VISIBLE_DEVICES", std::to_string(rank).c_str());
    CudaCommunicator c(join_group({rank, 2, rank, "127.0.0.1", port}, kConnectLimitMs));
    return cat("device ", c.device(), ", ", c.gpus(), " GPUs");
  });
  for (const std::string& of_rank : said) EXPECT_EQ(of_rank, "device 0, 2 GPUs");
}

TEST(DeviceScope, UsesNoDeviceThatThisProcessDoesNot) {
  if (devices() < 2) GTEST_SKIP() << "needs two GPUs";
  const auto said = forked_ranks(1, [](int) -> std::string {
    const auto use = [](int device) {
      cuda::check_cuda(cudaSetDevice(device), "choose a device");
      cuda::check_cuda(cudaFree(nullptr), "use it");
    };
    std::thread([&] { use(1); }).join();
    std::thread([] { const cuda::DeviceScope scope(1); }).join();
    if (cuda::has_context(0)) return "device 0 is used";
    int after = -1;
    std::thread([&] {
      use(0);
      { const cuda::DeviceScope scope(1); }
      after = cuda::current_device();
    }).join();
    return cat("device ", after, " is current again");
  });
  EXPECT_EQ(said[0], "device 0 is current again");
}

// ---- Memory of the caller

constexpr std::int64_t kPart = 5000;  // elements that each rank writes to each
constexpr std::int64_t kMegabyte = 1 << 20;

/// An allocation that a caller divides, as PyTorch's allocator does.
class CallersBlock {
 public:
  static constexpr std::int64_t kBytes = 16 * kMegabyte;
  static constexpr int kFill = 0x5a;

  CallersBlock() {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, kBytes), "allocate");
    memory_ = static_cast<std::byte*>(memory);
    check_cuda(cudaMemset(memory_, kFill, kBytes), "fill");
  }
  ~CallersBlock() { (void)cudaFree(memory_); }
  CallersBlock(const CallersBlock&) = delete;
  CallersBlock& operator=(const CallersBlock&) = delete;

  std::byte* at(std::int64_t offset) const { return memory_ + offset; }

  /// Whether nobody wrote to [begin, end).
  bool untouched(std::int64_t begin, std::int64_t end) const {
    std::vector<unsigned char> bytes(static_cast<std::size_t>(end - begin));
    check_cuda(cudaMemcpy(bytes.data(), memory_ + begin, bytes.size(), cudaMemcpyDeviceToHost),
               "copy");
    return std::ranges::count(bytes, kFill) == end - begin;
  }

 private:
  std::byte* memory_ = nullptr;
};

/// Ranks that have GPUs of their own, or else share them.
class CallersMemory : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  }
  static void expect_on_all(const std::string& sentence, const CommunicatorBody& body) {
    const auto said = on_communicators(GetParam(), body);
    EXPECT_EQ(said, std::vector<std::string>(said.size(), sentence));
  }
  const ScopedEnv share_{"UNIEP_SHARE_DEVICE", "1"};
  const ScopedEnv kind_{"UNIEP_SYMMETRIC_MEMORY", ""};
};
INSTANTIATE_TEST_SUITE_P(Ranks, CallersMemory, ::testing::Values(2, 4), ranks_name);

/// Two at a time in one allocation, at other places on each rank: so its handle is opened once for
/// both, and stays open for the second when the first is gone.
TEST_P(CallersMemory, MayBePartsOfOneAllocation) {
  expect_on_all("ipc ipc ipc", [](CudaCommunicator& c) -> std::string {
    const CallersBlock block;
    const std::int64_t bytes = c.size() * kPart * 4;
    const std::int64_t first = (1 + c.rank()) * kMegabyte;
    const std::int64_t second = (8 + c.rank()) * kMegabyte + 256;
    const auto memory = [&](std::int64_t offset) {
      return c.symmetric_memory(bytes, kConnectLimitMs, {.local = block.at(offset)});
    };
    std::string kinds;
    {
      const auto b = memory(second);
      {
        const auto a = memory(first);
        if (a->local() != block.at(first)) return "is elsewhere";
        kinds += write_to_all(c, *a, kPart) + " ";
        kinds += write_to_all(c, *b, kPart) + " ";
      }
      // Written to again after the mapping beside it has gone.
      c.bootstrap().all_gather("", "one is gone", kConnectLimitMs);
      check_cuda(cudaMemset(b->local(), 0, static_cast<std::size_t>(bytes)), "clear");
      check_cuda(cudaDeviceSynchronize(), "clear");
      c.bootstrap().all_gather("", "cleared", kConnectLimitMs);
      kinds += write_to_all(c, *b, kPart);
    }
    c.bootstrap().all_gather("", "done", kConnectLimitMs);
    const bool beside = block.untouched(0, first) && block.untouched(first + bytes, second) &&
                        block.untouched(second + bytes, CallersBlock::kBytes);
    return beside ? kinds : "something beside it was written";
  });
}

/// Calls `memory` for symmetric memory with this release, lets rank 0 go of it first, and looks at
/// when the release is called.
std::string released_once(
    CudaCommunicator& c,
    const std::function<std::unique_ptr<SymmetricMemory>(std::function<void()>)>& memory) {
  int released = 0;
  auto held = memory([&] { ++released; });
  const std::string kind = write_to_all(c, *held, kPart);
  c.bootstrap().all_gather("", "used", kConnectLimitMs);
  if (c.rank() == 0) held.reset();
  cuda::free_released_memory();
  if (c.size() > 1 && released != 0) return "released while peers use it";
  c.bootstrap().all_gather("", "rank 0 let go", kConnectLimitMs);
  held.reset();
  c.bootstrap().all_gather("", "all let go", kConnectLimitMs);
  for (int i = 0; i < 3; ++i) cuda::free_released_memory();
  return cat(kind, ", released ", released, " times");
}

TEST_P(CallersMemory, IsReleasedOnceWhenAllHaveLetGo) {
  expect_on_all("ipc, released 1 times", [](CudaCommunicator& c) {
    const CallersBlock block;
    return released_once(c, [&](std::function<void()> release) {
      return c.symmetric_memory(c.size() * kPart * 4, kConnectLimitMs,
                                {.local = block.at(kMegabyte), .release = std::move(release)});
    });
  });
}

TEST_P(CallersMemory, MayBeMappedByTheCaller) {
  expect_on_all("caller, released 1 times", [](CudaCommunicator& c) {
    const std::int64_t bytes = c.size() * kPart * 4;
    const auto mapped = c.symmetric_memory(bytes, kConnectLimitMs);
    std::vector<void*> peers;
    for (int r = 0; r < c.size(); ++r) peers.push_back(mapped->peer(r));
    const std::string said = released_once(c, [&](std::function<void()> release) {
      return c.symmetric_memory(bytes, kConnectLimitMs,
                                {.peers = peers, .release = std::move(release)});
    });
    c.bootstrap().all_gather("", "done", kConnectLimitMs);
    return said;
  });
}

/// Many at a time and one after another: what ranks tell each other by is used again.
TEST_P(CallersMemory, ComesAndGoesManyTimes) {
  expect_on_all("released 120 times", [](CudaCommunicator& c) {
    const CallersBlock block;
    int released = 0;
    for (int round = 0; round < 40; ++round) {
      std::vector<std::unique_ptr<SymmetricMemory>> held;
      for (int i = 0; i < 3; ++i) {
        held.push_back(
            c.symmetric_memory(4096, kConnectLimitMs,
                               {.local = block.at(i * kMegabyte), .release = [&] { ++released; }}));
      }
      if (round % 2 == 1) std::ranges::reverse(held);
    }
    c.bootstrap().all_gather("", "all let go", kConnectLimitMs);
    cuda::free_released_memory();
    return cat("released ", released, " times");
  });
}

/// One rank brings what cannot be used: all say why, nobody's memory is released, and the next
/// symmetric memory works.
TEST_P(CallersMemory, IsRefusedOnAllRanks) {
  struct Refusal {
    std::string part;  // of the sentence
    std::function<cuda::CallerMemory(const CallersBlock&, int ranks)> memory;
    std::int64_t bytes = 4096;
  };
  void* from_pool = nullptr;  // of the process that sets it
  const std::vector<Refusal> refusals = {
      {"; a multiple of 256 is accepted",
       [](const CallersBlock& b, int) { return cuda::CallerMemory{.local = b.at(128)}; }},
      {" ends after ",
       [](const CallersBlock& b, int) {
         return cuda::CallerMemory{.local = b.at(CallersBlock::kBytes - 2048)};
       }},
      {"which is no address of a device",
       [](const CallersBlock&, int) {
         alignas(256) static std::array<std::byte, 4096> host;
         return cuda::CallerMemory{.local = host.data()};
       }},
      {"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
       [&](const CallersBlock&, int) {
         check_cuda(cudaMallocAsync(&from_pool, 4096, nullptr), "allocate");
         check_cuda(cudaDeviceSynchronize(), "allocate");
         return cuda::CallerMemory{.local = from_pool};
       }},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.part);
    const auto said = on_communicators(GetParam(), [&](CudaCommunicator& c) {
      const CallersBlock block;
      bool released = false;
      cuda::CallerMemory callers{.local = block.at(0)};
      if (c.rank() == 1) callers = refusal.memory(block, c.size());
      callers.release = [&] { released = true; };
      const std::string sentence =
          failure_of([&] { c.symmetric_memory(refusal.bytes, kConnectLimitMs, callers); },
                     milliseconds(kConnectLimitMs));
      cuda::free_released_memory();
      if (released) return std::string("released");
      if (!block.untouched(0, CallersBlock::kBytes)) return std::string("written");
      return cat(sentence, "; then ", write_to_all(c, kPart));
    });
    EXPECT_EQ(said[0].rfind("rank 1: ", 0), 0u) << said[0];
    EXPECT_NE(said[0].find(refusal.part), std::string::npos) << said[0];
    EXPECT_NE(said[0].find("; then "), std::string::npos) << said[0];
    EXPECT_EQ(said, std::vector<std::string>(said.size(), said[0]));
  }
}

TEST_P(CallersMemory, OfOtherKindsOnOtherRanksIsRefused) {
  const auto said = on_communicators(GetParam(), [](CudaCommunicator& c) -> std::string {
    const CallersBlock block;
    cuda::CallerMemory callers;
    if (c.rank() == 1) callers.local = block.at(0);
    c.symmetric_memory(4096, kConnectLimitMs, callers);
    return "no error";
  });
  EXPECT_NE(said[0].find("ranks disagree"), std::string::npos) << said[0];
  EXPECT_EQ(said, std::vector<std::string>(said.size(), said[0]));
}

TEST(SymmetricMemory, AGroupOfOneUsesItsCallersMemory) {
  if (devices() < 1) GTEST_SKIP() << "needs a GPU";
  const auto said = on_communicators(1, [](CudaCommunicator& c) {
    const CallersBlock block;
    return released_once(c, [&](std::function<void()> release) {
      return c.symmetric_memory(kPart * 4, kConnectLimitMs,
                                {.local = block.at(kMegabyte), .release = std::move(release)});
    });
  });
  EXPECT_EQ(said[0], "local, released 1 times");
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
