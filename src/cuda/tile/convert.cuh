// SPDX-License-Identifier: Apache-2.0
// Loads and stores of numbers of any dtype, converted to and from float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/memory.cuh"
#include "cula/tensor.h"

namespace cula::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

// Rounds to nearest, ties to even.
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

// base + index * stride in bytes: a 32-bit by 32-bit product of 64 bits (one mad.wide).
template <class T>
__device__ __forceinline__ T* advanced(T* base, std::int32_t index, std::int32_t stride) {
    std::int64_t at;
    asm("mad.wide.s32 %0, %1, %2, %3;"
        : "=l"(at)
        : "r"(index), "r"(stride), "l"(reinterpret_cast<std::int64_t>(base)));
    return reinterpret_cast<T*>(at);
}

// The number at `from` if `in`, otherwise 0.
// In assembly, because the compiler turned the conditions into branches and placed the first use of a number
// before the next load. Here many loads are issued one after another, and each is waited for where its number
// is used.
__device__ __forceinline__ std::uint32_t load8_if(const void* from, bool in) {
    std::uint32_t x;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.u8 %0, [%1]; }"
                 : "=r"(x)
                 : "l"(from), "r"(static_cast<int>(in)));
    return x;
}
__device__ __forceinline__ std::uint32_t load16_if(const void* from, bool in) {
    std::uint32_t x;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.u16 %0, [%1]; }"
                 : "=r"(x)
                 : "l"(from), "r"(static_cast<int>(in)));
    return x;
}
__device__ __forceinline__ std::uint32_t load32_if(const void* from, bool in) {
    std::uint32_t x;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1]; }"
                 : "=r"(x)
                 : "l"(from), "r"(static_cast<int>(in)));
    return x;
}

// Not by the read-only path: what they load may be overwritten later by the same kernel.
__device__ __forceinline__ std::uint32_t load16_coherent_if(const void* from, bool in) {
    std::uint32_t x;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.u16 %0, [%1]; }"
                 : "=r"(x)
                 : "l"(from), "r"(static_cast<int>(in)));
    return x;
}
__device__ __forceinline__ std::uint32_t load32_coherent_if(const void* from, bool in) {
    std::uint32_t x;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1]; }"
                 : "=r"(x)
                 : "l"(from), "r"(static_cast<int>(in)));
    return x;
}

// A dtype as a 32-bit word, so that no byte has to be extracted. kNone: there is no tensor.
enum class Element : std::int32_t { kNone, kFloat32, kBFloat16, kFloat16 };

__host__ __device__ __forceinline__ Element element(Dtype dtype) {
    return dtype == Dtype::kFloat32    ? Element::kFloat32
           : dtype == Dtype::kBFloat16 ? Element::kBFloat16
           : dtype == Dtype::kFloat16  ? Element::kFloat16
                                       : Element::kNone;
}

// A number of 16 or 32 bits whose dtype is known at run time. load() does not depend on any loaded value, and
// nothing waits before value().
// Each width has a register of its own: of two predicated loads into one register the second waits for the
// first, even if a predicate disables one of them.
struct RawFloat {
    std::uint32_t narrow = 0, wide = 0;

    __device__ __forceinline__ void load(const void* from, Element type, bool in = true) {
        narrow = load16_if(from, in && type >= Element::kBFloat16);
        wide = load32_if(from, in && type == Element::kFloat32);
    }
    __device__ __forceinline__ void load_coherent(const void* from, Element type, bool in) {
        narrow = load16_coherent_if(from, in && type >= Element::kBFloat16);
        wide = load32_coherent_if(from, in && type == Element::kFloat32);
    }
    __device__ __forceinline__ float value(Element type) const {
        const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(narrow)));
        return type == Element::kFloat16 ? half : __uint_as_float(wide | narrow << 16);
    }
};

// Stores x as `type` if `in`; predicated, without a branch.
__device__ __forceinline__ void store_float_if(void* to, Element type, float x, bool in) {
    const unsigned short narrow = type == Element::kBFloat16
                                      ? __bfloat16_as_ushort(from_float<__nv_bfloat16>(x))
                                      : __half_as_ushort(from_float<__half>(x));
    if (in && type == Element::kFloat32) *static_cast<float*>(to) = x;
    if (in && type != Element::kFloat32) *static_cast<unsigned short*>(to) = narrow;
}

// Four neighbouring elements of T: 16 bytes of float, 8 of the 16-bit types.
template <class T>
struct Four {
    std::uint32_t word[sizeof(T)] = {};

    __device__ __forceinline__ explicit Four(const std::uint32_t* shared) {
        if constexpr (sizeof(T) == 4) {
            const uint4 raw = *reinterpret_cast<const uint4*>(shared);
            word[0] = raw.x, word[1] = raw.y, word[2] = raw.z, word[3] = raw.w;
        } else {
            const uint2 raw = *reinterpret_cast<const uint2*>(shared);
            word[0] = raw.x, word[1] = raw.y;
        }
    }
    Four() = default;

    __device__ __forceinline__ void put(void* to) const {
        if constexpr (sizeof(T) == 4)
            *static_cast<uint4*>(to) = uint4{word[0], word[1], word[2], word[3]};
        else
            *static_cast<uint2*>(to) = uint2{word[0], word[1]};
    }

    __device__ __forceinline__ float get(int i) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(word[i]);
        } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // one instruction each
            return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
        } else {
            const auto bits = static_cast<unsigned short>(i % 2 ? word[i / 2] >> 16 : word[i / 2]);
            return to_float(reinterpret_cast<const T&>(bits));
        }
    }
    // Call in order of i, from 0 to 3: the lower half of a word is set first.
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
