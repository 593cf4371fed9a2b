// A rank may begin before the name service knows rank 0's host, as where a cluster starts all of a
// group's hosts at once. This program has a name service of its own: it stands before libc's.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <string>

#include "base/check.h"
#include "group/tcp_bootstrap.h"
#include "support/forked_ranks.h"

namespace {

constexpr char kLateName[] = "late.host";
constexpr char kUnknownName[] = "unknown.host";
std::atomic<int> not_yet{0};  // how many more times the late name is not known

}  // namespace

extern "C" int getaddrinfo(const char* node, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  static const auto libc = reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, __func__));
  const bool late = node != nullptr && std::strcmp(node, kLateName) == 0;
  if (late && not_yet-- > 0) return EAI_AGAIN;
  if (node != nullptr && std::strcmp(node, kUnknownName) == 0) return EAI_NONAME;
  return libc(late ? "127.0.0.1" : node, service, hints, found);
}

namespace uniep::testing {
namespace {

constexpr int kLimit = 20000;
constexpr int kShort = 200;

/// The code of the Error with which rank 1 of two does not join; nothing where it does.
std::optional<ErrorCode> refusal(const std::string& address, int port, int limit_ms) {
  try {
    const TcpBootstrap bootstrap(1, 2, address, port, limit_ms);
    return std::nullopt;
  } catch (const Error& e) {
    return e.code();
  }
}

TEST(LateName, IsWaitedFor) {
  const int port = free_tcp_port();
  const auto said = forked_ranks(2, [port](int rank) {
    not_yet = rank == 1 ? 100 : 0;  // some tries of each of the group's ports
    TcpBootstrap bootstrap(rank, 2, kLateName, port, kLimit);
    return bootstrap.all_gather(cat(rank), "plan", kLimit)[1];
  });
  EXPECT_EQ(said, (std::vector<std::string>{"1", "1"}));
}

TEST(LateName, IsWaitedForNoLongerThanTheLimit) {
  not_yet = 1 << 30;
  EXPECT_EQ(refusal(kLateName, free_tcp_port(), kShort), ErrorCode::kTimeout);
  not_yet = 0;
}

TEST(LateName, ANameThatThereIsNotIsRefusedAtOnce) {
  EXPECT_EQ(refusal(kUnknownName, free_tcp_port(), kLimit), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace uniep::testing
