// SPDX-License-Identifier: Apache-2.0
// solve: X = (I + M)^-1 for a strictly lower triangular M, in float      ALGORITHM.md: solve
//
// Blocks of 16 on the diagonal by substitution, one warp each; corners of 16 and of 32 as -X22 M21 X11 on the tensor
// cores, each factor as the sum of two TF32 numbers: 22 bits, since near-collinear keys leave nothing to spare
// (docs/sm80.md).
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/chunk.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::sm80 {

// A square of floats in shared memory. The pitch keeps both the accumulator layout (8 bytes a lane) and rows free of
// conflicts.
template <int kSize>
struct Square {
    static constexpr int kPitch = kSize + 8;
    float x[kSize * kPitch];

    __device__ __forceinline__ float* at(int row, int column) { return x + row * kPitch + column; }
    __device__ __forceinline__ const float* at(int row, int column) const { return x + row * kPitch + column; }
};

// product [16 x 16] += left right [16 x 16], left as accumulators hold it: [n tile][fragment].
template <int kSize>
__device__ __forceinline__ void multiply_block(float (&product)[2][4], const float (&left)[2][4],
                                               const Square<kSize>& right, int row, int column) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        // Neighbouring columns of `left` serve as k and k + 4: rows of `right` follow suit.
        const TwoTf32 a0(left[step][0]), a1(left[step][2]), a2(left[step][1]), a3(left[step][3]);
        const std::uint32_t high[4] = {a0.high, a1.high, a2.high, a3.high}, low[4] = {a0.low, a1.low, a2.low, a3.low};
        const int k = row + 8 * step + lane % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int n = column + 8 * tile + lane / 4;
            const TwoTf32 b0(*right.at(k, n)), b1(*right.at(k + 1, n));
            mma_16x8x8_tf32(product[tile], low, b0.high, b1.high);
            mma_16x8x8_tf32(product[tile], high, b0.low, b1.low);
            mma_16x8x8_tf32(product[tile], high, b0.high, b1.high);
        }
    }
}

template <int kSize>
__device__ __forceinline__ void load_block(float (&block)[2][4], const Square<kSize>& s, int row, int column) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 pair =
                *reinterpret_cast<const float2*>(s.at(row + lane / 4 + 8 * half, column + 8 * tile + lane % 4 * 2));
            block[tile][2 * half] = pair.x, block[tile][2 * half + 1] = pair.y;
        }
}

// Called by kSize / 16 or more whole warps of the CTA, and all of its threads.
template <int kSize>
__device__ __forceinline__ void invert(const Square<kSize>& m, Square<kSize>& x) {
    constexpr int kBlocks = kSize / kBlock;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < kBlocks) {
        // Lane j: column j of the block, x_i = [i = j] - sum_{l < i} m_il x_l.
        const int first = warp * kBlock, j = lane % kBlock;
        float column[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            float row[kBlock], even = i == j ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
            for (int l = 0; l < i; l += 4) load4(row + l, m.at(first + i, first + l));
#pragma unroll
            for (int l = 0; l < i; ++l) (l % 2 ? odd : even) -= row[l] * column[l];
            column[i] = even + odd;
            if (lane < kBlock) *x.at(first + i, first + j) = column[i];
        }
    }
    __syncthreads();
    // Corners with sides of `half` blocks; a warp makes one block of one corner.
#pragma unroll 1
    for (int half = 1; half < kBlocks; half *= 2) {
        const int corner = warp / (half * half), of_row = warp / half % half, of_column = warp % half;
        const int top = corner * 2 * half, row = top + half + of_row;
        float result[2][4] = {};
        const bool busy = top + 2 * half <= kBlocks;
        if (busy) {
#pragma unroll 1
            for (int middle = of_column; middle < half; ++middle) {
                // Row of X22 times column of M21, then times the block of X11.
                float product[2][4] = {};
#pragma unroll 1
                for (int inner = 0; inner <= of_row; ++inner) {
                    float left[2][4];
                    load_block(left, x, row * kBlock, (top + half + inner) * kBlock);
                    multiply_block(product, left, m, (top + half + inner) * kBlock, (top + middle) * kBlock);
                }
                multiply_block(result, product, x, (top + middle) * kBlock, (top + of_column) * kBlock);
            }
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    *reinterpret_cast<float2*>(
                        x.at(row * kBlock + lane / 4 + 8 * e, (top + of_column) * kBlock + 8 * tile + lane % 4 * 2)) =
                        float2{-result[tile][2 * e], -result[tile][2 * e + 1]};
        }
        __syncthreads();
    }
}

}  // namespace cula::cuda::sm80
