// SPDX-License-Identifier: Apache-2.0
// The 64 value rows of a warpgroup that multiplies, in its registers and in shared memory: values and outputs of 16
// tokens at a time, as boxes of rows of 128 bytes, a token each.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm90/stage.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::sm90 {

using Packed = std::uint32_t[4];  // 16 x 16 of a warp, as an A operand

// Accumulators as A operands.
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

// Where the lane's row of a matrix stands in a box.
static_assert(kGroupRows == 64);
__device__ __forceinline__ std::uint32_t own_value_row() {
    const unsigned row = threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8,
                   unit = threadIdx.x / 32 % kGroupWarps * 2 + threadIdx.x / 8 % 2;
    return row * 128 + (unit ^ row % 8) * 16;
}
inline constexpr int kValueBlockBytes = 16 * 128;

// V^T in the layout of accumulators: words 0, 1: rows 0-7 and 8-15 of tokens 0-7; 2, 3: of tokens 8-15.
template <int kBlocks>
__device__ __forceinline__ void load_value_rows(Packed (&values)[kBlocks], std::uint32_t box) {
    const std::uint32_t from = box + own_value_row();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
        load_matrices_transposed(values[block], from + block * kValueBlockBytes);
}
template <class T, int kTiles>
__device__ __forceinline__ void store_value_rows(std::uint32_t box, const float (&out)[kTiles][4]) {
    const std::uint32_t to = box + own_value_row();
    Packed rows[kTiles / 2];
    pack<T>(rows, out);
#pragma unroll
    for (int block = 0; block < kTiles / 2; ++block)
        store_matrices_transposed(to + block * kValueBlockBytes, rows[block]);
}

}  // namespace cula::cuda::sm90
