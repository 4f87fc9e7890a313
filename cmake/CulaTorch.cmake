# SPDX-License-Identifier: Apache-2.0
# libcula_torch.so: the operators for PyTorch, on LibTorch's stable ABI. It needs PyTorch's headers and
# libtorch_cpu alone; find_package(Torch) is not used because with a CUDA build of PyTorch it looks for CUDA
# and brings its own flags.
include_guard(GLOBAL)

set(CULA_TORCH_DIR "" CACHE PATH "The torch package directory (it has include/ and lib/)")
set(CULA_NAMESPACE cula CACHE STRING "The namespace of the operators: torch.ops.<this>, and <this>_unchecked")
if(NOT CULA_NAMESPACE MATCHES "^[A-Za-z_][A-Za-z0-9_]*$")
  message(FATAL_ERROR "CULA_NAMESPACE must be a name as in C++, got \"${CULA_NAMESPACE}\"")
endif()
set(CULA_GLIBC "" CACHE STRING
    "The oldest glibc that the operators run with: 2.28 (tools/old_runtime.py), or empty for this machine's")

# A front end that isolates its builds (pip install .) hides the user's packages through PYTHONPATH or in an
# environment of its own, so the interpreter is asked as it is, then without PYTHONPATH (-I), then the active
# environment's.
function(cula_find_torch out)
  set(python "${Python3_EXECUTABLE}")
  if(NOT python AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
    set(python "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  elseif(NOT python)
    find_program(CULA_PYTHON NAMES python3 python)
    set(python "${CULA_PYTHON}")
  endif()
  string(CONCAT find "import importlib.util as u; s = u.find_spec('torch'); "
                     "print(s.submodule_search_locations[0] if s else '')")
  foreach(command IN ITEMS "${python}" "${python};-I" "$ENV{VIRTUAL_ENV}/bin/python;-I")
    execute_process(COMMAND ${command} -c "${find}" OUTPUT_VARIABLE found
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(found AND EXISTS "${found}/include/torch/csrc/stable/library.h")
      set(${out} "${found}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

file(GLOB torch_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bindings/torch/*.cc")
if(NOT CULA_TORCH OR NOT torch_sources)
  return()
endif()

set(torch_dir "${CULA_TORCH_DIR}")
if(NOT torch_dir)
  cula_find_torch(torch_dir)
endif()
if(NOT EXISTS "${torch_dir}/include/torch/csrc/stable/library.h")
  if(CULA_TORCH STREQUAL "AUTO" AND NOT CULA_TORCH_DIR)
    message(STATUS "PyTorch not found: the PyTorch operators are not built")
    return()
  endif()
  message(
    FATAL_ERROR
      "cula is built against the PyTorch that is installed (>= 2.10), and none was found: "
      "run 'pip install torch', then 'pip install .' again. (CULA_TORCH_DIR names the folder of a torch "
      "package elsewhere.)")
endif()
file(STRINGS "${torch_dir}/version.py" torch_version REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+" torch_version "${torch_version}")
if(torch_version VERSION_LESS 2.10)
  message(FATAL_ERROR "cula needs PyTorch >= 2.10; ${torch_dir} has ${torch_version}")
endif()
message(STATUS "PyTorch ${torch_version}: ${torch_dir}")

include(CulaBuildInfo)
add_library(cula_torch MODULE ${torch_sources})
cula_compile_options(cula_torch)
target_include_directories(cula_torch SYSTEM PRIVATE "${torch_dir}/include")
set(torch_target 2.10)  # the oldest that can load it
target_compile_definitions(cula_torch PRIVATE TORCH_TARGET_VERSION=0x020a000000000000
                                              CULA_NAMESPACE=${CULA_NAMESPACE})
target_link_libraries(cula_torch PRIVATE cula)
if(CULA_GLIBC)
  execute_process(COMMAND getconf GNU_LIBC_VERSION OUTPUT_VARIABLE glibc OUTPUT_STRIP_TRAILING_WHITESPACE)
  string(REGEX MATCH "[0-9.]+$" glibc "${glibc}")
endif()
if(CULA_GLIBC AND glibc VERSION_GREATER CULA_GLIBC)
  set(old_runtime "${PROJECT_BINARY_DIR}/glibc-${CULA_GLIBC}")
  find_program(CULA_PYTHON NAMES python3 python)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env "CC=${CMAKE_CXX_COMPILER}" "CXX=${CMAKE_CXX_COMPILER}" "${CULA_PYTHON}"
            "${PROJECT_SOURCE_DIR}/tools/old_runtime.py" "${CULA_GLIBC}" "${old_runtime}"
    COMMAND_ERROR_IS_FATAL ANY)
  target_link_options(cula_torch PRIVATE "-L${old_runtime}")
  # Before libtorch_cpu, which shows some functions of libstdc++ too, and those without a version.
  target_link_libraries(cula_torch PRIVATE stdc++)
endif()
target_link_libraries(cula_torch PRIVATE "${torch_dir}/lib/libtorch_cpu.so")
# Registration happens in static initializers, so nothing is exported; nothing may stay undefined but what
# torch has.
set(map "${PROJECT_SOURCE_DIR}/cmake/cula_torch.map")
target_link_options(
  cula_torch PRIVATE "LINKER:--version-script=${map}" LINKER:--no-undefined LINKER:--as-needed LINKER:-z,relro
  LINKER:-z,now LINKER:-z,noexecstack)
# No run path: Python has loaded PyTorch's libraries before.
set_target_properties(cula_torch PROPERTIES LINK_DEPENDS "${map}" SKIP_BUILD_RPATH ON)
if(SKBUILD)
  install(TARGETS cula_torch LIBRARY DESTINATION cula/lib)
  # Beside the package, where Python looks when it starts.
  install(FILES python/cula.pth python/_cula_startup.py DESTINATION .)
  include(CulaSbom)
  cula_sbom("${PROJECT_BINARY_DIR}/cula.cdx.json")
  install(FILES "${PROJECT_BINARY_DIR}/cula.cdx.json" DESTINATION "${SKBUILD_METADATA_DIR}/sboms")
elseif(PROJECT_IS_TOP_LEVEL)
  set_target_properties(cula_torch PROPERTIES
                        LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/python/cula/lib")
endif()
cula_build_info(cula_torch)
