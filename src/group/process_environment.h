#pragma once

#include <optional>
#include <string>

namespace uniep {

/// Which process of a group this is, and where they meet.
struct ProcessEnvironment {
  int rank = 0;
  int size = 1;
  int local_rank = 0;          ///< the CUDA device
  std::string master_address;  ///< where rank 0 listens
  int master_port = 0;
};

/// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; nothing where none of them is set.
/// Throws Error(kInvalidArgument) where some are missing or out of range.
std::optional<ProcessEnvironment> process_environment();

}  // namespace uniep
