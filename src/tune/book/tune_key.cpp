#include "tune/book/tune_key.h"

#ifdef UNIEP_HAS_CUDA
#include <cuda_runtime.h>

#include <map>
#include <mutex>

#include "base/cuda/check_cuda.h"
#include "base/cuda/driver.h"
#endif
#include "base/check.h"
#include "base/cpu_info.h"
#include "base/env.h"
#include "cpu/kernels/kernels.h"
#include "schedule/open_sizes.h"
#include "uniep/version.h"

namespace uniep::tune {
namespace {

/// What a key says of the hardware, and what runs there.
struct Hardware {
  std::string device;
  std::string driver;
  Place place;
};

#ifdef UNIEP_HAS_CUDA
Hardware ask_gpu(int ordinal) {
  int version = 0;
  cuda::check_cuda(cudaDriverGetVersion(&version), "ask for the version of the CUDA driver");
  return {cuda::device_text(ordinal),
          cat("CUDA ", version / 1000, '.', version % 1000 / 10),
          {Backend::kCuda, cuda::sms_to_hold(ordinal)}};
}

/// Each device is asked once.
const Hardware& this_gpu() {
  int ordinal = 0;
  cuda::check_cuda(cudaGetDevice(&ordinal), "ask for the device");
  static std::mutex mutex;
  static std::map<int, Hardware> known;
  const std::scoped_lock lock(mutex);
  const auto found = known.find(ordinal);
  return found != known.end() ? found->second
                              : known.emplace(ordinal, ask_gpu(ordinal)).first->second;
}
#endif

Hardware this_cpu() {
  static const std::string name = cat(cpu_model(), ", ", usable_cpus(), " CPUs");
  const std::string link = link_text();
  return {
      link.empty() ? name : cat(name, ", link ", link), cpu::kernels().name, {Backend::kCpu, 0}};
}

Hardware hardware(Backend backend) {
#ifdef UNIEP_HAS_CUDA
  if (backend == Backend::kCuda) return this_gpu();
#endif
  (void)backend;
  return this_cpu();
}

}  // namespace

std::string device_name(Backend backend, int hosts) {
  std::string device = hardware(backend).device;
  const double network = hosts > 1 ? env_network_gbps() : 0;
  return network > 0 ? cat(device, ", network ", network, " GB/s") : device;
}

TuneKey tune_key(Backend backend, const Problem& problem, const RankLayout& layout,
                 std::int64_t tokens, double skew, Pass pass) {
  return {.backend = backend,
          .device = device_name(backend, layout.hosts),
          .driver = hardware(backend).driver,
          .library = UNIEP_VERSION_STRING,
          .hidden = problem.hidden,
          .intermediate = problem.intermediate,
          .num_experts = problem.num_experts,
          .topk = problem.topk,
          .ranks = layout.ranks(),
          .hosts = layout.hosts,
          .pass = pass,
          .save = problem.save,
          .recompute_h = problem.recompute_h,
          .activation = problem.activation,
          .probs = problem.probs,
          .bias = problem.bias,
          .combine_groups = problem.combine_groups,
          .combine_partials = problem.combine_partials,
          .shared_experts = problem.shared_experts,
          .shared_gate = problem.shared_experts == 0 || problem.shared_gate,
          .backward_rows = problem.backward_rows,
          .gathered_hosts = problem.gathered_hosts,
          .in_waves = problem.first_host >= 0,
          .slot_rows = problem.slot_rows,
          .spare_sms = backend == Backend::kCuda ? env_spare_sms() : 0,
          .tokens = token_bucket(tokens),
          .skew = skew};
}

Place this_place(Backend backend) { return hardware(backend).place; }

}  // namespace uniep::tune
