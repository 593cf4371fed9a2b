#pragma once

// UNIEP_API marks what the shared library exports; everything else is hidden.
#if defined(UNIEP_SHARED) && defined(__GNUC__)
#define UNIEP_API __attribute__((visibility("default")))
#else
#define UNIEP_API
#endif

// UNIEP_HD marks a pure function that the host and a CUDA device both run.
#if defined(__CUDACC__)
#define UNIEP_HD __host__ __device__
#else
#define UNIEP_HD
#endif
