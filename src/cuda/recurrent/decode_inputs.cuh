// SPDX-License-Identifier: Apache-2.0
// What decode and verify have in common: where a CTA's work is, and how the inputs of its tokens reach it.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/recurrent/decode_args.h"
#include "cuda/recurrent/keys.cuh"
#include "cuda/recurrent/lanes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/float8.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::recurrent {

__device__ __forceinline__ std::int32_t load(const DecodeIndices& indices, int n, int column = 0,
                                             bool in = true) {
    const std::int32_t* const words =
        advanced(advanced(indices.data, n, indices.row), column, indices.column);
    const auto lower = static_cast<std::int32_t>(load32_if(words, in && indices.data));
    if (!indices.wide) return lower;
    return narrow_index(lower, static_cast<std::int32_t>(load32_if(words + 1, in && indices.data)));
}

__device__ __forceinline__ float load(const DecodeParameter& x, int head, int channel = 0) {
    return __uint_as_float(load32_if(x.data + (head * x.head + channel * x.channel), x.data != nullptr));
}

__device__ __forceinline__ float* scale_of(const DecodeScales& scales, std::int32_t slot, int head, int row) {
    return advanced(advanced(advanced(scales.data, head, scales.head), row, scales.v), slot, scales.slot);
}

// Whether a call of decode with kTokens places has one token per sequence: two places are those of its
// writes.
template <int kTokens>
inline constexpr bool kOneToken = kTokens < 4;

// Sums over a warp, of two numbers or of four. Of n, lanes i 32 / n and on receive the i-th sum.
// Each of the first steps halves the number of sums that a lane carries, so that four sums take six shuffles
// instead of twenty.
__device__ __forceinline__ float warp_sums(const float (&x)[2]) {
    const bool second = threadIdx.x & 16;
    const float own = (second ? x[1] : x[0]) + __shfl_xor_sync(0xffffffffu, second ? x[0] : x[1], 16);
    return row_sum(own + __shfl_xor_sync(0xffffffffu, own, 8));
}
__device__ __forceinline__ float warp_sums(const float (&x)[4]) {
    const bool second = threadIdx.x & 16, odd = threadIdx.x & 8;
    const float a = (second ? x[2] : x[0]) + __shfl_xor_sync(0xffffffffu, second ? x[0] : x[2], 16);
    const float b = (second ? x[3] : x[1]) + __shfl_xor_sync(0xffffffffu, second ? x[1] : x[3], 16);
    return row_sum((odd ? b : a) + __shfl_xor_sync(0xffffffffu, odd ? a : b, 8));
}

// The tokens of a sequence: [begin, begin + length) of row `batch`.
struct DecodeRange {
    int batch, begin, length;
};

// The prepared tokens, in shared memory.
template <int kKey, int kBlockRows, int kTokens, Keys kKeys>
struct alignas(16) DecodeTokens
    : OtherKeys<kKeys, kTokens, kKey>,
      OtherSums<kKeys, kTokens, (kKey < kStepThreads ? kKey : kStepThreads) / 32> {
    static constexpr int kThreads = kKey < kStepThreads ? kKey : kStepThreads, kWarps = kThreads / 32;

    float q[kTokens][kKey], k[kTokens][kKey], decay[kTokens][kKey];
    float qq[kTokens][kWarps], kk[kTokens][kWarps], kq[kTokens][kWarps];  // partial sums, one per warp
    float value[kTokens][kBlockRows], beta[kTokens][kBlockRows];
    std::int32_t state_index[kTokens];

    // What reads the state.
    __device__ __forceinline__ const float* reading_key(int j) const {
        if constexpr (kKeys == Keys::kErase)
            return this->e[j];
        else if constexpr (kKeys == Keys::kLowRank)
            return this->a[j];
        else
            return k[j];
    }
};

