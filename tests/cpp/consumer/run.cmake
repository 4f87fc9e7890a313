# SPDX-License-Identifier: Apache-2.0
# Installs the package of the build tree `build`, then configures, builds and runs the consumer against it
# under `work`. `cuda` is the toolkit's bin directory where the package has CUDA kernels.
if(cuda)
  list(APPEND options "-DCUDAToolkit_ROOT=${cuda}/..")
endif()
file(REMOVE_RECURSE "${work}")
set(configure "${CMAKE_COMMAND}" -S "${source}" -B "${work}/build" -G "${generator}"
    "-DCMAKE_PREFIX_PATH=${work}/prefix" "-DCMAKE_BUILD_TYPE=${config}" "-DCMAKE_CXX_COMPILER=${compiler}"
    "-DCMAKE_CXX_FLAGS=${flags}" ${options})
foreach(step IN ITEMS
    "${CMAKE_COMMAND};--install;${build};--prefix;${work}/prefix;--config;${config}"
    "${configure}"
    "${CMAKE_COMMAND};--build;${work}/build"
    "${work}/build/consumer")
  execute_process(COMMAND ${step} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${step}\nfailed (${result}):\n${output}")
  endif()
endforeach()
