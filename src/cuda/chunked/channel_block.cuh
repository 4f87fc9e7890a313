// SPDX-License-Identifier: Apache-2.0
// What a warp of prepare_channel computes of its block of 16 tokens, with one decay per channel: chunk
// operands and the products within the block and with earlier blocks, anchored or stepped
// (prepare_channel.cuh).
#pragma once

#include "cuda/chunked/block.cuh"
#include "cuda/chunked/channel_gates.cuh"
#include "cuda/chunked/plan.h"
#include "cuda/chunked/reader.h"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::chunked {

// kSolves: the chunk has an inverse, whose errors are of T's size (ChannelRule). Otherwise the scores are
// exact up to their own rounding (prepare_channel.cuh).
template <class T, bool kSolves>
using ScoreOperand = std::conditional_t<kSolves, T, __half>;

// A column meets the rows of a later block through a factor of the table from middle to middle.
// That factor covers the tail of the column's block, the blocks between, and the
// head of the row's block; row and column contribute the inverse of head and tail.
// It vanishes below 2^-126. With halves of at least 2^-54 that takes
// 2^-18 or less between the blocks, and such a pair hardly shows.
// Where some half decays by more, the columns are multiplied
// by two factors one after the other (`two_steps`).
inline constexpr float kOutOfRangeLog2 = 54.0f;

// The most that a half may decay by where its columns meet factors of the table. Additive algorithms have no
// second factor: beyond 2^-54 a factor that vanishes would take with it what decays by 2^-72 in truth.
template <class T, bool kSolves>
inline constexpr float kMostLog2 = !kSolves                    ? kOutOfRangeLog2
                                   : std::is_same_v<T, __half> ? 4.0f
                                                               : 100.0f;

// Factors of q and k for the lane's two tokens.
template <bool kSolves>
struct TokenScales {
    float2 operand[2];  // for operands of the scores
    float2 back[2];     // not solved: what those operands still lack of scale and norms

    __device__ __forceinline__ void set(int half, float2 whole, float2 squares) {
        if constexpr (kSolves) {
            operand[half] = whole;
        } else {
            const std::uint32_t q = power(squares.x), k = power(squares.y);
            operand[half] = {__uint_as_float(q), __uint_as_float(k)};
            back[half] = {whole.x * __uint_as_float(kInverse - q), whole.y * __uint_as_float(kInverse - k)};
        }
    }
    // For the chunk operands.
    __device__ __forceinline__ float2 whole(int half) const {
        if constexpr (kSolves) return operand[half];
        return {operand[half].x * back[half].x, operand[half].y * back[half].y};
    }

private:
    static constexpr std::uint32_t kInverse =
        2 * 0x3f800000u;  // minus the bits of a power of two: the bits of its inverse

    // Bits of the power of two that brings a norm nearest to 2^14. For zeros and NaNs: any power.
    static __device__ __forceinline__ std::uint32_t power(float squares) {
        const float inverse = fmaxf(rsqrtf(fmaxf(squares, 1e-37f)), 0x1p-120f);
        return __float_as_uint(0x1p14f * 1.41421356f * inverse) & 0x7f800000u;
    }
};

// Shared memory until the products. Buffers share memory with what is no longer needed: the L1 cache,
// through which q and k arrive, is what shared memory leaves of 256 KiB (docs/design/prepare.md).
template <int kKey>
struct ChannelOperands {
    using P = Parts<kKey>;
    static constexpr int kWarps = kPrepareThreads / 32;
    static constexpr int kColumns = std::max(kKey / 32, P::kPairs* P::kParts);

    // Per warp: the gates of its tokens, laid out by BlockGates.
    // Once all lanes have read a group's gates, its columns for the next two blocks take their place.
    union {
        float gates[kBlock * 32];
        ColumnWords columns[2];
    } group[kWarps][P::kGroups];
    // Gates are contiguous across groups.
    static_assert(sizeof(ColumnWords[2]) == sizeof(float[kBlock * 32]));
    union {
        std::uint16_t raw_gates[kWarps][kBlock * P::kChannels];
        struct {
            float from_start[P::kBlocks][kKey], to_end[P::kBlocks][kKey], between[P::kPairs][kKey];
            // Anchored: columns of the first block for the last of four, by
            // group. Stepped: all columns of one group, by pair and part.
            ColumnWords columns[kColumns];
        } table;
    };
    // head: log2 decay from a block's start to its middle. tail: from there to its end.
    // Where nothing is solved head becomes the factor itself. With two_steps tail does, too.
    float head[P::kBlocks][kKey], tail[P::kBlocks][kKey];
};

