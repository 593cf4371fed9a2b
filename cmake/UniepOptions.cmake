# Compile options shared by every target of the project.
add_library(uniep_options INTERFACE)
target_compile_features(uniep_options INTERFACE cxx_std_20)

# -ffp-contract=off: the numerics contract fixes every rounding, so the compiler may not fuse a
# multiply and an add on its own; where an FMA is meant, the code says so.
target_compile_options(uniep_options INTERFACE -Wall -Wextra -Wshadow -Wconversion
                       -Wno-sign-conversion -ffp-contract=off)
# Paths in debug information, asserts and error texts are relative to the source tree: two clones
# build the same bytes, and a compiler cache serves both.
target_compile_options(uniep_options INTERFACE -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=)
if(UNIEP_WERROR)
  target_compile_options(uniep_options INTERFACE -Werror)
endif()

if(UNIEP_SANITIZE)
  if(NOT UNIEP_SANITIZE MATCHES "^(address|thread|undefined)$")
    message(FATAL_ERROR
            "UNIEP_SANITIZE is '${UNIEP_SANITIZE}'; use address, thread or undefined")
  endif()
  # GCC 12 warns falsely about std::atomic_thread_fence and about some inlined copies under
  # sanitizers; the plain builds keep these warnings. -O1 compiles a quarter faster than -O2 here.
  target_compile_options(uniep_options INTERFACE -fsanitize=${UNIEP_SANITIZE}
                         -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all -g1 -Wno-error)
  target_link_options(uniep_options INTERFACE -fsanitize=${UNIEP_SANITIZE})
endif()