// A thread's inputs of kTokens tokens. fetch() issues the loads to registers; ready() computes what all
// threads need and writes it to DecodeTokens.
template <int kKey, int kBlockRows, int kTokens, Keys kKeys>
struct DecodeInputs
    : RawKeys<kKeys, kTokens * kKey / DecodeTokens<kKey, kBlockRows, kTokens, kKeys>::kThreads> {
    using Tokens = DecodeTokens<kKey, kBlockRows, kTokens, kKeys>;
    static constexpr int kOwned = kKey / Tokens::kThreads;  // channels per thread and token
    static constexpr int kValues = (kTokens * kBlockRows + kStepThreads - 1) / kStepThreads;

    RawFloat q[kTokens][kOwned], k[kTokens][kOwned], g[kTokens][kOwned], value[kValues], beta[kValues];
    std::int32_t state_index = 0;
    std::uint32_t decays = 0;          // bit j: whether token j decays the state (Keys::kSeveral)
    float bias[kOwned], A_log, gamma;  // of the value head

    static __device__ __forceinline__ bool owns_channels() {
        return Tokens::kThreads == kStepThreads || threadIdx.x < Tokens::kThreads;
    }
    static __device__ __forceinline__ int channel(int i) {
        return static_cast<int>(threadIdx.x) + i * Tokens::kThreads;
    }
    // The thread's i-th value belongs to token token_of(i) of the kTokens and to row row_of(i) of the CTA.
    static __device__ __forceinline__ bool owns_value(int i) {
        return kTokens * kBlockRows % kStepThreads == 0 ||
               threadIdx.x + i * kStepThreads < kTokens * kBlockRows;
    }
    static __device__ __forceinline__ int token_of(int i) {
        return static_cast<int>((threadIdx.x + i * kStepThreads) / kBlockRows);
    }
    static __device__ __forceinline__ int row_of(int i) {
        return static_cast<int>((threadIdx.x + i * kStepThreads) % kBlockRows);
    }

    __device__ __forceinline__ void fetch_head(const DecodeArgs& a, int value_head) {
        A_log = load(a.A_log, value_head), gamma = load(a.gamma, value_head);
#pragma unroll
        for (int i = 0; i < kOwned; ++i)
            bias[i] = owns_channels() ? load(a.dt_bias, value_head, channel(i)) : 0.0f;
    }

    // Issues the loads for tokens t0 to t0 + kTokens - 1 of sequence n; the CTA's rows start at row0. With
    // several keys these are writes, and a.q, a.g and state_indices have the tokens that they belong to.
    // Values come first and betas last: both are loaded under branches, and ptxas moves no load across a
    // branch. So the load of the state's slot, issued before, stays ahead, and the copies of the state stay
    // behind.
    __device__ __forceinline__ void fetch(const DecodeArgs& a, int n, const DecodeRange& range, int t0,
                                          int value_head, int row0) {
        const auto place_at = [&](const DecodeRows& rows, int head, int token, int c) {
            const char* at = advanced(advanced(rows.data, range.batch, rows.batch), head, rows.head);
            if constexpr (kTokens > 1) at = advanced(at, token, rows.token);
            return advanced(at, c, rows.last);
        };
        const auto place = [&](const DecodeRows& rows, int head, int j, int c) {
            return place_at(rows, head, range.begin + t0 + j, c);
        };
        const auto in = [&](int j) { return kTokens == 1 || t0 + j < range.length; };
        // The token of write j, and whether the write is its first (`decays`) and its last.
        int of[kTokens];
        std::uint32_t reads = 0;
        if constexpr (kKeys == Keys::kSeveral) {
            const int writes = static_cast<int>(a.writes.value);
            int token = a.writes.divide(range.begin + t0), before = range.begin + t0 - token * writes;
            decays = 0;
#pragma unroll
            for (int j = 0; j < kTokens; ++j) {
                const bool last = before + 1 == writes;
                of[j] = token;
                decays |= static_cast<std::uint32_t>(before == 0) << j;
                reads |= static_cast<std::uint32_t>(last) << j;
                token += last, before = last ? 0 : before + 1;
            }
        } else {
#pragma unroll
            for (int j = 0; j < kTokens; ++j) of[j] = range.begin + t0 + j;
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            if (owns_value(i)) {
                const int row = min(row0 + row_of(i), a.value_dim - 1);
                value[i].load(place(a.v, value_head, token_of(i), row), a.v.type, in(token_of(i)));
            }
        if (owns_channels()) {
            const int head = static_cast<int>(a.group.divide(value_head));
#pragma unroll
            for (int i = 0; i < kOwned; ++i)
#pragma unroll
                for (int j = 0; j < kTokens; ++j) {
                    const bool decay = kKeys != Keys::kSeveral || (decays >> j & 1) != 0,
                               read = kKeys != Keys::kSeveral || (reads >> j & 1) != 0;
                    q[j][i].load(place_at(a.q, head, of[j], channel(i)), a.q.type, in(j) && read);
                    k[j][i].load(place(a.k, head, j, channel(i)), a.k.type, in(j));
                    g[j][i].load(place_at(a.g, value_head, of[j], channel(i)), a.g.type, in(j) && decay);
                    if constexpr (kKeys == Keys::kErase)
                        this->erase[j * kOwned + i].load(place(a.erase, value_head, j, channel(i)),
                                                         a.erase.type, in(j));
                    if constexpr (kKeys == Keys::kLowRank) {
                        this->a_key[j * kOwned + i].load(place(a.a_key, value_head, j, channel(i)),
                                                         a.a_key.type, in(j));
                        this->b_key[j * kOwned + i].load(place(a.b_key, value_head, j, channel(i)),
                                                         a.b_key.type, in(j));
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            if (owns_value(i)) {
                const int row = min(row0 + row_of(i), a.value_dim - 1);
                beta[i].load(place(a.beta, value_head, token_of(i), row), a.beta.type, in(token_of(i)));
            }
        if constexpr (!kOneToken<kTokens>) {
            const int write = t0 + static_cast<int>(threadIdx.x),
                      t = kKeys == Keys::kSeveral ? a.writes.divide(write) : write;
            state_index = load(a.state_indices, n, t,
                               threadIdx.x < kTokens && write < range.length && t < a.state_indices.columns);
        }
    }

    // With erase keys a token writes beta v - S' e, which is 1 (beta v - S' e).
    static __device__ __forceinline__ void weigh(float& value, float& beta) {
        if constexpr (kKeys == Keys::kErase) value *= beta, beta = 1.0f;
    }

    // For 16-bit inputs: the i-th erase strength.
    __device__ __forceinline__ float erases(const DecodeArgs& a, int i) const {
        return erase_strength(this->erase[i].value(a.erase.type), a.beta_is_logit, a.most_erase);
    }

    __device__ __forceinline__ void ready(const DecodeArgs& a, int value_head, Tokens& s) const {
        if (owns_channels()) {
            const HeadGate gate(value_head, a.gate, A_log, a.lower_bound, gamma);
            float qq[kTokens] = {}, kk[kTokens] = {}, kq[kTokens] = {}, bq[kTokens] = {},
                  decay[kTokens * kOwned], shift[kTokens * kOwned];
#pragma unroll
            for (int j = 0; j < kTokens; ++j)
#pragma unroll
                for (int i = 0; i < kOwned; ++i) {
                    const float x = q[j][i].value(a.q.type), y = k[j][i].value(a.k.type);
                    qq[j] += x * x, kk[j] += y * y, kq[j] += y * x;
                    s.q[j][channel(i)] = x, s.k[j][channel(i)] = y;
                    if constexpr (kKeys == Keys::kLowRank) {
                        const float z = this->b_key[j * kOwned + i].value(a.b_key.type);
                        bq[j] += z * x;
                        s.a[j][channel(i)] = this->a_key[j * kOwned + i].value(a.a_key.type);
                        s.b[j][channel(i)] = z;
                    }
                    decay[j * kOwned + i] = g[j][i].value(a.g.type), shift[j * kOwned + i] = bias[i];
                }
            if (a.q.type == Element::kFloat32) {
                const ExactGate exact(a.gate, A_log, a.lower_bound, gamma);
#pragma unroll
                for (int i = 0; i < kTokens * kOwned; ++i) {
                    s.decay[i / kOwned][channel(i % kOwned)] = decay[i] + shift[i];
                    if constexpr (kKeys == Keys::kErase)
                        s.e[i / kOwned][channel(i % kOwned)] = this->erase[i].value(a.erase.type);
                }
#pragma unroll 1  // few calls have float32 inputs
                for (int i = 0; i < kTokens * kOwned; ++i) {
                    float& own = s.decay[i / kOwned][channel(i % kOwned)];
                    own = exact.decay(own);
                    if constexpr (kKeys == Keys::kErase) {
                        float& e = s.e[i / kOwned][channel(i % kOwned)];
                        e = s.k[i / kOwned][channel(i % kOwned)] *
                            beta_exact(e, a.beta_is_logit, a.most_erase);
                    }
                }
            } else {
                if (a.g.type != Element::kNone) gate.log2_decays(decay, shift);
#pragma unroll
                for (int j = 0; j < kTokens; ++j)
#pragma unroll
                    for (int i = 0; i < kOwned; ++i) {
                        s.decay[j][channel(i)] = exp2_fast(decay[j * kOwned + i] + gate.gamma2);
                        if constexpr (kKeys == Keys::kErase)
                            s.e[j][channel(i)] = k[j][i].value(a.k.type) * erases(a, j * kOwned + i);
                    }
            }
            if constexpr (kKeys == Keys::kSeveral) {
#pragma unroll
                for (int j = 0; j < kTokens; ++j)
                    if ((decays >> j & 1) == 0)
#pragma unroll
                        for (int i = 0; i < kOwned; ++i) s.decay[j][channel(i)] = 1.0f;
            }
            const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
            if constexpr (kTokens == 1) {  // all sums at once; each in the order in which one would be formed
                const float sums[4] = {kq[0], qq[0], kk[0], bq[0]}, own = warp_sums(sums);
                if (lane == 0) s.kq[0][warp] = own;
                if (lane == 8) s.qq[0][warp] = own;
                if (lane == 16) s.kk[0][warp] = own;
                if constexpr (kKeys == Keys::kLowRank)
                    if (lane == 24) s.bq[0][warp] = own;
            } else {
                const bool puts = lane % (32 / kTokens) == 0;
                const int j = lane / (32 / kTokens);
                const float products = warp_sums(kq);
                if (puts) s.kq[j][warp] = products;
                if constexpr (kKeys == Keys::kLowRank) {
                    const float of_b = warp_sums(bq);
                    if (puts) s.bq[j][warp] = of_b;
                }
                if (a.qk_l2norm) {
                    const float of_q = warp_sums(qq), of_k = warp_sums(kk);
                    if (puts) s.qq[j][warp] = of_q, s.kk[j][warp] = of_k;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            if (!owns_value(i)) continue;
            const float strength = beta[i].value(a.beta.type);
            s.value[token_of(i)][row_of(i)] = value[i].value(a.v.type);
            s.beta[token_of(i)][row_of(i)] = beta_exact(strength, a.beta_is_logit, a.most_beta);
            weigh(s.value[token_of(i)][row_of(i)], s.beta[token_of(i)][row_of(i)]);
        }
        if (!kOneToken<kTokens> && threadIdx.x < kTokens) s.state_index[threadIdx.x] = state_index;
    }
};

__device__ __forceinline__ int clamped_offset(const DecodeArgs& a, int i) {
    const std::int64_t at = a.cu_seqlens_64 ? static_cast<const std::int64_t*>(a.cu_seqlens)[i]
                                            : static_cast<const std::int32_t*>(a.cu_seqlens)[i];
    return static_cast<int>(at < 0 ? 0 : at > a.tokens ? a.tokens : at);
}

__device__ __forceinline__ bool is_null(const DecodeArgs& a, const DecodeStates& states, std::int32_t slot) {
    return (slot == a.null_index) |
           (static_cast<std::uint32_t>(slot) >= static_cast<std::uint32_t>(states.slots));
}

// What a CTA processes: sequence n, one value head, and the rows of its state from row0 on.
struct DecodePlace {
    int n, value_head, row0;
};
template <int kBlockRows>
__device__ __forceinline__ DecodePlace decode_place(const DecodeArgs& a, unsigned block) {
    const unsigned head_of_all = a.blocks.divide(block), n = a.value_heads.divide(head_of_all);
    return {static_cast<int>(n), static_cast<int>(head_of_all - n * a.value_heads.value),
            static_cast<int>(block - head_of_all * a.blocks.value) * kBlockRows};
}

}  // namespace cula::cuda::recurrent
