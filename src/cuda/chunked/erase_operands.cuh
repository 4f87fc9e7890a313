// SPDX-License-Identifier: Apache-2.0
// erase_operands: w o v, and e <- v, beta, k, erase, of rules with erase strengths (GDN-2)
//
// With k normalised where the call asks for it, and sigmoids of what is given as logits:
//   values = beta o v        beta per value channel or per token; rounded to T, as v is
//   keys = erase o k         only of backward calls, for the gradient kernel; rounded to T
//   strengths = erase        only where prepare_channel cannot read them as they came; float32
// The rule is then the delta rule whose beta is 1 (prepare_channel.cuh).
//
// Grid: 256 threads; kKey / 8 lanes per value head and kTokensOfLane neighbouring tokens, eight channels of e
// and eight value channels at a time each. No shared memory.
// Values come in pieces of 16 bytes as a rule. Those of all tokens of a lane are then on their way at once.
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

// The tokens of a lane's run, of a value head, and its first channel.
template <int kKey>
struct TokenRun {
    static constexpr int kLanes = kKey / 8;
    std::int64_t batch = 0, first = 0;
    int value_head = 0, tokens = 0, channel;

    // runs: of all rows b and value heads.
    __device__ __forceinline__ TokenRun(const DeviceArgs& a, std::int64_t runs)
        : channel(static_cast<int>(threadIdx.x) % kLanes * 8) {
        const std::int64_t number = (std::int64_t{blockIdx.x} * kEraseThreads + threadIdx.x) / kLanes;
        if (number >= runs) return;
        const std::int64_t of_head = number / a.value_heads,
                           runs_of_row = (a.tokens + kTokensOfLane - 1) / kTokensOfLane;
        batch = of_head / runs_of_row;
        first = (of_head - batch * runs_of_row) * kTokensOfLane;
        value_head = static_cast<int>(number - of_head * a.value_heads);
        tokens = static_cast<int>(min(std::int64_t{kTokensOfLane}, a.tokens - first));
    }
    __device__ __forceinline__ std::int64_t at(const TokenRows& rows, int t) const {
        return rows.offset(batch, first + t, value_head);
    }
    // Of rows in pieces of T. Those that do not exist are the first one.
    template <class T>
    __device__ __forceinline__ uint4 piece(const TokenRows& rows, int t, int c) const {
        const T* const row = static_cast<const T*>(rows.data) + at(rows, t < tokens ? t : 0);
        return __ldcs(reinterpret_cast<const uint4*>(row + c));
    }
};

template <class T>
__device__ __forceinline__ bool comes_in_pieces(const TokenRows& rows) {
    return rows.pieces && rows.dtype == kDtype<T>;
}

// All three are rows of a multiple of eight channels, contiguous, [B, T, HV, ..]; keys and strengths may be
// null. runs: of kTokensOfLane tokens, of all rows b and value heads.
template <class T, int kKey>
__global__ void __launch_bounds__(kEraseThreads, 3)
    erase_operands(const __grid_constant__ DeviceArgs a, T* keys, float* strengths, T* values,
                   std::int64_t runs) {
    pdl_wait();
    pdl_trigger();
    const TokenRun<kKey> run(a, runs);
    constexpr int kLanes = run.kLanes;
    const int i = run.channel;
    const std::int64_t row =
        (run.batch * a.tokens + run.first) * a.value_heads + run.value_head;  // of what is made

    if (keys || strengths) {
#pragma unroll 1
        for (int t = 0; t < kTokensOfLane; ++t) {
            const std::int64_t token = run.first + (t < run.tokens ? t : 0);
            const int head = a.by_group.divide(run.value_head);
            float k[8] = {}, erase[8] = {}, sum = 0.0f;
            if (i < a.key_dim) {
                load_eight<T>(k, a.k, a.k.offset(run.batch, token, head), i, a.key_dim);
                load_eight<T>(erase, a.erase, a.erase.offset(run.batch, token, run.value_head), i, a.key_dim);
            }
            if (a.qk_l2norm) {
#pragma unroll
                for (int e = 0; e < 8; ++e) sum = fmaf(k[e], k[e], sum);
#pragma unroll
                for (int lanes = 1; lanes < kLanes; lanes *= 2)
                    sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
            }
            const float scale = a.qk_l2norm ? rsqrtf(sum + 1e-6f) : 1.0f;
            const std::int64_t at = (row + std::int64_t{t} * a.value_heads) * width_of_rows(a.key_dim) + i;
            if (t >= run.tokens || i >= a.key_dim) continue;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (strengths) strengths[at + e] = erase[e];
                k[e] *= scale * beta_of(a, erase[e]);
            }
            if (keys) store_eight(keys + at, k);
        }
    }

    const std::int64_t width = width_of_rows(a.value_dim);
    if (a.beta_per_value && comes_in_pieces<T>(a.v) && comes_in_pieces<T>(a.beta)) {
#pragma unroll 1
        for (int c = i; c < a.value_dim; c += kLanes * 8) {
            uint4 v[kTokensOfLane], beta[kTokensOfLane];
#pragma unroll
            for (int t = 0; t < kTokensOfLane; ++t)
                v[t] = run.template piece<T>(a.v, t, c), beta[t] = run.template piece<T>(a.beta, t, c);
#pragma unroll
            for (int t = 0; t < kTokensOfLane; ++t) {
                float x[8], strength[8];
                unpack_eight<T>(x, v[t]), unpack_eight<T>(strength, beta[t]);
#pragma unroll
                for (int e = 0; e < 8; ++e) x[e] *= write_strength(a, strength[e]);
                if (t < run.tokens)
                    store_eight(values + (row + std::int64_t{t} * a.value_heads) * width + c, x);
            }
        }
        return;
    }
#pragma unroll 1
    for (int t = 0; t < run.tokens; ++t) {
        const std::int64_t v_row = run.at(a.v, t), beta_row = run.at(a.beta, t);
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
            store_eight(values + (row + std::int64_t{t} * a.value_heads) * width + c, v);
        }
    }
}

}  // namespace cula::cuda::chunked
