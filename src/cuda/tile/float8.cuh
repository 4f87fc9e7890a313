// SPDX-License-Identifier: Apache-2.0
// float8_e4m3fn on the device (core/float8.h has the format and the scales of rows): by the instructions of
// sm_89 and later where there are any, otherwise by the same arithmetic on bits as on the host.
#pragma once

#include "core/float8.h"
#include "cuda/tile/convert.cuh"

namespace cula::cuda {

template <>
inline constexpr Dtype kDtype<Float8E4M3> = Dtype::kFloat8E4M3;

// The codes of two numbers of at most 448, the first in the lower byte. Rounds to nearest, ties to even.
__device__ __forceinline__ std::uint32_t float8_codes(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
#else
    return Float8E4M3(first).bits | static_cast<std::uint32_t>(Float8E4M3(second).bits) << 8;
#endif
}

// The numbers of two codes, of which the first is in the lower byte. Every number of the format is one of
// float16.
__device__ __forceinline__ float2 float8_numbers(std::uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    std::uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(codes)));
    return {__half2float(__ushort_as_half(static_cast<unsigned short>(halves))),
            __half2float(__ushort_as_half(static_cast<unsigned short>(halves >> 16)))};
#else
    // As float16 the bits of a code mean 2^-8 of it, subnormals too.
    const auto number = [](std::uint32_t code) {
        const std::uint32_t bits = (code & 0x80u) << 8 | (code & 0x7fu) << 7;
        const float x = __half2float(__ushort_as_half(static_cast<unsigned short>(bits))) * 256.0f;
        return (code & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u) : x;
    };
    return {number(codes), number(codes >> 8)};
#endif
}

// The larger of two magnitudes, or NaN if one of them is.
__device__ __forceinline__ float larger_magnitude(float most, float x) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(most), "f"(fabsf(x)));
    return larger;
}

// Four neighbouring codes: four bytes.
template <>
struct Four<Float8E4M3> {
    std::uint32_t word[1] = {};

    __device__ __forceinline__ explicit Four(const std::uint32_t* shared) { word[0] = *shared; }
    Four() = default;

    __device__ __forceinline__ void put(void* to) const { *static_cast<std::uint32_t*>(to) = word[0]; }

    __device__ __forceinline__ float get(int i) const {
        const float2 pair = float8_numbers(word[0] >> i / 2 * 16);
        return i % 2 ? pair.y : pair.x;
    }
    __device__ __forceinline__ void set(const float (&x)[4]) {
        word[0] = float8_codes(x[0], x[1]) | float8_codes(x[2], x[3]) << 16;
    }
};

}  // namespace cula::cuda
