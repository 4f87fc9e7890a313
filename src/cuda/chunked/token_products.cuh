// SPDX-License-Identifier: Apache-2.0
// prepare_token: products of the keys of a chunk with its queries and keys, times norms, which all value
// heads of a head of q and k share.
//
// Products are in blocks of 16 x 16, the rows tokens j of an earlier block, the columns tokens i of a later
// one, as the accumulators of the lanes of a warp.
#pragma once

#include "cuda/chunked/block.cuh"
#include "cuda/chunked/tile_reads.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace cula::cuda::chunked {

// An accumulator [16 x 16]: of tile t (eight columns), element 2 h + e is row l/4 + 8 h, column 8 t + 2 (l%4)
// + e.
using Accumulator = float[2][4];

// Accumulators of blocks, in the order of lanes.
template <int kCount>
struct LaneBlocks {
    float4 of[kCount][2][32];  // [block][tile][lane]

    __device__ __forceinline__ void load(Accumulator& x, int block, int lane = own_lane()) const {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
            load4(x[tile], reinterpret_cast<const float*>(&of[block][tile][lane]));
    }
    __device__ __forceinline__ void store(int block, const Accumulator& x, int lane = own_lane()) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
            of[block][tile][lane] = {x[tile][0], x[tile][1], x[tile][2], x[tile][3]};
    }
};
// The number of a block left of the diagonal.
__device__ __forceinline__ int left_block(int later, int earlier) {
    return later * (later - 1) / 2 + earlier;
}

// Of blocks left of the diagonal.
template <int kKey>
using TokenOverlaps = LaneBlocks<Parts<kKey>::kPairs>;

// Products of a triangle of blocks.
template <int kKey>
struct TokenBlocks {
    TokenOverlaps<kKey> left;
    LaneBlocks<Parts<kKey>::kBlocks> diagonal;

    __device__ __forceinline__ void load(Accumulator& x, int later, int earlier,
                                         int lane = own_lane()) const {
        if (earlier < later)
            left.load(x, left_block(later, earlier), lane);
        else
            diagonal.load(x, later, lane);
    }
    __device__ __forceinline__ void store(int later, int earlier, const Accumulator& x) {
        if (earlier < later)
            left.store(left_block(later, earlier), x);
        else
            diagonal.store(later, x);
    }
};

// Of a chunk and head of q and k.
template <int kKey>
struct TokenProducts {
    TokenBlocks<kKey> scores, overlaps;  // q k^T times norms and scale; k k^T times norms
    float norms[2][kTokens<kKey>];       // one over those of q and k
};

// copy_tokens() by all threads of a CTA of prepare_token, with fewer instructions where rows lie in pieces:
// distances have 32 bits, and the swizzle is the same in each row of a thread where all threads cover a
// multiple of eight rows.
template <class T, int kKey, class Tokens = RowsAreTokens>
__device__ __forceinline__ void copy_chunk(T* tile, const TokenRows& rows, std::int64_t offset, int count,
                                           int key_dim, const Tokens& tokens = {}) {
    using Place = OperandTile<kKey, false>;
    constexpr int kRows = kTokens<kKey>, kUnits = kKey / 8, kStep = kPrepareThreads / kUnits;
    static_assert(kRows % kStep == 0);
    const int thread = static_cast<int>(threadIdx.x), unit = thread % kUnits, first = thread / kUnits;
    const std::uint32_t tile_at = shared_address(tile);
    const T* base = static_cast<const T*>(rows.data) + offset;
    if (rows.pieces) {
        const int pitch = static_cast<int>(rows.token * static_cast<std::int64_t>(sizeof(T))),
                  rows_in = unit * 8 < key_dim ? count : 0;
        const std::uint32_t first_at = tile_at + Place::unit(first, unit) * 16;
        base += unit * 8;
#pragma unroll 8
        for (int i = 0; i < kRows; i += kStep) {
            const int token = first + i;
            const bool in = token < rows_in && tokens.is_last(token);
            copy_async(kStep % 8 == 0 ? first_at + i * (Place::kUnits * 16)
                                      : tile_at + Place::unit(token, unit) * 16,
                       advanced(base, in ? tokens.token(token) : 0, pitch), in ? 16 : 0);
        }
    } else {
        copy_tokens<T, kRows, kKey>(tile, tile_at, rows, offset, count, key_dim, false, thread,
                                    kPrepareThreads, tokens);
    }
}

