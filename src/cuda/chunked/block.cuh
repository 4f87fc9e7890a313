// SPDX-License-Identifier: Apache-2.0
// The warp's block: 16 tokens of one head in registers, and the products of such blocks.
//
// Lane l holds tokens l/4 and l/4 + 8, and of each the channels 32 g + 8 (l%4) .. + 7 of every group g.
// So memory is read and written 16 bytes per lane.
// A product sums over channels, and their order along k is free as long as both operands use the same order:
// words 0 and 1 of a lane are k = 2 (l%4) and + 8 of one mma step, words 2 and 3 those of the next step.
// Hence the same registers serve as operand A (rows) and as operand B (columns).
#pragma once

#include <type_traits>

#include "cuda/chunked/chunk.cuh"
#include "cuda/chunked/solve.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::chunked {

inline constexpr int kPrepareThreads = 128;

// How the four warps of prepare share a chunk (prepare_token: its norms and products): a warp has
// one block, with all its channels or one part of them.
template <int kKey>
struct Parts {
    static constexpr int kBlocks = kTokens<kKey> / kBlock;
    static constexpr int kParts = kPrepareThreads / 32 / kBlocks;
    static constexpr int kChannels = kKey / kParts;  // of one part
    static constexpr int kGroups = kChannels / 32;
    static constexpr int kPairs = kBlocks * (kBlocks - 1) / 2;
};

// Which (block, part), or which task of prepare_token, the warp takes.
// Later blocks have more pairs to score than earlier ones,
// and warp w of every CTA runs on the same scheduler.
// So the assignment rotates with the CTA's number, which keeps the four schedulers equally busy.
__device__ __forceinline__ int role_of_warp() {
    constexpr int kWarps = kPrepareThreads / 32;
    return static_cast<int>(threadIdx.x / 32 + blockIdx.x / kWarps) % kWarps;
}

using Words = std::uint32_t[4];  // eight channels of one token

template <int kGroups>
struct BlockRows {
    Words word[2][kGroups];  // [token half][group]

    // Starts loading rows first_token + .. of `rows`. The first of these rows must exist.
    // If `ahead` is not zero, it also prefetches to L2 the rows `ahead` tokens further on, for a later CTA.
    // Until mask(), the contents beyond `count` tokens or key_dim
    // channels are undefined: so nothing waits for memory here.
    // Rows that cannot be read in 16-byte pieces are loaded afterwards, one element
    // at a time, into the registers that the switched-off wide loads did not write.
    // If both ways wrote the same registers, the compiler would
    // merge them by moves, and a move waits for its source.
    // `tokens`: the token of each row of the block, of which `first_token` is the first. Rows that are not
    // their token's last are not loaded.
    template <class T, class Tokens = RowsAreTokens>
    __device__ __forceinline__ void fetch(const TokenRows& rows, std::int64_t batch, std::int64_t first_token,
                                          int head, int count, int first_channel, int key_dim, int ahead = 0,
                                          const Tokens& tokens = {}) {
        const int lane = static_cast<int>(threadIdx.x) % 32, channel = first_channel + lane % 4 * 8;
        const T* first = static_cast<const T*>(rows.data) + rows.offset(batch, first_token, head) + channel;
        const int pitch = static_cast<int>(rows.token) * 2;
        const int last = count > 0 ? count - 1 : 0;
        const int own[2] = {min(lane / 4, last), min(lane / 4 + 8, last)};
        const T* from[2] = {advanced(first, tokens.token(own[0]), pitch),
                            advanced(first, tokens.token(own[1]), pitch)};
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                load_if(word[half][g], from[half] + 32 * g,
                        rows.pieces && channel + 32 * g < key_dim && tokens.is_last(own[half]));
        if (ahead > 0 && rows.pieces) {
            // Prefetch: two rows, and at most two 128-byte lines
            // of each, for the four lanes that share the rows.
            const int line = lane / 2 % 2 * 64;
            if (line < 32 * kGroups && channel + line < key_dim)
                prefetch(advanced((lane % 2 ? from[1] : from[0]) + line, ahead, pitch));
        }
        if (rows.pieces) return;
#pragma unroll 1
        for (int unit = 0; unit < 2 * kGroups; ++unit) {
            const int token = lane / 4 + unit % 2 * 8, c = unit / 2 * 32;
            const T* at = first + tokens.token(token) * rows.token + c;
            const bool in = token < count && tokens.is_last(token);
            Words words;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const bool low = in && channel + c + 2 * w < key_dim,
                           high = in && channel + c + 2 * w + 1 < key_dim;
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
    // Zeros in the first rows of pairs (RowsOfPairs), which a lane has two of or none.
    __device__ __forceinline__ void mask_first_of_pairs() {
        if (threadIdx.x / 4 % 2 != 0) return;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
#pragma unroll
                for (int w = 0; w < 4; ++w) word[half][g][w] = 0u;
    }
};

// Distance from a block's tokens to those that a later CTA reads, or zero where no whole block lies there.
// A wrong guess (at the end of a sequence) costs time only.
template <int kKey>
__device__ __forceinline__ int tokens_ahead(const DeviceArgs& a, const Schedule& schedule,
                                            std::int64_t first_token) {
    const int ahead = schedule.ahead * kTokens<kKey>;
    return first_token + ahead + kBlock <= a.tokens ? ahead : 0;
}

// CarryWaits::per_chunk. Always false where K > 128: only the
// portable carry takes that, and it does not wait per chunk.
template <int kKey>
__device__ __forceinline__ bool per_chunk(const Schedule& schedule) {
    return kKey <= 128 && schedule.waits.per_chunk;
}
// PDL of prepare, before it touches global memory: wait for the kernels before, then let the carry start.
// Where the carry waits per chunk, the trigger comes later, from lead_carry().
template <int kKey>
__device__ __forceinline__ void follow_kernels_before_carry(const Schedule& schedule) {
    pdl_wait();
    if (!per_chunk<kKey>(schedule)) pdl_trigger();
}
// mark_unprepared, lead_carry: by one thread, before the carry may start: for all operands of the CTA, then
// to trigger the carry. hand_over: by one thread, after those warps that write a chunk's operands have. It
// marks the chunk as ready.
__device__ __forceinline__ void mark_unprepared(std::int32_t* is_compensated, int operands) {
    for (int i = 0; i < operands; ++i) is_compensated[i] = kUnprepared;
}
__device__ __forceinline__ void lead_carry() {
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

// One number per token, loaded without waiting for it.
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

// product [16 x 16] += rows columns^T over 32 channels.
// column0 holds the columns' tokens 0-7, column8 tokens 8-15.
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

// Sum of squares of each token of the block, to `squares`, on the tensor cores.
// Two words serve as rows l/4 and l/4 + 8 of an m16n8k8 product,
// each in turn also as its column: the squares lie on the diagonal.
// The two words are neighbouring ones of one token, which are adjacent registers right after the load.
template <class T, int kGroups>
__device__ __forceinline__ void square_tokens(float* squares, const BlockRows<kGroups>& x) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float upper[2][4] = {}, lower[2][4] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const int half = w / 2, first = w % 2 * 2;
            const std::uint32_t a[2] = {x.word[half][g][first], x.word[half][g][first + 1]};
            mma_16x8x8<T>(upper[half], a, a[0]);
            mma_16x8x8<T>(lower[half], a, a[1]);
        }
    if (lane % 4 != lane / 8) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* const other = lower[half] + 2;
        squares[lane / 4 + 8 * half] = lane / 4 % 2 ? upper[half][1] + other[1] : upper[half][0] + other[0];
    }
}

