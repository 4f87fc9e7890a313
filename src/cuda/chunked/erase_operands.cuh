// SPDX-License-Identifier: Apache-2.0
// erase_operands: w o v, and e <- v, beta, k, erase, of rules with erase strengths (GDN-2)
//
// With k normalised where the call asks for it, and sigmoids of what is given as logits:
//   values = beta o v        beta per value channel or per token; rounded to T, as v is
//   keys = erase o k         only of backward calls, for the gradient kernel; rounded to T
//   strengths = erase        only where prepare_channel cannot read them as they came; float32
// The rule is then the delta rule whose beta is 1 (prepare_channel.cuh).
//
// Grid: 256 threads; kKey / 8 lanes per token and value head, eight channels of e and eight value channels at
// a time each. No shared memory.
#pragma once

#include "cuda/chunked/prepare_erase.h"
#include "cuda/device_args.h"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/eight.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::chunked {

// What beta multiplies values by.
__device__ __forceinline__ float write_strength(const DeviceArgs& a, float given) {
    return a.beta_is_logit ? sigmoid(given) : given;
}

// All three are rows of a multiple of eight channels, contiguous, [B, T, HV, ..]; keys and strengths may be
// null.
template <class T, int kKey>
__global__ void __launch_bounds__(kEraseThreads)
    erase_operands(const __grid_constant__ DeviceArgs a, T* keys, float* strengths, T* values,
                   std::int64_t rows) {
    pdl_wait();
    pdl_trigger();
    constexpr int kLanes = kKey / 8;
    const std::int64_t number = (std::int64_t{blockIdx.x} * kEraseThreads + threadIdx.x) / kLanes;
    if (number - static_cast<int>(threadIdx.x) % 32 / kLanes >= rows) return;  // the same for a whole warp
    const bool exists = number < rows;
    const std::int64_t of_token = exists ? number / a.value_heads : 0, batch = of_token / a.tokens,
                       token = of_token % a.tokens;
    const int value_head = exists ? static_cast<int>(number - of_token * a.value_heads) : 0,
              i = static_cast<int>(threadIdx.x) % kLanes * 8;

    if (keys || strengths) {
        float k[8] = {}, erase[8] = {}, sum = 0.0f;
        if (i < a.key_dim) {
            load_eight<T>(k, a.k, a.k.offset(batch, token, a.by_group.divide(value_head)), i, a.key_dim);
            load_eight<T>(erase, a.erase, a.erase.offset(batch, token, value_head), i, a.key_dim);
        }
        if (a.qk_l2norm) {
#pragma unroll
            for (int e = 0; e < 8; ++e) sum = fmaf(k[e], k[e], sum);
#pragma unroll
            for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        }
        const float scale = a.qk_l2norm ? rsqrtf(sum + 1e-6f) : 1.0f;
        const std::int64_t at = number * width_of_rows(a.key_dim) + i;
        if (exists && i < a.key_dim) {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (strengths) strengths[at + e] = erase[e];
                k[e] *= scale * beta_of(a, erase[e]);
            }
            if (keys) store_eight(keys + at, k);
        }
    }
    if (!exists) return;

    const std::int64_t v_row = a.v.offset(batch, token, value_head),
                       beta_row = a.beta.offset(batch, token, value_head);
    float beta[8];
    if (!a.beta_per_value) {
        const float one = load_float(a.beta.data, a.beta.dtype, beta_row);
#pragma unroll
        for (int e = 0; e < 8; ++e) beta[e] = one;
    }
#pragma unroll 1
    for (int c = i; c < a.value_dim; c += kLanes * 8) {
        float v[8];
        load_eight<T>(v, a.v, v_row, c, a.value_dim);
        if (a.beta_per_value) load_eight<T>(beta, a.beta, beta_row, c, a.value_dim);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] *= write_strength(a, beta[e]);
        store_eight(values + number * width_of_rows(a.value_dim) + c, v);
    }
}

}  // namespace cula::cuda::chunked
