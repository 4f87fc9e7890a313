// SPDX-License-Identifier: Apache-2.0
// gradient_channel, what a lane makes of its own channel and the 16 tokens of its block: decays, operands,
// pairs of tokens within the block, and from all of them the gradients of q, k and the log decay. All is
// float32, and decays are multiplied along, so that no factor exceeds 1.
#pragma once

#include "cuda/backward/channel_slices.cuh"
#include "cuda/backward/derivatives.cuh"

namespace cula::cuda::backward {

// Numbers of one channel, by token.
using Column = float[kBlock];

// x <- `count` numbers from `from` on, a row of `rows` apart, and zeros.
template <class Bits, class Value>
__device__ __forceinline__ void load_column(Column& x, const Bits* from, std::int64_t pitch, int count,
                                            Value value) {
    std::uint32_t words[kBlock];
    const auto load = [&](auto whole) {
#pragma unroll
        for (int t = 0; t < kBlock; ++t, from += pitch) {
            const bool in = decltype(whole)::value || t < count;
            words[t] = sizeof(Bits) == 2 ? load16_if(from, in) : load32_if(from, in);
        }
    };
    if (count >= kBlock)
        load(std::true_type{});
    else
        load(std::false_type{});
#pragma unroll
    for (int t = 0; t < kBlock; ++t) x[t] = value(words[t]);
}
__device__ __forceinline__ void load_column(Column& x, const TokenRows& rows, std::int64_t at, int count) {
    const auto* narrow = static_cast<const std::uint16_t*>(rows.data) + at;
    const auto* wide = static_cast<const std::uint32_t*>(rows.data) + at;
    if (rows.dtype == Dtype::kBFloat16)
        load_column(x, narrow, rows.token, count,
                    [](std::uint32_t word) { return __uint_as_float(word << 16); });
    else if (rows.dtype == Dtype::kFloat16)
        load_column(x, narrow, rows.token, count, [](std::uint32_t word) {
            return __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
        });
    else
        load_column(x, wide, rows.token, count, [](std::uint32_t word) { return __uint_as_float(word); });
}

// decay <- the decays of value head `value_head`, those of absent tokens (beyond `count`) being 1.
__device__ __forceinline__ void load_decays(Column& decay, const DeviceArgs& a, int value_head,
                                            std::int64_t at, int channel, int count) {
    const float bias = count > 0 && a.dt_bias.data
                           ? a.dt_bias.data[value_head * a.dt_bias.head + channel * a.dt_bias.channel]
                           : 0.0f;
    load_column(decay, a.g, at + channel * a.g.last, count);
#pragma unroll
    for (int t = 0; t < kBlock; ++t) decay[t] += bias;
    HeadGate(a, value_head).log2_decays(decay);
#pragma unroll
    for (int t = 0; t < kBlock; ++t)
        decay[t] = t < count ? exp2_fast(fmaxf(decay[t], kLeastLog2Decay)) : 1.0f;
}

template <class T, int kKey, bool kSolves>
struct OwnChannel {
    using P = Patches<kKey>;
    GradientChannelSmem<T, kKey>& s;
    const Patch<kKey>& patch;

    // q with scale and norm, and k with its norm. Loaded anew at every call (volatile): the compiler would
    // keep all of a column in registers from one phase to the next.
    __device__ __forceinline__ float q(int t) const {
        return raw(s.q[patch.warp], t * kGroup + patch.lane) *
               static_cast<const volatile float&>(s.factor[0][patch.first + t]);
    }
    __device__ __forceinline__ float k(int t) const {
        return raw(s.k[patch.warp], t * kGroup + patch.lane) *
               static_cast<const volatile float&>(s.factor[1][patch.first + t]);
    }

