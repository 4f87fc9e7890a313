// SPDX-License-Identifier: Apache-2.0
// Sixteen tokens of a head as one warp holds them, and the products of such blocks.
//
// Lane l holds of tokens l/4 and l/4 + 8 the channels 32 g + 8 (l%4) .. + 7, so that memory is read and
// written 16 bytes a lane. Which channel stands where along k of a product is free as long as both sides
// agree: words 0 and 1 of a lane serve as one step's k = 2 (l%4) and + 8, words 2 and 3 as the next's. Then
// the same registers are rows (a) and columns (b) of products.
#pragma once

#include <type_traits>

#include "cuda/chunked/chunk.cuh"
#include "cuda/chunked/solve.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::chunked {

inline constexpr int kPrepareThreads = 128;

// How the warps of prepare share a chunk: a block each, of all channels or of one part of them.
template <int kKey>
struct Parts {
    static constexpr int kBlocks = kTokens<kKey> / kBlock;
    static constexpr int kParts = kPrepareThreads / 32 / kBlocks;
    static constexpr int kChannels = kKey / kParts;  // of a part
    static constexpr int kGroups = kChannels / 32;
    static constexpr int kPairs = kBlocks * (kBlocks - 1) / 2;
};

// Which of them a warp is. The later blocks of a chunk have other work than the earlier ones, and warp w of
// every CTA runs on the same scheduler: taking turns keeps the four schedulers equally busy.
__device__ __forceinline__ int role_of_warp() {
    constexpr int kWarps = kPrepareThreads / 32;
    return static_cast<int>(threadIdx.x / 32 + blockIdx.x / kWarps) % kWarps;
}

using Words = std::uint32_t[4];  // eight channels of a token

template <int kGroups>
struct BlockRows {
    Words word[2][kGroups];  // [token half][group]

    // Asks for rows first_token + .. of `rows`, the first of which exists, and has those that are `ahead`
    // tokens further on, where that is not zero, brought to the second-level cache: when a CTA comes to them,
    // they are there. What lies beyond `count` tokens or key_dim channels is anything until mask(), so that
    // nothing waits for the memory before. Rows that cannot be read in pieces come afterwards, an element at
    // a time, to the registers that the loads left alone: two ways that each wrote them would meet in moves,
    // which wait for what they move.
    template <class T>
    __device__ __forceinline__ void fetch(const TokenRows& rows, std::int64_t batch, std::int64_t first_token,
                                          int head, int count, int first_channel, int key_dim,
                                          int ahead = 0) {
        const int lane = static_cast<int>(threadIdx.x) % 32, channel = first_channel + lane % 4 * 8;
        const T* first = static_cast<const T*>(rows.data) + rows.offset(batch, first_token, head) + channel;
        const int pitch = static_cast<int>(rows.token) * 2;
        const int last = count > 0 ? count - 1 : 0;
        const T* from[2] = {advanced(first, min(lane / 4, last), pitch),
                            advanced(first, min(lane / 4 + 8, last), pitch)};
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                load_if(word[half][g], from[half] + 32 * g, rows.pieces && channel + 32 * g < key_dim);
        if (ahead > 0 && rows.pieces) {
            // Two rows and at most two lines of each for the four lanes that share them.
            const int line = lane / 2 % 2 * 64;
            if (line < 32 * kGroups && channel + line < key_dim)
                prefetch(advanced((lane % 2 ? from[1] : from[0]) + line, ahead, pitch));
        }
        if (rows.pieces) return;
#pragma unroll 1
        for (int unit = 0; unit < 2 * kGroups; ++unit) {
            const int token = lane / 4 + unit % 2 * 8, c = unit / 2 * 32;
            const T* at = first + token * rows.token + c;
            Words words;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const bool low = token < count && channel + c + 2 * w < key_dim,
                           high = token < count && channel + c + 2 * w + 1 < key_dim;
                words[w] = load16_if(at + 2 * w, low) | load16_if(at + 2 * w + 1, high) << 16;
            }
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int w = 0; w < 4; ++w)
                        if (unit == 2 * g + half) word[half][g][w] = words[w];
        }
    }
    static __device__ __forceinline__ void load_if(Words& words, const void* from, bool in) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "l"(from), "r"(static_cast<int>(in)));
    }
    __device__ __forceinline__ void mask(int count, int first_channel, int key_dim) {
        if (count >= kBlock && key_dim >= first_channel + 32 * kGroups) return;
        const int lane = static_cast<int>(threadIdx.x) % 32, channel = first_channel + lane % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    if (lane / 4 + 8 * half >= count || channel + 32 * g >= key_dim) word[half][g][w] = 0u;
    }
    // Where products want the words in other registers than the loads: a mask that is always applied moves
    // them, once they are there, and no move comes before it.
    __device__ __forceinline__ void mask_moving(int count, int first_channel, int key_dim) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const std::uint32_t in = lane / 4 + 8 * half < count ? ~0u : 0u;
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
#pragma unroll
                for (int w = 0; w < 4; ++w) word[half][g][w] &= in;
        }
        if (key_dim < first_channel + 32 * kGroups) mask(count, first_channel, key_dim);
    }
};

