// SPDX-License-Identifier: Apache-2.0
// low_rank: one token of a rule with low-rank keys, for some rows of the state. Per row s [K] of S [V, K]:
//     r  = s . a
//     s <- s o exp(g) + r b + v k
//     o  = s . (exp(g) o q) + r (b . q) + v (k . q)      of the s before
// step.h and step_back.h have what is around it.
#pragma once

#include "cpu/inputs.h"

namespace cula::cpu::CULA_CPU_TARGET {

// What a token brings. Rows of channels are padded, and v and what is written per value channel have room for
// whole rows of the task.
struct LowRankToken {
    float *decay, *k, *a, *b;  // [K]
    float* v;                  // [V]
    float* read;               // [V]: r
    // Where there is an output.
    float* decayed_q;  // [K]: exp(g) o q
    float* out;        // [V]
    float key_query, b_query;
};

template <int kCount, bool kOutputs>
CULA_INLINE void pass_rows(const LowRankToken& token, int channels, const float* before, float* after,
                           std::int64_t stride, int row) {
    Vec reads[kCount] = {}, outs[kCount] = {};
    for (int c = 0; c < channels; c += kLanes) {
        const Vec a = load(token.a + c), q = kOutputs ? load(token.decayed_q + c) : Vec{};
        CULA_UNROLL
        for (int r = 0; r < kCount; ++r) {
            const Vec s = load(before + r * stride + c);
            reads[r] += s * a;
            if constexpr (kOutputs) outs[r] += s * q;
        }
    }
    float read[kCount], v[kCount];
    CULA_UNROLL
    for (int r = 0; r < kCount; ++r) {
        v[r] = token.v[row + r];
        token.read[row + r] = read[r] = sum(reads[r]);
        if constexpr (kOutputs)
            token.out[row + r] = sum(outs[r]) + read[r] * token.b_query + v[r] * token.key_query;
    }
    for (int c = 0; c < channels; c += kLanes) {
        const Vec decay = load(token.decay + c), b = load(token.b + c), k = load(token.k + c);
        CULA_UNROLL
        for (int r = 0; r < kCount; ++r)
            store(after + r * stride + c, load(before + r * stride + c) * decay + b * read[r] + k * v[r]);
    }
}

}  // namespace cula::cpu::CULA_CPU_TARGET
