// SPDX-License-Identifier: Apache-2.0
// What follows the walks of a window: the sums that they left per slice of value channels (`partials`) become
// gradients. And what a call ends with. Every sum has one order.
//
//   backward_heads       dg, dbeta: over slices; gate and sigmoid. Summands of dA_log and ddt_bias, added
//                        over 64 tokens: a row of `parameters`. Zeros for tokens that no sequence has. Of
//                        the erase key e = erase o k: derase, and its part of dk. Of low-rank keys: da, db.
//   backward_keys        dq, dk: over slices, then over the value heads of a group; norm.
//   backward_parameters  dA_log, ddt_bias: the rows of `parameters`, added in float64.
//   backward_untouched   d_initial of sequences without tokens: it is d_final.
//
// Grid:
//   backward_keys        tokens of the window * H, a warp each; four warps a CTA
//   backward_heads       blocks of 64 tokens of the window * HV; eight warps a CTA
//   backward_parameters  HV * groups of 32 parameters of a value head (A_log, then dt_bias); eight warps
//   backward_untouched   sequences * HV * slices of 16 value channels; four warps
//
// Budgets on sm_90, K = 64, 128, 256 (one number: the same for all):
//                        registers      shared memory, KiB
//   backward_keys        32, 40, 48     none
//   backward_heads       89             2.03, 4.03, 8.03         with erase keys 96, with low-rank keys 95
//   backward_parameters  32             2
//   backward_untouched   27, 34, 50     none
#pragma once

#include "cuda/recurrent/backward_derivatives.cuh"
#include "cuda/recurrent/backward_plan.h"
#include "cuda/recurrent/lanes.cuh"
#include "cuda/recurrent/state_row.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/store_gradient.cuh"

namespace cula::cuda::recurrent {

inline constexpr int kFinishThreads = 256, kFinishWarps = kFinishThreads / 32;

// The sum over slices of one column of a token and value head; first: of its first slice's row.
__device__ __forceinline__ float sum_of_slices(const BackwardPlan& plan, const float* first) {
    float all = first[0];
    for (int slice = 1; slice < plan.slices; ++slice) all += first[slice * plan.columns.count];
    return all;
}

// The gradient of one head's q (column plan.columns.q; row: place.token) or k (place.row).
template <int kKey>
__device__ __forceinline__ void finish_key(const DeviceArgs& a, const BackwardPlan& plan,
                                           const TokenRows& rows, const TokenRows& d_rows, int column,
                                           const TokenPlace& place, std::int64_t row, std::int64_t own,
                                           int head) {
    constexpr int kPerLane = kKey / 32;
    if (!d_rows.data) return;
    float all[kPerLane] = {};
    const std::int64_t row_of_head = std::int64_t{plan.slices} * plan.columns.count;
    const float* first = plan.partials + (own * a.value_heads + std::int64_t{head} * a.group) * row_of_head +
                         column + threadIdx.x % 32;
    for (int i = 0; place.in_sequence && i < a.group; ++i, first += row_of_head)
#pragma unroll
        for (int c = 0; c < kPerLane; ++c) all[c] += sum_of_slices(plan, first + 32 * c);
    if (place.in_sequence) {
        store_key_gradient(a, rows, d_rows, place.batch, row, head, all);
    } else {
        const std::int64_t first_channel = d_rows.offset(place.batch, row, head);
        for (int c = static_cast<int>(threadIdx.x % 32); c < a.key_dim; c += 32)
            store_gradient(d_rows.data, d_rows.dtype, first_channel + c, 0.0f);
    }
}

template <int kKey>
__global__ void __launch_bounds__(kStepThreads)
    backward_keys(const __grid_constant__ DeviceArgs a, const __grid_constant__ backward::Gradients d,
                  const __grid_constant__ BackwardPlan plan, const __grid_constant__ Window window) {
    const std::int64_t warp = std::int64_t{blockIdx.x} * kStepWarps + threadIdx.x / 32, own = warp / a.heads;
    const int head = static_cast<int>(warp % a.heads);
    if (own >= window.tokens()) return;
    const TokenPlace place = place_of_token(a, window, own);
    if (place.last) finish_key<kKey>(a, plan, a.q, d.d_q, plan.columns.q, place, place.token, own, head);
    finish_key<kKey>(a, plan, a.k, d.d_k, plan.columns.k, place, place.row, own, head);
}

// The row of one token and value head, written with zeros. channels: 1 where it has one number.
__device__ __forceinline__ void store_zeros(const TokenRows& rows, std::int64_t batch, std::int64_t row,
                                            int head, int channels) {
    if (!rows.data) return;
    const std::int64_t first = rows.offset(batch, row, head);
    for (int c = static_cast<int>(threadIdx.x % 32); c < channels; c += 32)
        store_gradient(rows.data, rows.dtype, first + c * rows.last, 0.0f);
}

// From the gradient of a token's erase key, erase o k, to that of its erase strengths. What k gets is added
// to the first slice's row, for backward_keys.
template <int kKey>
__device__ __forceinline__ void finish_erase_key(const DeviceArgs& a, const backward::Gradients& d,
                                                 const BackwardPlan& plan, const TokenPlace& place,
                                                 std::int64_t own, int value_head) {
    float* const sums =
        plan.partials + (own * a.value_heads + value_head) * std::int64_t{plan.slices} * plan.columns.count;
    const float* const key = plan.keys + (own * a.heads + value_head / a.group) * 2 * kKey + kKey;
    const std::int64_t row = d.d_erase.offset(place.batch, place.token, value_head);
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x % 32); c < a.key_dim; c += 32) {
        const float gradient = sum_of_slices(plan, sums + plan.columns.erase + c);
        const EraseStrength strength(a, place.batch, place.token, value_head, c);
        if (plan.columns.k >= 0) sums[plan.columns.k + c] += gradient * strength.value;
        if (d.d_erase.data)
            store_gradient(d.d_erase.data, d.d_erase.dtype, row + c, gradient * key[c] * strength.slope);
    }
}

