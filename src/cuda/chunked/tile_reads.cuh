// SPDX-License-Identifier: Apache-2.0
// Tiles of shared memory whose rows are tokens: how q and k get there as they came, and how a warp reads
// operands of mma.m16n8k16 from them.
#pragma once

#include "cuda/chunked/chunk.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::chunked {

// The shared memory addresses that a lane passes to ldmatrix for a swizzled tile: 16 rows by two units of 16
// bytes at a time. The lane's part is computed once; the loop adds and xors constants.
template <class Place, bool kTransposed>
struct LaneReads {
    static constexpr int kPitch = Place::kUnits * 16, kPairs = Place::kUnits / 2;
    std::uint32_t row, swizzle;

    __device__ __forceinline__ LaneReads() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int token = kTransposed ? lane % 16 : lane % 8 + lane / 16 * 8,
                  unit = kTransposed ? lane / 16 : lane / 8 % 2;
        row = static_cast<std::uint32_t>(token * kPitch);
        swizzle = static_cast<std::uint32_t>((Place::unit(token, unit) - token * Place::kUnits) * 16);
    }
    __device__ __forceinline__ std::uint32_t at(std::uint32_t tile, int block, int pair) const {
        return tile + pair / kPairs * (Place::kPanelUnits * 16) + block * 16 * kPitch + row +
               (swizzle ^ (pair % kPairs * 32));
    }
    // A copy that the compiler cannot prove equal. Without it the addresses of all units are kept in
    // registers over the loop, and S needs those.
    __device__ __forceinline__ LaneReads again() const {
        LaneReads copy = *this;
        asm volatile("" : "+r"(copy.swizzle));
        return copy;
    }
};

// Copies kRows tokens x kKey channels of a head, unchanged, to a tile, with zeros beyond `count` tokens and
// `key_dim` channels. `wide`: rows can be read in pieces of 16 bytes (cp.async). `tokens`: the token of each
// row of the tile, counted from that at `offset`; rows that are not their token's last are zero.
template <class T, int kRows, int kKey, class Tokens = RowsAreTokens>
__device__ __forceinline__ void copy_tokens(T* tile, std::uint32_t tile_at, const TokenRows& rows,
                                            std::int64_t offset, int count, int key_dim, bool wide,
                                            int thread, int threads, const Tokens& tokens = {}) {
    // A thread keeps its unit of 16 bytes and advances over the tokens by as many rows as all threads cover.
    // Where that is a multiple of eight, the swizzle is the same in each of them.
    constexpr int kUnits = kKey / 8;
    const int unit = thread % kUnits, step = threads / kUnits;
    const T* base = static_cast<const T*>(rows.data) + offset;
    if (wide) {
#pragma unroll 4
        for (int token = thread / kUnits; token < kRows; token += step) {
            const bool in = token < count && unit * 8 < key_dim && tokens.is_last(token);
            copy_async(tile_at + OperandTile<kKey, false>::unit(token, unit) * 16,
                       base + (in ? tokens.token(token) * rows.token + unit * 8 : 0), in ? 16 : 0);
        }
    } else {
#pragma unroll 1
        for (int token = thread / kUnits; token < kRows; token += step)
#pragma unroll 1
            for (int e = 0; e < 8; ++e)
                tile[OperandTile<kKey, false>::unit(token, unit) * 8 + e] =
                    token < count && unit * 8 + e < key_dim && tokens.is_last(token)
                        ? base[tokens.token(token) * rows.token + unit * 8 + e]
                        : from_float<T>(0.0f);
    }
}

}  // namespace cula::cuda::chunked
