// SPDX-License-Identifier: Apache-2.0
// Numbers in memory to float and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cula/tensor.h"

namespace cula::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}

template <class T>
inline constexpr Dtype kDtype = Dtype::kFloat32;
template <>
inline constexpr Dtype kDtype<__nv_bfloat16> = Dtype::kBFloat16;
template <>
inline constexpr Dtype kDtype<__half> = Dtype::kFloat16;

// Element i of an array whose dtype is known at run time.
__device__ __forceinline__ float load_float(const void* data, Dtype dtype, std::int64_t i) {
    switch (dtype) {
        case Dtype::kBFloat16: return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
        case Dtype::kFloat16: return to_float(static_cast<const __half*>(data)[i]);
        case Dtype::kFloat64: return static_cast<float>(static_cast<const double*>(data)[i]);
        default: return static_cast<const float*>(data)[i];
    }
}

__device__ __forceinline__ void store_float(void* data, Dtype dtype, std::int64_t i, float x) {
    switch (dtype) {
        case Dtype::kBFloat16: static_cast<__nv_bfloat16*>(data)[i] = from_float<__nv_bfloat16>(x); break;
        case Dtype::kFloat16: static_cast<__half*>(data)[i] = from_float<__half>(x); break;
        default: static_cast<float*>(data)[i] = x; break;
    }
}

// 16 bytes of T as floats.
template <class T>
struct Pack {
    static constexpr int kCount = 16 / sizeof(T);
    std::uint32_t word[4] = {};

    __device__ __forceinline__ void load(const T* p) {
        const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(p));
        word[0] = raw.x, word[1] = raw.y, word[2] = raw.z, word[3] = raw.w;
    }
    __device__ __forceinline__ void store(T* p) const {
        __stcs(reinterpret_cast<uint4*>(p), uint4{word[0], word[1], word[2], word[3]});
    }

    __device__ __forceinline__ float get(int i) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(word[i]);
        } else {
            const auto bits = static_cast<unsigned short>(i % 2 ? word[i / 2] >> 16 : word[i / 2]);
            return to_float(reinterpret_cast<const T&>(bits));
        }
    }
    // Elements i and i + 1 (16-bit types), or element i (float).
    __device__ __forceinline__ void set(int i, float x) {
        if constexpr (sizeof(T) == 4) {
            word[i] = __float_as_uint(x);
        } else {
            const T rounded = from_float<T>(x);
            const std::uint32_t bits = reinterpret_cast<const unsigned short&>(rounded);
            word[i / 2] = i % 2 ? (word[i / 2] & 0xffffu) | bits << 16 : bits;
        }
    }
};

}  // namespace cula::cuda