// How far from a block's tokens those are that a later CTA reads, or zero where that is no whole block. A
// wrong guess, at the end of a sequence, costs nothing but time.
template <int kKey>
__device__ __forceinline__ int tokens_ahead(const DeviceArgs& a, const Schedule& schedule,
                                            std::int64_t first_token) {
    const int ahead = schedule.ahead * kTokens<kKey>;
    return first_token + ahead + kBlock <= a.tokens ? ahead : 0;
}

// Schedule::per_chunk; false where the carry is a portable one, which does not.
template <int kKey>
__device__ __forceinline__ bool per_chunk(const Schedule& schedule) {
    return kKey <= 128 && schedule.per_chunk;
}
// Before prepare touches global memory; where the carry waits per chunk, it is let start later.
template <int kKey>
__device__ __forceinline__ void follow_kernels_before_carry(const Schedule& schedule) {
    pdl_wait();
    if (!per_chunk<kKey>(schedule)) pdl_trigger();
}
// By one thread of a CTA: before the carry starts, which waits per chunk; and when all warps have written an
// image.
__device__ __forceinline__ void lead_carry(std::int32_t* is_compensated, int operands) {
    for (int i = 0; i < operands; ++i) is_compensated[i] = kUnprepared;
    __threadfence();
    pdl_trigger();
}
template <int kKey>
__device__ __forceinline__ void hand_over(const Schedule& schedule, std::int32_t* is_compensated,
                                          bool compensated) {
    if (per_chunk<kKey>(schedule))
        publish(is_compensated, compensated);
    else
        *is_compensated = compensated;
}

// One number of a token, asked for without waiting.
struct TokenNumber {
    RawFloat raw;
    const void* at;

    __device__ __forceinline__ void ask(const TokenRows& rows, std::int64_t batch, std::int64_t token,
                                        int head, bool in) {
        const std::int64_t bytes = rows.dtype == Dtype::kFloat64 ? 8 : rows.dtype == Dtype::kFloat32 ? 4 : 2;
        at = static_cast<const char*>(rows.data) + rows.offset(batch, token, head) * bytes;
        raw.load(at, element(rows.dtype), in);
    }
    __device__ __forceinline__ float value(const TokenRows& rows) const {
        return rows.dtype == Dtype::kFloat64 ? load_float(at, Dtype::kFloat64, 0)
                                             : raw.value(element(rows.dtype));
    }
};

// Sum over the four lanes that share a token.
__device__ __forceinline__ float token_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <class T, int kGroups>
__device__ __forceinline__ float dot(const BlockRows<kGroups>& x, const BlockRows<kGroups>& y, int half) {
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 a = unpack2<T>(x.word[half][g][w]), b = unpack2<T>(y.word[half][g][w]);
            sum += a.x * b.x + a.y * b.y;
        }
    return token_sum(sum);
}

// product [16 x 16] += rows columns^T over 32 channels; the columns' tokens 0-7 and 8-15.
template <class T>
__device__ __forceinline__ void multiply_group(float (&product)[2][4], const Words& row0, const Words& row8,
                                               const Words& column0, const Words& column8) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const std::uint32_t a[4] = {row0[2 * step], row8[2 * step], row0[2 * step + 1], row8[2 * step + 1]};
        mma_16x8x16<T>(product[0], a, column0[2 * step], column0[2 * step + 1]);
        mma_16x8x16<T>(product[1], a, column8[2 * step], column8[2 * step + 1]);
    }
}

