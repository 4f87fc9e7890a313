# SPDX-License-Identifier: Apache-2.0
# cula_compile_options(target): how every source of this project is compiled. An enumerator that a switch does
# not know is always an error: it is how the seams of the update rules stop the build (docs/design/adding.md).
include_guard(GLOBAL)

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(CULA_CCACHE ccache)
  if(CULA_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CULA_CCACHE}")
  endif()
endif()

# What limits the damage of a bug in memory and costs nothing that can be measured (docs/design/cpu.md):
# canaries on the stack, and the C library's functions with the sizes of what they write to. The latter need
# optimization, and the sanitizers do without. Level 3 needs GCC 12 or Clang 9 and glibc 2.34; what is older
# takes it for 2.
set(hardening -fstack-protector-strong)
if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  set(optimized $<CONFIG:Release,RelWithDebInfo,MinSizeRel>)
  list(APPEND hardening $<${optimized}:-U_FORTIFY_SOURCE> $<${optimized}:-D_FORTIFY_SOURCE=3>)
endif()

function(cula_compile_options target)
  set_target_properties(
    ${target}
    PROPERTIES CXX_STANDARD 20
               CXX_STANDARD_REQUIRED ON
               CXX_EXTENSIONS OFF
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include")
  target_compile_options(${target} PRIVATE ${hardening} -Wall -Wextra -Wconversion -Wno-sign-conversion
                                           -Werror=switch
                                           $<$<BOOL:${CULA_WERROR}>:-Werror>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # A constructor's parameter may have its member's name. -Wrestrict is false on std::string's + (GCC bug
    # 105651).
    target_compile_options(${target} PRIVATE -Wshadow=local -Wno-restrict)
  else()
    target_compile_options(${target} PRIVATE -Wshadow)
  endif()
endfunction()
