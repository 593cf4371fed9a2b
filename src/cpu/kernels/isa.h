#pragma once

#include "cpu/kernels/kernels.h"

namespace uniep::cpu {

// One per translation unit kernels_*.cpp; the AVX ones exist only in x86-64 builds. Reach them
// through kernels_for(), which knows what the CPU supports.
extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace uniep::cpu
