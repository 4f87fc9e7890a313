# SPDX-License-Identifier: Apache-2.0
# cula_build_info(target): build_info.json beside the target's file, which cula.build_info() reads; and one
# line of it at the end of a build.
include_guard(GLOBAL)

# The commit that is built, with + behind it where files differ; empty outside a clone.
function(cula_source_commit out)
  if(NOT EXISTS "${PROJECT_SOURCE_DIR}/.git")
    return()
  endif()
  set(git git -C "${PROJECT_SOURCE_DIR}")
  execute_process(COMMAND ${git} rev-parse HEAD OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE
                  ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    return()
  endif()
  execute_process(COMMAND ${git} diff-index --quiet HEAD -- RESULT_VARIABLE changed ERROR_QUIET)
  if(changed)
    string(APPEND commit "+")
  endif()
  set(${out} "${commit}" PARENT_SCOPE)
endfunction()

function(cula_build_info target)
  set(info "{}")
  set(cuda_compiler "")
  set(architectures "")
  set(summary "for CPUs alone: ${CULA_WITHOUT_CUDA}")
  if(CULA_WITH_CUDA)
    set(cuda_compiler "${CMAKE_CUDA_COMPILER_ID} ${CMAKE_CUDA_COMPILER_VERSION}")
    list(JOIN cuda_architectures " " architectures)
    set(summary "with CUDA kernels for ${architectures}")
  endif()
  cula_source_commit(commit)
  foreach(
    pair IN
    ITEMS "version=${PROJECT_VERSION}"
          "source=${commit}"
          "namespace=${CULA_NAMESPACE}"
          "build_type=${CMAKE_BUILD_TYPE}"
          "processor=${CMAKE_SYSTEM_PROCESSOR}"
          "compiler=${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
          "torch_target=${torch_target}"
          "torch_headers=${torch_version}"
          "cuda_compiler=${cuda_compiler}"
          "cuda_architectures=${architectures}"
          "without_cuda=${CULA_WITHOUT_CUDA}")
    string(REGEX MATCH "^([a-z_]+)=(.*)$" pair "${pair}")
    string(JSON info SET "${info}" "${CMAKE_MATCH_1}" "\"${CMAKE_MATCH_2}\"")
  endforeach()
  set(file "${PROJECT_BINARY_DIR}/build_info.json")
  file(CONFIGURE OUTPUT "${file}" CONTENT "@info@\n" @ONLY)
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${file}")
  add_custom_command(
    TARGET ${target} POST_BUILD
    COMMAND ${CMAKE_COMMAND} -E copy "${file}" "$<TARGET_FILE_DIR:${target}>/build_info.json"
    COMMAND ${CMAKE_COMMAND} -E echo "cula ${PROJECT_VERSION} ${summary}"
    VERBATIM)
  if(SKBUILD)
    install(FILES "${file}" DESTINATION cula/lib)
  endif()
endfunction()
