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

// Not by the read-only path: forks::settle_forks may have written them since this kernel started.
__device__ __forceinline__ std::int32_t load(const DecodeIndices& indices, int n, int column = 0,
                                             bool in = true) {
    const std::int32_t* const words =
        advanced(advanced(indices.data, n, indices.row), column, indices.column);
    const auto lower = static_cast<std::int32_t>(load32_coherent_if(words, in && indices.data));
    if (!indices.wide) return lower;
    return narrow_index(lower, static_cast<std::int32_t>(load32_coherent_if(words + 1, in && indices.data)));
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

// Loads the numbers at from[i] into to[i * step], and zeros where not in(i). kByType asks for the type once,
// under a branch: a load of the other width takes an instruction even where a predicate disables it. It
// leaves registers of the other width alone, so `to` must hold zeros or numbers of the same type. Decode does
// without: addresses that wait for a branch are registers that it lacks.
template <bool kByType, int kCount, class In>
__device__ __forceinline__ void load_numbers(RawFloat* to, int step, const char* const (&from)[kCount],
                                             Element type, const In& in) {
    if constexpr (!kByType) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) to[i * step].load(from[i], type, in(i));
    } else if (type == Element::kFloat32) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) to[i * step].wide = load32_if(from[i], in(i));
    } else if (type != Element::kNone) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) to[i * step].narrow = load16_if(from[i], in(i));
    }
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

// Which values a thread loads. kRows: neighbouring threads those of neighbouring rows. kAccumulators: lane l
// of a warp those of token l % 4 in rows l / 4 and l / 4 + 8 of the warp's 16 rows of each tile. The sequence
// must have a token, and places beyond its end load its last one again, so that no load needs a predicate;
// nothing may use them.
enum class Values { kRows, kAccumulators };
inline constexpr int kAccumulatorRows = kStepThreads / 2;  // of a tile: 16 of each warp

// A thread's inputs of kTokens tokens. fetch() issues the loads to registers; ready() computes what all
// threads need and writes it to DecodeTokens.
template <int kKey, int kBlockRows, int kTokens, Keys kKeys, Values kOfThread = Values::kRows>
struct DecodeInputs
    : RawKeys<kKeys, kTokens * kKey / DecodeTokens<kKey, kBlockRows, kTokens, kKeys>::kThreads> {
    using Tokens = DecodeTokens<kKey, kBlockRows, kTokens, kKeys>;
    static constexpr int kOwned = kKey / Tokens::kThreads;  // channels per thread and token
    static constexpr int kValues = (kTokens * kBlockRows + kStepThreads - 1) / kStepThreads;
    static_assert(kOfThread == Values::kRows || (kTokens == 4 && kBlockRows % kAccumulatorRows == 0));

    RawFloat q[kTokens * kOwned], k[kTokens * kOwned], g[kTokens * kOwned], value[kValues], beta[kValues];
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
        if constexpr (kOfThread == Values::kAccumulators) return static_cast<int>(threadIdx.x % kTokens);
        return static_cast<int>((threadIdx.x + i * kStepThreads) / kBlockRows);
    }
    static __device__ __forceinline__ int row_of(int i) {
        if constexpr (kOfThread == Values::kAccumulators)
            return static_cast<int>(threadIdx.x / 32 * 16 + threadIdx.x % 32 / kTokens) +
                   i / 2 * kAccumulatorRows + i % 2 * 8;
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
    // Values come first and betas last: both are loaded under branches, for verify all inputs are, and ptxas
    // moves no load across a branch. So the load of the state's slot, where it was issued before, stays
    // ahead, and the copies of the state stay behind (unless decode asks for slots first).
    __device__ __forceinline__ void fetch(const DecodeArgs& a, int n, const DecodeRange& range, int t0,
                                          int value_head, int row0) {
        constexpr bool kRepeats = kOfThread == Values::kAccumulators;
        const auto in = [&](int j) { return kTokens == 1 || kRepeats || t0 + j < range.length; };
        const auto place = [&](int j) {
            return range.begin + (kRepeats ? min(t0 + j, range.length - 1) : t0 + j);
        };
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
            for (int j = 0; j < kTokens; ++j) of[j] = place(j);
        }
        // Number i of a thread is of token token_at(i) and channel channel_at(i); 0 if not wanted(i).
        const auto fetch_numbers = [&]<int kCount>(RawFloat* to, int step, const DecodeRows& rows, int head,
                                                   const auto& token_at, const auto& channel_at,
                                                   const auto& wanted) {
            const char* const first = advanced(advanced(rows.data, range.batch, rows.batch), head, rows.head);
            const char* at[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                at[i] = advanced(first, channel_at(i), rows.last);
                if constexpr (kTokens > 1) at[i] = advanced(at[i], token_at(i), rows.token);
            }
            load_numbers<kOfThread == Values::kAccumulators>(to, step, at, rows.type, wanted);
        };
        const auto fetch_values = [&](RawFloat(&to)[kValues], const DecodeRows& rows) {
            static_assert(kValues == 1 || kTokens * kBlockRows % kStepThreads == 0);
            if (owns_value(0))
                fetch_numbers.template operator()<kValues>(
                    to, 1, rows, value_head, [&](int i) { return place(token_of(i)); },
                    [&](int i) { return min(row0 + row_of(i), a.value_dim - 1); },
                    [&](int i) { return in(token_of(i)); });
        };
        const auto fetch_channels = [&](RawFloat(&to)[kTokens * kOwned], const DecodeRows& rows, int head,
                                        const auto& token_at, const auto& wanted) {
#pragma unroll
            for (int i = 0; i < kOwned; ++i)
                fetch_numbers.template operator()<kTokens>(
                    to + i, kOwned, rows, head, token_at, [&](int) { return channel(i); },
                    [&](int j) { return in(j) && wanted(j); });
        };
        const auto of_write = [&](int j) { return of[j]; };
        const auto always = [](int) { return true; };
        const auto decayed = [&](int j) { return kKeys != Keys::kSeveral || (decays >> j & 1) != 0; };
        const auto read = [&](int j) { return kKeys != Keys::kSeveral || (reads >> j & 1) != 0; };
        fetch_values(value, a.v);
        if (owns_channels()) {
            const int head = static_cast<int>(a.group.divide(value_head));
            fetch_channels(q, a.q, head, of_write, read);
            fetch_channels(k, a.k, head, place, always);
            fetch_channels(g, a.g, value_head, of_write, decayed);
            if constexpr (kKeys == Keys::kErase)
                fetch_channels(this->erase, a.erase, value_head, place, always);
            if constexpr (kKeys == Keys::kLowRank) {
                fetch_channels(this->a_key, a.a_key, value_head, place, always);
                fetch_channels(this->b_key, a.b_key, value_head, place, always);
            }
        }
        fetch_values(beta, a.beta);
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
                    const int at = j * kOwned + i;
                    const float x = q[at].value(a.q.type), y = k[at].value(a.k.type);
                    qq[j] += x * x, kk[j] += y * y, kq[j] += y * x;
                    s.q[j][channel(i)] = x, s.k[j][channel(i)] = y;
                    if constexpr (kKeys == Keys::kLowRank) {
                        const float z = this->b_key[at].value(a.b_key.type);
                        bq[j] += z * x;
                        s.a[j][channel(i)] = this->a_key[at].value(a.a_key.type);
                        s.b[j][channel(i)] = z;
                    }
                    decay[at] = g[at].value(a.g.type), shift[at] = bias[i];
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
                            s.e[j][channel(i)] =
                                k[j * kOwned + i].value(a.k.type) * erases(a, j * kOwned + i);
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
