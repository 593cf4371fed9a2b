#include "profile/measure_cuda_profile.h"

#include <cuda_runtime_api.h>

#include "base/check.h"
#include "base/cuda/check_cuda.h"
#include "base/utc_now.h"
#include "common/machine.h"
#include "cuda/device/dispatch_shape.h"
#include "cuda/device/sm90/tile_shape.h"
#include "group/cuda/cuda_communicator.h"
#include "profile/device_lab.h"
#include "tune/book/schedule_book.h"
#include "tune/book/tune_key.h"

namespace uniep::tool {
namespace {

double cache_bytes() {
  int ordinal = 0, bytes = 0;
  cuda::check_cuda(cudaGetDevice(&ordinal), "ask for the device");
  cuda::check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, ordinal),
                   "ask for the size of its L2 cache");
  return bytes;
}

/// How the kernels organise their workers, and what is not measured, or not by one GPU.
tune::MachineProfile known_profile(int ranks, std::optional<tune::MachineProfile> like) {
  const std::string device = tune::device_name(Backend::kCuda);
  if (!like) like = tune::shipped_profile_of(Backend::kCuda, device);
  require(ranks > 1 || like, ErrorCode::kUnsupported,
          "one GPU has no link to measure, and there is no shipped profile of ", device,
          " to take it from; --ranks 2 or more, or --like PROFILE is accepted");
  tune::MachineProfile known;
  known.name = "measured";
  known.backend = Backend::kCuda;
  known.device = device;
  known.source =
      cat("uniep profile, ", ranks, " ranks, ", utc_now(), ", ", to_string(this_build()));
  known.lanes = cuda::kDispatchWarps;
  known.push_depth = 1;  // a sender's tiles behind its consumer's
  known.k_step = cuda::kTileK;
  known.cache_bytes = cache_bytes();
  if (!like) return known;
  known.source += cat(ranks > 1 ? "; draw_s, alone and crowd: "
                                : "; draw_s, alone, crowd, link, flags and beside_link: ",
                      like->source);
  known.draw_s = like->draw_s;
  known.dispatch = {.alone = like->dispatch.alone, .crowd = like->dispatch.crowd};
  known.reduce = {.alone = like->reduce.alone, .crowd = like->reduce.crowd};
  if (ranks > 1) return known;
  known.link = like->link;
  known.wake = like->wake;
  known.beside_link = like->beside_link;
  return known;
}

}  // namespace

tune::MeasuredProfile measure_cuda_profile(const Communicator& group, BenchDevice& device,
                                           const tune::LabOptions& options,
                                           const std::optional<tune::MachineProfile>& like) {
  const tune::MachineProfile known = known_profile(group.size(), like);
  DeviceLab lab(group, cuda::single_rank(), device);
  return measure_lab_profile(lab, known, options);
}

}  // namespace uniep::tool