template <int kKey>
struct ChannelSmem {
    using P = Parts<kKey>;
    union {
        ChannelOperands<kKey> operands;
        PairSquares<kKey> pairs;
    };
    float beta[kTokens<kKey>];
    float norms[2][P::kParts][kTokens<kKey>];
    float back[kTokens<kKey>];  // TokenScales::back of k
    float fading[P::kBlocks];
    // Whether a half of the warp's block decays by more than 2^-kOutOfRangeLog2 in one of its channels
    int out_of_range[kPrepareThreads / 32];
    std::uint64_t gates_there[kPrepareThreads / 32];  // mbarriers, where a warp's gates come as a TMA tile
};

// Each CTA takes 1 KiB more for the system. Three fit the 164 KiB carve-out of sm_90.
// The next carve-out is 196 KiB, and would leave the L1 cache less of the 256 KiB that both share.
static_assert((sizeof(ChannelSmem<128>) + 1024) * kChannelCtas <= 164 * 1024);

// Index of a pair of blocks (row, column). Pairs of one column are adjacent.
template <int kBlocks>
__device__ __forceinline__ constexpr int pair_of(int row, int column) {
    return column * (2 * kBlocks - column - 1) / 2 + row - column - 1;
}

// What reads, if it is not k: of eight channels of one of the lane's tokens, as it came.
template <class T, Reader kReader>
struct ReaderWords {};
// Erase strengths, of T or float32.
template <class T>
struct ReaderWords<T, Reader::kErase> {
    Words word[2];  // rows of T take the first four

    // x *= strengths
    __device__ __forceinline__ void multiply(float (&x)[8], const DeviceArgs& a) const {
        const bool wide = a.erase.dtype == Dtype::kFloat32;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            float2 pair = unpack2<T>(word[0][i / 2]);
            if (wide) pair = {__uint_as_float(word[i / 4][i % 4]), __uint_as_float(word[i / 4][i % 4 + 1])};
            x[i] *= beta_of(a, pair.x), x[i + 1] *= beta_of(a, pair.y);
        }
    }
};
// The low-rank key a of the first of two rows, of T. A second row has none.
template <class T>
struct ReaderWords<T, Reader::kUndecayed> {
    Words word[1];

    // x = -a: what it reads is written with the opposite sign (erase keys take away).
    __device__ __forceinline__ void take(float (&x)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float2 pair = unpack2<T>(word[0][i / 2]);
            x[i] = -pair.x, x[i + 1] = -pair.y;
        }
    }
};

// Where they wait in shared memory: for each thread the pieces of 16 bytes that it takes, which it copies
// itself. Rows come in whole pieces (EraseOperands::converts()); those of float32 take twice as many.
template <class T, int kKey, Reader kReader>
struct ReaderPieces {
    static constexpr int kOf = 2 * Parts<kKey>::kGroups;  // of a thread, of T
    static constexpr std::size_t kBytes = erases(kReader) ? kOf * kPrepareThreads * sizeof(uint4) : 0;

    uint4* pieces;  // the thread's, kPrepareThreads apart: [T or both halves of float32, group, token half]

    static std::size_t bytes(const TokenRows& rows) {
        return rows.dtype == Dtype::kFloat32 ? 2 * kBytes : kBytes;
    }
    // Starts to copy rows first_token + .. of the warp's block, from `channel` of the lane on; zeros beyond
    // `count` rows and key_dim channels.
    __device__ __forceinline__ void copy(const TokenRows& rows, std::int64_t batch, std::int64_t first_token,
                                         int head, int count, int channel, int key_dim) const {
        const int wide = kReader == Reader::kErase && rows.dtype == Dtype::kFloat32, size = 2 << wide;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
            bool in = row < count;
            int token = row;
            if constexpr (kReader == Reader::kUndecayed)
                in = in && RowsOfPairs::is_first(row), token = RowsOfPairs::token(row);
            const auto* const from =
                static_cast<const unsigned char*>(rows.data) +
                (rows.offset(batch, first_token + (in ? token : 0), head) + channel) * size;
            for (int piece = 0; piece <= wide; ++piece)
#pragma unroll
                for (int g = 0; g < kOf / 2; ++g)
                    copy_async(shared_address(pieces + (piece * kOf + 2 * g + half) * kPrepareThreads),
                               from + 32 * g * size + 16 * piece,
                               in && channel + 32 * g + 4 * piece < key_dim ? 16 : 0);
        }
    }
    __device__ __forceinline__ void load(ReaderWords<T, kReader>& to, const TokenRows& rows, int g,
                                         int half) const {
        const auto put = [&](Words& words, int piece) {
            const uint4 x = pieces[(piece * kOf + 2 * g + half) * kPrepareThreads];
            words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
        };
        put(to.word[0], 0);
        if constexpr (kReader == Reader::kErase)
            if (rows.dtype == Dtype::kFloat32) put(to.word[1], 1);
    }
};

