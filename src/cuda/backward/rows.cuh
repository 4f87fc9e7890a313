// SPDX-License-Identifier: Apache-2.0
// Rows of q and k of a chunk, and of their gradients, as a warp holds them: 16 tokens x 8 kTiles channels in
// the accumulator layout of mma.m16n8k16. Lane l has tokens l / 4 and l / 4 + 8 of its block, and of each
// tile of eight channels 2 (l % 4) and the next.
#pragma once

#include <cstdint>

#include "cuda/chunked/chunk.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/store_gradient.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::backward {

template <int kTiles>
using RowTiles = float[kTiles][4];

// The lane's number, in a form that the compiler cannot prove equal to other such numbers. What follows from
// it is then computed where it is needed, and not kept over a loop, whose accumulators need the registers.
__device__ __forceinline__ int lane_again() {
    int lane = static_cast<int>(threadIdx.x) % 32;
    asm volatile("" : "+r"(lane));
    return lane;
}

// Sum over the four lanes that share a token.
__device__ __forceinline__ float sum_over_channels(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The lane's place in such rows: those of block `block`, from channel `first_channel` on, a multiple of the
// warp's channels.
template <class T, int kKey>
struct LaneRows {
    using Place = chunked::OperandTile<kKey, false>;
    static_assert(Place::kUnits == 8);
    int token, channel;  // the lane's first token and channel
    std::uint32_t at;    // in bytes, of both in a tile of shared memory

    __device__ __forceinline__ LaneRows(int block, int first_channel) {
        const int lane = lane_again();
        token = block * chunked::kBlock + lane / 4;
        channel = first_channel + lane % 4 * 2;
        at = static_cast<std::uint32_t>(Place::unit(token, first_channel / 8) * 16 + lane % 4 * 4);
    }
    // The lane's two neighbouring channels in a tile of shared memory. The swizzle of both tokens is the
    // same.
    __device__ __forceinline__ std::uint32_t* word(T* rows, int tile, int half) const {
        const std::uint32_t place =
            (at ^ static_cast<std::uint32_t>(tile) * 16) + half * (8 * Place::kUnits * 16);
        return reinterpret_cast<std::uint32_t*>(reinterpret_cast<unsigned char*>(rows) + place);
    }
    __device__ __forceinline__ float2 pair(const T* rows, int tile, int half) const {
        return unpack2<T>(*word(const_cast<T*>(rows), tile, half));
    }
    // x . rows of the lane's token, over the warp's channels.
    template <int kTiles>
    __device__ __forceinline__ float dot(const RowTiles<kTiles>& x, const T* rows, int half) const {
        float sum = 0.0f;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const float2 y = pair(rows, tile, half);
            sum = fmaf(x[tile][2 * half], y.x, fmaf(x[tile][2 * half + 1], y.y, sum));
        }
        return sum_over_channels(sum);
    }
    // The derivative of a norm, dx = r (dy - (dy . y) y) with y = r x: from dy to dx. along: dy . y.
    template <int kTiles>
    __device__ __forceinline__ void through_norm(RowTiles<kTiles>& d, const T* rows, int half, float r,
                                                 float along) const {
        const float back = along * r;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const float2 x = pair(rows, tile, half);
            d[tile][2 * half] = r * (d[tile][2 * half] - back * x.x);
            d[tile][2 * half + 1] = r * (d[tile][2 * half + 1] - back * x.y);
        }
    }
};

// Stores the warp's rows of a gradient. `staged`: a tile of shared memory of which no other warp reads or
// writes these rows and channels. first: the chunk's first element. tokens: where the rows of the chunk lie
// behind it; those that are not their token's last are left out. Warp-collective.
template <class T, int kKey, int kTiles, class Tokens = RowsAreTokens>
__device__ __forceinline__ void store_rows(const TokenRows& to, std::int64_t first, int count, int key_dim,
                                           const LaneRows<T, kKey>& rows, T* staged,
                                           const RowTiles<kTiles>& x, const Tokens& tokens = {}) {
    const bool narrow = to.dtype == kDtype<T>;
    if (!to.pieces) {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            const int token = rows.token + 8 * half;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int channel = rows.channel + 8 * tile + e;
                    if (token < count && channel < key_dim && tokens.is_last(token))
                        store_float(to.data, to.dtype, first + tokens.token(token) * to.token + channel,
                                    half ? x[tile][2 + e] : x[tile][e]);
                }
        }
        return;
    }
    if (!narrow) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = rows.token + 8 * half;
            float* const row =
                static_cast<float*>(to.data) + first + tokens.token(token) * to.token + rows.channel;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
                if (token < count && rows.channel + 8 * tile < key_dim && tokens.is_last(token))
                    *reinterpret_cast<float2*>(row + 8 * tile) = {x[tile][2 * half], x[tile][2 * half + 1]};
        }
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
            *rows.word(staged, tile, half) = pack2<T>(x[tile][2 * half], x[tile][2 * half + 1]);
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x) % 32, block = rows.token & ~(chunked::kBlock - 1),
              unit = rows.channel / 8 + lane % kTiles;
    constexpr int kStep = 32 / kTiles;  // tokens that the lanes store at a time
#pragma unroll
    for (int i = 0; i < chunked::kBlock; i += kStep) {
        const int token = block + i + lane / kTiles;
        if (token < count && unit * 8 < key_dim && tokens.is_last(token))
            *reinterpret_cast<uint4*>(static_cast<T*>(to.data) + first + tokens.token(token) * to.token +
                                      unit * 8) =
                reinterpret_cast<const uint4*>(staged)[LaneRows<T, kKey>::Place::unit(token, unit)];
    }
}

}  // namespace cula::cuda::backward