// The gradient of a low-rank key, whose sums begin at `sums`.
__device__ __forceinline__ void finish_low_rank_key(const DeviceArgs& a, const BackwardPlan& plan,
                                                    const TokenRows& d_rows, const TokenPlace& place,
                                                    int value_head, const float* sums) {
    if (!d_rows.data) return;
    const std::int64_t row = d_rows.offset(place.batch, place.token, value_head);
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x % 32); c < a.key_dim; c += 32)
        store_gradient(d_rows.data, d_rows.dtype, row + c, sum_of_slices(plan, sums + c));
}

template <int kKey, Keys kKeys>
__global__ void __launch_bounds__(kFinishThreads, 2)
    backward_heads(const __grid_constant__ DeviceArgs a, const __grid_constant__ backward::Gradients d,
                   const __grid_constant__ BackwardPlan plan, const __grid_constant__ Window window) {
    __shared__ float of_bias[kFinishWarps][kKey],
        of_A_log[kFinishWarps];  // running sums; a lane's are its own
    const int value_head = static_cast<int>(blockIdx.x) % a.value_heads,
              warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const std::int64_t block = blockIdx.x / a.value_heads, first = block * kParameterTokens;
    const bool per_channel = a.algorithm.decay == kChannelDecay, of_decay = d.decay();
    const int channels = per_channel ? a.key_dim : 1,
              column = per_channel ? plan.columns.decay : plan.columns.token_decay;
    const ExactGate gate(a.gate, a.A_log.data ? a.A_log.data[value_head * a.A_log.head] : 0.0f, a.lower_bound,
                         0.0f);
    const float* const bias = a.dt_bias.data + value_head * a.dt_bias.head;
    float A_log_sum = 0.0f;
    for (int c = lane; c < channels; c += 32) of_bias[warp][c] = 0.0f;
#pragma unroll 1
    for (int i = warp; i < kParameterTokens && first + i < window.tokens(); i += kFinishWarps) {
        const TokenPlace place = place_of_token(a, window, first + i);
        if (!place.in_sequence) {
            const auto zeros = [&](const TokenRows& rows, std::int64_t row, int count) {
                store_zeros(rows, place.batch, row, value_head, count);
            };
            zeros(d.d_v, place.row, a.value_dim);
            zeros(d.d_beta, place.row, a.beta_per_value ? a.value_dim : 1);
            if (place.first) zeros(d.d_g, place.token, channels);
            if constexpr (kKeys == Keys::kErase) zeros(d.d_erase, place.row, a.key_dim);
            if constexpr (kKeys == Keys::kLowRank) {
                zeros(d.d_a_key, place.token, a.key_dim);
                zeros(d.d_b_key, place.token, a.key_dim);
            }
            continue;
        }
        const float* const sums = plan.partials + ((first + i) * a.value_heads + value_head) *
                                                      std::int64_t{plan.slices} * plan.columns.count;
        if (plan.columns.beta >= 0 && lane == 0)
            store_beta_gradient<kKeys>(a, d.d_beta, place.batch, place.row, value_head, 0,
                                       sum_of_slices(plan, sums + plan.columns.beta));
        if constexpr (kKeys == Keys::kErase)
            if (plan.columns.erase >= 0) finish_erase_key<kKey>(a, d, plan, place, first + i, value_head);
        if constexpr (kKeys == Keys::kLowRank) {
            finish_low_rank_key(a, plan, d.d_a_key, place, value_head, sums + plan.columns.a_key);
            finish_low_rank_key(a, plan, d.d_b_key, place, value_head, sums + plan.columns.b_key);
        }
        if (!of_decay || !place.first) continue;
        const std::int64_t g_row = a.g.offset(place.batch, place.token, value_head),
                           d_g_row = d.d_g.offset(place.batch, place.token, value_head);
#pragma unroll 1
        for (int c = lane; c < channels; c += 32) {
            const float raw = load_float(a.g.data, a.g.dtype, g_row + c),
                        x = a.dt_bias.data ? raw + bias[c * a.dt_bias.channel] : raw;
            const ExactGateGradient gradient = through_gate(gate, x, sum_of_slices(plan, sums + column + c));
            if (d.d_g.data) store_gradient(d.d_g.data, d.d_g.dtype, d_g_row + c, gradient.of_x);
            of_bias[warp][c] += gradient.of_x;
            A_log_sum += gradient.of_A_log;
        }
    }
    if (!d.parameters()) return;
    A_log_sum = warp_sum(A_log_sum);
    if (lane == 0) of_A_log[warp] = A_log_sum;
    __syncthreads();
    float* const row =
        plan.parameters + ((window.first_parameters + block) * a.value_heads + value_head) * (1 + channels);
    for (int c = static_cast<int>(threadIdx.x); c < channels; c += kFinishThreads) {
        float all = of_bias[0][c];
        for (int other = 1; other < kFinishWarps; ++other) all += of_bias[other][c];
        row[1 + c] = all;
    }
    if (threadIdx.x == 0) row[0] = sum(of_A_log);
}

