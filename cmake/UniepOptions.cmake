# Compile options shared by every target of the project.
add_library(uniep_options INTERFACE)
target_compile_features(uniep_options INTERFACE cxx_std_20)

# uniep_host_options(option...): for the C++ compiler; for nvcc's host compiler too, one by one, in
# quotes of nvcc's own where it would take them apart, as at the spaces of a path.
function(uniep_host_options)
  target_compile_options(uniep_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${ARGN}>")
  if(UNIEP_CUDA)
    list(TRANSFORM ARGN REPLACE "^(.*[ ,].*)$" "\"\\1\"")
    list(TRANSFORM ARGN PREPEND "-Xcompiler=")
    target_compile_options(uniep_options INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${ARGN}>")
  endif()
endfunction()

# uniep_export_only(library script): by a version script. Not by LINKER:, which would take the
# script's path apart at commas.
function(uniep_export_only library script)
  target_link_options(${library} PRIVATE "SHELL:-Xlinker \"--version-script=${script}\"")
  set_property(TARGET ${library} APPEND PROPERTY LINK_DEPENDS ${script})
endfunction()

# -ffp-contract=off: the numerics contract fixes every rounding, so the compiler may not fuse a
# multiply and an add on its own; where an FMA is meant, the code says so.
uniep_host_options(-Wall -Wextra -ffp-contract=off)
# What nvcc makes of a source for the host compiler does not keep to these two.
target_compile_options(uniep_options INTERFACE
                       $<$<COMPILE_LANGUAGE:CXX>:-Wshadow -Wconversion -Wno-sign-conversion>)
# Paths in debug information, asserts and error texts are relative to the source tree: two clones
# build the same bytes, and a compiler cache serves both.
uniep_host_options(-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=)
if(UNIEP_WERROR)
  uniep_host_options(-Werror)
endif()

if(UNIEP_UNITY)
  # To GCC a source that another includes is a header, whose types have no members of unnamed
  # namespaces.
  target_compile_options(uniep_options INTERFACE
                         $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endif()

if(UNIEP_SANITIZE)
  if(NOT UNIEP_SANITIZE MATCHES "^(address|thread|undefined|address,undefined)$")
    message(FATAL_ERROR
            "UNIEP_SANITIZE is '${UNIEP_SANITIZE}'; use address, undefined, both as address,undefined, or thread")
  endif()
  # GCC 12 warns falsely about std::atomic_thread_fence and about some inlined copies under
  # sanitizers; the plain builds keep these warnings. -O1 compiles a quarter faster than -O2 here, and
  # -O0 what computes little (UNIEP_COMPUTES_LITTLE of a target) in half the time of -O1.
  set(little $<BOOL:$<TARGET_PROPERTY:UNIEP_COMPUTES_LITTLE>>)
  uniep_host_options(-fsanitize=${UNIEP_SANITIZE} $<IF:${little},-O0,-O1> -fno-omit-frame-pointer
                     -fno-sanitize-recover=all -g1 -Wno-error)
  if(UNIEP_SANITIZE STREQUAL "address,undefined")
    # These checks of UndefinedBehaviorSanitizer stand at every access, and take a quarter of a
    # compilation. AddressSanitizer sees most of what they would, accesses by pointers to nothing or out
    # of an object, but not an object of another class than its pointer says (vptr). Behind -fsanitize,
    # or it has no effect.
    uniep_host_options(-fno-sanitize=null,vptr,object-size $<${little}:-fno-sanitize=alignment>)
  endif()
  target_link_options(uniep_options INTERFACE -fsanitize=${UNIEP_SANITIZE})
endif()