// kReader: what reads the state; the rows of L and k_decayed are its.
template <class T, int kKey, bool kSolves, Reader kReader = Reader::kKey>
struct ChannelBlock {
    static constexpr bool kErases = erases(kReader), kUndecayed = kReader == Reader::kUndecayed;
    using P = Parts<kKey>;
    using Rows = BlockRows<P::kGroups>;
    using Operand = ScoreOperand<T, kSolves>;
    using Wide = __nv_bfloat16;  // operands whose factors may exceed 1, additive
    using Reading = ReaderWords<T, kReader>;

    const DeviceArgs& a;
    ChannelOperands<kKey>& s;
    ChannelChunk<T, kKey>& chunk;
    const int warp;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int block = warp % P::kBlocks, part = warp / P::kBlocks, first = block * kBlock;

    // own_unit: position of the lane's first unit of group 0
    // in the gates; the unit beside it differs in one bit.
    // operand_unit: its position in a tile of the chunk operands.
    using Place = OperandTile<kKey, true>;
    const int own_unit = lane / 4 * 32 + (lane % 4 * 2 ^ (lane / 4 & 1)) * 4;
    const int operand_unit = Place::unit(first + lane / 4, part* P::kGroups * 4 + lane % 4) * 8;

    // log2 of the decay between the block's middle and `token`, for eight channels of group g.
    __device__ __forceinline__ void gates(float (&x)[8], int token, int g) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int unit = lane % 4 * 2 + i;
            load4(x + 4 * i, s.group[warp][g].gates + token * 32 + (unit ^ (token & 1)) * 4);
        }
    }
    // The same for the lane's token of a half. Eight tokens on, units have the same swizzle.
    __device__ __forceinline__ void own_gates(float (&x)[8], int half, int g) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load4(x + 4 * i, s.group[warp][g].gates + (own_unit ^ 4 * i) + half * 8 * 32);
    }
    // The same of the state that the lane's token of a half reads. The first token of a block reads the state
    // at its start.
    __device__ __forceinline__ void reading_gates(float (&x)[8], int half, int g) const {
        if constexpr (kUndecayed) {
            const int token = lane / 4 + 8 * half, after = token % 2 ? token : token - 1;
            if (after >= 0) return gates(x, after, g);
            table(x, s.head[block], g);
#pragma unroll
            for (float& gate : x) gate = -gate;
        } else {
            own_gates(x, half, g);
        }
    }
    __device__ __forceinline__ void table(float (&x)[8], const float* row, int g) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load4(x + 4 * i, row + part * P::kChannels + 32 * g + lane % 4 * 8 + 4 * i);
    }

    __device__ __forceinline__ void put(T* tile, int half, int g, const Words& words) const {
        const int panel = g * Place::kPanelUnits * 8, rows = 8 * half * Place::kUnits * 8;
        *reinterpret_cast<uint4*>(tile + panel + rows + operand_unit) = as_uint4(words);
    }
    // Where the columns of block `earlier` for block `later` lie.
    // Anchored: those of group g. Stepped: of the only group there is.
    __device__ __forceinline__ ColumnWords& columns_of(int later, int earlier, int g) const {
        const int distance = later - earlier - 1;
        return distance < 2 ? s.group[part * P::kBlocks + earlier][g].columns[distance]
                            : s.table.columns[part * P::kGroups + g];
    }
    __device__ __forceinline__ ColumnWords& columns_of(int later, int earlier) const {
        return s.table.columns[pair_of<P::kBlocks>(later, earlier) * P::kParts + part];
    }
    __device__ __forceinline__ void get_columns(Words (&words)[2], const ColumnWords& from) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 x = from[half][lane];
            words[half][0] = x.x, words[half][1] = x.y, words[half][2] = x.z, words[half][3] = x.w;
        }
    }

    // From keys to what reads.
    __device__ __forceinline__ void to_reader(float (&x)[8], const Reading& reader) const {
        if constexpr (kUndecayed)
            reader.take(x);
        else if constexpr (kErases)
            reader.multiply(x, a);
    }
    static __device__ __forceinline__ void unpack(float (&x)[8], const Words& words, float scale) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 pair = unpack2<T>(words[w]);
            x[2 * w] = pair.x * scale, x[2 * w + 1] = pair.y * scale;
        }
    }
    static __device__ __forceinline__ void pack(Words& words, const float (&x)[8]) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = pack2<Operand>(x[2 * w], x[2 * w + 1]);
    }
    // x as two bf16 words.
    static __device__ __forceinline__ void pack_halves(Words& high, Words& low, const float (&x)[8]) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            high[w] = pack2<Wide>(x[2 * w], x[2 * w + 1]);
            low[w] = pack_rest<Wide>({x[2 * w], x[2 * w + 1]}, high[w]);
        }
    }
    template <class To>
    static __device__ __forceinline__ void pack_product(Words& words, const float (&x)[8],
                                                        const float (&y)[8]) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = pack2<To>(x[2 * w] * y[2 * w], x[2 * w + 1] * y[2 * w + 1]);
    }
    // words = x exp2(sign * gate + exponent)
    template <class To>
    static __device__ __forceinline__ void pack_stepped(Words& words, const float (&x)[8],
                                                        const float (&gate)[8], float sign,
                                                        const float (&exponent)[8]) {
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = exp2_fast(sign * gate[i] + exponent[i]);
        pack_product<To>(words, x, y);
    }

    // Anchored decay: makes all operands from q and k, and the products within the block. q and k become the
    // rows that later meet columns of earlier blocks. load_reader(words, g, half) loads what reads
    // of a group and half.
    template <class LoadReader>
    __device__ __forceinline__ void score(Rows& q, Rows& k, LoadReader load_reader,
                                          const TokenScales<kSolves>& scales, bool two_steps,
                                          float (&own)[2][2][4]) const {
        const int first_pair = pair_of<P::kBlocks>(block + 1, block);
#pragma unroll
        for (int g = 0; g < P::kGroups; ++g) {
            Words columns[2], rows[2], columns_low[2], rows_low[2],
                words;  // rows and low words: not where kSolves
            float column[2][8], factor[8], head[8];
            table(factor, s.table.from_start[block], g);
            if (!kSolves) table(head, s.head[block], g);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float gate[8], x[8], fall[8];
                Reading reader;
                load_reader(reader, g, half);
                reading_gates(gate, half, g);
#pragma unroll
                for (int i = 0; i < 8; ++i) fall[i] = exp2_fast(gate[i]);
                if constexpr (kUndecayed) own_gates(gate, half, g);
                unpack(x, q.word[half][g], scales.operand[half].x);
#pragma unroll
                for (int i = 0; i < 8; ++i) x[i] *= fall[i];
                if constexpr (kSolves) {
                    pack(q.word[half][g], x);
                } else {
                    pack_halves(rows[half], rows_low[half], x);
                    pack_product<Operand>(q.word[half][g], x, head);
#pragma unroll
                    for (int i = 0; i < 8; ++i) x[i] *= scales.back[half].x;
                }
                pack_product<T>(words, x, factor);
                put(chunk.q_decayed, half, g, words);

                unpack(column[half], k.word[half][g], scales.operand[half].y);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    x[i] = column[half][i] * fall[i], column[half][i] *= exp2_fast(-gate[i]);
                if constexpr (kUndecayed) {
                    reader.take(x);
#pragma unroll
                    for (int i = 0; i < 8; ++i) x[i] *= fall[i];
                } else if constexpr (kErases) {
                    reader.multiply(x, a);
                }
                if constexpr (kSolves) {
                    pack(columns[half], column[half]);
                    pack(k.word[half][g], x);
                    pack_product<T>(words, x, factor);
                    put(chunk.k_decayed, half, g, words);
                } else {
                    pack_halves(columns[half], columns_low[half], column[half]);
                }
            }
            if constexpr (kSolves) {
                multiply_group<T>(own[0], q.word[0][g], q.word[1][g], columns[0], columns[1]);
                multiply_group<T>(own[1], k.word[0][g], k.word[1][g], columns[0], columns[1]);
            } else {
                multiply_group<Wide>(own[0], rows_low[0], rows_low[1], columns[0], columns[1]);
                multiply_group<Wide>(own[0], rows[0], rows[1], columns_low[0], columns_low[1]);
                multiply_group<Wide>(own[0], rows[0], rows[1], columns[0], columns[1]);
            }
            if (kSolves && two_steps) {
                table(factor, s.tail[block], g);
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int i = 0; i < 8; ++i) column[half][i] *= factor[i];
            }
            table(factor, s.table.to_end[block], g);
            // To the middles of the next blocks, loaded one block ahead; those of the last block are unused
            float factors[2][8];
            table(factors[0], s.table.between[min(first_pair, P::kPairs - 1)], g);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float rest[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) rest[i] = kSolves ? factor[i] : factor[i] * scales.back[half].y;
                pack_product<T>(words, column[half], rest);
                put(chunk.k_remaining, half, g, words);
            }
            __syncwarp();  // all lanes have read the group's gates
