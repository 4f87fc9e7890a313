// SPDX-License-Identifier: Apache-2.0
// backward_prepare: the inputs of one window's tokens, in float32 and as the equations take them, into the
// workspace (BackwardPlan): q and k normalised, decays, erase or low-rank keys, v, write strengths, scale *
// d_o.
//
// Grid: tokens of the window * (H + HV), a warp each: first the H heads of q and k, then the value heads.
// The walks read every number of it from each slice of value channels, and twice or three times; here every
// gate is computed once, as exactly as float32 allows. Channels beyond K and V become zero, so that the walks
// need no bounds.
//
// Budgets on sm_90: CTAs of 128 threads with 48 registers each, for every K; no shared memory.
#pragma once

#include "cuda/recurrent/backward_derivatives.cuh"
#include "cuda/recurrent/backward_plan.h"
#include "cuda/recurrent/lanes.cuh"
#include "cuda/rule.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::recurrent {

// row: of q or k; count: its channels, or none where it is zero.
template <int kKey>
__device__ __forceinline__ void prepare_key(const DeviceArgs& a, const TokenRows& rows, std::int64_t row,
                                            int count, float* to) {
    float x[kKey / 32], squares = 0.0f;
    load_channels(x, rows, row, count);
#pragma unroll
    for (const float element : x) squares += element * element;
    const float factor = norm_factor(a, warp_sum(squares));
#pragma unroll
    for (int i = 0; i < kKey / 32; ++i) to[threadIdx.x % 32 + 32 * i] = x[i] * factor;
}

// Where a rule has erase strengths: the erase key of a value head, erase o k.
template <int kKey>
__device__ __forceinline__ void prepare_erase_key(const DeviceArgs& a, const TokenPlace& place,
                                                  int value_head, float* to) {
    float x[kKey / 32], squares = 0.0f;
    load_channels(x, a.k, a.k.offset(place.batch, place.row, value_head / a.group), a.key_dim);
#pragma unroll
    for (const float element : x) squares += element * element;
    const float factor = norm_factor(a, warp_sum(squares));
#pragma unroll
    for (int i = 0; i < kKey / 32; ++i) to[threadIdx.x % 32 + 32 * i] = x[i] * factor;
#pragma unroll 1  // each lane's own channels
    for (int c = static_cast<int>(threadIdx.x % 32); c < a.key_dim; c += 32)
        to[c] *= EraseStrength(a, place.batch, place.token, value_head, c).value;
}

// A low-rank key.
template <int kKey>
__device__ __forceinline__ void copy_key(const TokenRows& rows, std::int64_t row, int count, float* to) {
    float x[kKey / 32];
    load_channels(x, rows, row, count);
#pragma unroll
    for (int i = 0; i < kKey / 32; ++i) to[threadIdx.x % 32 + 32 * i] = x[i];
}

template <int kKey, Keys kKeys>
__global__ void __launch_bounds__(kStepThreads)
    backward_prepare(const __grid_constant__ DeviceArgs a, const __grid_constant__ backward::Gradients d,
                     const __grid_constant__ BackwardPlan plan, const __grid_constant__ Window window) {
    const int tasks = a.heads + a.value_heads, lane = static_cast<int>(threadIdx.x % 32);
    const std::int64_t warp = std::int64_t{blockIdx.x} * kStepWarps + threadIdx.x / 32, own = warp / tasks;
    const int task = static_cast<int>(warp % tasks);
    if (own >= window.tokens()) return;
    const TokenPlace place = place_of_token(a, window, own);
    if (!place.in_sequence) return;  // no walk reads it
    if (task < a.heads) {
        float* const to = plan.keys + (own * a.heads + task) * 2 * kKey;
        prepare_key<kKey>(a, a.q, a.q.offset(place.batch, place.token, task), place.last ? a.key_dim : 0, to);
        prepare_key<kKey>(a, a.k, a.k.offset(place.batch, place.row, task), a.key_dim, to + kKey);
        return;
    }
    const int value_head = task - a.heads;
    const std::int64_t at = own * a.value_heads + value_head;

    const bool per_channel = a.algorithm.decay == kChannelDecay;
    const ExactGate gate(a.gate, a.A_log.data ? a.A_log.data[value_head * a.A_log.head] : 0.0f, a.lower_bound,
                         !per_channel && a.gamma.data ? a.gamma.data[value_head * a.gamma.head] : 0.0f);
    const std::int64_t g_row = a.g.offset(place.batch, place.token, value_head);
    const float* const bias = a.dt_bias.data + value_head * a.dt_bias.head;
    float one = 0.0f;
    if (!per_channel) {
        float x = a.algorithm.decay == kTokenDecay ? load_float(a.g.data, a.g.dtype, g_row) : 0.0f;
        if (a.dt_bias.data) x += *bias;
        // Without g there is no raw gate either: gamma alone, which may be zero.
        one = a.algorithm.decay == kTokenDecay ? gate.decay(x) : exp_exact(gate.gamma);
    }
#pragma unroll 1
    for (int c = lane; c < kKey; c += 32) {
        float decay = one;
        if (per_channel && c < a.key_dim)
            decay = gate.decay(load_float(a.g.data, a.g.dtype, g_row + c) +
                               (a.dt_bias.data ? bias[c * a.dt_bias.channel] : 0.0f));
        if (!place.first) decay = 1.0f;
        plan.decays[at * kKey + c] = c < a.key_dim ? decay : 0.0f;
    }

    if constexpr (kKeys == Keys::kErase)
        prepare_erase_key<kKey>(a, place, value_head, plan.other_keys + at * kKey);
    if constexpr (kKeys == Keys::kLowRank) {
        float* const to = plan.other_keys + at * 2 * kKey;
        copy_key<kKey>(a.a_key, a.a_key.offset(place.batch, place.token, value_head), a.key_dim, to);
        copy_key<kKey>(a.b_key, a.b_key.offset(place.batch, place.token, value_head), a.key_dim, to + kKey);
    }
    const bool takes_betas = answer_for(
        a.algorithm.update, []<Update kUpdate>(UpdateConstant<kUpdate>) { return takes_beta(kUpdate); });
    float* const to = plan.values + at * 3 * plan.value_dim;
    const bool reads = place.last && d.d_o.data;
    const std::int64_t v_row = a.v.offset(place.batch, place.row, value_head),
                       d_row = d.d_o.offset(place.batch, place.token, value_head),
                       beta_row = a.beta.offset(place.batch, place.row, value_head),
                       beta_step = a.beta_per_value ? a.beta.last : 0;
#pragma unroll 1
    for (int c = lane; c < plan.value_dim; c += 32) {
        const bool in = c < a.value_dim;
        to[c] = in ? load_float(a.v.data, a.v.dtype, v_row + c) : 0.0f;
        if (takes_betas)
            to[plan.value_dim + c] =
                in ? beta_exact(load_float(a.beta.data, a.beta.dtype, beta_row + c * beta_step),
                                a.beta_is_logit, most_beta<kKeys>(a))
                   : 0.0f;
        to[2 * plan.value_dim + c] =
            in && reads ? a.scale * load_float(d.d_o.data, d.d_o.dtype, d_row + c) : 0.0f;
    }
}

}  // namespace cula::cuda::recurrent
