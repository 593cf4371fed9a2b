#include "api/compared_results.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "layer/expert_places.h"
#include "uniep/error.h"

#ifdef UNIEP_HAS_CUDA
#include <cuda_runtime_api.h>

#include "base/cuda/check_cuda.h"
#endif

namespace uniep {
namespace {

// What is done to the caller's memory on the host or the device. On the device each waits until it
// is done, for any stream: streams that do not wait for the default one would not wait for it.

/// Waits until what is on any stream is done: gradients may still be written.
void wait_for_device(Backend backend) {
#ifdef UNIEP_HAS_CUDA
  if (backend == Backend::kCuda) {
    cuda::check_cuda(cudaDeviceSynchronize(), "wait for the device");
  }
#endif
  (void)backend;
}

void copy_to_host(Backend backend, std::span<std::byte> to, const std::byte* from) {
  if (to.empty()) return;
#ifdef UNIEP_HAS_CUDA
  if (backend == Backend::kCuda) {
    return cuda::check_cuda(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyDeviceToHost),
                            "copy results to the host");
  }
#endif
  (void)backend;
  std::memcpy(to.data(), from, to.size());
}

void copy_from_host(Backend backend, std::span<std::byte> to, const std::byte* from) {
  if (to.empty()) return;
#ifdef UNIEP_HAS_CUDA
  if (backend == Backend::kCuda) {
    cuda::check_cuda(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyHostToDevice),
                     "copy gradients to the device");
    return cuda::check_cuda(cudaStreamSynchronize(nullptr), "copy gradients to the device");
  }
#endif
  (void)backend;
  std::memcpy(to.data(), from, to.size());
}

/// Every bit set: a NaN in every floating point type.
void fill_with_nans(Backend backend, std::span<std::byte> memory) {
  if (memory.empty()) return;
#ifdef UNIEP_HAS_CUDA
  if (backend == Backend::kCuda) {
    cuda::check_cuda(cudaMemset(memory.data(), 0xff, memory.size()), "overwrite results");
    return cuda::check_cuda(cudaStreamSynchronize(nullptr), "overwrite results");
  }
#endif
  (void)backend;
  std::memset(memory.data(), 0xff, memory.size());
}

std::int64_t count_differing_elements(std::span<const std::byte> a, std::span<const std::byte> b,
                                      std::size_t width) {
  if (std::memcmp(a.data(), b.data(), a.size()) == 0) return 0;
  std::int64_t differing = 0;
  for (std::size_t i = 0; i < a.size(); i += width) {
    differing += std::memcmp(&a[i], &b[i], width) == 0 ? 0 : 1;
  }
  return differing;
}

}  // namespace

void ComparedResults::add(std::span<std::byte> bytes, std::size_t width, bool added_to) {
  tensors_.push_back({.bytes = bytes, .width = width, .added_to = added_to});
}

void ComparedResults::add(const WeightGrad& grad) {
  with_matrices(grad, [&]<class Element>(const ExpertMatrices<Element>& matrices) {
    for_each_tensor(matrices, [&](std::span<Element> tensor) {
      add(std::as_writable_bytes(tensor), sizeof(Element), !is_overwritten(grad));
    });
  });
}

void ComparedResults::hold() {
  wait_for_device(backend_);
  for (Tensor& t : tensors_) {
    t.expected.reserve(t.bytes.size());
    if (!t.added_to) continue;
    t.before.resize(t.bytes.size());
    copy_to_host(backend_, t.before, t.bytes.data());
  }
  held_ = true;
}

void ComparedResults::prepare() {
  for (const Tensor& t : tensors_) {
    t.added_to ? copy_from_host(backend_, t.bytes, t.before.data())
               : fill_with_nans(backend_, t.bytes);
  }
}

void ComparedResults::expect_this() {
  for (Tensor& t : tensors_) {
    t.expected.resize(t.bytes.size());
    copy_to_host(backend_, t.expected, t.bytes.data());
  }
}

std::int64_t ComparedResults::count_differing() const {
  // So many bytes are compared at a time: those of a device are copied first.
  constexpr std::size_t kPiece = std::size_t{64} << 20;
  std::vector<std::byte> piece;
  std::int64_t differing = 0;
  for (const Tensor& t : tensors_) {
    for (std::size_t begin = 0; begin < t.bytes.size(); begin += kPiece) {
      const std::size_t size = std::min(kPiece, t.bytes.size() - begin);
      std::span<const std::byte> found = t.bytes.subspan(begin, size);
      if (backend_ != Backend::kCpu) {
        piece.resize(size);
        copy_to_host(backend_, piece, found.data());
        found = piece;
      }
      differing +=
          count_differing_elements(found, std::span(t.expected).subspan(begin, size), t.width);
    }
  }
  return differing;
}

void ComparedResults::restore() {
  held_ = false;
  for (const Tensor& t : tensors_) {
    if (t.added_to) copy_from_host(backend_, t.bytes, t.before.data());
  }
}

ComparedResults::~ComparedResults() {
  if (!held_) return;
  try {
    wait_for_device(backend_);  // a pass that failed may not have ended
    restore();
  } catch (const Error&) {  // what failed first is on its way to the caller
  }
}

}  // namespace uniep
