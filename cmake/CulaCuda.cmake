# SPDX-License-Identifier: Apache-2.0
# The CUDA kernels. Whether they are built is decided here, alike for make, pip and CMake: CULA_CUDA is ON,
# OFF, or AUTO, where they are built on a machine with a GPU and an nvcc that knows every architecture below.
include_guard(GLOBAL)

set(cuda AUTO)
if(NOT "$ENV{CULA_CUDA}" STREQUAL "")
  set(cuda "$ENV{CULA_CUDA}")  # for front ends that pass no options on
endif()
set(CULA_CUDA "${cuda}" CACHE STRING
    "Build the CUDA kernels: ON, OFF, or AUTO (where a GPU and nvcc are found)")
set_property(CACHE CULA_CUDA PROPERTY STRINGS AUTO ON OFF)
# Machine code for every architecture that a kernel is measured or used on, and PTX of the last for those to
# come. 80 also runs on 86 and 89, 100 on 103. Calls of sm90 launch portable kernels, too: 90a has wgmma.
set(CULA_CUDA_ARCHITECTURES "80-real;90a-real;100;120-real" CACHE STRING
    "CUDA architectures of the portable kernels")
set(cuda_minimum 12.8)  # the first with 100 and 120

# cula_without_cuda(reason): the library is for CPUs alone, and says why where it is asked for more.
function(cula_without_cuda reason)
  set(CULA_WITHOUT_CUDA "${reason}" PARENT_SCOPE)
  set_property(SOURCE "${PROJECT_SOURCE_DIR}/src/registry.cc" APPEND
               PROPERTY COMPILE_DEFINITIONS "CULA_WITHOUT_CUDA=\"${reason}\"")
  message(STATUS "The CUDA kernels are not built: ${reason}")
endfunction()

if(NOT CULA_CUDA)
  cula_without_cuda("it was built with CULA_CUDA=${CULA_CUDA}")
  return()
endif()
if(CULA_CUDA STREQUAL "AUTO")
  execute_process(COMMAND nvidia-smi -L OUTPUT_VARIABLE gpus ERROR_QUIET RESULT_VARIABLE found)
  if(NOT found EQUAL 0 OR NOT gpus MATCHES "^GPU ")
    cula_without_cuda("no GPU was found where it was built")
    return()
  endif()
endif()

# A distribution's own nvcc is often too old, so the search goes on behind it; last comes what tools/setup.sh
# installs.
function(cula_find_nvcc out)
  find_program(on_path nvcc NO_CACHE)
  file(GLOB in_venv "${PROJECT_SOURCE_DIR}/.venv/cuda/nvidia/cu*/bin/nvcc")
  foreach(nvcc IN ITEMS ${on_path} /usr/local/cuda/bin/nvcc ${in_venv})
    if(EXISTS "${nvcc}")
      execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version ERROR_QUIET)
      if(version MATCHES "release ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_GREATER_EQUAL cuda_minimum)
        set(${out} "${nvcc}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
endfunction()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  cula_find_nvcc(nvcc)
  if(nvcc)
    set(ENV{CUDACXX} "${nvcc}")
  endif()
endif()
include(CheckLanguage)
if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
  check_language(CUDA)  # an nvcc may be there and refuse this host compiler
endif()
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)  # so that the next configuration looks again
  if(CULA_CUDA STREQUAL "AUTO")
    cula_without_cuda("no nvcc >= ${cuda_minimum} that works was found where it was built")
    message(WARNING "This machine has a GPU, but no nvcc >= ${cuda_minimum} that works with "
                    "${CMAKE_CXX_COMPILER}: cula is built for CPUs alone. Put nvcc on PATH or set CUDACXX, "
                    "then build again; 'make cuda' installs one into .venv.")
    return()
  endif()
  message(FATAL_ERROR "CULA_CUDA=ON needs nvcc >= ${cuda_minimum} that works with ${CMAKE_CXX_COMPILER}: "
                      "put it on PATH, or set CUDACXX")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS cuda_minimum)
  message(FATAL_ERROR "cula needs nvcc >= ${cuda_minimum}; ${CMAKE_CUDA_COMPILER} is "
                      "${CMAKE_CUDA_COMPILER_VERSION}. CULA_CUDA=OFF builds the library for CPUs alone.")
