#pragma once

#include <cublas_v2.h>

#include <string>

namespace uniep::tool {

/// cuBLAS, loaded at run time: only floors need it, and many machines have it in PyTorch alone.
class CublasLibrary {
 public:
  /// Looks for it at the first call.
  static const CublasLibrary& get();

  /// Why it cannot be used, as a clause; empty where it can.
  const std::string& missing() const { return missing_; }
  const std::string& file() const { return file_; }

  /// What cublas_api.h declares, of which it has a second one for C++.
  using GemmStridedBatched = cublasStatus_t(cublasHandle_t, cublasOperation_t, cublasOperation_t,
                                            int m, int n, int k, const void* alpha, const void* a,
                                            cudaDataType a_type, int lda, long long a_stride,
                                            const void* b, cudaDataType b_type, int ldb,
                                            long long b_stride, const void* beta, void* c,
                                            cudaDataType c_type, int ldc, long long c_stride,
                                            int batch_count, cublasComputeType_t, cublasGemmAlgo_t);

  decltype(&::cublasCreate_v2) create = nullptr;
  decltype(&::cublasDestroy_v2) destroy = nullptr;
  decltype(&::cublasGetStatusString) status_string = nullptr;
  GemmStridedBatched* gemm_strided_batched = nullptr;

  /// Throws Error(kDevice) unless `status` is success; `what` as in check_cuda.
  void check(cublasStatus_t status, const char* what) const;

 private:
  CublasLibrary();

  std::string missing_;
  std::string file_;
};

}  // namespace uniep::tool