// Asks for a row of a head that a later CTA copies.
template <class T, int kKey>
__device__ __forceinline__ void prefetch_row(const TokenRows& rows, std::int64_t batch, std::int64_t token,
                                             int head, int key_dim) {
    constexpr int kLine = 64;  // elements
    if (!rows.pieces) return;
    const T* const row = static_cast<const T*>(rows.data) + rows.offset(batch, token, head);
#pragma unroll
    for (int channel = 0; channel < kKey; channel += kLine)
        if (channel < key_dim) prefetch(row + channel);
}

// wgmma multiplies chunks of 64 tokens.
template <int kKey>
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kMultipliesSquares = kTokens<kKey> == 64;
#else
inline constexpr bool kMultipliesSquares = false;
#endif

// The four warps of a CTA on the tiles of one chunk and head, in this order; the CTA synchronises between
// them.
template <class T, int kKey>
struct TokenMultiplier {
    using P = Parts<kKey>;
    using Place = OperandTile<kKey, false>;
    static constexpr int kRows = kTokens<kKey>;
    static constexpr bool kSquares = kMultipliesSquares<kKey>;

    const T *q, *k;
    TokenProducts<kKey>& to;
    const int warp;                                // what it does follows from this
    const bool overlaps;                           // whether they are wanted
    float of_q[kRows / 8][4], of_k[kRows / 8][4];  // of all keys, by wgmma

    __device__ __forceinline__ TokenMultiplier(const T* of_q, const T* of_k, TokenProducts<kKey>& products,
                                               int warp, bool overlaps)
        : q(of_q), k(of_k), to(products), warp(warp), overlaps(overlaps) {}

