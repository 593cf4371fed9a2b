#pragma once

#include <cstdint>

namespace uniep::ptx {

__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ std::uint32_t load_relaxed_gpu(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ std::uint32_t load_acquire_system(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ std::uint32_t load_relaxed_system(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void add_release_gpu(std::uint32_t* p, std::uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void add_release_system(std::uint32_t* p, std::uint32_t v) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/// The thread's number, and its lane's, read anew at each place that asks. From threadIdx the
/// compiler would compute what depends on them once, ahead of all loops, and keep it in registers
/// that main loops need, or in local memory, whose lines every fence throws out of L1.
__device__ __forceinline__ int thread_id() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// To be preceded by a fence of the GPU's scope.
__device__ __forceinline__ void add_relaxed_gpu(std::uint32_t* p, std::uint32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/// To be preceded by `fence_system`: one fence, then many cheap adds.
__device__ __forceinline__ void add_relaxed_system(std::uint32_t* p, std::uint32_t v) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ std::uint64_t global_nanoseconds() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

/// The clock of this SM, in cycles.
__device__ __forceinline__ std::uint64_t sm_cycles() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t));
  return t;
}

/// Time in units of 1024 ns, in half the registers: for spans of up to an hour.
__device__ __forceinline__ std::uint32_t global_ticks() {
  return static_cast<std::uint32_t>(global_nanoseconds() >> 10);
}

/// The last 32 bits of the time in ns: half the registers, for times of up to 4 seconds.
__device__ __forceinline__ std::uint32_t global_nanoseconds_low() {
  std::uint32_t t;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t));
  return t;
}

/// This thread's number in the grid. Volatile, so that it is computed where it is needed: kept, it
/// would take a register all along.
__device__ __forceinline__ std::uint32_t global_thread() {
  std::uint32_t thread;
  asm volatile(
      "{\n"
      ".reg .u32 cta, threads;\n"
      "mov.u32 cta, %%ctaid.x;\n"
      "mov.u32 threads, %%ntid.x;\n"
      "mov.u32 %0, %%tid.x;\n"
      "mad.lo.u32 %0, cta, threads, %0;\n"
      "}"
      : "=r"(thread));
  return thread;
}

/// Lets the stream's next launch begin beside this one, once every CTA has said so or ended, where
/// that launch asks for it (cudaLaunchAttributeProgrammaticStreamSerialization).
__device__ __forceinline__ void let_next_launch_begin() {
  asm volatile("griddepcontrol.launch_dependents;");
}

/// Waits until the launch before this one has ended, and sees what it wrote.
__device__ __forceinline__ void wait_for_last_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace uniep::ptx
