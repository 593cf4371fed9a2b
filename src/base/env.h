#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace uniep {

/// An environment variable that the library reads. All of uniep's own are listed in env.cpp and
/// nowhere else; help texts and docs come from that list.
struct EnvVariable {
  std::string_view name;
  std::string_view meaning;
  std::string_view default_text;
};
std::span<const EnvVariable> environment_variables();

/// A variable that is set and called UNIEP_..., but that nothing reads: mistyped, or of another
/// version.
struct UnknownVariable {
  std::string name;
  std::string nearest;  ///< the listed one that was probably meant; empty: none is near
};
/// The unknown variables, in the order of their names. What the build, tests and scripts of this
/// repository read is known.
std::vector<UnknownVariable> unknown_environment_variables();

/// The longest limit of a wait that is accepted, in milliseconds: 50 minutes, so that kernels can
/// count up to it, and a quarter more, in 32 bits.
inline constexpr int kLongestWaitMs = 3000000;

inline constexpr int kUsualWaitMs = 30000;

/// UNIEP_TIMEOUT_MS: limit of every wait in milliseconds; unset: kUsualWaitMs.
int env_timeout_ms();

/// UNIEP_CPU_LINK_GBPS: speed of the emulated link between CPU ranks in 1e9 bytes per second and
/// direction; nothing where no link is emulated.
std::optional<double> env_link_gbps();

/// UNIEP_CPU_LINK_LATENCY_US: latency of the emulated link.
double env_link_latency_us();

/// Hosts that a group's ranks are taken to be on; 0: as found.
int env_hosts();
/// UNIEP_HOST_ID; empty: the kernel's boot id counts.
std::string env_host_id();
/// UNIEP_SOCKET_IFNAME; empty: the interface is found.
std::string env_socket_interface();
/// The bandwidth of each rank's port to other hosts, in 1e9 bytes/s; 0: not emulated.
double env_network_gbps();

/// "emulated, 1 GB/s and 5 us": that link, for reports; empty where there is none.
std::string link_text();

/// UNIEP_CPU_ISA: instruction set the CPU kernels are forced to; empty: the best there is.
std::string env_cpu_isa();

/// UNIEP_NCCL_LIBRARY: what the CUDA backend loads NCCL from.
std::string env_nccl_library();

/// NCCL_NVLS_ENABLE, which is NCCL's and which the CUDA backend sets to 0.
std::string env_nccl_nvls_enable();

/// UNIEP_SYMMETRIC_MEMORY: "auto", "nccl" or "ipc".
std::string env_symmetric_memory();

/// UNIEP_SHARE_DEVICE: whether several ranks may use one GPU.
bool env_share_device();

/// UNIEP_SPARE_SMS: SMs of a GPU that kernels which wait for other ranks leave to other kernels.
int env_spare_sms();
inline constexpr int kMostSpareSms = 64;

/// UNIEP_TUNE_CACHE, or its default in the user's cache folder; empty: there is none, nor HOME.
std::string env_tune_cache();

// What launchers set, each in variables of its own; `process_environment` puts them together.
std::optional<int> env_rank(const char* name = "RANK");
std::optional<int> env_ranks(const char* name);  ///< a number of ranks
std::optional<std::string> env_text(const char* name);
std::optional<std::string> env_master_addr();
std::optional<int> env_master_port();

}  // namespace uniep
