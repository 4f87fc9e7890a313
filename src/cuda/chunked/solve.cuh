// SPDX-License-Identifier: Apache-2.0
// solve: X = (I + M)^-1 for a strictly lower triangular M, in float      ALGORITHM.md: solve
//
// By halves: the inverse of the lower triangle [A 0; C B] is [A^-1 0; -B^-1 C A^-1 B^-1].
//   1  a warp inverts a 16 x 16 block on the diagonal: halves of 8 by substitution, joined by two products
//   2  warps 0 and 1 join neighbouring blocks to squares of 32
//   3  all four warps join the two squares of 32 to one of 64
// Products run on the tensor cores in TF32, with one or two words per factor.
#pragma once

#include "cuda/chunked/chunk.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::chunked {

// When a chunk is compensated: some row of overlaps (beta L) has squares that sum to more than this.
// Roundings of the inverse T and of the writes U then add up instead of averaging out.
// The carry therefore reads both words of the inverse and of the
// scores, and keeps U as two words (docs/design/prepare.md).
inline constexpr float kMostSquares = 1.0f;

// Functions below take the lane as an argument, by default own_lane().
// A loop over chunks passes lane_anew(): otherwise the compiler keeps
// everything derived from the lane in registers across the loop.
__device__ __forceinline__ int own_lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int lane_anew() {
    int lane;
    asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
    return lane;
}

// A square of floats in shared memory.
// Pitch and swizzle keep three accesses free of bank conflicts: the accumulator layout
// (8 bytes per lane), rows (16 bytes per lane), and the columns of a right factor.
// Four neighbours from a multiple of four on stay adjacent.
template <int kSize>
struct Square {
    static constexpr int kPitch = kSize + 8;
    float x[kSize * kPitch];

    static __device__ __forceinline__ constexpr int place(int row, int column) {
        return row * kPitch + (column ^ (row & 4) * 3);
    }
    // Element (i, j) of the block at (row, column), multiples
    // of 16. A column's swizzle changes bits 2 and 3 only.
    __device__ __forceinline__ float* at(int row, int column, int i, int j) {
        return x + row * kPitch + column + place(i, j);
    }
    __device__ __forceinline__ const float* at(int row, int column, int i, int j) const {
        return x + row * kPitch + column + place(i, j);
    }
};

// A factor of a TF32 product. The tensor cores drop the lower 13 bits of what they read.
// `rounded`: after that drop, the nearest number of 11 bits, for any finite x. `rest`: what it leaves over.
// Both words together hold x to 2^-22.
struct Tf32 {
    std::uint32_t rounded, rest;

    __device__ __forceinline__ explicit Tf32(float x) {
        rounded = __float_as_uint(x) + 0x1000u;
        rest = __float_as_uint(x - __uint_as_float(rounded & 0xffffe000u));
    }
};

// product [16 x 16] += left right [16 x 16], left in accumulator layout: [n tile][fragment].
// kExact: two-word factors (22 bits) instead of one word (11 bits).
template <bool kExact, int kSize>
__device__ __forceinline__ void multiply_block(float (&product)[2][4], const float (&left)[2][4],
                                               const Square<kSize>& right, int row, int column,
                                               int lane = own_lane()) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        // Neighbouring columns of `left` serve as k and k + 4, so rows of `right` are read in the same order.
        const Tf32 a0(left[step][0]), a1(left[step][2]), a2(left[step][1]), a3(left[step][3]);
        const std::uint32_t a[4] = {a0.rounded, a1.rounded, a2.rounded, a3.rounded};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const float* from =
                right.at(row, column, lane % 4 * 2, 8 * tile + lane / 4) + 8 * step * right.kPitch;
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

// Position of a lane's pair of a 16 x 16 product.
template <class SquareOf>
__device__ __forceinline__ auto* pair_at(SquareOf& s, int row, int column, int tile, int half, int lane) {
    return s.at(row, column, lane / 4, 8 * tile + lane % 4 * 2) + 8 * half * s.kPitch;
}

