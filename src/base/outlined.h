#pragma once

#include "uniep/macros.h"

// UNIEP_OUTLINED stands behind UNIEP_HD at functions that only some passes call. A GPU reads a
// kernel's code from memory as it runs, and waits for it wherever it skips a long branch: so these
// are calls, whose code stands apart. Not for what all passes call: a call costs time, too.
#if defined(__CUDACC__)
#define UNIEP_OUTLINED __noinline__
#else
#define UNIEP_OUTLINED
#endif
