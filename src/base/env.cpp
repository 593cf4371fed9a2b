#include "base/env.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "base/check.h"
#include "base/nearest.h"
#include "base/quotes.h"
#include "base/rank_limits.h"

namespace uniep {
namespace {

constexpr EnvVariable kVariables[] = {
    {"UNIEP_TIMEOUT_MS", "limit of every wait, in milliseconds (1 to 3000000)", "30000"},
    {"UNIEP_CPU_LINK_GBPS",
     "emulate a link between CPU ranks: speed per direction in 1e9 bytes/s (1e-06 to "
     "1000000)",
     "off"},
    {"UNIEP_CPU_LINK_LATENCY_US", "latency of the emulated link, in microseconds (0 to 1000000)",
     "5"},
    {"UNIEP_HOSTS",
     "hosts that the CPU processes of a group are taken to be on, in equal runs of ranks (1 to "
     "64); between these they share no memory",
     "as found"},
    {"UNIEP_HOST_ID",
     "name of the host that this process is taken to be on, at most 63 characters; processes of "
     "different names share no memory; unset: the kernel's boot id",
     "as found"},
    {"UNIEP_SOCKET_IFNAME",
     "network interface, such as eth0, by whose IPv4 address ranks of other hosts reach this one; "
     "unset: the one that leads to MASTER_ADDR, else the first but loopback",
     "as found"},
    {"UNIEP_CPU_NETWORK_GBPS",
     "emulate a network between hosts: speed of each CPU rank's port per direction in 1e9 bytes/s "
     "(1e-06 to 1000000)",
     "off"},
    {"UNIEP_CPU_ISA", "instruction set of the CPU kernels: portable, avx2 or avx512",
     "best available"},
    {"UNIEP_NCCL_LIBRARY", "file of the NCCL library (2.28 or newer) that the CUDA backend loads",
     "libnccl.so.2"},
    {"UNIEP_SYMMETRIC_MEMORY",
     "how GPUs reach each other's memory: nccl (windows), ipc (CUDA IPC) or auto", "auto"},
    {"UNIEP_SHARE_DEVICE",
     "1: several ranks may use one GPU, whose time they share: for tests and development, slow",
     "0"},
    {"UNIEP_SPARE_SMS",
     "SMs that kernels which wait for other ranks leave to collectives of NCCL beside them (0 to "
     "64)",
     "0"},
    {"NCCL_NVLS_ENABLE", "whether NCCL may use NVLink multicast, which uniep does not use", "0"},
    {"UNIEP_TUNE_CACHE", "file of the schedules that were tuned on this machine",
     "uniep/tuned.json in XDG_CACHE_HOME"},
    {"XDG_CACHE_HOME", "folder of files that programs may keep", "$HOME/.cache"},
    {"HOME", "the user's folder", "none: no tuned schedules are kept"},
    {"RANK", "rank of this process among the processes of its group, as torchrun sets it", "none"},
    {"WORLD_SIZE", "number of these processes (1 to 64); RANK counts from 0 to below it", "none"},
    {"LOCAL_RANK",
     "CUDA device of this process, counted from 0; modulo their number with UNIEP_SHARE_DEVICE=1, "
     "or where this process sees only one",
     "none"},
    {"MASTER_ADDR",
     "host name or address at which rank 0 listens for the others; unset: under Slurm the step's "
     "first host, under mpirun 127.0.0.1 where all are on one host",
     "none, or as found"},
    {"MASTER_PORT",
     "port at which rank 0 listens (1 to 65535); where it is taken, one of the next 15",
     "under Slurm and mpirun 29500"},
    {"OMPI_COMM_WORLD_RANK", "what RANK is, where Open MPI's mpirun has started the process",
     "none"},
    {"OMPI_COMM_WORLD_SIZE", "WORLD_SIZE there", "none"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK there", "none"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "processes of this host there", "none"},
    {"PMIX_NAMESPACE", "name of the run there, which tells its processes from those of others",
     "none"},
    {"PMI_RANK", "what RANK is, where mpirun of MPICH or of Intel MPI has started the process",
     "none"},
    {"PMI_SIZE", "WORLD_SIZE there", "none"},
    {"MPI_LOCALRANKID", "LOCAL_RANK there", "none"},
    {"MPI_LOCALNRANKS", "processes of this host there", "none"},
    {"SLURM_PROCID", "what RANK is, where srun has started the process", "none"},
    {"SLURM_STEP_NUM_TASKS", "WORLD_SIZE there", "none"},
    {"SLURM_LOCALID", "LOCAL_RANK there", "none"},
    {"SLURM_STEP_NODELIST", "hosts of the step there; rank 0 is on the first", "none"},
    {"SLURM_JOB_ID", "number of the job there; with the next it tells the step from others",
     "none"},
    {"SLURM_STEP_ID", "number of the step there", "none"},
};

constexpr std::string_view kOwnPrefix = "UNIEP_";

/// What only the build, tests, benchmarks and scripts of the repository read.
constexpr std::string_view kOfTheRepository[] = {
    "UNIEP_BRIDGE",        "UNIEP_CUDA",       "UNIEP_FUZZ_CXX", "UNIEP_FUZZ_INCLUDE",
    "UNIEP_LAUNCHER_TEST", "UNIEP_OVERLAP",    "UNIEP_PICTURES", "UNIEP_PLAN_BENCH",
    "UNIEP_PROGRAM",       "UNIEP_TEST_CASES", "UNIEP_TRACE",
};

bool is_known(std::string_view name) {
  return std::ranges::count(kVariables, name, &EnvVariable::name) > 0 ||
         std::ranges::count(kOfTheRepository, name) > 0;
}

/// The nearest name, found without the prefix, which would make any two of them look alike.
std::string nearest_variable(std::string_view unknown) {
  std::vector<std::string> names;
  for (const EnvVariable& v : kVariables) {
    if (v.name.starts_with(kOwnPrefix)) names.emplace_back(v.name.substr(kOwnPrefix.size()));
  }
  const std::string name = nearest(unknown.substr(kOwnPrefix.size()), names);
  return name.empty() ? name : cat(kOwnPrefix, name);
}

const char* value_of(const char* name) {
  const bool declared =
      std::ranges::count(kVariables, std::string_view(name), &EnvVariable::name) == 1;
  ensure(declared, "environment variable ", name, " is not among those that are declared");
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

double number(const char* name, const char* text, double low, int high) {
  const char* end = text + std::strlen(text);
  double v = 0;
  const auto [rest, error] = std::from_chars(text, end, v);
  const bool whole = error == std::errc() && rest == end && std::isfinite(v);
  require(whole && v >= low && v <= high, ErrorCode::kInvalidArgument, "environment variable ",
          name, " is ", in_quotes(text), "; a number from ", low, " to ", high, " is accepted");
  return v;
}

std::optional<std::string> text_of(const char* name) {
  const char* text = value_of(name);
  return text == nullptr ? std::nullopt : std::optional<std::string>(text);
}

std::optional<int> integer(const char* name, int low, int high) {
  const std::string text = text_of(name).value_or("");
  if (text.empty()) return std::nullopt;
  int v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  require(error == std::errc() && end == text.data() + text.size() && v >= low && v <= high,
          ErrorCode::kInvalidArgument, "environment variable ", name, " is ", in_quotes(text),
          "; an integer from ", low, " to ", high, " is accepted");
  return v;
}

}  // namespace

std::span<const EnvVariable> environment_variables() { return kVariables; }

std::vector<UnknownVariable> unknown_environment_variables() {
  std::vector<UnknownVariable> unknown;
  for (char** e = environ; e != nullptr && *e != nullptr; ++e) {
    const std::string_view entry = *e;
    const std::string_view name = entry.substr(0, entry.find('='));
    const bool is_set = name.size() + 1 < entry.size();  // an empty one counts as unset
    if (!is_set || !name.starts_with(kOwnPrefix) || is_known(name)) continue;
    unknown.push_back({std::string(name), nearest_variable(name)});
  }
  std::ranges::sort(unknown, {}, &UnknownVariable::name);
  return unknown;
}

int env_timeout_ms() {
  const char* text = value_of("UNIEP_TIMEOUT_MS");
  return text == nullptr ? kUsualWaitMs
                         : static_cast<int>(number("UNIEP_TIMEOUT_MS", text, 1, kLongestWaitMs));
}

std::optional<double> env_link_gbps() {
  const char* text = value_of("UNIEP_CPU_LINK_GBPS");
  if (text == nullptr) return std::nullopt;
  return number("UNIEP_CPU_LINK_GBPS", text, 1e-6, 1000000);
}

double env_link_latency_us() {
  const char* text = value_of("UNIEP_CPU_LINK_LATENCY_US");
  return text == nullptr ? 5.0 : number("UNIEP_CPU_LINK_LATENCY_US", text, 0, 1000000);
}

int env_hosts() { return integer("UNIEP_HOSTS", 1, kMaxGroupRanks).value_or(0); }

std::string env_host_id() {
  constexpr std::size_t kLongest = 63;
  const std::string id = text_of("UNIEP_HOST_ID").value_or("");
  require(id.size() <= kLongest, ErrorCode::kInvalidArgument,
          "environment variable UNIEP_HOST_ID has ", id.size(), " characters; 1 to ", kLongest,
          " are accepted");
  return id;
}

std::string env_socket_interface() { return text_of("UNIEP_SOCKET_IFNAME").value_or(""); }

double env_network_gbps() {
  const char* text = value_of("UNIEP_CPU_NETWORK_GBPS");
  return text == nullptr ? 0 : number("UNIEP_CPU_NETWORK_GBPS", text, 1e-6, 1000000);
}

std::string link_text() {
  const auto gbps = env_link_gbps();
  return gbps ? cat("emulated, ", *gbps, " GB/s and ", env_link_latency_us(), " us") : "";
}

std::string env_cpu_isa() {
  const char* text = value_of("UNIEP_CPU_ISA");
  return text == nullptr ? "" : text;
}

std::string env_nccl_library() { return text_of("UNIEP_NCCL_LIBRARY").value_or("libnccl.so.2"); }

std::string env_nccl_nvls_enable() { return text_of("NCCL_NVLS_ENABLE").value_or(""); }

std::string env_symmetric_memory() {
  const std::string text = text_of("UNIEP_SYMMETRIC_MEMORY").value_or("auto");
  require(text == "auto" || text == "nccl" || text == "ipc", ErrorCode::kInvalidArgument,
          "environment variable UNIEP_SYMMETRIC_MEMORY is ", in_quotes(text),
          "; auto, nccl and ipc are accepted");
  return text;
}

bool env_share_device() { return integer("UNIEP_SHARE_DEVICE", 0, 1).value_or(0) == 1; }

int env_spare_sms() { return integer("UNIEP_SPARE_SMS", 0, kMostSpareSms).value_or(0); }

std::optional<int> env_rank(const char* name) { return integer(name, 0, kMaxGroupRanks - 1); }
std::optional<int> env_ranks(const char* name) { return integer(name, 1, kMaxGroupRanks); }
std::optional<std::string> env_text(const char* name) { return text_of(name); }
std::optional<std::string> env_master_addr() { return text_of("MASTER_ADDR"); }
std::optional<int> env_master_port() { return integer("MASTER_PORT", 1, 65535); }

std::string env_tune_cache() {
  if (const auto path = text_of("UNIEP_TUNE_CACHE")) return *path;
  const char* own = "/uniep/tuned.json";
  if (const auto folder = text_of("XDG_CACHE_HOME")) return *folder + own;
  // Not a folder that others can write to: they could choose this user's schedules.
  const auto home = text_of("HOME");
  return home ? *home + "/.cache" + own : "";
}

}  // namespace uniep