#pragma unroll
            for (int i = 0; i + 1 < P::kBlocks; ++i) {
                if (block + i + 1 >= P::kBlocks) break;
                if (i + 2 < P::kBlocks)
                    table(factors[(i + 1) % 2], s.table.between[min(first_pair + i + 1, P::kPairs - 1)], g);
                ColumnWords& to = columns_of(block + i + 1, block, g);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    pack_product<Operand>(words, column[half], factors[i % 2]);
                    to[half][lane] = as_uint4(words);
                }
            }
        }
    }

    // Stepped decay loads q and k again, group by group, and what reads in every use:
    // load(q, k, g). This makes the products within the block.
    // A pair of tokens belongs to the level of the highest bit in which their numbers differ.
    // What a level computes for other pairs is dropped, even infinities.
    template <class Load, class LoadReader>
    __device__ __forceinline__ void score_stepped(Load load, LoadReader load_reader,
                                                  const TokenScales<kSolves>& scales,
                                                  float (&own)[2][2][4]) const {
        BlockRows<1> q, k;
        float self[2] = {};
#pragma unroll 1
        for (int level = kBlock / 2; level > 0; level /= 2) {
            float product[2][2][4] = {};
#pragma unroll 1
            for (int g = 0; g < P::kGroups; ++g) {
                load(q, k, g);
                Words columns[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int token = lane / 4 + 8 * half;
                    if (level == 1) self[half] += dot<T>(q, k, half);
                    float gate[8], reading[8], border[8], x[8];
                    Reading reader;
                    load_reader(reader, g, half);
                    gates(gate, token, g);
                    if constexpr (kUndecayed) reading_gates(reading, half, g);
                    gates(border, token / (2 * level) * (2 * level) + level - 1, g);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        gate[i] -= border[i];
                        reading[i] = kUndecayed ? reading[i] - border[i] : gate[i];
                        border[i] = 0.0f;
                    }
                    unpack(x, q.word[half][0], scales.operand[half].x);
                    pack_stepped<Operand>(q.word[half][0], x, reading, 1.0f, border);
                    unpack(x, k.word[half][0], scales.operand[half].y);
                    if constexpr (kErases) pack_stepped<Operand>(columns[half], x, gate, -1.0f, border);
                    to_reader(x, reader);
                    pack_stepped<Operand>(k.word[half][0], x, reading, 1.0f, border);
                    if constexpr (!kErases) pack_stepped<Operand>(columns[half], x, gate, -1.0f, border);
                }
                multiply_group<Operand>(product[0], q.word[0][0], q.word[1][0], columns[0], columns[1]);
                if (kSolves)
                    multiply_group<Operand>(product[1], k.word[0][0], k.word[1][0], columns[0], columns[1]);
            }
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = lane / 4 + e / 2 * 8, j = 8 * tile + lane % 4 * 2 + e % 2;
                    if (j < i && (i ^ j) / level == 1)
                        own[0][tile][e] = product[0][tile][e], own[1][tile][e] = product[1][tile][e];
                }
        }
        // The pair of a token with itself.
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (lane % 4 * 2 + e == lane / 4)
                    own[0][half][2 * half + e] = self[half] * scales.operand[half].x * scales.operand[half].y;
    }

    // Stepped decay, one group at a time: operands_stepped makes the operands.
    // After a barrier cross_stepped makes the products with
    // earlier blocks, whose columns decay to this block's start.
    template <class Load, class LoadReader>
    __device__ __forceinline__ void operands_stepped(Load load, LoadReader load_reader,
                                                     const TokenScales<kSolves>& scales, int g) const {
        BlockRows<1> q, k;
        load(q, k, g);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float gate[8], x[8], exponent[8];
            Reading reader;
            load_reader(reader, g, half);
            Words words;
            reading_gates(gate, half, g);
            table(exponent, s.table.from_start[block], g);
            unpack(x, q.word[half][0], scales.whole(half).x);
            pack_stepped<T>(words, x, gate, 1.0f, exponent);
            put(chunk.q_decayed, half, g, words);
            unpack(x, k.word[half][0], scales.whole(half).y);
            to_reader(x, reader);
            if (kSolves) {
                pack_stepped<T>(words, x, gate, 1.0f, exponent);
                put(chunk.k_decayed, half, g, words);
            }
            if constexpr (kErases) unpack(x, k.word[half][0], scales.whole(half).y);
            if constexpr (kUndecayed) own_gates(gate, half, g);
            table(exponent, s.table.to_end[block], g);
            pack_stepped<T>(words, x, gate, -1.0f, exponent);
            put(chunk.k_remaining, half, g, words);
            if (!kSolves) unpack(x, k.word[half][0], scales.operand[half].y);
            for (int later = block + 1; later < P::kBlocks; ++later) {
                table(exponent, s.table.between[pair_of<P::kBlocks>(later, block)], g);
                pack_stepped<Operand>(words, x, gate, -1.0f, exponent);
                columns_of(later, block)[half][lane] = as_uint4(words);
            }
        }
    }
    using Cross = float[P::kBlocks - 1][2][2][4];  // q k^T and k k^T with each earlier block

    template <class Load, class LoadReader>
    __device__ __forceinline__ void cross_stepped(Load load, LoadReader load_reader,
                                                  const TokenScales<kSolves>& scales, int g,
                                                  Cross& product) const {
        BlockRows<1> q, k;
        load(q, k, g);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float gate[8], x[8], exponent[8];
            Reading reader;
            load_reader(reader, g, half);
            reading_gates(gate, half, g);
            table(exponent, s.head[block], g);
            unpack(x, q.word[half][0], scales.operand[half].x);
            pack_stepped<Operand>(q.word[half][0], x, gate, 1.0f, exponent);
            unpack(x, k.word[half][0], scales.operand[half].y);
            to_reader(x, reader);
            pack_stepped<Operand>(k.word[half][0], x, gate, 1.0f, exponent);
        }
