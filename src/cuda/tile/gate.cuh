// SPDX-License-Identifier: Apache-2.0
// Gates, decays and write strengths of a head, from what the caller gave.
#pragma once

#include "cuda/device_args.h"
#include "cuda/tile/convert.cuh"

namespace cula::cuda {

inline constexpr float kLog2E = 1.44269504088896f;
inline constexpr float kLeastLog2Decay = -160.0f;  // 2^-160 is zero in float: sums of decays stay small numbers

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exp2_fast(-kLog2E * x)); }

// log2(1 + 2^y): softplus in base 2, as max(y, 0) + log2(1 + e) with e = 2^-|y| at most 1. The logarithm is the series
// of 2 atanh(e / (2 + e)), good to float's last digits at any size, where the approximate instruction is not for small
// e.
__device__ __forceinline__ float softplus2(float y) {
    const float e = exp2_fast(-fabsf(y)), z = __fdividef(e, 2.0f + e), zz = z * z;
    float series = 1.0f / 13.0f;
    series = series * zz + 1.0f / 11.0f;
    series = series * zz + 1.0f / 9.0f;
    series = series * zz + 1.0f / 7.0f;
    series = series * zz + 1.0f / 5.0f;
    series = series * zz + 1.0f / 3.0f;
    series = series * zz + 1.0f;
    return fmaxf(y, 0.0f) + 2.0f * kLog2E * z * series;
}

struct HeadGate {
    int value_head;
    Gate kind;
    float slope;         // exp(A_log)
    float lower_bound2;  // lower_bound in base 2
    float gamma2;        // log2 of the head's constant decay
    float bias;          // dt_bias where there is one per head

    __device__ __forceinline__ HeadGate(const DeviceArgs& a, int head)
        : value_head(head), kind(a.gate), slope(1.0f), lower_bound2(a.lower_bound * kLog2E), gamma2(0.0f), bias(0.0f) {
        if (a.A_log.data) slope = exp2_fast(a.A_log.data[head * a.A_log.head] * kLog2E);
        if (a.gamma.data) gamma2 = a.gamma.data[head * a.gamma.head] * kLog2E;
        if (a.dt_bias.data && a.algorithm.decay != Decay::kPerChannel) bias = a.dt_bias.data[head * a.dt_bias.head];
    }

    // log2 of the decay of a raw gate (with its bias added) or a given log decay.
    __device__ __forceinline__ float log2_decay(float x) const {
        switch (kind) {
            case Gate::kSoftplus: return -slope * softplus2(x * kLog2E);
            case Gate::kBounded: return lower_bound2 * sigmoid(slope * x);
            case Gate::kLogDecay: break;
        }
        return x * kLog2E;
    }
    // x <- log2 decays of x + bias, with one branch for all.
    template <int kCount>
    __device__ __forceinline__ void log2_decays(float (&x)[kCount], const float (&bias)[kCount]) const {
        const auto each = [&](auto decay) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) x[i] = decay(x[i] + bias[i]);
        };
        if (kind == Gate::kSoftplus)
            each([&](float y) { return -slope * softplus2(y * kLog2E); });
        else if (kind == Gate::kBounded)
            each([&](float y) { return lower_bound2 * sigmoid(slope * y); });
        else
            each([](float y) { return y * kLog2E; });
    }
};

__device__ __forceinline__ float channel_bias(const DeviceArgs& a, int value_head, int channel) {
    return a.dt_bias.data ? a.dt_bias.data[value_head * a.dt_bias.head + channel * a.dt_bias.channel] : 0.0f;
}

// log2 of a token's decay where it has one number.
__device__ __forceinline__ float token_log2_decay(const DeviceArgs& a, const HeadGate& gate, std::int64_t b,
                                                  std::int64_t t, int value_head) {
    if (a.algorithm.decay != Decay::kPerToken) return gate.gamma2;
    return gate.log2_decay(load_float(a.g.data, a.g.dtype, a.g.offset(b, t, value_head)) + gate.bias) + gate.gamma2;
}

__device__ __forceinline__ float beta_of(const DeviceArgs& a, float x) {
    return a.beta_is_logit ? sigmoid(x) * (a.allow_neg_eigval ? 2.0f : 1.0f) : x;
}

}  // namespace cula::cuda
