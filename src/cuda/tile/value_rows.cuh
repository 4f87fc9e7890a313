// SPDX-License-Identifier: Apache-2.0
// The 64 value rows of a warpgroup (sm_90), in registers (accumulator and A operand layout) and in shared
// memory: values and outputs as TMA tiles of one 128-byte row per token, moved 16 tokens at a time.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/store_row.cuh"

namespace cula::cuda {

// Rounds accumulators to T and packs them as A operands.
template <class T, int kTiles>
__device__ __forceinline__ void pack(Packed (&rows)[kTiles / 2], const float (&x)[kTiles][4]) {
#pragma unroll
    for (int block = 0; block < kTiles / 2; ++block)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float* pair = &x[2 * block + w / 2][w % 2 * 2];
            rows[block][w] = pack2<T>(pair[0], pair[1]);
        }
}

// The default for a function that returns the factors of a lane's two tokens in a tile: no factor.
struct NoFactor {
    __device__ __forceinline__ float2 operator()(int) const { return {1.0f, 1.0f}; }
};
// values = V - R * factor, R being what was read from the state and the factor one per token.
template <class T, int kBlocks, int kTiles, class Factor = NoFactor>
__device__ __forceinline__ void subtract_read(Packed (&values)[kBlocks], const float (&read)[kTiles][4],
                                              const Factor& factor = {}) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int tile = 2 * block + x / 2;
            const float2 v = unpack2<T>(values[block][x]), f = factor(tile);
            const float2 r{read[tile][x % 2 * 2] * f.x, read[tile][x % 2 * 2 + 1] * f.y};
            values[block][x] = pack2<T>(v.x - r.x, v.y - r.y);
        }
}
// The low words: u * factor - rounded, packed, where `rounded` is u * factor as packed before.
template <class T, int kBlocks, int kTiles, class Factor = NoFactor>
__device__ __forceinline__ void take_low_words(Packed (&low)[kBlocks], const Packed (&rounded)[kBlocks],
                                               const float (&u)[kTiles][4], const Factor& factor = {}) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int tile = 2 * block + x / 2;
            const float2 f = factor(tile);
            low[block][x] =
                pack_rest<T>({u[tile][x % 2 * 2] * f.x, u[tile][x % 2 * 2 + 1] * f.y}, rounded[block][x]);
        }
}

// The byte offset in a TMA tile (128-byte swizzle) of the 8 x 8 matrix row that this lane addresses for
// ldmatrix and stmatrix.
static_assert(kWarpgroupRows == 64);
__device__ __forceinline__ std::uint32_t own_value_row() {
    const unsigned row = threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8,
                   unit = threadIdx.x / 32 % kWarpgroupWarps * 2 + threadIdx.x / 8 % 2;
    return row * 128 + (unit ^ row % 8) * 16;
}
inline constexpr int kValueBlockBytes = 16 * 128;

// Values from a TMA tile in the layout of an A operand: words 0 and 1 have value rows 0-7 and 8-15 of tokens
// 0-7, words 2 and 3 those of tokens 8-15. store_value_rows is the way back, for outputs.
template <int kBlocks>
__device__ __forceinline__ void load_value_rows(Packed (&values)[kBlocks], std::uint32_t tile) {
    const std::uint32_t from = tile + own_value_row();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
        load_matrices_transposed(values[block], from + block * kValueBlockBytes);
}
template <class T, int kTiles>
__device__ __forceinline__ void store_value_rows(std::uint32_t tile, const float (&out)[kTiles][4]) {
    const std::uint32_t to = tile + own_value_row();
#pragma unroll
    for (int block = 0; block < kTiles / 2; ++block) {
        Packed rows;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float* pair = &out[2 * block + w / 2][w % 2 * 2];
            rows[w] = round_row<T>(pair[0], pair[1]);
        }
        store_matrices_transposed(to + block * kValueBlockBytes, rows);
    }
}

}  // namespace cula::cuda
