# UNIEP_CUDA=ON promises a CUDA backend, so it never falls back to a CPU-only build in silence.
find_program(UNIEP_NVCC nvcc HINTS /usr/local/cuda/bin)
mark_as_advanced(UNIEP_NVCC)
if(UNIEP_CUDA)
  if(NOT UNIEP_NVCC)
    message(FATAL_ERROR
            "UNIEP_CUDA is ON, but nvcc was found neither on PATH nor in /usr/local/cuda/bin. "
            "Install the CUDA toolkit, or use a CPU preset: cmake --preset cpu-release")
  endif()
  message(FATAL_ERROR
          "UNIEP_CUDA is ON and nvcc is at ${UNIEP_NVCC}, but uniep ${PROJECT_VERSION} has no CUDA "
          "backend yet. Use a CPU preset: cmake --preset cpu-release")
endif()
