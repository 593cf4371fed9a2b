#pragma once

#include "uniep/problem.h"

namespace uniep::cuda {

/// Coefficients of an erff, the highest power first: of x^2 near 0, and of |x| from `begin_of_far`
/// on. A kernel has them as a parameter, which takes no registers.
struct ErfCoefficients {
  float begin_of_far;
  float of[2][7];  // near, far
};

constexpr ErfCoefficients coefficients_of(CudaErf erf) {
  if (erf == CudaErf::kSince13_2) {
    return {0x1.00f650p0f,
            {{0x1.1b1c12p-14f, -0x1.90f4fap-11f, 0x1.510d82p-8f, -0x1.b7899ep-6f, 0x1.ce2576p-4f,
              -0x1.812710p-2f, 0x1.06eba8p-3f},
             {0x1.1c936ep-14f, -0x1.e78e46p-11f, 0x1.c7c088p-8f, -0x1.336deep-5f, 0x1.40e556p-3f,
              0x1.d431e6p-1f, 0x1.41e7d6p-1f}}};
  }
  return {0x1.00c1fcp0f,
          {{0x1.63d2d4p-14f, -0x1.ae9a40p-11f, 0x1.55abd4p-8f, -0x1.b837cep-6f, 0x1.ce315ep-4f,
            -0x1.812758p-2f, 0x1.06eba6p-3f},
           {0x1.d69874p-14f, -0x1.5c00b6p-10f, 0x1.13233ep-7f, -0x1.49b334p-5f, 0x1.46aa32p-3f,
            0x1.d369f2p-1f, 0x1.421428p-1f}}};
}

}  // namespace uniep::cuda
