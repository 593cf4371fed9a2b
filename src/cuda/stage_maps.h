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

/// Of all GEMM stages of a pass, in the order of enum Stage.
struct PassMaps {
  static constexpr int kMax = 4;
  StageMaps stages[kMax];
};

}  // namespace uniep::cuda
