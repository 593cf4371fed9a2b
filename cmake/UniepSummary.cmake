# One line at the end of configuring that says what this build contains.
if(UNIEP_CUDA)
  set(_backends "CPU and CUDA (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, sm_90a, NCCL ${_nccl_version} headers)")
elseif(UNIEP_NVCC)
  set(_backends "CPU only (nvcc is at ${UNIEP_NVCC}: the preset cuda, or -DUNIEP_CUDA=ON, would use it)")
else()
  set(_backends "CPU only (no nvcc found)")
endif()
set(_san "none")
if(UNIEP_SANITIZE)
  set(_san ${UNIEP_SANITIZE})
endif()
message(STATUS
        "uniep ${PROJECT_VERSION}: ${CMAKE_BUILD_TYPE}, backends: ${_backends}, sanitizer: ${_san}")
