// SPDX-License-Identifier: Apache-2.0
// Eight neighbouring channels of a token's row between memory and the registers of one thread. A piece is 16
// bytes (TokenRows::pieces).
#pragma once

#include "cuda/device_args.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/store_gradient.cuh"

namespace cula::cuda {

template <class T>
__device__ __forceinline__ void store_eight(T* to, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(to) = {pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]),
                                     pack2<T>(x[6], x[7])};
}

template <class T>
__device__ __forceinline__ void unpack_eight(float (&x)[8], const uint4& words) {
    const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const float2 pair = unpack2<T>(word[w]);
        x[2 * w] = pair.x, x[2 * w + 1] = pair.y;
    }
}

// Elements i to i + 7 of a row that starts at `row`; zeros from `width` on.
template <class T>
__device__ __forceinline__ void load_eight(float (&x)[8], const TokenRows& rows, std::int64_t row, int i,
                                           int width) {
    if (rows.dtype == kDtype<T> && rows.pieces)
        return unpack_eight<T>(
            x, __ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(rows.data) + row + i)));
    if (rows.dtype == Dtype::kFloat32 && rows.pieces && i + 8 <= width) {
        const auto* const from = static_cast<const float*>(rows.data) + row + i;
        load4(x, from), load4(x + 4, from + 4);
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
        x[e] = i + e < width ? load_float(rows.data, rows.dtype, row + (i + e) * rows.last) : 0.0f;
}

// Stores elements i to i + 7 of a row that starts at `row`, up to `width`.
template <class T>
__device__ __forceinline__ void put_eight(const TokenRows& rows, std::int64_t row, int i, int width,
                                          const float (&x)[8]) {
    if (rows.dtype == kDtype<T> && rows.pieces)
        return store_eight<T>(static_cast<T*>(rows.data) + row + i, x);
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (i + e < width) store_gradient(rows.data, rows.dtype, row + (i + e) * rows.last, x[e]);
}

// All eight, of rows of T or float32 that a call makes for itself: these have a multiple of eight channels.
template <class T>
__device__ __forceinline__ void store_made(const TokenRows& rows, std::int64_t row, int i,
                                           const float (&x)[8]) {
    if (rows.dtype == Dtype::kFloat32) {
        auto* const to = reinterpret_cast<float4*>(static_cast<float*>(rows.data) + row + i);
        to[0] = {x[0], x[1], x[2], x[3]}, to[1] = {x[4], x[5], x[6], x[7]};
    } else {
        store_eight<T>(static_cast<T*>(rows.data) + row + i, x);
    }
}

}  // namespace cula::cuda
