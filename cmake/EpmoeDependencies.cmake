# Finds what the build needs, and says what it took. MPI is optional. This version has neither CUDA kernels nor an NCCL
# transport: their AUTO means OFF, and ON is refused.
find_package(OpenMP REQUIRED COMPONENTS C)
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

find_path(EPMOE_CBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas ${CMAKE_LIBRARY_ARCHITECTURE} REQUIRED)
find_library(EPMOE_CBLAS_LIBRARY NAMES openblas REQUIRED)
add_library(epmoe_blas INTERFACE)
target_include_directories(epmoe_blas SYSTEM INTERFACE ${EPMOE_CBLAS_INCLUDE})
target_link_libraries(epmoe_blas INTERFACE ${EPMOE_CBLAS_LIBRARY})

find_path(EPMOE_JANSSON_INCLUDE jansson.h REQUIRED)
find_library(EPMOE_JANSSON_LIBRARY jansson REQUIRED)
add_library(epmoe_jansson INTERFACE)
target_include_directories(epmoe_jansson SYSTEM INTERFACE ${EPMOE_JANSSON_INCLUDE})
target_link_libraries(epmoe_jansson INTERFACE ${EPMOE_JANSSON_LIBRARY})

foreach(feature CUDA NCCL MPI)
  if(NOT EPMOE_${feature} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "EPMOE_${feature} is '${EPMOE_${feature}}': expected AUTO, ON or OFF")
  endif()
  set(EPMOE_HAVE_${feature} OFF)
endforeach()

foreach(feature CUDA NCCL)
  if(EPMOE_${feature} STREQUAL "ON")
    message(FATAL_ERROR "EPMOE_${feature} is ON: this version has no CUDA kernels and no NCCL transport yet; "
                        "leave it AUTO or OFF for the CPU backend")
  endif()
endforeach()

if(NOT EPMOE_MPI STREQUAL "OFF")
  find_package(MPI COMPONENTS C)
  if(MPI_C_FOUND)
    set(EPMOE_HAVE_MPI ON)
  elseif(EPMOE_MPI STREQUAL "ON")
    message(FATAL_ERROR "EPMOE_MPI is ON and no MPI for C was found: install libopenmpi-dev, or put mpicc on PATH")
  endif()
endif()

message(STATUS "epmoe: MPI ${EPMOE_HAVE_MPI}, CUDA ${EPMOE_HAVE_CUDA}, NCCL ${EPMOE_HAVE_NCCL}, "
               "BLAS ${EPMOE_CBLAS_LIBRARY}")