template <int kSize>
__device__ __forceinline__ void load_block(float (&block)[2][4], const Square<kSize>& s, int row, int column,
                                           int lane = own_lane()) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 pair = *reinterpret_cast<const float2*>(pair_at(s, row, column, tile, half, lane));
            block[tile][2 * half] = pair.x, block[tile][2 * half + 1] = pair.y;
        }
}

// product [8 x 8] = left right at 22 bits. x0, x1: the lane's pair of `left` in accumulator layout.
// right: from (row, column) on within the diagonal block at `first`.
template <int kSize>
__device__ __forceinline__ void multiply_eighths(float (&product)[4], float x0, float x1,
                                                 const Square<kSize>& right, int first, int row, int column,
                                                 int lane) {
    const float* from = right.at(first, first, row + lane % 4 * 2, column + lane / 4);
    const Tf32 a0(x0), a2(x1), b0(from[0]), b1(from[right.kPitch]);
    const std::uint32_t a[4] = {a0.rounded, 0u, a2.rounded, 0u}, rest[4] = {a0.rest, 0u, a2.rest, 0u};
    mma_16x8x8_tf32(product, rest, b0.rounded, b1.rounded);
    mma_16x8x8_tf32(product, a, b0.rest, b1.rest);
    mma_16x8x8_tf32(product, a, b0.rounded, b1.rounded);
}

// Column j of the inverse of a half of a diagonal block, the half
// that begins at `begin`: x_i = [i = j] - sum_{l < i} m_il x_l.
inline constexpr int kHalfBlock = kBlock / 2;

template <int kSize>
__device__ __forceinline__ void substitute(float (&column)[kHalfBlock], const Square<kSize>& m, int first,
                                           int begin, int j) {
#pragma unroll
    for (int i = 0; i < kHalfBlock; ++i) {
        float of_row[kHalfBlock], even = begin + i == j ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
        for (int l = 0; l < i; l += 4) load4(of_row + l, m.at(first, first, begin + i, begin + l));
#pragma unroll
        for (int l = 0; l < i; ++l) (l % 2 ? odd : even) -= of_row[l] * column[l];
        column[i] = even + odd;
    }
}

// join_halves computes the lower left quarter of a block's inverse,
// put_joined stores it. The two halves are inverted already.
template <int kSize>
__device__ __forceinline__ float2 join_halves(const Square<kSize>& m, int first, int lane) {
    float left[4] = {}, joined[4] = {};
    const auto pair = *reinterpret_cast<const float2*>(
        m.at(first, first, kHalfBlock + lane / 4, kHalfBlock + lane % 4 * 2));
    multiply_eighths(left, pair.x, pair.y, m, first, kHalfBlock, 0, lane);
    multiply_eighths(joined, left[0], left[1], m, first, 0, 0, lane);
    return {-joined[0], -joined[1]};
}
template <int kSize>
__device__ __forceinline__ void put_joined(Square<kSize>& m, int first, float2 joined, int lane) {
    *reinterpret_cast<float2*>(m.at(first, first, kHalfBlock + lane / 4, lane % 4 * 2)) = joined;
}

// Replaces M by X in block (row, row), including zeros above the diagonal. By one warp.
template <int kSize>
__device__ __forceinline__ void invert_diagonal(Square<kSize>& m, int row) {
    // Lanes 0-15 each compute column j of the half it lies in.
    // Lanes 24-31 write the zeros of the upper half in the columns of the lower half.
    const int lane = own_lane(), first = row * kBlock, j = lane % kBlock;
    const int begin = j / kHalfBlock * kHalfBlock;  // of the half
    float column[kHalfBlock];
    substitute(column, m, first, begin, j);
    __syncwarp();
    const int to = lane < kBlock ? begin : 0;
    if (lane < kBlock || begin > 0)
#pragma unroll
        for (int i = 0; i < kHalfBlock; ++i)
            *m.at(first, first, to + i, j) = lane < kBlock ? column[i] : 0.0f;
    __syncwarp();
    const float2 joined = join_halves(m, first, lane);
    __syncwarp();
    put_joined(m, first, joined, lane);
}

