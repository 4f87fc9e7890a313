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

__device__ __forceinline__ void load4(float* to, const float* from) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// One number whose dtype is known at run time, loaded without looking at it: nothing waits before value().
struct RawFloat {
    std::uint32_t bits = 0;

    __device__ __forceinline__ void load(const void* data, Dtype dtype, std::int64_t i, bool in) {
        const bool narrow = dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat16;
        if (in && narrow) bits = __ldg(static_cast<const unsigned short*>(data) + i);
        if (in && dtype == Dtype::kFloat32) bits = __ldg(static_cast<const std::uint32_t*>(data) + i);
        if (in && dtype == Dtype::kFloat64)
            bits = __float_as_uint(static_cast<float>(static_cast<const double*>(data)[i]));
    }
    __device__ __forceinline__ float value(Dtype dtype) const {
        if (dtype == Dtype::kBFloat16) return __uint_as_float(bits << 16);
        if (dtype == Dtype::kFloat16) return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
        return __uint_as_float(bits);
    }
};

// Four neighbouring elements of T: 16 bytes of float, 8 of the 16-bit types.
template <class T>
struct Four {
    std::uint32_t word[sizeof(T)] = {};

    __device__ __forceinline__ void load(const T* p) {
        if constexpr (sizeof(T) == 4) {
            const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(p));
            word[0] = raw.x, word[1] = raw.y, word[2] = raw.z, word[3] = raw.w;
        } else {
            const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(p));
            word[0] = raw.x, word[1] = raw.y;
        }
    }
    __device__ __forceinline__ void store(T* p) const {
        if constexpr (sizeof(T) == 4)
            __stcs(reinterpret_cast<uint4*>(p), uint4{word[0], word[1], word[2], word[3]});
        else
            __stcs(reinterpret_cast<uint2*>(p), uint2{word[0], word[1]});
    }

    __device__ __forceinline__ float get(int i) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(word[i]);
        } else {
            const auto bits = static_cast<unsigned short>(i % 2 ? word[i / 2] >> 16 : word[i / 2]);
            return to_float(reinterpret_cast<const T&>(bits));
        }
    }
    // In order from 0 to 3.
    __device__ __forceinline__ void set(int i, float x) {
        if constexpr (sizeof(T) == 4) {
            word[i] = __float_as_uint(x);
        } else {
            const T rounded = from_float<T>(x);
            const std::uint32_t bits = reinterpret_cast<const unsigned short&>(rounded);
            word[i / 2] = i % 2 ? word[i / 2] | bits << 16 : bits;
        }
    }
};

}  // namespace cula::cuda
