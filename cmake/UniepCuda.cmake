# UNIEP_CUDA=ON promises a CUDA backend: what that lacks is said here, and configuring stops. It
# never falls back to a CPU-only build in silence; AUTO does, and UniepSummary.cmake says so.
string(TOUPPER "${UNIEP_CUDA}" _cuda)
if(NOT _cuda MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "UNIEP_CUDA is '${UNIEP_CUDA}'; ON, OFF and AUTO are accepted")
endif()
set(UNIEP_CUDA ${_cuda})
find_program(UNIEP_NVCC nvcc HINTS /usr/local/cuda/bin)
mark_as_advanced(UNIEP_NVCC)
if(NOT UNIEP_CUDA)
  return()
endif()

# uniep_no_cuda(what is missing): AUTO builds without, ON stops. Leaves this file in both cases.
macro(uniep_no_cuda)
  if(NOT UNIEP_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "UNIEP_CUDA is ON, but " ${ARGN}
            ", or use a CPU preset: cmake --preset cpu-release (make PRESET=cpu-release)")
  endif()
  set(UNIEP_CUDA OFF)
  return()
endmacro()

if(NOT UNIEP_NVCC)
  uniep_no_cuda("nvcc was found neither on PATH nor in /usr/local/cuda/bin. "
                "Install the CUDA toolkit 13.0 or newer")
endif()
execute_process(COMMAND ${UNIEP_NVCC} --version OUTPUT_VARIABLE _nvcc_text ERROR_QUIET)
string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _match "${_nvcc_text}")
set(UNIEP_NVCC_VERSION "${CMAKE_MATCH_1}")
if(UNIEP_NVCC_VERSION VERSION_LESS 13.0)
  uniep_no_cuda("${UNIEP_NVCC} is version '${UNIEP_NVCC_VERSION}'. "
                "Install the CUDA toolkit 13.0 or newer (-DUNIEP_NVCC=FILE names its nvcc)")
endif()

# NCCL: headers only. The library itself is loaded at run time (src/group/cuda/nccl_library.h).
get_filename_component(_cuda_root ${UNIEP_NVCC} REALPATH)
get_filename_component(_cuda_root ${_cuda_root}/../.. ABSOLUTE)
file(GLOB _nccl_hints ${_cuda_root}/include ${_cuda_root}/targets/x86_64-linux/include
     /usr/lib/python3*/site-packages/nvidia/nccl/include
     /usr/local/lib/python3*/*-packages/nvidia/nccl/include
     /opt/*/.venv/lib/python3*/site-packages/nvidia/nccl/include
     $ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/nccl/include)
if(UNIEP_PYTHON)  # PyTorch brings them
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u; print(next(iter(u.find_spec('nvidia.nccl').submodule_search_locations)))"
    OUTPUT_VARIABLE _nccl_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(APPEND _nccl_hints ${_nccl_package}/include)
endif()
find_path(UNIEP_NCCL_INCLUDE_DIR nccl_device.h HINTS ${_nccl_hints})
set(_nccl_version "none")
if(UNIEP_NCCL_INCLUDE_DIR)
  file(STRINGS ${UNIEP_NCCL_INCLUDE_DIR}/nccl.h _lines REGEX "#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" _lines "${_lines}")
  string(REPLACE ";" "." _nccl_version "${_lines}")
endif()
if(_nccl_version STREQUAL "none" OR _nccl_version VERSION_LESS 2.28)
  uniep_no_cuda("NCCL's headers nccl.h and nccl_device.h of version 2.28 or newer were "
                "not found (found: ${_nccl_version}). Install NCCL (Debian: libnccl-dev; or pip install "
                "nvidia-nccl-cu13), name the folder by -DUNIEP_NCCL_INCLUDE_DIR=DIR")
endif()

# What else a toolkit has, where only a part of it may be installed: beside nvcc, or where the system
# has such files. cuBLAS is what the command line compares products with, and is loaded at run time.
set(_headers cuda_runtime.h)
if(UNIEP_BUILD_TOOLS)
  list(APPEND _headers cublas_v2.h)
endif()
foreach(_header ${_headers})
  unset(_found)
  find_path(_found ${_header} NO_CACHE
            HINTS ${_cuda_root}/include ${_cuda_root}/targets/x86_64-linux/include)
  if(NOT _found)
    uniep_no_cuda("the header ${_header} was not found beside ${UNIEP_NVCC}. "
                  "Install the whole CUDA toolkit 13.0 or newer")
  endif()
endforeach()
unset(_found)
find_library(_found cudart_static NO_CACHE
             HINTS ${_cuda_root} PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib)
if(NOT _found)
  uniep_no_cuda("libcudart_static.a was not found beside ${UNIEP_NVCC}. "
                "Install the whole CUDA toolkit 13.0 or newer")
endif()
set(UNIEP_CUDA ON)

# One host compiler for everything; the code for the device is named once, below.
set(CMAKE_CUDA_COMPILER ${UNIEP_NVCC})
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
set(CMAKE_CUDA_ARCHITECTURES OFF)
# The CUDA runtime is linked by name, and statically: what CMake adds of itself would reach the
# users of the installed library as a demand for the CUDA language.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
enable_language(CUDA)
# CMake 3.25.1 knows of no C++20 for nvcc, and without these drops the standard in silence.
foreach(_kind STANDARD EXTENSION)
  if(NOT CMAKE_CUDA20_${_kind}_COMPILE_OPTION)
    set(CMAKE_CUDA20_${_kind}_COMPILE_OPTION -std=c++20)
  endif()
endforeach()
if(NOT cuda_std_20 IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
  list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
list(PREPEND CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CURRENT_LIST_DIR}/nvcc_strict.sh)
set(CMAKE_CUDA_FLAGS_DEBUG "-g -O2")  # kernels without optimisation are of no use to anybody
find_package(CUDAToolkit 13.0 REQUIRED)

# How CUDA sources are compiled; warnings and the like of the host part are in UniepOptions.cmake.
# -ffp-contract=off has no counterpart here: device code says by __fmul_rn and the like where the
# contract forbids a fused multiply-add, and wants one everywhere else.
add_library(uniep_cuda_options INTERFACE)
target_compile_options(uniep_cuda_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:
                       -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr
                       -Xptxas=-warn-spills -Xcudafe=--display_error_number>)
target_include_directories(uniep_cuda_options SYSTEM INTERFACE ${UNIEP_NCCL_INCLUDE_DIR})
target_link_libraries(uniep_cuda_options INTERFACE CUDA::toolkit)