template <int kKey>
__global__ void __launch_bounds__(kFinishThreads)
    backward_parameters(const __grid_constant__ DeviceArgs a, const __grid_constant__ backward::Gradients d,
                        const __grid_constant__ BackwardPlan plan, const std::int64_t rows) {
    __shared__ double sums[kFinishWarps][32];
    const int columns = 1 + (a.algorithm.decay == kChannelDecay ? a.key_dim : 1),
              groups = (columns + 31) / 32, value_head = static_cast<int>(blockIdx.x) / groups,
              warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
              column = static_cast<int>(blockIdx.x) % groups * 32 + lane;
    double all = 0.0;
    for (std::int64_t row = warp; column < columns && row < rows; row += kFinishWarps)
        all += static_cast<double>(plan.parameters[(row * a.value_heads + value_head) * columns + column]);
    sums[warp][lane] = all;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (int other = 1; other < kFinishWarps; ++other) all += sums[other][lane];
    const backward::ParameterGradient& to = column == 0 ? d.d_A_log : d.d_dt_bias;
    if (to.data)
        to.data[value_head * to.head + (column - (column > 0)) * to.channel] = static_cast<float>(all);
}

template <int kKey>
__global__ void __launch_bounds__(kStepThreads)
    backward_untouched(const __grid_constant__ DeviceArgs a, const __grid_constant__ backward::Gradients d,
                       const __grid_constant__ BackwardPlan plan) {
    const int slice = static_cast<int>(blockIdx.x) % plan.slices,
              value_head = static_cast<int>(blockIdx.x) / plan.slices % a.value_heads,
              row = slice * kWalkRows + static_cast<int>(threadIdx.x) / kLanesPerRow;
    const std::int64_t n = blockIdx.x / plan.slices / a.value_heads;
    if (tokens_of(a, n).length > 0) return;
    StateRow<kKey> Z;
    if (d.d_final.data && (!a.has_initial || a.has_initial[n]))
        Z.load(a, d.d_final, d.d_final.offset(n, value_head), row, a.value_dim);
    else
        for (float& x : Z.x) x = 0.0f;
    Z.store(a, d.d_initial, d.d_initial.offset(n, value_head), row, a.value_dim);
}

}  // namespace cula::cuda::recurrent
