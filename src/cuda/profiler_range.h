#pragma once

#include <string>

#include "schedule/pass_view.h"

namespace uniep::cuda {

/// What a profiler shows of a launch of a pass, by its stages: "uniep forward: dispatch, fc1".
std::string range_name(const PassView& view, int launch);

/// A range of NVTX for as long as it lives. Nsight Systems and other tools that read such ranges
/// show it for the host and for the kernels that are launched within. Without such a tool, nothing.
class ProfilerRange {
 public:
  /// `name()` is the text; called only where somebody reads it.
  template <class Name>
  explicit ProfilerRange(Name&& name) : open_(is_read()) {
    if (open_) begin(name());
  }
  ~ProfilerRange() {
    if (open_) end();
  }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  static bool is_read();
  static void begin(const std::string& name);
  static void end();

  const bool open_;
};

}  // namespace uniep::cuda
