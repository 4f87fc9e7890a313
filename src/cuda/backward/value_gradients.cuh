// SPDX-License-Identifier: Apache-2.0
// value_gradients: d_v, d_beta <- the gradient of beta o v, v, beta, of rules with erase strengths (GDN-2)
//
// With x the gradient of beta o v, which the walks have written:
//   d_v = beta o x        d_beta = v o x, or, where a token has one beta, v . x; through the sigmoid of
//   logits
//
// Grid: 256 threads; kKey / 8 lanes per value head and kTokensOfLane neighbouring tokens, eight value
// channels at a time each. Tokens behind the last packed sequence are left to zero_tail (sum.cuh). No shared
// memory.
#pragma once

#include "cuda/backward/derivatives.cuh"
#include "cuda/backward/gradients.h"
#include "cuda/chunked/erase_operands.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/eight.cuh"
#include "cuda/tile/store_gradient.cuh"

namespace cula::cuda::backward {

// runs: of kTokensOfLane tokens, of all rows b and value heads.
template <class T, int kKey>
__global__ void __launch_bounds__(chunked::kEraseThreads, 2)
    value_gradients(const __grid_constant__ DeviceArgs a, const __grid_constant__ TokenRows d_values,
                    const __grid_constant__ Gradients d, std::int64_t runs) {
    pdl_trigger_and_wait();
    constexpr int kTokens = chunked::kTokensOfLane;
    chunked::TokenRun<kKey> run(a, runs);
    constexpr int kLanes = run.kLanes;
    if (a.cu_seqlens)
        run.tokens = static_cast<int>(
            max(std::int64_t{0}, min(std::int64_t{run.tokens}, Offsets(a).at(a.sequences) - run.first)));

    // Of one token from channel i on: d_v, and the products v o x, through the sigmoid of logits.
    const auto differentiate = [&](const float(&x)[8], const float(&v)[8], const float(&given)[8],
                                   float(&d_v)[8], float(&products)[8]) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            d_v[e] = x[e] * chunked::write_strength(a, given[e]);
            products[e] = x[e] * v[e];
            if (a.beta_per_value && a.beta_is_logit) products[e] *= sigmoid(given[e]) * sigmoid(-given[e]);
        }
    };
    const auto writes_pieces = [](const TokenRows& rows) {
        return !rows.data || chunked::comes_in_pieces<T>(rows);
    };
    if (a.beta_per_value && chunked::comes_in_pieces<T>(d_values) && chunked::comes_in_pieces<T>(a.v) &&
        chunked::comes_in_pieces<T>(a.beta) && writes_pieces(d.d_v) && writes_pieces(d.d_beta)) {
#pragma unroll 1
        for (int i = run.channel; i < a.value_dim; i += kLanes * 8) {
            uint4 x[kTokens], v[kTokens], given[kTokens];
#pragma unroll
            for (int t = 0; t < kTokens; ++t) {
                x[t] = run.template piece<T>(d_values, t, i), v[t] = run.template piece<T>(a.v, t, i);
                given[t] = run.template piece<T>(a.beta, t, i);
            }
#pragma unroll
            for (int t = 0; t < kTokens; ++t) {
                float of_x[8], of_v[8], strength[8], d_v[8], products[8];
                unpack_eight<T>(of_x, x[t]), unpack_eight<T>(of_v, v[t]);
                unpack_eight<T>(strength, given[t]);
                differentiate(of_x, of_v, strength, d_v, products);
                if (t >= run.tokens) continue;
                if (d.d_v.data) store_eight(static_cast<T*>(d.d_v.data) + run.at(d.d_v, t) + i, d_v);
                if (d.d_beta.data)
                    store_eight(static_cast<T*>(d.d_beta.data) + run.at(d.d_beta, t) + i, products);
            }
        }
        return;
    }
#pragma unroll 1
    for (int t = 0; t < kTokens; ++t) {  // all lanes of a warp in step: they share sums
        const bool exists = t < run.tokens;
        float given[8], sum = 0.0f;
        if (exists && !a.beta_per_value) {
            const float one = load_float(a.beta.data, a.beta.dtype, run.at(a.beta, t));
#pragma unroll
            for (int e = 0; e < 8; ++e) given[e] = one;
        }
#pragma unroll 1
        for (int i = run.channel; exists && i < a.value_dim; i += kLanes * 8) {
            float x[8], v[8], d_v[8], products[8];
            load_eight<T>(x, d_values, run.at(d_values, t), i, a.value_dim);
            load_eight<T>(v, a.v, run.at(a.v, t), i, a.value_dim);
            if (a.beta_per_value) load_eight<T>(given, a.beta, run.at(a.beta, t), i, a.value_dim);
            differentiate(x, v, given, d_v, products);
            if (d.d_v.data) put_eight<T>(d.d_v, run.at(d.d_v, t), i, a.value_dim, d_v);
            if (a.beta_per_value && d.d_beta.data)
                put_eight<T>(d.d_beta, run.at(d.d_beta, t), i, a.value_dim, products);
#pragma unroll
            for (float product : products) sum += product;
        }
        if (a.beta_per_value || !d.d_beta.data) continue;
#pragma unroll
        for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (!exists || run.channel > 0) continue;
        if (a.beta_is_logit) sum *= sigmoid(given[0]) * sigmoid(-given[0]);
        store_gradient(d.d_beta.data, d.d_beta.dtype, run.at(d.d_beta, t), sum);
    }
}

}  // namespace cula::cuda::backward
