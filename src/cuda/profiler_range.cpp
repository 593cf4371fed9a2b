#include "cuda/profiler_range.h"

#include <nvtx3/nvToolsExt.h>

#include <array>

#include "base/check.h"
#include "schedule/launches.h"

namespace uniep::cuda {

std::string range_name(const PassView& view, int launch) {
  const Launch held = launch_contents(view, launch);
  std::array<bool, kMaxStages> named{};
  std::string stages;
  for (const TrackList* tracks : {&held.comm, &held.main}) {
    for (int i = 0; i < tracks->count; ++i) {
      const Track& track = tracks->tracks[i];
      bool& before = named[static_cast<std::size_t>(track.stage)];
      if (track.count == 0 || before) continue;
      stages += cat(stages.empty() ? "" : ", ", name(track.stage));
      before = true;
    }
  }
  return cat("uniep ", name(view.pass), ": ", stages);
}

bool ProfilerRange::is_read() {
  // A tool is there from the process's first range on, or never.
  static const bool read = [] {
    const bool counted = nvtxRangePushA("uniep") >= 0;
    if (counted) nvtxRangePop();
    return counted;
  }();
  return read;
}

void ProfilerRange::begin(const std::string& name) { nvtxRangePushA(name.c_str()); }

void ProfilerRange::end() { nvtxRangePop(); }

}  // namespace uniep::cuda
