#include "cpu/kernels/kernels.h"

#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/env.h"
#include "base/quotes.h"
#include "cpu/kernels/isa.h"

namespace uniep::cpu {
namespace {

constexpr Isa kBestFirst[] = {Isa::kAvx512, Isa::kAvx2, Isa::kPortable};

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kPortable:
      return "portable";
  }
  return "unknown";
}

std::string supported_names() {
  std::string names;
  for (const Isa isa : kBestFirst) {
    if (kernels_for(isa) != nullptr)
      names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  return names;
}

bool has_stride(const MatrixView& v, int stride) {
  return v.row_stride == stride || v.col_stride == stride;
}

constexpr std::align_val_t kAlignment{64};

}  // namespace

GemmScratch::GemmScratch(GemmScratch&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), capacity_(std::exchange(other.capacity_, 0)) {}

GemmScratch::~GemmScratch() { ::operator delete(data_, kAlignment); }

float* GemmScratch::reserve(std::size_t count) {
  if (count > capacity_) {
    ::operator delete(data_, kAlignment);
    data_ = nullptr;
    capacity_ = 0;
    data_ = static_cast<float*>(::operator new(count * sizeof(float), kAlignment));
    capacity_ = count;
  }
  return data_;
}

const Kernels* kernels_for(Isa isa) {
#ifdef UNIEP_X86_KERNELS
  if (isa == Isa::kAvx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return &kAvx2Kernels;
  }
  if (isa == Isa::kAvx512 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma")) {
    return &kAvx512Kernels;
  }
#endif
  return isa == Isa::kPortable ? &kPortableKernels : nullptr;
}

const Kernels& select_kernels(const std::string& wanted) {
  for (const Isa isa : kBestFirst) {
    const Kernels* found = kernels_for(isa);
    if (wanted.empty() && found != nullptr) return *found;
    if (wanted == isa_name(isa)) {
      require(found != nullptr, ErrorCode::kUnsupported, "UNIEP_CPU_ISA is ", in_quotes(wanted),
              ", which this CPU or this build lacks; it has ", supported_names());
      return *found;
    }
  }
  throw Error(ErrorCode::kInvalidArgument,
              cat("UNIEP_CPU_ISA is ", in_quotes(wanted),
                  "; accepted are portable, avx2, avx512, or empty for "
                  "the best one; this CPU and build have ",
                  supported_names()));
}

const Kernels& kernels() {
  static const Kernels& chosen = select_kernels(env_cpu_isa());
  return chosen;
}

void gemm_tile(const Kernels& kernels, std::int64_t m, std::int64_t n, std::int64_t k, MatrixView a,
               MatrixView b, float* c, std::int64_t ldc, GemmScratch& scratch, bool add) {
  ensure(m >= 0 && n >= 0 && k >= 0 && (ldc >= n || m <= 1), "gemm_tile of m=", m, ", n=", n,
         ", k=", k, ", ldc=", ldc);
  ensure(has_stride(a, 1) && (has_stride(b, 1) || has_stride(b, 2)),
         "gemm_tile of a matrix whose elements do not lie together");
  kernels.gemm(m, n, k, a, b, c, ldc, scratch, add);
}

}  // namespace uniep::cpu
