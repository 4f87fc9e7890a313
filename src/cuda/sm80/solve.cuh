// SPDX-License-Identifier: Apache-2.0
// solve: X = (I + M)^-1 for a strictly lower triangular M, in float      ALGORITHM.md: solve
//
// A warp makes a row of blocks of 16, from the diagonal to the left: X_rr by substitution, then
//   X_rj = -(sum over l in (j, r] of X_rl M_lj) X_jj
// on the tensor cores. It reads what the others made on the diagonal, and of its own row alone what lies left of it, so
// that one barrier does.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/chunk.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::sm80 {

// A square of floats in shared memory. Pitch and permutation keep the accumulators' layout (8 bytes a lane), rows (16
// bytes) and the columns of a right factor free of conflicts. Four neighbours from a multiple of four on stay together.
template <int kSize>
struct Square {
    static constexpr int kPitch = kSize + 8;
    float x[kSize * kPitch];

    static __device__ __forceinline__ constexpr int place(int row, int column) {
        return row * kPitch + (column ^ (row & 4) * 3);
    }
    // In the block from (row, column) on, multiples of 16: only bits 2 and 3 of a column ever change.
    __device__ __forceinline__ float* at(int row, int column, int i, int j) {
        return x + row * kPitch + column + place(i, j);
    }
    __device__ __forceinline__ const float* at(int row, int column, int i, int j) const {
        return x + row * kPitch + column + place(i, j);
    }
};

// A factor for the tensor cores, which drop the lower 13 bits of what they read: after that `rounded` is the nearest
// number of 11 bits, for any finite x, and `rest` what it leaves over. Together they are good to 2^-22.
struct Tf32 {
    std::uint32_t rounded, rest;

    __device__ __forceinline__ explicit Tf32(float x) {
        rounded = __float_as_uint(x) + 0x1000u;
        rest = __float_as_uint(x - __uint_as_float(rounded & 0xffffe000u));
    }
};

// product [16 x 16] += left right [16 x 16], left as accumulators hold it: [n tile][fragment]. kExact: 22 bits of each
// factor instead of 11.
template <bool kExact, int kSize>
__device__ __forceinline__ void multiply_block(float (&product)[2][4], const float (&left)[2][4],
                                               const Square<kSize>& right, int row, int column) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        // Neighbouring columns of `left` serve as k and k + 4: rows of `right` follow suit.
        const Tf32 a0(left[step][0]), a1(left[step][2]), a2(left[step][1]), a3(left[step][3]);
        const std::uint32_t a[4] = {a0.rounded, a1.rounded, a2.rounded, a3.rounded};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const float* from = right.at(row, column, lane % 4 * 2, 8 * tile + lane / 4) + 8 * step * right.kPitch;
            const Tf32 b0(from[0]), b1(from[right.kPitch]);
            if constexpr (kExact) {
                const std::uint32_t rest[4] = {a0.rest, a1.rest, a2.rest, a3.rest};
                mma_16x8x8_tf32(product[tile], rest, b0.rounded, b1.rounded);
                mma_16x8x8_tf32(product[tile], a, b0.rest, b1.rest);
            }
            mma_16x8x8_tf32(product[tile], a, b0.rounded, b1.rounded);
        }
    }
}

// Where a lane's pairs of a 16 x 16 product stand.
template <class SquareOf>
__device__ __forceinline__ auto* pair_at(SquareOf& s, int row, int column, int tile, int half) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return s.at(row, column, lane / 4, 8 * tile + lane % 4 * 2) + 8 * half * s.kPitch;
}

template <int kSize>
__device__ __forceinline__ void load_block(float (&block)[2][4], const Square<kSize>& s, int row, int column) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 pair = *reinterpret_cast<const float2*>(pair_at(s, row, column, tile, half));
            block[tile][2 * half] = pair.x, block[tile][2 * half + 1] = pair.y;
        }
}

// X in place of M in block (row, row), what lies above the diagonal included. One warp.
template <int kSize>
__device__ __forceinline__ void invert_diagonal(Square<kSize>& m, int row) {
    // Lane j, and j + 16: column j of the block, x_i = [i = j] - sum_{l < i} m_il x_l.
    const int lane = static_cast<int>(threadIdx.x) % 32, first = row * kBlock, j = lane % kBlock;
    float column[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
        float of_row[kBlock], even = i == j ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
        for (int l = 0; l < i; l += 4) load4(of_row + l, m.at(first, first, i, l));
#pragma unroll
        for (int l = 0; l < i; ++l) (l % 2 ? odd : even) -= of_row[l] * column[l];
        column[i] = even + odd;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBlock; ++i) *m.at(first, first, i, j) = column[i];
}

// Row `row` of X left of the diagonal to x, from M and the inverses on its diagonal. One warp, after all others have
// made theirs.
template <bool kExact, int kSize>
__device__ __forceinline__ void invert_row(const Square<kSize>& m, Square<kSize>& x, int row) {
#pragma unroll 1
    for (int column = row - 1; column >= 0; --column) {
        float sum[2][4] = {}, product[2][4] = {};
#pragma unroll 1
        for (int inner = row; inner > column; --inner) {
            float left[2][4];
            load_block(left, inner == row ? m : x, row * kBlock, inner * kBlock);
            multiply_block<kExact>(sum, left, m, inner * kBlock, column * kBlock);
        }
        multiply_block<kExact>(product, sum, m, column * kBlock, column * kBlock);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(pair_at(x, row * kBlock, column * kBlock, tile, half)) =
                    float2{-product[tile][2 * half], -product[tile][2 * half + 1]};
        __syncwarp();
    }
}

}  // namespace cula::cuda::sm80
