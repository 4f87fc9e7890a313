// SPDX-License-Identifier: Apache-2.0
// low_rank: one token of a rule with low-rank keys, for some rows of the state. Per row s [K] of S [V, K]:
//     r  = s . a
//     s <- s o exp(g) + r b + v k
//     o  = s . (exp(g) o q) + r (b . q) + v (k . q)      of the s before
// step.h and step_back.h have what is around it.
#pragma once

#include <type_traits>

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

// Rows of a state that pass a token together: with an output each has two sums over channels, else one, and
// those of all rows fill a vector.
inline constexpr int kOutputRows = kLanes > 8 ? kLanes / 2 : 4, kStateRows = kLanes > 4 ? kLanes : 4;

// dst[i] = sum(x[i]), in an order that does not depend on kCount. dst has room for whole vectors.
template <int kCount>
CULA_INLINE void store_sums(float* dst, const Vec (&x)[kCount]) {
    CULA_UNROLL
    for (int first = 0; first < kCount; first += kLanes) {
        Vec group[kLanes];
        CULA_UNROLL
        for (int i = 0; i < kLanes; ++i) group[i] = first + i < kCount ? x[first + i] : Vec{};
        store(dst + first, sums(group));
    }
}

template <int kCount, bool kOutputs>
CULA_INLINE void pass_rows(const LowRankToken& token, int channels, const float* before, float* after,
                           std::int64_t stride, int row) {
    Vec partial[kOutputs ? 2 * kCount : kCount] = {};  // of r, then of s . (exp(g) o q)
    for (int c = 0; c < channels; c += kLanes) {
        const Vec a = load(token.a + c), q = kOutputs ? load(token.decayed_q + c) : Vec{};
        CULA_UNROLL
        for (int r = 0; r < kCount; ++r) {
            const Vec s = load(before + r * stride + c);
            partial[r] += s * a;
            if constexpr (kOutputs) partial[kCount + r] += s * q;
        }
    }
    float found[2 * kCount + kLanes];
    store_sums(found, partial);
    const float* v = token.v + row;
    for (int r = 0; r < kCount; ++r) {
        token.read[row + r] = found[r];
        if constexpr (kOutputs)
            token.out[row + r] = found[kCount + r] + found[r] * token.b_query + v[r] * token.key_query;
    }
    for (int c = 0; c < channels; c += kLanes) {
        const Vec decay = load(token.decay + c), b = load(token.b + c), k = load(token.k + c);
        CULA_UNROLL
        for (int r = 0; r < kCount; ++r)
            store(after + r * stride + c, load(before + r * stride + c) * decay + b * found[r] + k * v[r]);
    }
}

// Calls pass(std::integral_constant<int, count>, row) for all rows, kMost at a time where there are as many,
// else four. rows is a multiple of 4.
template <int kMost, class Pass>
CULA_INLINE void each_rows(int rows, const Pass& pass) {
    int row = 0;
    for (; row + kMost <= rows; row += kMost) pass(std::integral_constant<int, kMost>{}, row);
    for (; row < rows; row += 4) pass(std::integral_constant<int, 4>{}, row);
}

}  // namespace cula::cpu::CULA_CPU_TARGET
