// SPDX-License-Identifier: Apache-2.0
// Sixteen tokens of a head as one warp holds them, and the products of such blocks.
//
// Lane l holds of tokens l/4 and l/4 + 8 the channels 32 g + 8 (l%4) .. + 7, so that memory is read and written 16
// bytes a lane. Which channel stands where along k of a product is free as long as both sides agree: words 0 and 1 of a
// lane serve as one step's k = 2 (l%4) and + 8, words 2 and 3 as the next's. Then the same registers are rows (a) and
// columns (b) of products.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/chunk.cuh"
#include "cuda/sm80/solve.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::sm80 {

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

using Words = std::uint32_t[4];  // eight channels of a token

template <int kGroups>
struct BlockRows {
    Words word[2][kGroups];  // [token half][group]

    // Asks for rows first_token + .. of `rows`, the first of which exists. What lies beyond `count` tokens or key_dim
    // channels becomes zero in mask(), so that nothing waits for the memory before.
    template <class T>
    __device__ __forceinline__ void fetch(const TokenRows& rows, std::int64_t batch, std::int64_t first_token, int head,
                                          int count, int first_channel, int key_dim) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const bool wide = (rows.batch | rows.token | rows.head | key_dim) % 8 == 0 &&
                          reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0;
        const int channel = first_channel + lane % 4 * 8;
        if (wide) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = lane / 4 + 8 * half;
                const T* from = static_cast<const T*>(rows.data) +
                                rows.offset(batch, first_token + (token < count ? token : 0), head);
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
                    const uint4 x = __ldg(
                        reinterpret_cast<const uint4*>(from + (channel + 32 * g < key_dim ? channel + 32 * g : 0)));
                    word[half][g][0] = x.x, word[half][g][1] = x.y, word[half][g][2] = x.z, word[half][g][3] = x.w;
                }
            }
            return;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = lane / 4 + 8 * half;
            const T* from = static_cast<const T*>(rows.data) + rows.offset(batch, first_token + token, head) + channel;
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const int c = 32 * g + 2 * w;
                    const float low = token < count && channel + c < key_dim ? to_float(from[c]) : 0.0f;
                    const float high = token < count && channel + c + 1 < key_dim ? to_float(from[c + 1]) : 0.0f;
                    word[half][g][w] = pack2<T>(low, high);
                }
        }
    }
    __device__ __forceinline__ void mask(int count, int first_channel, int key_dim) {
        const int lane = static_cast<int>(threadIdx.x) % 32, channel = first_channel + lane % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    if (lane / 4 + 8 * half >= count || channel + 32 * g >= key_dim) word[half][g][w] = 0u;
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

// Columns of a block in shared memory, each lane's words where the same lane of any warp reads them.
template <int kKey>
struct Columns {
    uint4 words[kKey / 32][2][32];
};

__device__ __forceinline__ uint4 as_uint4(const Words& w) { return {w[0], w[1], w[2], w[3]}; }

// What score leaves for solve and emit.
template <int kKey>
struct PairSquares {
    Square<kTokens<kKey>> scores, overlaps;  // q k^T; beta k k^T
};

// Writes a 16 x 16 product to its place, on and below the diagonal (scores) or below it; `add` where another part of
// the channels is there already. Returns the sum of squares of this lane's elements in rows l/4 and l/4 + 8.
template <int kSize>
__device__ __forceinline__ float2 store_product(Square<kSize>& square, const float (&product)[2][4], int row,
                                                int column, bool add) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float2 squares{0.0f, 0.0f};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row + lane / 4 + 8 * half, j = column + 8 * tile + lane % 4 * 2;
            auto* to = reinterpret_cast<float2*>(square.at(i, j));
            float2 pair{product[tile][2 * half], product[tile][2 * half + 1]};
            if (add) pair = {pair.x + to->x, pair.y + to->y};
            *to = pair;
            (half ? squares.y : squares.x) += (j < i ? pair.x * pair.x : 0.0f) + (j + 1 < i ? pair.y * pair.y : 0.0f);
        }
    return squares;
}

// The lower triangle of a square, scaled by column, as a tile of T; the rest is zero. `low`: what rounding to T left
// over.
template <class T, int kSize>
__device__ __forceinline__ void emit_lower(T* tile, const Square<kSize>& square, const float* column_scale, bool low) {
    for (int x = static_cast<int>(threadIdx.x); x < kSize * kSize / 8; x += kPrepareThreads) {
        const int row = x / (kSize / 8), unit = x % (kSize / 8);
        Words words;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const int column = unit * 8 + 2 * w;
            float2 pair = *reinterpret_cast<const float2*>(square.at(row, column));
            if (column_scale) pair = {pair.x * column_scale[column], pair.y * column_scale[column + 1]};
            if (column > row) pair.x = 0.0f;
            if (column + 1 > row) pair.y = 0.0f;
            words[w] = pack2<T>(pair.x, pair.y);
            if (low) {
                const float2 rounded = unpack2<T>(words[w]);
                words[w] = pack2<T>(pair.x - rounded.x, pair.y - rounded.y);
            }
        }
        *reinterpret_cast<uint4*>(tile + Tile<kSize>::unit(row, unit) * 8) = as_uint4(words);
    }
}

// Overlaps whose squares sum to more than this in some row let roundings of the inverse and of the written values add
// up instead of averaging out: the carry then reads both halves of the inverse, and splits what it writes
// (docs/sm80.md).
inline constexpr float kMostSquares = 1.0f;

}  // namespace cula::cuda::sm80
