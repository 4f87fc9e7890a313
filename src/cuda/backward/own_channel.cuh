// SPDX-License-Identifier: Apache-2.0
// gradient_channel, what a lane makes of its column, two channels of the eight tokens of half a block:
// decays, operands, pairs of tokens within the half, and from all of them the gradients of q, k and the log
// decay. This is float32, and decays are multiplied along, so that no factor exceeds 1. The pairs of the two
// halves of a block are decayed to the border between them and are tensor core products, as those of two
// blocks are.
#pragma once

#include "cuda/backward/channel_columns.cuh"
#include "cuda/backward/channel_slices.cuh"
#include "cuda/chunked/reader.h"

namespace cula::cuda::backward {

using chunked::Reader;

// The lane's column of erase keys, in global memory: three phases read it, and shared memory has no room.
// Rules that have none read with their keys. With kUndecayed they are -a in first rows, and zeros in second
// ones.
template <class T, Reader kReader>
struct EraseColumn {
    static constexpr bool kUndecayed = kReader == Reader::kUndecayed;
    const T* first;
    std::int64_t pitch;
    int count;

    template <int kKey>
    __device__ __forceinline__ EraseColumn(const DeviceArgs& a, const ChannelPlace& place,
                                           const Patch<kKey>& patch, int value_head)
        : EraseColumn(kUndecayed ? a.a_key : a.erase_keys, a.key_dim, place, patch, value_head) {}
    template <int kKey>
    __device__ __forceinline__ EraseColumn(const TokenRows& keys, int key_dim, const ChannelPlace& place,
                                           const Patch<kKey>& patch, int value_head)
        : first(static_cast<const T*>(keys.data) +
                keys.offset(place.batch, (place.begin + patch.token) / (kUndecayed ? 2 : 1), value_head) +
                patch.channel),
          pitch(keys.token),
          count(patch.channel < key_dim ? place.count - patch.token : 0) {}

    __device__ __forceinline__ void load(std::uint32_t (&words)[kHalf]) const {
        constexpr Rows kRows = kUndecayed ? Rows::kFirst : Rows::kAll;
#pragma unroll
        for (int t = 0; t < kHalf; ++t) {
            words[t] = has_row(kRows, t) ? load32_if(first + token_of_row(kRows, t) * pitch, t < count) : 0u;
            if (kUndecayed) words[t] ^= 0x80008000u;
        }
    }
    __device__ __forceinline__ void load(Column& x) const {
        std::uint32_t words[kHalf];
        load(words);
        unpack_column<T>(x, words);
    }
};

template <class T>
struct EraseColumn<T, Reader::kKey> {};

// kReader: what reads the state; the rows of L are its. With kUndecayed the first of two rows reads the state
// before it decays, and no decay of its own is a factor of what it reads (chunked/low_rank_rows.cuh).
template <class T, int kKey, bool kSolves, Reader kReader = Reader::kKey>
struct OwnChannel {
    static constexpr bool kErases = erases(kReader), kUndecayed = kReader == Reader::kUndecayed;
    using P = Patches<kKey>;
    GradientChannelSmem<T, kKey>& s;
    const Patch<kKey>& patch;
    [[no_unique_address]] const EraseColumn<T, kReader> erase;

    // q (which = 0) or k as they came. Loaded anew at every call: the compiler would keep all of a column in
    // registers from one phase to the next.
    __device__ __forceinline__ void load_raw(Column& x, int which) const {
        const T* from = (which ? s.k : s.q)[patch.warp];
        std::uint32_t words[kHalf];
#pragma unroll
        for (int t = 0; t < kHalf; ++t)
            words[t] = load_word(shared_address(from + ((patch.half * kHalf + t) ^ patch.half) * kGroup +
                                                patch.lane % 16 * 2));
        unpack_column<T>(x, words);
    }
    // q with scale and norm, or k with its norm.
    __device__ __forceinline__ void load(Column& x, int which) const {
        load_raw(x, which);
#pragma unroll
        for (int t = 0; t < kHalf; t += 4) {
            std::uint32_t factors[4];
            load_words(factors, shared_address(&s.factor[which][patch.token + t]));
#pragma unroll
            for (int i = 0; i < 8; ++i) x[2 * t + i] *= __uint_as_float(factors[i / 2]);
        }
    }

