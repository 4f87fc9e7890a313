# SPDX-License-Identifier: Apache-2.0
# The C++ package: find_package(cula) gives cula::cula.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/cula")
install(TARGETS cula EXPORT culaTargets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT cpp)
install(DIRECTORY include/cula DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT cpp)
install(EXPORT culaTargets NAMESPACE cula:: DESTINATION "${config_dir}" COMPONENT cpp)

configure_package_config_file(cmake/culaConfig.cmake.in "${PROJECT_BINARY_DIR}/culaConfig.cmake"
                              INSTALL_DESTINATION "${config_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/culaConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/culaConfig.cmake" "${PROJECT_BINARY_DIR}/culaConfigVersion.cmake"
        DESTINATION "${config_dir}" COMPONENT cpp)
