#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

namespace uniep::ptx {

/// Tensor box -> shared memory; completes on `barrier`. Coordinates are innermost first; elements
/// out of the tensor arrive as zeros.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, std::uint64_t* barrier,
                                         int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, std::uint64_t* barrier,
                                         int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// Tensor maps in global memory, which ordinary stores have written: a copy with the address of
/// another tensor, what all stores of maps are followed by, and what comes ahead of a map's use.
__device__ __forceinline__ void set_tensor_map_address(CUtensorMap* map, const void* tensor) {
  asm volatile("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;" ::"l"(map),
               "l"(tensor)
               : "memory");
}
__device__ __forceinline__ void release_tensor_maps() {
  asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
}
__device__ __forceinline__ void acquire_tensor_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/// Tensor box -> L2.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

/// Shared memory -> tensor box, in the thread's current bulk group; what lies out of the tensor is
/// not written.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int c0, int c1,
                                          int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], "
      "[%1];" ::"l"(&map),
      "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

/// Plain bytes, a multiple of 16 and 16-byte aligned on both sides.
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Until at most `kPending` of this thread's groups have still to read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Until at most `kPending` of this thread's groups have still to be visible to it.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Orders this thread's ordinary shared-memory writes before later accesses of the copy engine and
/// the tensor cores.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Orders ordinary accesses of global memory before later ones of TMA, which may then read what was
/// acquired by ordinary loads.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace uniep::ptx
