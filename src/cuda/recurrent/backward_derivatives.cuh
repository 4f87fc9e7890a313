// SPDX-License-Identifier: Apache-2.0
// From the gradients of what the equations take to those of what the call got, as exactly as float32 allows:
//
//     gate     softplus  dx = -e sigmoid(x) da                   dA_log += da a
//              bounded   dx = lower_bound e s (1 - s) da         dA_log += dx x,  with s = sigmoid(e x)
//              x = g + dt_bias, a the log decay, e = exp(A_log);  dg = dx,  ddt_bias += dx
//     beta     dx = beta sigmoid(-x) dbeta                       where beta = c sigmoid(x); so does erase
//     norm     dx = r (dy - (dy . y) y),                         y = r x,  r = 1 / sqrt(x . x + 1e-6)
//
// 1 - sigmoid(x) is sigmoid(-x), which loses no digits. The chunked kernels' are backward/derivatives.cuh.
#pragma once

#include "cuda/device_args.h"
#include "cuda/recurrent/keys.h"
#include "cuda/recurrent/lanes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/store_gradient.cuh"

namespace cula::cuda::recurrent {

// The gradient of x = g + bias, and the summand of dA_log.
struct ExactGateGradient {
    float of_x, of_A_log;
};

// x: the raw gate with its bias, or the log decay. d_a: the gradient of the log decay.
__device__ __forceinline__ ExactGateGradient through_gate(const ExactGate& gate, float x, float d_a) {
    // A clamped exp(A_log) does not depend on A_log.
    const bool clamped = gate.slope >= kMostGateSlope;
    switch (gate.kind) {
        case Gate::kSoftplus: {
            const float softplus = fmaxf(x, 0.0f) + log1pf(exp_exact(-fabsf(x)));
            return {d_a * (-gate.slope * sigmoid_exact(x)), clamped ? 0.0f : d_a * (-gate.slope * softplus)};
        }
        case Gate::kBounded: {
            const float both = sigmoid_exact(gate.slope * x) * sigmoid_exact(-gate.slope * x),
                        of_x = d_a * (gate.lower_bound * (gate.slope * both));
            return {of_x, clamped ? 0.0f : of_x * x};
        }
        case Gate::kLogDecay: break;
    }
    return {d_a, 0.0f};
}

// The largest write strength. With erase strengths those may be doubled, and beta may not.
template <Keys kKeys>
__device__ __forceinline__ float most_beta(const DeviceArgs& a) {
    return kKeys != Keys::kErase && a.allow_neg_eigval ? 2.0f : 1.0f;
}

// Writes the gradient of beta, or of its logit, from that of the write strength. channel: 0 where a token has
// one.
template <Keys kKeys>
__device__ __forceinline__ void store_beta_gradient(const DeviceArgs& a, const TokenRows& d_beta,
                                                    std::int64_t batch, std::int64_t token, int value_head,
                                                    int channel, float gradient) {
    if (a.beta_is_logit) {
        const float given = load_float(a.beta.data, a.beta.dtype,
                                       a.beta.offset(batch, token, value_head) + channel * a.beta.last);
        gradient *= beta_exact(given, true, most_beta<kKeys>(a)) * sigmoid_exact(-given);
    }
    store_gradient(d_beta.data, d_beta.dtype, d_beta.offset(batch, token, value_head) + channel * d_beta.last,
                   gradient);
}

// The erase strength of channel c of a token, and by what it depends on what was given.
struct EraseStrength {
    float value, slope = 1.0f;

    __device__ __forceinline__ EraseStrength(const DeviceArgs& a, std::int64_t batch, std::int64_t token,
                                             int value_head, int c)
        : value(load_float(a.erase.data, a.erase.dtype, a.erase.offset(batch, token, value_head) + c)) {
        if (!a.beta_is_logit) return;
        const float given = value;
        value = beta_exact(given, true, a.allow_neg_eigval ? 2.0f : 1.0f);
        slope = value * sigmoid_exact(-given);
    }
};

// The factor that normalises a row whose squares add up to `squares`.
__device__ __forceinline__ float norm_factor(const DeviceArgs& a, float squares) {
    return a.qk_l2norm ? 1.0f / sqrtf(squares + 1e-6f) : 1.0f;
}

// Channels lane, lane + 32, .. of a row in one warp; zero from `count` on.
template <int kCount>
__device__ __forceinline__ void load_channels(float (&x)[kCount], const TokenRows& rows, std::int64_t row,
                                              int count) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int c = static_cast<int>(threadIdx.x % 32) + 32 * i;
        x[i] = c < count ? load_float(rows.data, rows.dtype, row + c) : 0.0f;
    }
}

// Writes the gradient of a row of q or k, one warp, from that of the row as the equations take it.
template <int kCount>
__device__ __forceinline__ void store_key_gradient(const DeviceArgs& a, const TokenRows& rows,
                                                   const TokenRows& d_rows, std::int64_t batch,
                                                   std::int64_t token, int head, float (&d_y)[kCount]) {
    if (a.qk_l2norm) {
        float y[kCount], squares = 0.0f, along = 0.0f;
        load_channels(y, rows, rows.offset(batch, token, head), a.key_dim);
#pragma unroll
        for (int i = 0; i < kCount; ++i) squares += y[i] * y[i];
        const float factor = norm_factor(a, warp_sum(squares));
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            y[i] *= factor;
            along += y[i] * d_y[i];
        }
        along = warp_sum(along);
#pragma unroll
        for (int i = 0; i < kCount; ++i) d_y[i] = (d_y[i] - along * y[i]) * factor;
    }
    const std::int64_t row = d_rows.offset(batch, token, head);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int c = static_cast<int>(threadIdx.x % 32) + 32 * i;
        if (c < a.key_dim) store_gradient(d_rows.data, d_rows.dtype, row + c, d_y[i]);
    }
}

}  // namespace cula::cuda::recurrent
