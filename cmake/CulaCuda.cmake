# SPDX-License-Identifier: Apache-2.0
# The CUDA kernels: every line of a target's instances.txt becomes one source, so that instances compile side by side and are
# cached one by one. Without nvcc the library is built for CPUs alone.
include_guard(GLOBAL)

set(CULA_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO (where nvcc is found), ON or OFF")
set_property(CACHE CULA_CUDA PROPERTY STRINGS AUTO ON OFF)
# Machine code for every architecture that a kernel is measured or used on, and PTX for those to come. 80 also runs on 86 and
# 89, 100 on 103.
set(CULA_CUDA_ARCHITECTURES "80-real;90-real;100-real;120" CACHE STRING "CUDA architectures of the portable kernels")

if(NOT CULA_CUDA)
  return()
endif()
include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(CULA_NVCC nvcc PATHS /usr/local/cuda/bin)
  if(CULA_NVCC)
    set(CMAKE_CUDA_COMPILER "${CULA_NVCC}")
  endif()
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(CULA_CUDA STREQUAL "AUTO")
    message(STATUS "nvcc not found: the CUDA kernels are not built")
    return()
  endif()
  message(FATAL_ERROR "CULA_CUDA=ON needs nvcc: put it on PATH or set CUDACXX")
endif()
if(CULA_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CULA_CCACHE}")
endif()
set(CMAKE_CUDA_ARCHITECTURES "${CULA_CUDA_ARCHITECTURES}")
enable_language(CUDA)
if(CMAKE_VERSION VERSION_LESS 3.25.2)
  # It knows C++20 but not nvcc's flag for it.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()

set(sm80 "${PROJECT_SOURCE_DIR}/src/cuda/sm80")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${sm80}/instances.txt")
file(STRINGS "${sm80}/instances.txt" instances REGEX "^[^#]")
set(sources "")
foreach(line IN LISTS instances)
  separate_arguments(line)
  list(GET line 0 pass)
  list(GET line 1 type)
  list(GET line 2 key)
  set(source "${PROJECT_BINARY_DIR}/instances/sm80/${pass}_${type}_${key}.cu")
  file(CONFIGURE OUTPUT "${source}"
       CONTENT "#include \"cuda/sm80/${pass}_instance.cuh\"\nCULA_INSTANTIATE(${type}, ${key})\n")
  list(APPEND sources "${source}")
endforeach()

add_library(cula_sm80 OBJECT ${sources})
set_target_properties(
  cula_sm80
  PROPERTIES CUDA_STANDARD 20
             CUDA_STANDARD_REQUIRED ON
             CUDA_VISIBILITY_PRESET hidden
             POSITION_INDEPENDENT_CODE ON)
target_include_directories(cula_sm80 PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include")
# ptxas reports each kernel's registers, stack and spills; tools/check_ptxas.py reads the log.
target_compile_options(cula_sm80 PRIVATE -Xptxas=-v --expt-relaxed-constexpr)

find_package(CUDAToolkit REQUIRED)
file(GLOB host_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/cuda/*.cc" "${PROJECT_SOURCE_DIR}/src/cuda/sm80/*.cc")
target_sources(cula PRIVATE ${host_sources} $<TARGET_OBJECTS:cula_sm80>)
target_compile_definitions(cula PRIVATE CULA_WITH_CUDA=1)
target_link_libraries(cula PRIVATE CUDA::cudart_static)
