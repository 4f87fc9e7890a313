// SPDX-License-Identifier: Apache-2.0
// Tensor core products of one warp (mma.sync), sm_80: d [16 x 8] += a [16 x 16] b [16 x 8], float
// accumulators.
//
// Fragments, for lane l:
//     d: rows l/4 and l/4 + 8, columns 2 (l%4) and the next; d[0], d[1] are the first row, d[2], d[3] the
//     second
//     a: pairs along k; a[0], a[1] are rows l/4 and l/4 + 8 at k = 2 (l%4), a[2], a[3] the same rows at k + 8
//     b: pairs along k; b0 at k = 2 (l%4), b1 at k + 8, column l/4
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace cula::cuda {

using Packed = std::uint32_t[4];  // a [16 x 16]

template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const Packed& a, std::uint32_t b0,
                                            std::uint32_t b1);

template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&d)[4], const Packed& a, std::uint32_t b0,
                                                           std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&d)[4], const Packed& a, std::uint32_t b0,
                                                    std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d [16 x 8] += a [16 x 8] b [8 x 8]. Lane l holds of a: rows l/4 and l/4 + 8 at k = 2 (l%4) and the next; of
// b: the same k, column l/4.
template <class T>
__device__ __forceinline__ void mma_16x8x8(float (&d)[4], const std::uint32_t (&a)[2], std::uint32_t b);

template <>
__device__ __forceinline__ void mma_16x8x8<__nv_bfloat16>(float (&d)[4], const std::uint32_t (&a)[2],
                                                          std::uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

template <>
__device__ __forceinline__ void mma_16x8x8<__half>(float (&d)[4], const std::uint32_t (&a)[2],
                                                   std::uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

// d [16 x 8] += a [16 x 8] b [8 x 8] in TF32. Lane l holds of a: rows l/4 and l/4 + 8 at k = l%4, then both
// at k + 4; of b: k = l%4 and k + 4, column l/4.
__device__ __forceinline__ void mma_16x8x8_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two floats to T and packs them as neighbours along k, the first in the lower half.
template <class T>
__device__ __forceinline__ std::uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack2<__nv_bfloat16>(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <>
__device__ __forceinline__ std::uint32_t pack2<__half>(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// The same, but computed anew at every call. Used where many packed results would otherwise occupy registers
// from one use to the next.
template <class T>
__device__ __forceinline__ std::uint32_t pack2_again(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack2_again<__nv_bfloat16>(float low, float high) {
    std::uint32_t word;
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <>
__device__ __forceinline__ std::uint32_t pack2_again<__half>(float low, float high) {
    std::uint32_t word;
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <class T>
__device__ __forceinline__ float2 unpack2(std::uint32_t word);
template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(std::uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 unpack2<__half>(std::uint32_t word) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
}

// As pack2, but in float16 a number beyond the largest finite one becomes that one: its product with a zero
// of the other operand is then zero, not NaN. A NaN stays a NaN.
template <class T>
__device__ __forceinline__ std::uint32_t pack2_finite(float low, float high) {
    std::uint32_t word = pack2<T>(low, high);
    if constexpr (std::is_same_v<T, __half>)
        asm("{ .reg .b32 most; min.NaN.f16x2 most, %0, %1; max.NaN.f16x2 %0, most, %2; }"
            : "+r"(word)
            : "r"(0x7bff7bffu), "r"(0xfbfffbffu));
    return word;
}

// The low word of a compensated operand: what rounding `x` to `packed` took away, packed.
template <class T>
__device__ __forceinline__ std::uint32_t pack_rest(float2 x, std::uint32_t packed) {
    const float2 rounded = unpack2<T>(packed);
    return pack2_finite<T>(x.x - rounded.x, x.y - rounded.y);
}

}  // namespace cula::cuda