    // Operands of the patch for pairs with other blocks, and the decay of the block.
    __device__ __forceinline__ void put_operands(const Column& decay) const {
        Column keys;
        float to_end = 1.0f, from_start = 1.0f;
        const bool rows = patch.block > 0, columns = patch.block < P::kBlocks - 1;
#pragma unroll
        for (int pair = kBlock / 2 - 1; pair >= 0; --pair) {
            const int t = 2 * pair;
            const float first = to_end * decay[t + 1];
            keys[t] = k(t), keys[t + 1] = k(t + 1);
            if (columns)
                s.operands.k_columns[patch.block][pair][patch.channel] =
                    pack2<T>(keys[t] * first, keys[t + 1] * to_end);
            to_end = first * decay[t];
        }
#pragma unroll
        for (int pair = 0; pair < kBlock / 2; ++pair) {
            const int t = 2 * pair;
            const float first = from_start * decay[t], second = first * decay[t + 1];
            if (rows) {
                s.operands.q_rows[patch.block - 1][pair][patch.channel] =
                    pack2<T>(q(t) * first, q(t + 1) * second);
                if (kSolves)
                    s.operands.k_rows[patch.block - 1][pair][patch.channel] =
                        pack2<T>(keys[t] * first, keys[t + 1] * second);
            }
            from_start = second;
        }
        s.whole[patch.block][patch.channel] = from_start;
    }

    // From accumulators to columns, through the warp's patch of shared memory.
    __device__ __forceinline__ void turn(const float (&x)[4][4]) const {
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(
                    &s.turned[patch.warp][patch.lane / 4 + 8 * half][8 * n + patch.lane % 4 * 2]) = {
                    x[n][2 * half], x[n][2 * half + 1]};
        __syncwarp();
    }
    __device__ __forceinline__ float& turned(int t) const { return s.turned[patch.warp][t][patch.lane]; }

    // The part of dg that is the same for all tokens of the block: rows of later blocks, columns of earlier
    // ones, and what passes the whole chunk.
    __device__ __forceinline__ float crossing() const {
        const int c = patch.channel;
        float sum = 0.0f, later = s.whole[patch.block][c];
#pragma unroll
        for (int i = 1; i < P::kBlocks; ++i) {
            if (i <= patch.block) continue;
            sum = fmaf(s.rows_crossing[block_pair(i, patch.block)][c], later, sum);
            later *= s.whole[i][c];
        }
        float after = 1.0f;
#pragma unroll
        for (int j = P::kBlocks - 1; j >= 0; --j) {
            if (j < patch.block) sum = fmaf(s.columns_leaving[j][c], after, sum);
            after *= s.whole[j][c];
        }
        return fmaf(s.passing[c], after, sum);
    }

    // The gradients: d_q without scale and norm, d_k without norm, and in place of the decays those of the
    // log decays. Rows and columns are the block sums of the patch.
    //
    // d_k[j] begins with what column j gets from the chunk's end, and gets that of the rows from the last on:
    // before row t - 1 is next, k_j d_k[j] is the sum over all paths from token j that cross t's decay. Rows
    // of the second half meet columns of the first by way of the border between them, as blocks do; the
    // columns get that after the second half.
    __device__ __forceinline__ void gradients(const Ends& ends, Column& decay, Column& d_q,
                                              Column& d_k) const {
        keep_no_products(decay);
        turn(ends.columns);
        float factor = 1.0f;
#pragma unroll
        for (int t = kBlock - 1; t >= 0; --t) {
            d_k[t] = turned(t) * factor;
            if (t >= kHalf) factor *= decay[t];  // columns of the first half stay at the border
        }
        turn(ends.q);
        factor = 1.0f;
#pragma unroll
        for (int t = 0; t < kBlock; ++t) factor *= decay[t], d_q[t] = turned(t) * factor;
        if constexpr (kSolves) {  // the rows of d_k remain in shared memory
            turn(ends.k);
            factor = 1.0f;
#pragma unroll
            for (int t = 0; t < kBlock; ++t) factor *= decay[t], turned(t) *= factor;
        }
        Column keys;  // those of the first half decayed to the border, to begin with
        float of_rows[kHalf];
        float leaving = 0.0f, from_before = 0.0f;  // columns of the first half; rows of the second
        factor = 1.0f;
#pragma unroll
        for (int j = kHalf - 1; j >= 0; --j) {
            keys[j] = k(j) * factor;
            leaving = fmaf(keys[j], d_k[j], leaving);
            factor *= decay[j];
        }
#pragma unroll
        for (int t = kHalf; t < kBlock; ++t) keys[t] = k(t);
        factor = 1.0f;
#pragma unroll
        for (int t = kHalf; t < kBlock; ++t) {
            factor *= decay[t];
            const float query = q(t), of_q = query * factor, of_k = keys[t] * factor;
            float before = query * d_q[t], sum_q = 0.0f, sum_k = 0.0f;
            for_columns<0, kHalf>(t, [&](int j, float d_score, float d_overlap) {
                sum_q = fmaf(d_score, keys[j], sum_q);
                d_k[j] = fmaf(d_score, of_q, d_k[j]);
                if (!kSolves) return;
                sum_k = fmaf(d_overlap, keys[j], sum_k);
                d_k[j] = fmaf(d_overlap, of_k, d_k[j]);
            });
            d_q[t] = fmaf(factor, sum_q, d_q[t]);
            float within = of_q * sum_q;
            if constexpr (kSolves) {
                before = fmaf(keys[t], turned(t), before);
                turned(t) = fmaf(factor, sum_k, turned(t));
                within = fmaf(of_k, sum_k, within);
            }
            from_before += before;
            of_rows[t - kHalf] = before + within;
        }

        const float around = crossing();
        float rows = around + leaving;
#pragma unroll
        for (int t = kBlock - 1; t >= kHalf; --t) {
            rows += of_rows[t - kHalf];
            finish_token<kHalf>(t, rows, keys, decay, d_q, d_k);
        }
        factor = 1.0f;
#pragma unroll
        for (int j = kHalf - 1; j >= 0; --j) {
            keys[j] = k(j);
            d_k[j] *= factor;
            factor *= decay[j];
        }
        rows = around + from_before;
#pragma unroll
        for (int t = kHalf - 1; t >= 0; --t) {
            rows = fmaf(q(t), d_q[t], rows);
            if (kSolves) rows = fmaf(keys[t], turned(t), rows);
            finish_token<0>(t, rows, keys, decay, d_q, d_k);
        }
    }

private:
    static constexpr int kHalf = kBlock / 2;

