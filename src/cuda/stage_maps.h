#pragma once

#include <cuda.h>

namespace uniep::cuda {

/// Tensor maps of one GEMM stage; those that it has no use for are unspecified.
struct StageMaps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap aux;  // what the epilogue reads
  CUtensorMap out0;
  CUtensorMap out1;
};

}  // namespace uniep::cuda
