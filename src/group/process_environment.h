#pragma once

#include <cstdint>
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
  std::uint64_t run = 0;  ///< tells the group from others at that port; 0: the port does
};

/// What a launcher says: torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT;
/// where these are not set, what mpirun (Open MPI, MPICH, Intel MPI) or Slurm's srun says of
/// several processes that it has started. Nothing where no launcher is seen. Throws
/// Error(kInvalidArgument) where some are missing or out of range.
std::optional<ProcessEnvironment> process_environment();

/// The first host of a list as Slurm writes it: of "gpu[03-05,9],login" "gpu03".
std::string first_of_host_list(const std::string& list);

}  // namespace uniep