// Sums of the squares of a block's tokens, to `squares`: diagonals of products of two words as rows l/4 and
// l/4 + 8 with each of them as column l/4. kTogether: the words of both tokens, as they stand side by side
// where a block's rows are multiplied as they came; otherwise neighbours of one token, as they stand when
// they came from memory. Asked for the other way, the compiler moves every word.
template <class T, bool kTogether, int kGroups>
__device__ __forceinline__ void square_tokens(float* squares, const BlockRows<kGroups>& x) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float upper[2][4] = {}, lower[2][4] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const int half = w / 2, first = w % 2 * 2;
            const std::uint32_t a[2] = {kTogether ? x.word[0][g][w] : x.word[half][g][first],
                                        kTogether ? x.word[1][g][w] : x.word[half][g][first + 1]};
            mma_16x8x8<T>(upper[half], a, a[0]);
            mma_16x8x8<T>(lower[half], a, a[1]);
        }
    if (lane % 4 != lane / 8) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* one = !kTogether ? upper[half] : half == 0 ? upper[0] : lower[0] + 2;
        const float* other = !kTogether ? lower[half] + 2 : half == 0 ? upper[1] : lower[1] + 2;
        squares[lane / 4 + 8 * half] = lane / 4 % 2 ? one[1] + other[1] : one[0] + other[0];
    }
}

// Columns of a block in shared memory, of 32 channels: [token half][lane], where the same lane of any warp
// reads them.
using ColumnWords = uint4[2][32];

__device__ __forceinline__ uint4 as_uint4(const Words& w) { return {w[0], w[1], w[2], w[3]}; }

// What score leaves for solve and emit: q k^T, or room for blocks of it and of the inverse on their way out;
// beta k k^T.
template <int kKey>
struct PairSquares {
    Square<kTokens<kKey>> scores, overlaps;
};

// Writes a 16 x 16 product to its place; `add`: and to what another part of the channels has left there.
template <int kSize>
__device__ __forceinline__ void add_product(Square<kSize>& square, float (&product)[2][4], int row,
                                            int column, bool add) {
    if (add) {
        float before[2][4];
        load_block(before, square, row, column);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) product[tile][e] += before[tile][e];
    }
    store_block(square, product, row, column);
}

// The squares of the lane's elements in rows l/4 and l/4 + 8; of a block on the diagonal, those below it.
template <bool kDiagonal>
__device__ __forceinline__ void add_squares(float2& squares, const float (&product)[2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const bool below = !kDiagonal || 8 * tile + lane % 4 * 2 + e % 2 < lane / 4 + e / 2 * 8;
            const float x = below ? product[tile][e] : 0.0f;
            float& sum = e / 2 ? squares.y : squares.x;
            sum = fmaf(x, x, sum);
        }
}

// Of a block on the diagonal.
__device__ __forceinline__ void zero_above_diagonal(float (&product)[2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (8 * tile + lane % 4 * 2 + e % 2 > lane / 4 + e / 2 * 8) product[tile][e] = 0.0f;
}

// A block on its way to a triangle: as accumulators hold it, to a slot in shared memory, and from there to
// `block`, 16 bytes a lane. kLow: what rounding to T leaves over. The warp meets before, between and after.
inline constexpr int kSlot = kBlock * kBlock / 2;  // floats

template <bool kLow, class T>
__device__ __forceinline__ void turn_block(float* slot, const float (&x)[2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    auto* const to = reinterpret_cast<std::uint32_t*>(slot) + lane / 4 * 8 + lane % 4;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 pair{x[tile][2 * half], x[tile][2 * half + 1]};
            const std::uint32_t word = pack2<T>(pair.x, pair.y);
            to[half * kSlot / 2 + (tile ^ lane / 16) * 4] = kLow ? pack_rest<T>(pair, word) : word;
        }
}
template <class T>
__device__ __forceinline__ void put_block(T* block, const float* slot) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    reinterpret_cast<uint4*>(block)[lane] = reinterpret_cast<const uint4*>(slot)[lane];
}