    // The same of one token.
    __device__ __forceinline__ void load(float (&x)[2], int which, int t) const {
        const T* from = (which ? s.k : s.q)[patch.warp];
        const float2 pair = unpack2<T>(load_word(
            shared_address(from + ((patch.half * kHalf + t) ^ patch.half) * kGroup + patch.lane % 16 * 2)));
        const float factor = __uint_as_float(load_word(shared_address(&s.factor[which][patch.token + t])));
        x[0] = pair.x * factor, x[1] = pair.y * factor;
    }

    // Operands of the patch for pairs with other blocks, and the decay of the block.
    __device__ __forceinline__ void put_operands(const Column& decay) const {
        const bool rows = patch.block > 0, columns = patch.block < P::kBlocks - 1;
        float own[2], other[2];
        whole_halves(own, other, decay);
        Column keys;
        load(keys, 1);
        if (columns) {
            float to_end[2] = {patch.half ? 1.0f : other[0], patch.half ? 1.0f : other[1]};
            put_columns(s.operands.k_columns[patch.block], patch.half * kHalf / 2, patch.channel, keys, decay,
                        to_end);
        }
        if (rows) {
            const float from_start[2] = {patch.half ? other[0] : 1.0f, patch.half ? other[1] : 1.0f};
            if constexpr (kErases) erase.load(keys);
            if (kSolves)
                put_rows<kUndecayed>(s.operands.k_rows[patch.block - 1], patch.half * kHalf / 2,
                                     patch.channel, keys, decay, from_start);
            Column queries;
            load(queries, 0);
            put_rows<false>(s.operands.q_rows[patch.block - 1], patch.half * kHalf / 2, patch.channel,
                            queries, decay, from_start);
        }
        if (patch.half == 0)
            *reinterpret_cast<float2*>(&s.whole[patch.block][patch.channel]) = {own[0] * other[0],
                                                                                own[1] * other[1]};
    }

    // The gradients: d_q without scale and norm, d_k without norm, and in place of the decays those of the
    // log decays. Rows and columns of `ends` are the block sums of the patch. row_k: with erase keys their
    // gradients, of which d_k has nothing yet; otherwise it is of no use afterwards.
    //
    // d_k[j] begins with what column j gets from behind its half, and gets that of the rows from the last on:
    // before row t - 1 is next, k_j d_k[j] is the sum over all paths from token j that cross t's decay.
    __device__ __forceinline__ void gradients(Ends& ends, Column& decay, Column& d_q, Column& d_k,
                                              Column& row_k) const {
        keep_no_products(decay);
        float rows[2];
        halves(rows, ends, decay);
        keep_no_products(decay);

        turn(d_k, ends.columns);
        float factor[2] = {1.0f, 1.0f};
#pragma unroll
        for (int i = 2 * kHalf - 1; i >= 0; --i) d_k[i] *= factor[i % 2], factor[i % 2] *= decay[i];
        turn(d_q, ends.q);
        if constexpr (kSolves) {
            turn(row_k, ends.k);
        } else {
#pragma unroll
            for (int i = 0; i < 2 * kHalf; ++i) row_k[i] = 0.0f;
        }
        factor[0] = factor[1] = 1.0f;
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) {
            if (kUndecayed && is_first_row(i / 2)) row_k[i] *= factor[i % 2];
            factor[i % 2] *= decay[i];
            d_q[i] *= factor[i % 2];
            if (kSolves && !(kUndecayed && is_first_row(i / 2))) row_k[i] *= factor[i % 2];
        }
        keep_no_products(decay);
        Column keys;
        load(keys, 1);
        std::uint32_t reading[kHalf];
        if constexpr (kErases) erase.load(reading);
#pragma unroll
        for (int t = kHalf - 1; t >= 0; --t) {
            float reader[2] = {keys[2 * t], keys[2 * t + 1]};
            if constexpr (kErases) {
                const float2 pair = unpack2<T>(reading[t]);
                reader[0] = pair.x, reader[1] = pair.y;
            }
            finish_token(t, rows, keys, reader, decay, d_q, row_k, d_k);
        }
    }

private:
    // Words of pairs of tokens of half a block.
    using HalfWords = std::uint32_t[kHalf / 2][kGroup + 8];
    struct HalfPlace {
        HalfWords k_columns, q_rows, k_rows;  // all to or from the border between the halves
        float whole[2][kGroup];               // decay of a half
        float crossing[2][kGroup];            // the sum over the paths that cross it, to or from the other
    };

