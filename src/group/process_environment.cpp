#include "group/process_environment.h"

#include "base/check.h"
#include "base/env.h"

namespace uniep {

std::optional<ProcessEnvironment> process_environment() {
  const auto rank = env_rank();
  const auto size = env_world_size();
  const auto local_rank = env_local_rank();
  const auto address = env_master_addr();
  const auto port = env_master_port();
  const bool any = rank || size || local_rank || address || port;
  if (!any) return std::nullopt;

  std::string missing;
  const auto expect = [&](bool set, const char* name) {
    if (!set) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  expect(rank.has_value(), "RANK");
  expect(size.has_value(), "WORLD_SIZE");
  expect(local_rank.has_value(), "LOCAL_RANK");
  expect(address.has_value(), "MASTER_ADDR");
  expect(port.has_value(), "MASTER_PORT");
  require(missing.empty(), ErrorCode::kInvalidArgument,
          "of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT these are not set: ",
          missing, "; all of them (as torchrun sets them) or none are accepted");
  require(*rank < *size, ErrorCode::kInvalidArgument, "environment variable RANK is ", *rank,
          " and WORLD_SIZE is ", *size, "; a RANK from 0 to ", *size - 1, " is accepted");
  return ProcessEnvironment{*rank, *size, *local_rank, *address, *port};
}

}  // namespace uniep
