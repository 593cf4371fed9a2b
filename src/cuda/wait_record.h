#pragma once

#include <cstdint>

#include "base/math.h"
#include "uniep/stage.h"

namespace uniep::cuda {

/// Who waited for what when a device's wait expired: WaitReport for kernels. Lies in memory that
/// the host sees; the first wait that expires fills it, `written` last.
struct WaitRecord {
  std::uint32_t written = 0;
  Stage stage = Stage::kPlan;
  std::int32_t rank = -1;
  std::int32_t peer = -1;  // -1: no other rank
  std::int64_t tile = -1;  // -1: does not apply
  std::uint32_t expected = 0;
  std::uint32_t seen = 0;
};

}  // namespace uniep::cuda