endif()
if(CMAKE_VERSION VERSION_LESS 3.25.2)
  # It knows C++20 but not nvcc's flag for it.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
find_package(CUDAToolkit ${cuda_minimum} REQUIRED)

if(CULA_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CULA_CCACHE}")
endif()
list(PREPEND CMAKE_CUDA_COMPILER_LAUNCHER "${PROJECT_SOURCE_DIR}/cmake/nvcc_log.sh")
# nvcc's -O is the level of host code alone, which launches kernels: device code is optimized in full.
string(REPLACE "-O3" "-O2" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")

# No source tells 120 from 100, so 120's machine code is assembled from the PTX of 100 where both are built:
# to translate C++ to PTX takes as long as to assemble it.
set(portable ${CULA_CUDA_ARCHITECTURES})
set(portable_options "")
if("100" IN_LIST portable AND "120-real" IN_LIST portable)
  list(REMOVE_ITEM portable "120-real")
  set(portable_options "--generate-code=arch=compute_100,code=sm_120")
endif()

# cula_add_cuda_target(name architectures [option..]): the kernels of src/cuda/<name>. Every line of its
# instances.txt becomes one source, so that instances compile side by side and are cached one by one.
function(cula_add_cuda_target name architectures)
  set(folder "${PROJECT_SOURCE_DIR}/src/cuda/${name}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${folder}/instances.txt")
  file(STRINGS "${folder}/instances.txt" instances REGEX "^[^#]")
  set(sources "")
  foreach(instance IN LISTS instances)
    separate_arguments(instance)
    list(GET instance 0 pass)
    list(GET instance 1 type)
    list(GET instance 2 key)
    set(source "${PROJECT_BINARY_DIR}/instances/${name}/${pass}_${type}_${key}.cu")
    file(CONFIGURE OUTPUT "${source}"
         CONTENT "#include \"cuda/${name}/${pass}_instance.cuh\"\nCULA_INSTANTIATE(${type}, ${key})\n")
    list(APPEND sources "${source}")
  endforeach()

  set(target cula_${name})
  add_library(${target} OBJECT ${sources})
  set_target_properties(
    ${target}
    PROPERTIES CUDA_ARCHITECTURES "${architectures}"
               CUDA_STANDARD 20
               CUDA_STANDARD_REQUIRED ON
               CUDA_EXTENSIONS OFF
               CUDA_VISIBILITY_PRESET hidden
               POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include")
  # --compress-mode: a library of less than a quarter of the bytes; by default machine code is not compressed.
  # -v: nvcc_log.sh keeps what ptxas says of each kernel. tools/check_ptxas.py judges that, and the warnings,
  # for which CULA_WERROR would compile everything again.
  target_compile_options(${target} PRIVATE -Xptxas=-v --expt-relaxed-constexpr -Xcompiler=-Werror=switch
                                           --compress-mode=size ${ARGN})

  file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/instances/${name}.txt"
       CONTENT "$<JOIN:$<TARGET_OBJECTS:${target}>,\n>\n")

  file(GLOB host_sources CONFIGURE_DEPENDS "${folder}/*.cc")
  target_sources(cula PRIVATE ${host_sources} $<TARGET_OBJECTS:${target}>)
endfunction()

file(GLOB cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/cuda/*.cc")
target_sources(cula PRIVATE ${cuda_sources})
target_compile_definitions(cula PRIVATE CULA_WITH_CUDA=1)
target_link_libraries(cula PRIVATE CUDA::cudart_static)
set(CULA_WITH_CUDA ON)  # for culaConfig.cmake and cula.build_info()

foreach(folder IN ITEMS chunked backward recurrent forks float8 sm80)
  cula_add_cuda_target(${folder} "${portable}" ${portable_options})
endforeach()
cula_add_cuda_target(sm90 "90a-real")
set(cuda_architectures ${CULA_CUDA_ARCHITECTURES} 90a-real)
list(REMOVE_DUPLICATES cuda_architectures)
