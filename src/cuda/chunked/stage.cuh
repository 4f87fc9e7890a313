// SPDX-License-Identifier: Apache-2.0
// What the portable walks over chunks, sm80/carry.cuh and backward/return.cuh, share: a stage of shared
// memory, how it is filled, and the products of one warp with its tiles. A warp holds 16 value rows: of a
// state [16 x kKey] and of what tokens write [16 x tokens], in the accumulator layout of mma.m16n8k16. Two
// neighbouring accumulators, rounded and packed, are half of its A operand, so that results become left
// factors without shuffles.
#pragma once

#include "cuda/chunked/chunk.cuh"
#include "cuda/chunked/tile_reads.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::chunked {

inline constexpr int kMaxCarryWarps = 8;  // of a CTA

// q and k as they came, which the products read where the decay is per token.
struct NoTiles {};
template <class T, int kKey>
struct RawTiles {
    T q[kTokens<kKey> * kKey], k[kTokens<kKey> * kKey];
};

template <class T, int kKey, bool kPerChannel>
struct CarryStage {
    ChunkOperands<T, kKey, kPerChannel> operands;
    std::conditional_t<kPerChannel, NoTiles, RawTiles<T, kKey>> raw;
    alignas(16) T values[kMaxCarryWarps][kTokens<kKey> * kWarpRows];  // [warp][token][value row]
};

// LaneReads for a Triangle: a block of 16 x 16 at a time.
template <int kRows, bool kTransposed = false>
struct TriangleReads {
    std::uint32_t place;

    __device__ __forceinline__ TriangleReads() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int token = kTransposed ? lane % 16 : lane % 8 + lane / 16 * 8,
                  unit = kTransposed ? lane / 16 : lane / 8 % 2;
        place = static_cast<std::uint32_t>(Triangle<kRows>::in_block(token, unit) * 16);
    }
    __device__ __forceinline__ std::uint32_t at(std::uint32_t triangle, int block, int panel) const {
        return triangle + Triangle<kRows>::block_begin(block, panel) * 16 + place;
    }
};

// Channels 16 step to 16 step + 15 of a state, rounded: an A operand.
template <class T, int kKey>
__device__ __forceinline__ void pack_step(Packed& packed, const float (&state)[kKey / 8][4], int step) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const float* pair = &state[2 * step + x / 2][x % 2 * 2];
        packed[x] = pack2_again<T>(pair[0], pair[1]);
    }
}

// product [16 x kRows] += packed [16 x 16] (columns 16 step to 16 step + 15 of tile [kRows x kKey])^T.
template <class T, int kRows, class Place>
__device__ __forceinline__ void multiply_step(float (&product)[kRows / 8][4], const Packed& packed,
                                              std::uint32_t tile, const LaneReads<Place, false>& reads,
                                              int step) {
#pragma unroll
    for (int block = 0; block < kRows / 16; ++block) {
        std::uint32_t m[4];
        load_matrices(m, reads.at(tile, block, step));
        mma_16x8x16<T>(product[2 * block], packed, m[0], m[1]);
        mma_16x8x16<T>(product[2 * block + 1], packed, m[2], m[3]);
    }
}

// product [16 x kRows] += packed [16 x 16] (columns 16 step to 16 step + 15 of triangle [kRows x kRows])^T.
// Blocks above the diagonal are skipped.
template <class T, int kRows>
__device__ __forceinline__ void multiply_triangle(float (&product)[kRows / 8][4], const Packed& packed,
                                                  std::uint32_t triangle, const TriangleReads<kRows>& reads,
                                                  int step) {
#pragma unroll
    for (int block = step; block < kRows / 16; ++block) {
        std::uint32_t m[4];
        load_matrices(m, reads.at(triangle, block, step));
        mma_16x8x16<T>(product[2 * block], packed, m[0], m[1]);
        mma_16x8x16<T>(product[2 * block + 1], packed, m[2], m[3]);
    }
}

// product [16 x kRows] += packed [16 x 16] (rows 16 step to 16 step + 15 of triangle [kRows x kRows]). Blocks
// above the diagonal are skipped.
template <class T, int kRows>
__device__ __forceinline__ void multiply_triangle_rows(float (&product)[kRows / 8][4], const Packed& packed,
                                                       std::uint32_t triangle,
                                                       const TriangleReads<kRows, true>& reads, int step) {
#pragma unroll
    for (int panel = 0; panel <= step; ++panel) {
        std::uint32_t m[4];
        load_matrices_transposed(m, reads.at(triangle, step, panel));
        mma_16x8x16<T>(product[2 * panel], packed, m[0], m[1]);
        mma_16x8x16<T>(product[2 * panel + 1], packed, m[2], m[3]);
    }
}

// state [16 x kKey] += packed [16 x 16 tokens] (rows 16 block to 16 block + 15 of tile [kRows x kKey]).
template <class T, int kKey, class Place>
__device__ __forceinline__ void multiply_carry(float (&state)[kKey / 8][4], const Packed& packed,
                                               std::uint32_t tile, const LaneReads<Place, true>& reads,
                                               int block) {
#pragma unroll
    for (int column = 0; column < kKey / 16; ++column) {
        std::uint32_t m[4];
        load_matrices_transposed(m, reads.at(tile, block, column));
        mma_16x8x16<T>(state[2 * column], packed, m[0], m[1]);
        mma_16x8x16<T>(state[2 * column + 1], packed, m[2], m[3]);
    }
}

// Copies `bytes` bytes, which a CTA shares among its warps: a warp copies runs of eight times 512 bytes (32
// lanes x 16 bytes). `to` and `from` are the lane's: 16 bytes further from one lane to the next.
__device__ __forceinline__ void copy_bytes(std::uint32_t to, const unsigned char* from, int bytes, int warp,
                                           int warps, int lane) {
    constexpr int kRun = 8 * 512;
    int x = warp * kRun;
#pragma unroll 1
    for (; x + kRun <= bytes; x += warps * kRun)
#pragma unroll
        for (int i = 0; i < 8; ++i) copy_async(to + x + i * 512, from + x + i * 512);
    if (x < bytes) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (x + i * 512 + lane * 16 < bytes) copy_async(to + x + i * 512, from + x + i * 512);
    }
}

// Whether rows of `width` elements of 16 bits can be copied in pieces of 16 bytes.
__device__ __forceinline__ bool in_pieces(const TokenRows& rows, int width) {
    return (rows.batch | rows.token | rows.head | width) % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0;
}

}  // namespace cula::cuda::chunked
