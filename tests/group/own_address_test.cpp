// At which address ranks of other hosts reach this one.
#include "group/own_address.h"

#include <gtest/gtest.h>

#include "group/tcp_socket.h"
#include "support/expect_error.h"
#include "support/scoped_env.h"

namespace uniep::testing {
namespace {

/// As a host's own name often is: a name for the loopback interface that is not known as such.
constexpr char kOwnName[] = "127.1";

/// What is found where nothing leads to others: an address of the network, or none on a machine
/// that has no network.
std::string address_of_network(const std::string& other) {
  try {
    return own_address(other);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported) << e.what();
    EXPECT_NE(std::string(e.what()).find("UNIEP_SOCKET_IFNAME"), std::string::npos) << e.what();
    return "none";
  }
}

TEST(OwnAddress, IsThatOfTheInterfaceThatWasNamed) {
  const ScopedEnv named("UNIEP_SOCKET_IFNAME", "lo");
  EXPECT_EQ(own_address(""), "127.0.0.1");
  EXPECT_EQ(own_address("192.0.2.1"), "127.0.0.1");
}

TEST(OwnAddress, AnInterfaceThatIsNotThereIsRefused) {
  const ScopedEnv named("UNIEP_SOCKET_IFNAME", "lo7");
  try {
    (void)own_address("");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    for (const char* word : {"UNIEP_SOCKET_IFNAME", "'lo7'", "accepted: lo"}) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << word << ": " << e.what();
    }
  }
}

TEST(OwnAddress, LeadsToTheOther) {
  const ScopedEnv unset("UNIEP_SOCKET_IFNAME", "");
  EXPECT_EQ(own_address("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(own_address("localhost"), "127.0.0.1");
  const std::string own = address_of_network("");
  EXPECT_TRUE(own == "none" || own_address(own) == own) << own;
}

TEST(OwnAddress, IsNotLoopbackBehindTheHostsOwnName) {
  const ScopedEnv unset("UNIEP_SOCKET_IFNAME", "");
  EXPECT_FALSE(tcp::is_loopback(address_of_network(kOwnName)));
  EXPECT_EQ(address_of_network(kOwnName), address_of_network(""));
}

TEST(OwnAddress, AHostListensWhereOthersFindIt) {
  const Descriptor everywhere = tcp::listen_at_any_port(kOwnName);
  const Descriptor loopback = tcp::listen_at_any_port("127.0.0.1");
  const auto reached = [](const Descriptor& listener, const std::string& address) {
    return tcp::connect_to(address, tcp::port_of(listener),
                           Deadline::in(std::chrono::milliseconds(2000)))
        .valid();
  };
  // 127.0.0.2 is another address of this host.
  EXPECT_TRUE(reached(everywhere, "127.0.0.1"));
  EXPECT_TRUE(reached(everywhere, "127.0.0.2"));
  EXPECT_TRUE(reached(loopback, "127.0.0.1"));
  EXPECT_FALSE(reached(loopback, "127.0.0.2"));
}

}  // namespace
}  // namespace uniep::testing