// Rows of scores, in `scores` of a chunk, to a triangle: what lies left of the diagonal, then the lower half
// of the block there. One warp: lane l turns to row l % 16 and one half of each block.
template <bool kLow, class T, int kSize>
__device__ __forceinline__ void emit_lower(T* triangle, const Square<kSize>& scores, int row) {
    using Lower = Triangle<kSize>;
    const int lane = static_cast<int>(threadIdx.x) % 32, i = lane % kBlock, half = lane / kBlock;
    T* const to = triangle + Lower::in_block(i, half) * 8;
#pragma unroll 1
    for (int column = 0; column <= row; ++column) {
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; e += 4)
            load4(x + e, scores.at(row * kBlock, column * kBlock, i, 8 * half + e));
        Words words;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
#pragma unroll
            for (int e = 2 * w; e < 2 * w + 2; ++e)
                if (column == row && 8 * half + e > i) x[e] = 0.0f;
            words[w] = pack2<T>(x[2 * w], x[2 * w + 1]);
            if (kLow) words[w] = pack_rest<T>({x[2 * w], x[2 * w + 1]}, words[w]);
        }
        *reinterpret_cast<uint4*>(to + Lower::block_begin(row, column) * 8) = as_uint4(words);
    }
}

// Overlaps whose squares sum to more than this in some row let roundings of the inverse and of the written
// values add up instead of averaging out: the carry then reads both halves of the inverse, and splits what it
// writes (docs/sm80.md).
inline constexpr float kMostSquares = 1.0f;

// Whether a row of the lane's does, given its part of their squares. What is no number does, too.
__device__ __forceinline__ bool needs_compensation(float2 squares) {
    const float x = token_sum(squares.x), y = token_sum(squares.y);
    return !(x <= kMostSquares && y <= kMostSquares);
}

// The end of prepare of a delta rule: the inverse, times beta, to the image. All warps that have blocks of
// the chunk, after each has stored its row of overlaps and inverted its diagonal and all have met. `slots`:
// memory of the warp.
template <class T, int kKey, class Chunk>
__device__ __forceinline__ void emit_inverse(Chunk& operands, Square<kTokens<kKey>>& overlaps,
                                             const float* beta, float* slots, int block, bool compensated) {
    constexpr int kRows = kTokens<kKey>, kBlocks = kRows / kBlock;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto emit = [&](float(&x)[2][4], int row, int column) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const auto scale =
                *reinterpret_cast<const float2*>(beta + column * kBlock + 8 * tile + lane % 4 * 2);
#pragma unroll
            for (int e = 0; e < 4; ++e) x[tile][e] *= e % 2 ? scale.y : scale.x;
        }
        const int begin = Triangle<kRows>::block_begin(row, column) * 8;
        __syncwarp();
        turn_block<false, T>(slots, x);
        if (compensated) turn_block<true, T>(slots + kSlot, x);
        __syncwarp();
        put_block(operands.inverse + begin, slots);
        if (compensated) put_block(operands.inverse_low + begin, slots + kSlot);
    };
    const auto emit_stored = [&](int row, int column, int from_row, int from_column) {
        float x[2][4];
        load_block(x, overlaps, from_row * kBlock, from_column * kBlock);
        emit(x, row, column);
    };
    // While the other warps join their blocks.
    if (block >= kBlocks / 2)
#pragma unroll 1
        for (int b = block; b >= 0; b -= kBlocks / 2) emit_stored(b, b, b, b);
    float x[2][4];
    // Where T has 8 bits, products of factors of 11 are lost in its own rounding; coupled keys are what
    // magnifies them.
    if (compensated || std::is_same_v<T, __half>)
        invert_lower<true>(overlaps, block, x);
    else
        invert_lower<false>(overlaps, block, x);
    if constexpr (kBlocks == 2) {
        if (block == 0) emit(x, 1, 0);
    } else {
        emit(x, 3 - block / 2, block % 2);
        if (block % 2) emit_stored(block, block - 1, block - 1, block);
    }
}

}  // namespace cula::cuda::chunked