// Column operand of a block for 32 channels, in shared memory: [token half][lane].
// Lane l of every warp reads the word that lane l of the producing warp wrote.
using ColumnWords = uint4[2][32];

__device__ __forceinline__ uint4 as_uint4(const Words& w) { return {w[0], w[1], w[2], w[3]}; }

// What score leaves in shared memory for solve.
// scores: q k^T, later reused as a staging buffer for blocks of scores and of the inverse.
// overlaps: beta k k^T.
template <int kKey>
struct PairSquares {
    Square<kTokens<kKey>> scores, overlaps;
};

// Stores a 16 x 16 product. `add`: adds to what another part of the channels has stored there.
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

// Adds the squares of the lane's elements in rows l/4 and l/4 +
// 8. In a diagonal block only those below the diagonal count.
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

// For a block on the diagonal.
__device__ __forceinline__ void zero_above_diagonal(float (&product)[2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (8 * tile + lane % 4 * 2 + e % 2 > lane / 4 + e / 2 * 8) product[tile][e] = 0.0f;
}

// turn_block and put_block move a block from accumulators to a triangle in global memory, 16 bytes per lane.
// turn_block transposes the layout through a slot in shared memory, put_block copies the slot to `block`.
// kLow: the low words, which are what rounding to T has left over.
// The caller puts a __syncwarp() before, between and after the two.
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

// Whether one of the lane's rows exceeds kMostSquares, given
// the lane's part of the row sums. A NaN counts as exceeding.
__device__ __forceinline__ bool needs_compensation(float2 squares) {
    const float x = token_sum(squares.x), y = token_sum(squares.y);
    return !(x <= kMostSquares && y <= kMostSquares);
}

// Last step of prepare for a rule that solves: completes the inverse,
// multiplies it by beta and stores it to the chunk operands.
// Called by one warp per block (where two share a block, the one with the last part).
// Before it every warp has stored its row of overlaps and
// inverted its diagonal block, and a CTA barrier has followed.
// `slots`: staging memory of the warp.
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
    // The later half of the warps stores diagonal blocks
    // while the earlier half joins blocks in invert_lower().
    if (block >= kBlocks / 2)
#pragma unroll 1
        for (int b = block; b >= 0; b -= kBlocks / 2) emit_stored(b, b, b, b);
    float x[2][4];
    // bf16 has 8 significant bits, so the error of one TF32
    // product (11 bits) is below that of rounding the result.
    // fp16 has 11 bits, and near-collinear keys magnify the
    // error: both take products of two-word factors (22 bits).
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
