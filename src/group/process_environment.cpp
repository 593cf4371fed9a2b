#include "group/process_environment.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/env.h"
#include "base/mixed_bits.h"

namespace uniep {
namespace {

/// The variables in which a launcher says who a process is; null: it has none of the kind.
struct Launcher {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* hosts;
  std::array<const char*, 2> run;  ///< together the same in all processes of a run, and in no other
};

constexpr Launcher kTorchrun{.rank = "RANK",
                             .size = "WORLD_SIZE",
                             .local_rank = "LOCAL_RANK",
                             .local_size = nullptr,
                             .hosts = nullptr,
                             .run = {}};

/// The launchers of MPI come first: under Slurm they start their helpers by srun, whose variables
/// all ranks of a host inherit. Slurm's variables are those of a step, as a job's are set in its
/// script, too, which is no rank.
constexpr Launcher kOthers[] = {{.rank = "OMPI_COMM_WORLD_RANK",
                                 .size = "OMPI_COMM_WORLD_SIZE",
                                 .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
                                 .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
                                 .hosts = nullptr,
                                 .run = {"PMIX_NAMESPACE", nullptr}},
                                {.rank = "PMI_RANK",
                                 .size = "PMI_SIZE",
                                 .local_rank = "MPI_LOCALRANKID",
                                 .local_size = "MPI_LOCALNRANKS",
                                 .hosts = nullptr,
                                 .run = {}},
                                {.rank = "SLURM_PROCID",
                                 .size = "SLURM_STEP_NUM_TASKS",
                                 .local_rank = "SLURM_LOCALID",
                                 .local_size = nullptr,
                                 .hosts = "SLURM_STEP_NODELIST",
                                 .run = {"SLURM_JOB_ID", "SLURM_STEP_ID"}}};

constexpr int kDefaultPort = 29500;  // torchrun's

void require_rank_below_size(const Launcher& launcher, int rank, int size) {
  require(rank < size, ErrorCode::kInvalidArgument, "environment variable ", launcher.rank, " is ",
          rank, " and ", launcher.size, " is ", size, "; a ", launcher.rank, " from 0 to ",
          size - 1, " is accepted");
}

std::optional<ProcessEnvironment> of_torchrun() {
  const auto rank = env_rank(kTorchrun.rank);
  const auto size = env_ranks(kTorchrun.size);
  const auto local_rank = env_rank(kTorchrun.local_rank);
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
  require_rank_below_size(kTorchrun, *rank, *size);
  return ProcessEnvironment{*rank, *size, *local_rank, *address, *port};
}

/// One of several processes: what is started alone, such as a shell, starts ranks of its own.
bool has_started(const Launcher& launcher) {
  return env_text(launcher.rank) && env_text(launcher.local_rank) &&
         env_text(launcher.size).value_or("1") != "1";
}

std::string address_of_rank_0(const Launcher& launcher, int size) {
  if (const auto address = env_master_addr()) return *address;
  if (launcher.hosts != nullptr) {
    if (const auto hosts = env_text(launcher.hosts)) return first_of_host_list(*hosts);
  }
  const bool on_one_host = launcher.local_size != nullptr && env_ranks(launcher.local_size) == size;
  require(
      on_one_host, ErrorCode::kInvalidArgument, "MASTER_ADDR is not set, and ", launcher.rank,
      " and its companions do not tell the host of rank 0; MASTER_ADDR with the name or address "
      "of that host, the same in all processes, is accepted");
  return "127.0.0.1";
}

/// 0 where the launcher numbers no runs.
std::uint64_t number_of_run(const Launcher& launcher) {
  std::string text;
  for (const char* name : launcher.run) {
    if (name != nullptr) text += env_text(name).value_or("") + '.';
  }
  return text.empty() ? 0 : hash_of(text);
}

ProcessEnvironment environment_of(const Launcher& launcher) {
  ProcessEnvironment e{.rank = env_rank(launcher.rank).value(),
                       .size = env_ranks(launcher.size).value(),
                       .local_rank = env_rank(launcher.local_rank).value(),
                       .master_address = {},
                       .master_port = env_master_port().value_or(kDefaultPort),
                       .run = number_of_run(launcher)};
  require_rank_below_size(launcher, e.rank, e.size);
  e.master_address = address_of_rank_0(launcher, e.size);
  return e;
}

}  // namespace

std::optional<ProcessEnvironment> process_environment() {
  const bool by_torchrun = env_text(kTorchrun.rank) || env_text(kTorchrun.size);
  const auto other = std::ranges::find_if(kOthers, has_started);
  if (!by_torchrun && other != std::end(kOthers)) return environment_of(*other);
  return of_torchrun();
}

std::string first_of_host_list(const std::string& list) {
  std::string first;
  for (std::size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      first += list[at];
      continue;
    }
    // "03" of "[03-05,9]".
    first += list.substr(at + 1, list.find_first_of("-,]", at) - at - 1);
    at = std::min(list.find(']', at), list.size() - 1);
  }
  return first;
}

}  // namespace uniep