    // Before the CTA synchronises: what the thread has copied is there for all.
    static __device__ __forceinline__ void publish_tiles() {
        if constexpr (kSquares) fence_async_proxy();
    }
    __device__ __forceinline__ void start() {
        if constexpr (kSquares) {
            multiply(of_q, q);
            if (overlaps) multiply(of_k, k);
        }
    }
    // One over the norms of q and k, or one. A warp takes as many of their blocks as every other.
    __device__ __forceinline__ void store_norms(bool wanted) {
        const int lane = own_lane();
        const LaneReads<Place, true> reads;
#pragma unroll
        for (int i = 0; i < 2 * P::kBlocks / 4; ++i) {
            const int of = P::kBlocks == 4 ? i : warp / 2, block = warp % P::kBlocks;
            float* const norms = to.norms[of] + block * kBlock;
            if (!wanted) {
                if (lane < kBlock) norms[lane] = 1.0f;
                continue;
            }
            // Of 16 tokens with eight of them: the squares are on the diagonal.
            const std::uint32_t tile = shared_address(of ? k : q);
            float upper[4] = {}, lower[4] = {};
#pragma unroll
            for (int step = 0; step < kKey / 16; ++step) {
                std::uint32_t rows[4];
                load_matrices(rows, reads.at(tile, block, step));
#pragma unroll
                for (int unit = 0; unit < 4; unit += 2) {
                    const std::uint32_t both[2] = {rows[unit], rows[unit + 1]};
                    mma_16x8x8<T>(upper, both, both[0]);
                    mma_16x8x8<T>(lower, both, both[1]);
                }
            }
            if (lane % 4 != lane / 8) continue;
            const bool odd = lane / 4 % 2;
            norms[lane / 4] = rsqrtf((odd ? upper[1] : upper[0]) + 1e-6f);
            norms[lane / 4 + 8] = rsqrtf((odd ? lower[3] : lower[2]) + 1e-6f);
        }
    }
    __device__ __forceinline__ void finish(float scale) {
        if constexpr (kSquares) {
            wgmma::wait<0>();
            wgmma::hold(of_q);
            if (overlaps) wgmma::hold(of_k);
            // The products of a warpgroup's warps are those of its blocks of rows, whatever `warp` is.
            const int earlier = static_cast<int>(threadIdx.x) / 32;
            const Rows rows(to, earlier);
#pragma unroll
            for (int later = 0; later < P::kBlocks; ++later) {
                if (later < earlier) continue;
                store(rows, of_q + 2 * later, to.scores, 0, scale, later, earlier, false);
                if (overlaps) store(rows, of_k + 2 * later, to.overlaps, 1, 1.0f, later, earlier, false);
            }
        } else {
            const int later = warp % P::kBlocks, part = warp / P::kBlocks;
            const LaneReads<Place, true> row_reads;
            const LaneReads<Place, false> column_reads;
#pragma unroll 1
            for (int turn = 0; turn < P::kParts; ++turn) {
                if (turn > 0) __syncthreads();
                if (turn != part) continue;
#pragma unroll 1
                for (int earlier = 0; earlier <= later; ++earlier) {
                    Accumulator product[2] = {};
#pragma unroll
                    for (int step = 0; step < P::kChannels / 16; ++step) {
                        const int pair = part * P::kChannels / 16 + step;
                        std::uint32_t left[4], columns[4];
                        load_matrices(left, row_reads.at(shared_address(k), earlier, pair));
#pragma unroll
                        for (int of = 0; of < 2; ++of) {
                            if (of && !overlaps) continue;
                            load_matrices(columns, column_reads.at(shared_address(of ? k : q), later, pair));
                            mma_16x8x16<T>(product[of][0], left, columns[0], columns[1]);
                            mma_16x8x16<T>(product[of][1], left, columns[2], columns[3]);
                        }
                    }
                    const Rows rows(to, earlier);
                    store(rows, product[0], to.scores, 0, scale, later, earlier, part > 0);
                    if (overlaps) store(rows, product[1], to.overlaps, 1, 1.0f, later, earlier, part > 0);
                }
            }
        }
    }

private:
    // Of all keys with the rows of another tile.
    __device__ __forceinline__ void multiply(float (&product)[kRows / 8][4], const T* columns) const {
        const wgmma::Operand left = wgmma::operand<64>(shared_address(k)),
                             right = wgmma::operand<64>(shared_address(columns));
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step) {
            const int at = step / 4 * Place::kPanelUnits + step % 4 * 2;
            wgmma::multiply_shared<T, kRows / 8>(product, left + at, right + at, step > 0);
        }
        wgmma::commit();
    }

    // One over the norms of the keys of a lane's rows.
    struct Rows {
        float norm[2];
        __device__ __forceinline__ Rows(const TokenProducts<kKey>& of, int earlier) {
            const float* const norms = of.norms[1] + earlier * kBlock + own_lane() / 4;
            norm[0] = norms[0], norm[1] = norms[8];
        }
    };
    // x times norms, of columns those of q (0) or k (1), and `scale`; add: to what another part of the
    // channels has stored.
    __device__ __forceinline__ void store(const Rows& rows, float (*x)[4], TokenBlocks<kKey>& blocks, int of,
                                          float scale, int later, int earlier, bool add) const {
        Accumulator scaled;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const auto columns = *reinterpret_cast<const float2*>(to.norms[of] + later * kBlock + 8 * tile +
                                                                  own_lane() % 4 * 2);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                scaled[tile][e] = x[tile][e] * ((e % 2 ? columns.y : columns.x) * scale * rows.norm[e / 2]);
        }
        if (add) {
            Accumulator before;
            blocks.load(before, later, earlier);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) scaled[tile][e] += before[tile][e];
        }
        blocks.store(later, earlier, scaled);
    }
};

}  // namespace cula::cuda::chunked
