# What `cmake --install` puts where, so that others link epmoe by find_package(epmoe) or pkg-config. Nothing installed
# holds an absolute path of this build: the prefix can be moved.
include(CMakePackageConfigHelpers)

set(epmoe_headers include/epmoe/epmoe.h)
if(EPMOE_HAVE_MPI)
  list(APPEND epmoe_headers include/epmoe/epmoe_mpi.h)
endif()
install(FILES ${epmoe_headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/epmoe)

# Two export sets: a program without MPI must not need MPI because the library was built with it.
set(epmoe_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/epmoe)
install(TARGETS epmoe epmoe_static EXPORT epmoe_targets)
install(EXPORT epmoe_targets FILE epmoeTargets.cmake NAMESPACE epmoe:: DESTINATION ${epmoe_package_dir})
if(EPMOE_HAVE_MPI)
  install(TARGETS epmoe_mpi epmoe_mpi_static EXPORT epmoe_mpi_targets)
  install(EXPORT epmoe_mpi_targets FILE epmoeMpiTargets.cmake NAMESPACE epmoe:: DESTINATION ${epmoe_package_dir})
endif()
configure_package_config_file(cmake/epmoeConfig.cmake.in epmoeConfig.cmake INSTALL_DESTINATION ${epmoe_package_dir})
write_basic_package_version_file(epmoeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/epmoeConfig.cmake ${PROJECT_BINARY_DIR}/epmoeConfigVersion.cmake
        DESTINATION ${epmoe_package_dir})

# The Python package: PYTHONPATH=PREFIX/share/epmoe/python. It finds the library of its own prefix.
install(DIRECTORY python/epmoe DESTINATION ${CMAKE_INSTALL_DATADIR}/epmoe/python FILES_MATCHING PATTERN "*.py")

# pkg-config. ${pcfiledir} is where the .pc file lies.
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX BASE_DIRECTORY ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig
           OUTPUT_VARIABLE EPMOE_PC_UP)
set(EPMOE_PC_LIBDIR "\${prefix}")
cmake_path(APPEND EPMOE_PC_LIBDIR ${CMAKE_INSTALL_LIBDIR})
set(EPMOE_PC_INCLUDEDIR "\${prefix}")
cmake_path(APPEND EPMOE_PC_INCLUDEDIR ${CMAKE_INSTALL_INCLUDEDIR})
list(TRANSFORM EPMOE_STATIC_LINK REPLACE "^([^-].*)$" "-l\\1" OUTPUT_VARIABLE EPMOE_PC_PRIVATE)
list(JOIN EPMOE_PC_PRIVATE " " EPMOE_PC_PRIVATE)
set(package_files epmoe.pc)
if(EPMOE_HAVE_MPI)
  list(APPEND package_files epmoe_mpi.pc)
endif()
foreach(file ${package_files})
  configure_file(cmake/${file}.in ${file} @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${file} DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