#pragma unroll
        for (int earlier = 0; earlier < P::kBlocks - 1; ++earlier) {
            if (earlier >= block) continue;
            Words column[2];
            get_columns(column, columns_of(block, earlier));
            multiply_group<Operand>(product[earlier][0], q.word[0][0], q.word[1][0], column[0], column[1]);
            if (kSolves)
                multiply_group<Operand>(product[earlier][1], k.word[0][0], k.word[1][0], column[0],
                                        column[1]);
        }
    }
    // Anchored decay: products with earlier blocks. The nearest block
    // comes first: in the other order ptxas spills where T is fp16.
    __device__ __forceinline__ void cross(const Rows& q, const Rows& k, Cross& product) const {
#pragma unroll
        for (int earlier = P::kBlocks - 2; earlier >= 0; --earlier) {
            if (earlier >= block) continue;
#pragma unroll
            for (int g = 0; g < P::kGroups; ++g) {
                Words column[2];
                get_columns(column, columns_of(block, earlier, g));
                multiply_group<Operand>(product[earlier][0], q.word[0][g], q.word[1][g], column[0],
                                        column[1]);
                if (kSolves)
                    multiply_group<Operand>(product[earlier][1], k.word[0][g], k.word[1][g], column[0],
                                            column[1]);
            }
        }
    }
};

}  // namespace cula::cuda::chunked
