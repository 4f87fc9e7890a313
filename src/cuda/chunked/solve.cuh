// SPDX-License-Identifier: Apache-2.0
// solve: X = (I + M)^-1 for a strictly lower triangular M, in float      ALGORITHM.md: solve
//
// By halves: the inverse of a lower triangle [A 0; C B] is [A^-1 0; -B^-1 C A^-1 B^-1]. A warp inverts a
// block of 16 on the diagonal, its halves of 8 by substitution; then warps join blocks to squares of 32, and
// these to one of 64, with products on the tensor cores.
#pragma once

#include "cuda/chunked/chunk.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::chunked {

// The functions below take the lane that they run on: as a rule this one; but a loop over chunks would keep
// all that follows from it in registers, unless it hands over one that is asked for anew (lane_anew()).
__device__ __forceinline__ int own_lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int lane_anew() {
    int lane;
    asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
    return lane;
}

// A square of floats in shared memory. Pitch and permutation keep the accumulators' layout (8 bytes a lane),
// rows (16 bytes) and the columns of a right factor free of conflicts. Four neighbours from a multiple of
// four on stay together.
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

// A factor for the tensor cores, which drop the lower 13 bits of what they read: after that `rounded` is the
// nearest number of 11 bits, for any finite x, and `rest` what it leaves over. Together they are good to
// 2^-22.
struct Tf32 {
    std::uint32_t rounded, rest;

    __device__ __forceinline__ explicit Tf32(float x) {
        rounded = __float_as_uint(x) + 0x1000u;
        rest = __float_as_uint(x - __uint_as_float(rounded & 0xffffe000u));
    }
};

// product [16 x 16] += left right [16 x 16], left as accumulators hold it: [n tile][fragment]. kExact: 22
// bits of each factor instead of 11.
template <bool kExact, int kSize>
__device__ __forceinline__ void multiply_block(float (&product)[2][4], const float (&left)[2][4],
                                               const Square<kSize>& right, int row, int column,
                                               int lane = own_lane()) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        // Neighbouring columns of `left` serve as k and k + 4: rows of `right` follow suit.
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

// Where a lane's pairs of a 16 x 16 product stand.
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

// product [8 x 8] = left right, left as accumulators hold it, at 22 bits: x0, x1 of what a lane has of
// `left`; right from (row, column) of the block at `first` on the diagonal.
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

// A column of the inverse of the half of a block on the diagonal that begins at `begin`: x_i = [i = j] -
// sum_{l < i} m_il x_l.
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

// The inverse's quarter that joins two inverted halves of the block at `first`.
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

// X in place of M in block (row, row), zeros above the diagonal included. One warp.
template <int kSize>
__device__ __forceinline__ void invert_diagonal(Square<kSize>& m, int row) {
    // Lane j < 16: column j of the two halves. The last eight lanes: zeros in the upper half of the columns
    // of the lower.
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

// The same in both blocks on the diagonal of a square of two: a column a lane.
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

// The blocks of X left of the diagonal, after all warps have inverted theirs and met. Of four blocks a warp
// returns (3 - warp / 2, warp % 2), as accumulators hold it, and (1, 0) and (3, 2) then stand above the
// diagonal, where M has nothing, at (0, 1) and (2, 3). All four warps take part. Of two, warp 0 returns (1,
// 0).
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
    // Two neighbours on the diagonal, of which `upper` is the first: -X_ll M_lu X_uu.
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
        // Y = X_lower M, a block each; then -Y X_upper, of whose first column two blocks are not zero.
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
