// SPDX-License-Identifier: Apache-2.0
// value_gradients: d_v, d_beta <- the gradient of beta o v, v, beta, of rules with erase strengths (GDN-2)
//
// With x the gradient of beta o v, which the walks have written:
//   d_v = beta o x        d_beta = v o x, or, where a token has one beta, v . x; through the sigmoid of
//   logits
//
// Grid: 256 threads; kKey / 8 lanes per token and value head, eight value channels at a time each. Tokens
// behind the last packed sequence are left to zero_tail (sum.cuh). No shared memory.
#pragma once

#include "cuda/backward/derivatives.cuh"
#include "cuda/backward/gradients.h"
#include "cuda/chunked/erase_operands.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/eight.cuh"
#include "cuda/tile/store_gradient.cuh"

namespace cula::cuda::backward {

template <class T, int kKey>
__global__ void __launch_bounds__(chunked::kEraseThreads)
    value_gradients(const __grid_constant__ DeviceArgs a, const __grid_constant__ TokenRows d_values,
                    const __grid_constant__ Gradients d, std::int64_t rows) {
    pdl_trigger_and_wait();
    constexpr int kLanes = kKey / 8;
    const std::int64_t number = (std::int64_t{blockIdx.x} * chunked::kEraseThreads + threadIdx.x) / kLanes;
    const std::int64_t of_token = number < rows ? number / a.value_heads : 0, batch = of_token / a.tokens,
                       token = of_token % a.tokens;
    const bool exists = number < rows && (!a.cu_seqlens || token < Offsets(a).at(a.sequences));
    const int value_head = static_cast<int>(number - of_token * a.value_heads),
              first = static_cast<int>(threadIdx.x) % kLanes * 8;
    const std::int64_t at = exists ? d_values.offset(batch, token, value_head) : 0,
                       v_at = exists ? a.v.offset(batch, token, value_head) : 0,
                       beta_at = exists ? a.beta.offset(batch, token, value_head) : 0;

    float given[8], sum = 0.0f;
    if (exists && !a.beta_per_value) {
        const float one = load_float(a.beta.data, a.beta.dtype, beta_at);
#pragma unroll
        for (int e = 0; e < 8; ++e) given[e] = one;
    }
#pragma unroll 1
    for (int i = first; exists && i < a.value_dim; i += kLanes * 8) {
        float x[8], v[8], of[8];
        load_eight<T>(x, d_values, at, i, a.value_dim);
        load_eight<T>(v, a.v, v_at, i, a.value_dim);
        if (a.beta_per_value) load_eight<T>(given, a.beta, beta_at, i, a.value_dim);
#pragma unroll
        for (int e = 0; e < 8; ++e) of[e] = x[e] * chunked::write_strength(a, given[e]);
        if (d.d_v.data) put_eight<T>(d.d_v, d.d_v.offset(batch, token, value_head), i, a.value_dim, of);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            of[e] = x[e] * v[e];
            if (!a.beta_per_value) sum += of[e];
            if (a.beta_is_logit) of[e] *= sigmoid(given[e]) * sigmoid(-given[e]);
        }
        if (a.beta_per_value && d.d_beta.data)
            put_eight<T>(d.d_beta, d.d_beta.offset(batch, token, value_head), i, a.value_dim, of);
    }
    if (a.beta_per_value || !d.d_beta.data) return;
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (!exists || first > 0) return;
    if (a.beta_is_logit) sum *= sigmoid(given[0]) * sigmoid(-given[0]);
    store_gradient(d.d_beta.data, d.d_beta.dtype, d.d_beta.offset(batch, token, value_head), sum);
}

}  // namespace cula::cuda::backward