    // Of the two rows of kUndecayed; halves of a block begin with one.
    static constexpr bool is_first_row(int t) { return t % 2 == 0; }

    // Products of decays of the lane's half, and of the other.
    __device__ __forceinline__ void whole_halves(float (&own)[2], float (&other)[2],
                                                 const Column& decay) const {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            own[e] = decay[e];
#pragma unroll
            for (int t = 1; t < kHalf; ++t) own[e] *= decay[2 * t + e];
            other[e] = __shfl_xor_sync(0xffffffffu, own[e], 16);
        }
    }

    // Words of pairs of tokens, from row `first` on: x decayed from behind token t to the end of the half
    // and by to_end, or from the start of the half to t and by from_start.
    template <int kPitch>
    static __device__ __forceinline__ void put_columns(std::uint32_t (*to)[kPitch], int first, int channel,
                                                       const Column& x, const Column& decay,
                                                       const float (&to_end)[2]) {
        float late[2] = {to_end[0], to_end[1]};
#pragma unroll
        for (int pair = kHalf / 2 - 1; pair >= 0; --pair) {
            std::uint32_t words[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int i = 4 * pair + e;
                const float early = late[e] * decay[i + 2];
                words[e] = pack2<T>(x[i] * early, x[i + 2] * late[e]);
                late[e] = early * decay[i];
            }
            *reinterpret_cast<uint2*>(&to[first + pair][channel]) = {words[0], words[1]};
        }
    }
    // undecayed: of rows of kUndecayed that read.
    template <bool undecayed, int kPitch>
    static __device__ __forceinline__ void put_rows(std::uint32_t (*to)[kPitch], int first, int channel,
                                                    const Column& x, const Column& decay,
                                                    const float (&from_start)[2]) {
        float before[2] = {from_start[0], from_start[1]};
#pragma unroll
        for (int pair = 0; pair < kHalf / 2; ++pair) {
            std::uint32_t words[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int i = 4 * pair + e;
                const float early = before[e] * decay[i], late = early * decay[i + 2];
                words[e] = pack2<T>(x[i] * (undecayed ? before[e] : early), x[i + 2] * late);
                before[e] = late;
            }
            *reinterpret_cast<uint2*>(&to[first + pair][channel]) = {words[0], words[1]};
        }
    }

    // What the two halves of a block have to do with each other, as blocks have (channel_blocks.cuh), through
    // the place of the warp's turned patch. Rows of the second half then run from the border between the
    // halves, and so do columns of the first. rows: the part of dg that is the same for all tokens of the
    // lane's half.
    __device__ __forceinline__ void halves(float (&rows)[2], Ends& ends, const Column& decay) const {
        constexpr int kPairs = kHalf / 2;
        constexpr float kNone[2] = {1.0f, 1.0f};
        auto& place = *reinterpret_cast<HalfPlace*>(&s.turned[patch.warp]);
        static_assert(sizeof(HalfPlace) <= sizeof(PatchFloats));
        const int channel = patch.lane % 16 * 2;
        {
            float own[2], other[2];
            whole_halves(own, other, decay);
            *reinterpret_cast<float2*>(&place.whole[patch.half][channel]) = {own[0], own[1]};
            Column x;
            load(x, 1);
            if (patch.half == 0) {
                put_columns(place.k_columns, 0, channel, x, decay, kNone);
            } else {
                if constexpr (kErases) erase.load(x);
                if (kSolves) put_rows<kUndecayed>(place.k_rows, 0, channel, x, decay, kNone);
                load(x, 0);
                put_rows<false>(place.q_rows, 0, channel, x, decay, kNone);
            }
        }
        __syncwarp();
        const int pair = patch.lane % kPairs, column = patch.lane / 4;
        const std::uint32_t scores = half_square(s.own_scores[patch.block]),
                            overlaps = kSolves ? half_square(s.own_overlaps[patch.block]) : 0u,
                            of_columns[4] = {transposed(scores), 0u, kSolves ? transposed(overlaps) : 0u, 0u},
                            of_q[2] = {0u, scores}, of_k[2] = {0u, overlaps};
        float leaving[8] = {}, entering[8] = {};
        add_products(leaving, ends.columns, 0, place.whole[1], place.k_columns);
        add_products(entering, ends.q, 1, place.whole[0], place.q_rows);
        if (kSolves) add_products(entering, ends.k, 1, place.whole[0], place.k_rows);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int c = 8 * n + column;
            const std::uint32_t keys = place.k_columns[pair][c];
            mma_16x8x16<T>(ends.columns[n], of_columns, place.q_rows[pair][c],
                           kSolves ? place.k_rows[pair][c] : 0u);
            mma_16x8x8<T>(ends.q[n], of_q, keys);
            if (kSolves) mma_16x8x8<T>(ends.k[n], of_k, keys);
        }
        scatter_sums<4, 4>(leaving);
        scatter_sums<4, 4>(entering);
        const int mine = column / 2 * 8 + patch.lane % 4 * 2 + column % 2;
        place.crossing[0][mine] = entering[0], place.crossing[1][mine] = leaving[0];
        crossing(rows);
        __syncwarp();
        const float2 crossing_half = *reinterpret_cast<const float2*>(&place.crossing[patch.half][channel]);
        rows[0] += crossing_half.x, rows[1] += crossing_half.y;
    }

    // x, rows of the second half or columns of the first, crosses the other half, and the sums over tokens of
    // its products with `operand` are added.
    __device__ __forceinline__ void add_products(float (&sums)[8], float (&x)[4][4], int half,
                                                 const float (&whole)[kGroup],
                                                 const HalfWords& operand) const {
        const int channel = patch.lane % 4 * 2, odd = patch.lane / 4 % 2;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 decay = *reinterpret_cast<const float2*>(&whole[8 * n + channel]);
            const uint2 words = *reinterpret_cast<const uint2*>(&operand[patch.lane / 8][8 * n + channel]);
            const float2 first = unpack2<T>(words.x), second = unpack2<T>(words.y);
            float &low = x[n][2 * half], &high = x[n][2 * half + 1];
            low *= decay.x, high *= decay.y;
            sums[2 * n] = fmaf(odd ? first.y : first.x, low, sums[2 * n]);
            sums[2 * n + 1] = fmaf(odd ? second.y : second.x, high, sums[2 * n + 1]);
        }
    }

    // The A operand of rows of the second half and columns of the first.
    __device__ __forceinline__ std::uint32_t half_square(const float (&square)[kBlock][kBlock]) const {
        const float2 pair =
            *reinterpret_cast<const float2*>(&square[kHalf + patch.lane / 4][patch.lane % 4 * 2]);
        return pack2<T>(pair.x, pair.y);
    }

    // From accumulators to columns, through the warp's patch of shared memory.
    __device__ __forceinline__ void turn(Column& to, const float (&x)[4][4]) const {
        turn_patch(to, x, s.turned[patch.warp], patch);
    }

    // The part of dg that is the same for all tokens of the block: rows of later blocks, columns of earlier
    // ones, and what passes the whole chunk.
    __device__ __forceinline__ void crossing(float (&sums)[2]) const {
        const int c = patch.channel;
        const auto pair = [c](const float* row) { return load_pair(shared_address(row + c)); };
        float2 sum = {0.0f, 0.0f}, later = pair(s.whole[patch.block]), after = {1.0f, 1.0f};
#pragma unroll
        for (int i = 1; i < P::kBlocks; ++i) {
            if (i <= patch.block) continue;
            const float2 rows = pair(s.rows_crossing[block_pair(i, patch.block)]), whole = pair(s.whole[i]);
            sum.x = fmaf(rows.x, later.x, sum.x), sum.y = fmaf(rows.y, later.y, sum.y);
            later.x *= whole.x, later.y *= whole.y;
        }
#pragma unroll
        for (int j = P::kBlocks - 1; j >= 0; --j) {
            if (j < patch.block) {
                const float2 columns = pair(s.columns_leaving[j]);
                sum.x = fmaf(columns.x, after.x, sum.x), sum.y = fmaf(columns.y, after.y, sum.y);
            }
            const float2 whole = pair(s.whole[j]);
            after.x *= whole.x, after.y *= whole.y;
        }
        const float2 passing = pair(s.passing);
        sums[0] = fmaf(passing.x, after.x, sum.x), sums[1] = fmaf(passing.y, after.y, sum.y);
    }

    // Products of decays are multiplied anew after this: the compiler would keep them in registers.
    static __device__ __forceinline__ void keep_no_products(Column& decay) {
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) asm volatile("" : "+f"(decay[i]));
    }

    // Row t with the columns of its half and with itself. rows: sums of the paths from before the half to
    // rows behind t, and of others that cross all of the half. reader: the key that reads.
    __device__ __forceinline__ void finish_token(int t, float (&rows)[2], const Column& keys,
                                                 const float (&reader)[2], Column& decay, Column& d_q,
                                                 Column& row_k, Column& d_k) const {
        const int first = patch.half * kHalf;
        const float(&scores)[kBlock][kBlock] = s.own_scores[patch.block];
        const float(&overlaps)[kBlock][kBlock] = s.own_overlaps[patch.block];
        const float diagonal = __uint_as_float(load_word(shared_address(&scores[first + t][first + t])));
        float query[2];
        load(query, 0, t);
        // Whether the row reads the state before its decay, which the paths that end in it do not cross then.
        const bool before_decay = kUndecayed && is_first_row(t);
        float between[2], crossing[2], d_key[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int i = 2 * t + e;
            if (before_decay) crossing[e] = rows[e];
            rows[e] = fmaf(query[e], d_q[i], rows[e]);
            if (kSolves) rows[e] = fmaf(reader[e], row_k[i], rows[e]);
            if (!before_decay) crossing[e] = rows[e];
            d_q[i] = fmaf(diagonal, keys[i], d_q[i]);
            d_key[e] = kErases   ? row_k[i]
                       : kSolves ? fmaf(diagonal, query[e], row_k[i])
                                 : diagonal * query[e];
            between[e] = before_decay ? 1.0f : decay[i];
        }
#pragma unroll
        for (int four = kHalf - 4; four >= 0; four -= 4) {
            if (four >= t) continue;
            // Loaded in the program's order: the compiler would load many rows ahead.
            std::uint32_t d_scores[4], d_overlaps[4] = {};
            load_words(d_scores, shared_address(&scores[first + t][first + four]));
            if (kSolves) load_words(d_overlaps, shared_address(&overlaps[first + t][first + four]));
#pragma unroll
            for (int j = four + 3; j >= four; --j) {
                if (j >= t) continue;
                const float d_score = __uint_as_float(d_scores[j - four]),
                            d_overlap = __uint_as_float(d_overlaps[j - four]);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int i = 2 * j + e, own = 2 * t + e;
                    const float decayed = keys[i] * between[e];
                    float row = d_score * query[e];
                    d_q[own] = fmaf(d_score, decayed, d_q[own]);
                    if constexpr (kSolves) {
                        row = fmaf(d_overlap, reader[e], row);
                        d_key[e] = fmaf(d_overlap, decayed, d_key[e]);
                    }
                    if (before_decay) crossing[e] = fmaf(keys[i], d_k[i], crossing[e]);
                    d_k[i] = fmaf(between[e], row, d_k[i]);
                    if (!before_decay) crossing[e] = fmaf(keys[i], d_k[i], crossing[e]);
                    between[e] *= decay[i];
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if constexpr (kErases) {
                d_k[2 * t + e] = fmaf(diagonal, query[e], d_k[2 * t + e]);
                row_k[2 * t + e] = d_key[e];
            } else {
                d_k[2 * t + e] += d_key[e];
            }
            decay[2 * t + e] = crossing[e];
        }
    }
};

}  // namespace cula::cuda::backward
