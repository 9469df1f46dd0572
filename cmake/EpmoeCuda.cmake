# CUDA sources. A file's suffix says what it is compiled for:
#   _sm80.cu   sm_80 and sm_90 machine code, and PTX for anything newer: the tier that every device can run
#   _sm90.cu   sm_90a only: wgmma and TMA
set(EPMOE_SM80_ARCHS -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90
                     -gencode=arch=compute_80,code=compute_80)
set(EPMOE_SM90_ARCHS -gencode=arch=compute_90a,code=sm_90a)

if(CCACHE_PROGRAM)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

# How every .cu of this tree is compiled. archs: one of the lists above.
function(epmoe_cuda_options target archs)
  target_compile_options(${target} PRIVATE ${archs} -lineinfo
                         -Xcompiler=-Wall,-Wextra,-fvisibility=hidden
                         # What nvcc adds to a kernel must not need the C++ runtime: the library links as C.
                         -Xcompiler=-fno-threadsafe-statics,-fno-exceptions
                         $<$<BOOL:${EPMOE_WERROR}>:-Werror=all-warnings -Xcompiler=-Werror>)
  target_compile_features(${target} PRIVATE cuda_std_17)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
endfunction()

file(GLOB epmoe_sm80_sources CONFIGURE_DEPENDS kernels/*_sm80.cu comm/*_sm80.cu moe/*_sm80.cu dense_layers/*_sm80.cu)
file(GLOB epmoe_sm90_sources CONFIGURE_DEPENDS kernels/*_sm90.cu comm/*_sm90.cu dense_layers/*_sm90.cu)
set(EPMOE_CUDA_OBJECTS)
foreach(arch 80 90)
  if(epmoe_sm${arch}_sources)
    add_library(epmoe_cuda_sm${arch} OBJECT ${epmoe_sm${arch}_sources})
    epmoe_cuda_options(epmoe_cuda_sm${arch} "${EPMOE_SM${arch}_ARCHS}")
    list(APPEND EPMOE_CUDA_OBJECTS $<TARGET_OBJECTS:epmoe_cuda_sm${arch}>)
  endif()
endforeach()
list(APPEND EPMOE_ISA_OBJECTS ${EPMOE_CUDA_OBJECTS})

add_library(epmoe_cuda INTERFACE)
target_compile_definitions(epmoe_cuda INTERFACE EPMOE_HAVE_CUDA=1 $<$<BOOL:${EPMOE_HAVE_NCCL}>:EPMOE_HAVE_NCCL=1>)
# Loaded at run time: nothing is linked.
find_path(EPMOE_CUBLASLT_INCLUDE cublasLt.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
mark_as_advanced(EPMOE_CUBLASLT_INCLUDE)
if(EPMOE_CUBLASLT_INCLUDE)
  target_compile_definitions(epmoe_cuda INTERFACE EPMOE_HAVE_CUBLASLT=1)
  message(STATUS "Dense products on CUDA: cuBLASLt, where it is found at run time")
else()
  message(STATUS "Dense products on CUDA: the grouped GEMM (the toolkit has no cublasLt.h)")
endif()
target_include_directories(epmoe_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(epmoe_cuda INTERFACE CUDA::cudart_static)
set(EPMOE_CUDA_STATIC_LINK -L${CUDAToolkit_LIBRARY_DIR} cudart_static dl rt)
if(EPMOE_HAVE_NCCL)
  target_include_directories(epmoe_cuda SYSTEM INTERFACE ${EPMOE_NCCL_INCLUDE})
  target_link_libraries(epmoe_cuda INTERFACE ${EPMOE_NCCL_LIBRARY})
  list(APPEND EPMOE_CUDA_STATIC_LINK nccl)
endif()
