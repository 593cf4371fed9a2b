# `find_package(uniep)` for installed trees; tests/install proves that it works.
include(CMakePackageConfigHelpers)

install(TARGETS uniep EXPORT uniepTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/uniep ${PROJECT_BINARY_DIR}/include/uniep
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT uniepTargets NAMESPACE uniep:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/uniep)

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
