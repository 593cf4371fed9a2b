// What ranks that share a GPU, and memory that they share, decide on the host: needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "base/check.h"
#include "group/cuda/device_sharing.h"
#include "group/cuda/handle_cache.h"
#include "group/cuda/ipc_memory.h"
#include "support/expect_error.h"

namespace uniep::cuda {
namespace {

using uniep::testing::expect_error;
using uniep::testing::expect_invalid;

RankGpu gpu(char uuid, bool mps = false) { return {.uuid = std::string(16, uuid), .mps = mps}; }

TEST(DeviceSharing, RanksTakeTheirDevicesInTurn) {
  EXPECT_EQ(device_of(3, 8), 3);
  EXPECT_EQ(device_of(3, 4), 3);
  EXPECT_EQ(device_of(3, 2), 1);
  EXPECT_EQ(device_of(3, 1), 0);
  EXPECT_EQ(device_of(3, 0), 3) << "no device at all is refused for what it is";
}

TEST(DeviceSharing, GpusAreSentAsBytes) {
  for (const bool mps : {false, true}) {
    RankGpu sent = gpu('x', mps);
    sent.uuid[3] = '\0';
    const RankGpu got = rank_gpu(to_bytes(sent));
    EXPECT_EQ(got.uuid, sent.uuid);
    EXPECT_EQ(got.mps, mps);
  }
}

TEST(DeviceSharing, GpusAreCountedOnce) {
  for (const bool share : {false, true}) {
    EXPECT_EQ(count_gpus({gpu('a')}, share), 1);
    EXPECT_EQ(count_gpus({gpu('a'), gpu('b'), gpu('c')}, share), 3);
  }
  EXPECT_EQ(count_gpus({gpu('a'), gpu('a')}, true), 1);
  EXPECT_EQ(count_gpus({gpu('a'), gpu('b'), gpu('a'), gpu('b'), gpu('a')}, true), 2);
}

TEST(DeviceSharing, IsRefusedUnlessItIsAskedFor) {
  expect_invalid(
      "ranks 1 and 2 use the same GPU; one GPU for each rank (LOCAL_RANK) is accepted, or "
      "UNIEP_SHARE_DEVICE=1, which is for tests and development, and slow",
      [] {
        count_gpus({gpu('a'), gpu('b'), gpu('b')}, false);
      });
}

TEST(DeviceSharing, IsRefusedWhereMpsRunsProcessesSideBySide) {
  EXPECT_EQ(count_gpus({gpu('a', true), gpu('b', true)}, true), 2);
  expect_error(ErrorCode::kUnsupported,
               "ranks 0 and 1 share a GPU that CUDA MPS serves, where kernels that wait for each "
               "other may never run together; UNIEP_SHARE_DEVICE=1 is accepted without MPS",
               [] {
                 count_gpus({gpu('a', true), gpu('a', true)}, true);
               });
}

TEST(DeviceSharing, LeavesCudaIpcOnly) {
  EXPECT_EQ(kind_of_shared("auto"), "ipc");
  EXPECT_EQ(kind_of_shared("ipc"), "ipc");
  expect_error(
      ErrorCode::kUnsupported,
      "UNIEP_SYMMETRIC_MEMORY is 'nccl', and ranks share a GPU (UNIEP_SHARE_DEVICE), which "
      "NCCL does not support; auto and ipc are accepted",
      [] { kind_of_shared("nccl"); });
}

TEST(IpcPart, IsSentAsBytes) {
  const IpcPart sent{.handle = std::string(63, '\0') + "h", .offset = (std::int64_t{1} << 40) + 7};
  const std::string bytes = to_bytes(sent);
  EXPECT_EQ(bytes.size(), IpcPart::kBytes);
  EXPECT_EQ(ipc_part(bytes).handle, sent.handle);
  EXPECT_EQ(ipc_part(bytes).offset, sent.offset);
}

/// Opens as the driver does that refuses a handle which is open already.
class FakeDriver {
 public:
  HandleCache::Functions functions() {
    return {.open = [this](const std::string& handle) -> void* {
              require(handle != "bad", ErrorCode::kDevice, "no such handle");
              open_.push_back(handle);
              EXPECT_EQ(std::ranges::count(open_, handle), 1);
              ++opens;
              return addresses_ + open_.size() * 16 + handle.size();
            },
            .close =
                [this](void*) {
                  ++closes;
                  open_.pop_back();
                  require(!fail_to_close, ErrorCode::kDevice, "cannot close");
                }};
  }
  int opens = 0;
  int closes = 0;
  bool fail_to_close = false;

 private:
  std::vector<std::string> open_;
  char addresses_[1024] = {};
};

TEST(HandleCache, OpensOnceForAllUsersAndClosesAfterTheLast) {
  FakeDriver driver;
  HandleCache cache(driver.functions());
  void* const address = cache.acquire(0, "h");
  EXPECT_EQ(cache.acquire(0, "h"), address);
  EXPECT_EQ(cache.acquire(0, "h"), address);
  cache.release(0, "h");
  cache.release(0, "h");
  EXPECT_EQ(driver.closes, 0);
  EXPECT_EQ(cache.acquire(0, "h"), address);
  cache.release(0, "h");
  cache.release(0, "h");
  EXPECT_EQ(driver.opens, 1);
  EXPECT_EQ(driver.closes, 1);
  cache.acquire(0, "h");
  EXPECT_EQ(driver.opens, 2) << "it was closed, and the memory may be another by now";
}

TEST(HandleCache, KeepsHandlesApart) {
  FakeDriver driver;
  HandleCache cache(driver.functions());
  EXPECT_NE(cache.acquire(0, "h"), cache.acquire(0, "other"));
  EXPECT_EQ(driver.opens, 2);
  cache.release(0, "other");
  EXPECT_EQ(driver.closes, 1);
}

TEST(HandleCache, KeepsNothingOfAHandleThatDoesNotOpen) {
  FakeDriver driver;
  HandleCache cache(driver.functions());
  for (int i = 0; i < 2; ++i) {
    expect_error(ErrorCode::kDevice, "no such handle", [&] { cache.acquire(0, "bad"); });
  }
  EXPECT_THROW(cache.release(0, "bad"), Error);
}

TEST(HandleCache, ForgetsAHandleThatDoesNotClose) {
  FakeDriver driver;
  driver.fail_to_close = true;
  HandleCache cache(driver.functions());
  cache.acquire(0, "h");
  expect_error(ErrorCode::kDevice, "cannot close", [&] { cache.release(0, "h"); });
  cache.acquire(0, "h");
  EXPECT_EQ(driver.opens, 2);
}

TEST(HandleCache, ServesManyThreads) {
  FakeDriver driver;
  HandleCache cache(driver.functions());
  cache.acquire(0, "h");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        cache.acquire(0, "h");
        cache.release(0, "h");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(driver.opens, 1);
  EXPECT_EQ(driver.closes, 0);
  cache.release(0, "h");
  EXPECT_EQ(driver.closes, 1);
}

}  // namespace
}  // namespace uniep::cuda
