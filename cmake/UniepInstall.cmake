# `find_package(uniep)` and `pkg-config uniep` for installed trees, and the docs; tests/install proves
# that they work.
include(CMakePackageConfigHelpers)

install(TARGETS uniep EXPORT uniepTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/uniep ${PROJECT_BINARY_DIR}/include/uniep
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT uniepTargets NAMESPACE uniep:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/uniep)

# What a program in C needs that links the static library.
set(UNIEP_LIBS_FOR_C)
if(NOT BUILD_SHARED_LIBS AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  set(UNIEP_LIBS_FOR_C stdc++ m)
endif()

set(UNIEP_CONFIG_NEEDS_CUDART OFF)
if(UNIEP_CUDA AND NOT BUILD_SHARED_LIBS)
  set(UNIEP_CONFIG_NEEDS_CUDART ON)
  set(UNIEP_CONFIG_CUDART_DIR ${CUDAToolkit_LIBRARY_DIR})
endif()
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/uniepConfig.cmake.in ${PROJECT_BINARY_DIR}/uniepConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/uniep)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/uniepConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/uniepConfig.cmake ${PROJECT_BINARY_DIR}/uniepConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/uniep)

# pkg-config: what CMake's targets say, for everybody else.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(UNIEP_PC_PREFIX ${CMAKE_INSTALL_PREFIX})
  set(UNIEP_PC_LIBDIR ${CMAKE_INSTALL_FULL_LIBDIR})
  set(UNIEP_PC_INCLUDEDIR ${CMAKE_INSTALL_FULL_INCLUDEDIR})
else()
  file(RELATIVE_PATH _to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  string(REGEX REPLACE "/$" "" _to_prefix ${_to_prefix})
  set(UNIEP_PC_PREFIX "\${pcfiledir}/${_to_prefix}")
  set(UNIEP_PC_LIBDIR "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(UNIEP_PC_INCLUDEDIR "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
set(UNIEP_PC_VARIABLES)
set(UNIEP_PC_CFLAGS)
set(UNIEP_PC_LIBS " -pthread")
list(TRANSFORM UNIEP_LIBS_FOR_C PREPEND " -l" OUTPUT_VARIABLE UNIEP_PC_LIBS_PRIVATE)
string(REPLACE ";" "" UNIEP_PC_LIBS_PRIVATE "${UNIEP_PC_LIBS_PRIVATE}")
if(BUILD_SHARED_LIBS)
  set(UNIEP_PC_CFLAGS " -DUNIEP_SHARED")
else()
  string(PREPEND UNIEP_PC_LIBS " -Wl,--exclude-libs,libuniep.a")
  if(UNIEP_CUDA)
    get_filename_component(_cudart_dir ${CUDA_cudart_static_LIBRARY} DIRECTORY)
    set(UNIEP_PC_VARIABLES "# Another place: pkg-config --define-variable=cudalibdir=DIR\ncudalibdir=${_cudart_dir}\n")
    string(APPEND UNIEP_PC_LIBS " -L\${cudalibdir} -lcudart_static -ldl -lrt")
  endif()
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/uniep.pc.in ${PROJECT_BINARY_DIR}/uniep.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/uniep.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# Laid out as in the repository, so that the links between them hold.
if(PROJECT_IS_TOP_LEVEL)
  install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/CONTRIBUTING.md
                ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR}
          FILES_MATCHING PATTERN "*.md" PATTERN "*.svg" PATTERN "*.png" PATTERN data EXCLUDE)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples DESTINATION ${CMAKE_INSTALL_DOCDIR}
          FILES_MATCHING PATTERN "*.cpp" PATTERN "*.py")
endif()