// The same for both diagonal blocks of a 32 x 32 square: one column per lane.
template <int kSize>
__device__ __forceinline__ void invert_diagonals(Square<kSize>& m, int lane) {
    static_assert(kSize == 2 * kBlock);
    const int first = lane / kBlock * kBlock, j = lane % kBlock;
    const int begin = j / kHalfBlock * kHalfBlock;
    float column[kHalfBlock];
    substitute(column, m, first, begin, j);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kHalfBlock; ++i) {
        *m.at(first, first, begin + i, j) = column[i];
        if (begin > 0) *m.at(first, first, i, j) = 0.0f;
    }
    __syncwarp();
    const float2 upper = join_halves(m, 0, lane), lower = join_halves(m, kBlock, lane);
    __syncwarp();
    put_joined(m, 0, upper, lane), put_joined(m, kBlock, lower, lane);
}

template <int kSize>
__device__ __forceinline__ void store_block(Square<kSize>& s, const float (&block)[2][4], int row, int column,
                                            int lane = own_lane()) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<float2*>(pair_at(s, row, column, tile, half, lane)) =
                float2{block[tile][2 * half], block[tile][2 * half + 1]};
}

// The blocks of X left of the diagonal. Called after all
// warps have inverted their diagonal blocks and synchronized.
// Four blocks: all four warps take part. Each returns block (3 - warp / 2, warp % 2) in accumulator layout.
// Blocks (1, 0) and (3, 2) are left in shared memory above
// the diagonal, where M is zero: at (0, 1) and (2, 3).
// Two blocks: warp 0 returns block (1, 0).
template <bool kExact, int kSize>
__device__ __forceinline__ void invert_lower(Square<kSize>& m, int warp, float (&x)[2][4],
                                             int lane = own_lane()) {
    const auto load = [&](float(&block)[2][4], int row, int column) {
        load_block(block, m, row * kBlock, column * kBlock, lane);
    };
    const auto multiply = [&](float(&product)[2][4], const float(&left)[2][4], int row, int column) {
        multiply_block<kExact>(product, left, m, row * kBlock, column * kBlock, lane);
    };
    const auto negate = [&] {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[tile][e] = -x[tile][e];
    };
    // Joins two neighbouring diagonal blocks, `upper` and the one after it: -X_ll M_lu X_uu.
    const auto join = [&](int upper) {
        const int lower = upper + 1;
        load(x, lower, lower);
#pragma unroll 1
        for (int right = lower; right >= upper; --right) {
            float product[2][4] = {};
            multiply(product, x, right, upper);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[tile][e] = product[tile][e];
        }
        negate();
    };
    if constexpr (kSize == 2 * kBlock) {
        if (warp == 0) join(0);
    } else {
        static_assert(kSize == 4 * kBlock);
        if (warp < 2) {
            join(2 * warp);
            store_block(m, x, 2 * warp * kBlock, (2 * warp + 1) * kBlock, lane);
        }
        __syncthreads();
        // Y = X_lower M, one block per warp, then -Y X_upper. Of the first
        // column of X_upper both blocks are non-zero, of the second one.
        const int row = 3 - warp / 2, column = warp % 2;
        float left[2][4], y[2][4] = {};
#pragma unroll 1
        for (int inner = 2; inner <= row; ++inner) {
            load(left, inner == row ? row : 2, inner == row ? row : 3);
            multiply(y, left, inner, column);
        }
        if (column == 1) store_block(m, y, 0, row * kBlock, lane);
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[tile][e] = 0.0f;
#pragma unroll 1
        for (int inner = column;; ++inner) {
            multiply(x, y, inner == column ? column : 0, inner);
            if (inner == 1) break;
            load(y, 0, row);
        }
        negate();
    }
}

}  // namespace cula::cuda::chunked
