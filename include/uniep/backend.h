#pragma once

namespace uniep {

/// What a group computes on: threads of one process, or GPUs.
enum class Backend : int { kCpu, kCuda };

constexpr const char* name(Backend backend) { return backend == Backend::kCpu ? "cpu" : "cuda"; }

}  // namespace uniep
