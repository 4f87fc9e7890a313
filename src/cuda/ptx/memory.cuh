// SPDX-License-Identifier: Apache-2.0
// Loads and stores of shared memory (ldmatrix, words) and asynchronous copies to it (cp.async): sm_80.
#pragma once

#include <cstdint>

namespace cula::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Loads four 8 x 8 matrices of 16-bit elements (ldmatrix). Lane l gives the address of row l % 8 of matrix l
// / 8.
// Of each matrix lane l receives the pair in row l/4 at columns 2 (l%4) and the next. Of the transposed form
// it receives the pair in rows 2 (l%4) and the next at column l/4.
__device__ __forceinline__ void load_matrices(std::uint32_t (&m)[4], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row));
}
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&m)[4], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row));
}

// Stores four 8 x 8 matrices (stmatrix, sm_90). Lane l gives the address of row l % 8 of matrix l / 8; its
// pair of matrix m goes to row l/4, columns 2 (l%4) and the next, or, transposed, to column l/4 of those
// rows.
__device__ __forceinline__ void store_matrices(std::uint32_t row, const std::uint32_t (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t row, const std::uint32_t (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

// The transpose of an 8 x 8 matrix that is held as load_matrices() leaves it (movmatrix).
__device__ __forceinline__ std::uint32_t transposed(std::uint32_t m) {
    std::uint32_t t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(m));
    return t;
}

// Words of shared memory. Volatile: the compiler keeps these accesses in the order of the program.
__device__ __forceinline__ std::uint32_t load_word(std::uint32_t at) {
    std::uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at));
    return word;
}
__device__ __forceinline__ void load_words(std::uint32_t (&words)[4], std::uint32_t at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at));
}
// Loaded anew at every call: the compiler does not keep the pair in registers between two uses.
__device__ __forceinline__ float2 load_pair(std::uint32_t at) {
    float2 pair;
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(at));
    return pair;
}
__device__ __forceinline__ void store_word(std::uint32_t at, std::uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}
__device__ __forceinline__ void store_word_if(bool is, std::uint32_t at, std::uint32_t word) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.b32 [%1], %2; }" ::"r"(
                     static_cast<std::uint32_t>(is)),
                 "r"(at), "r"(word)
                 : "memory");
}
__device__ __forceinline__ void store_pair_if(bool is, std::uint32_t at, float2 pair) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.v2.f32 [%1], {%2, %3}; }" ::"r"(
                     static_cast<std::uint32_t>(is)),
                 "r"(at), "f"(pair.x), "f"(pair.y)
                 : "memory");
}

// Prefetches the line of global memory that contains `p` to the second-level cache.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Copies 16 bytes to shared memory, bypassing the first-level cache.
__device__ __forceinline__ void copy_async(std::uint32_t shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global));
}
// Writes 16 bytes, of which `bytes` are copied and the rest are zero.
__device__ __forceinline__ void copy_async(std::uint32_t shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits until all but the latest kPending groups of the thread have completed.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

}  // namespace cula::cuda
