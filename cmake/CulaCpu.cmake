# SPDX-License-Identifier: Apache-2.0
# The CPU kernels: src/cpu/isa.cc is compiled once per instruction set, and src/cpu/entry.cc picks one at run
# time.
include_guard(GLOBAL)

set(CULA_CPU_NOT_RUN "" CACHE STRING "CPU targets that nothing runs: compiled without sanitizers")

# cula_add_cpu_target(name flags...): namespace cula::cpu::<name>, compiled with these flags.
function(cula_add_cpu_target name)
  set(target cula_cpu_${name})
  add_library(${target} OBJECT "${PROJECT_SOURCE_DIR}/src/cpu/isa.cc")
  cula_compile_options(${target})
  # Multiply-adds may be fused, sums keep their order: no -ffast-math.
  target_compile_options(${target} PRIVATE ${ARGN} -ffp-contract=fast -fno-math-errno -fno-trapping-math
                                           -fno-exceptions)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # False on the vectors that the AVX-512 intrinsics leave undefined on purpose (GCC bug 105593).
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized -Wno-uninitialized)
  endif()
  if(name IN_LIST CULA_CPU_NOT_RUN)
    target_compile_options(${target} PRIVATE -fno-sanitize=all -g0)
  endif()
  target_compile_definitions(${target} PRIVATE CULA_CPU_TARGET=${name})
  target_sources(cula PRIVATE $<TARGET_OBJECTS:${target}>)
endfunction()

cula_add_cpu_target(portable)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(avx2 -mavx2 -mfma -mf16c)
  set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c)
  set(avx512bf16 ${avx512} -mavx512bf16)
  cula_add_cpu_target(avx2 ${avx2})
  cula_add_cpu_target(avx512 ${avx512})
  cula_add_cpu_target(avx512bf16 ${avx512bf16})
  cula_add_cpu_target(amx ${avx512bf16} -mamx-tile -mamx-bf16)
endif()