    static __device__ __forceinline__ float raw(const T (&patch_of)[kBlock * kGroup], int at) {
        const auto bits = reinterpret_cast<const volatile unsigned short&>(patch_of[at]);
        return to_float(reinterpret_cast<const T&>(bits));
    }

    // Products of decays are multiplied anew after this: the compiler would keep them in registers.
    static __device__ __forceinline__ void keep_no_products(Column& decay) {
#pragma unroll
        for (int t = 0; t < kBlock; ++t) asm volatile("" : "+f"(decay[t]));
    }

    // body(j, dA_tj, dL_tj) for the columns j of [kFirst, kFirst + kHalf), from the last on.
    template <int kFirst, int kCount, class Body>
    __device__ __forceinline__ void for_columns(int t, Body body) const {
#pragma unroll
        for (int four = kFirst + kCount - 4; four >= kFirst; four -= 4) {
            if (four >= t) continue;
            // Loaded in the program's order: the compiler would load many rows ahead.
            std::uint32_t d_scores[4], d_overlaps[4] = {};
            load_words(d_scores, shared_address(&s.own_scores[patch.block][t][four]));
            if (kSolves) load_words(d_overlaps, shared_address(&s.own_overlaps[patch.block][t][four]));
#pragma unroll
            for (int e = 3; e >= 0; --e)
                if (four + e < t)
                    body(four + e, __uint_as_float(d_scores[e]), __uint_as_float(d_overlaps[e]));
        }
    }

    // Row t with the columns of its half, which begins at kFirst, and with itself. rows: of the paths to rows
    // from t on, and of others that cross all of the half.
    template <int kFirst>
    __device__ __forceinline__ void finish_token(int t, float rows, const Column& keys, Column& decay,
                                                 Column& d_q, Column& d_k) const {
        const float query = q(t), own = s.own_scores[patch.block][t][t];
        float d_key = kSolves ? turned(t) : 0.0f, between = decay[t];
        d_q[t] = fmaf(own, keys[t], d_q[t]);
        d_key = fmaf(own, query, d_key);
        for_columns<kFirst, kHalf>(t, [&](int j, float d_score, float d_overlap) {
            const float decayed = keys[j] * between;
            float row = d_score * query;
            d_q[t] = fmaf(d_score, decayed, d_q[t]);
            if constexpr (kSolves) {
                row = fmaf(d_overlap, keys[t], row);
                d_key = fmaf(d_overlap, decayed, d_key);
            }
            d_k[j] = fmaf(between, row, d_k[j]);
            rows = fmaf(keys[j], d_k[j], rows);
            between *= decay[j];
        });
        d_k[t] += d_key;
        decay[t] = rows;
    }
};

}  // namespace cula::cuda::backward
