// SPDX-License-Identifier: Apache-2.0
// float16 as the emulated kernels use it: two bytes, rounded to nearest, ties to even.
#pragma once

#include <immintrin.h>

#include "emulator/device.h"

struct __half {
    unsigned short bits;
};
struct alignas(4) __half2 {
    __half x, y;
};

inline float __half2float(__half x) { return _cvtsh_ss(x.bits); }
inline __half __float2half_rn(float x) {
    if (x != x) return {0x7fff};
    return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)};
}
inline __half __float2half(float x) { return __float2half_rn(x); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float22half2_rn(float2 x) { return __floats2half2_rn(x.x, x.y); }
