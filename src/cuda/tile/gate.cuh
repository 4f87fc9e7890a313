// SPDX-License-Identifier: Apache-2.0
// Decays and write strengths of a head, computed from the gates that the caller gave (Gate in
// cula/problem.h).
#pragma once

#include "cuda/device_args.h"
#include "cuda/rule.h"
#include "cuda/tile/convert.cuh"

namespace cula::cuda {

inline constexpr float kLog2E = 1.44269504088896f;
// Log decays are clamped here: 2^-160 is zero in float, and sums of clamped log decays stay small numbers.
inline constexpr float kLeastLog2Decay = -160.0f;

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The minimum; a NaN if one of the two is.
__device__ __forceinline__ float min_or_nan(float x, float y) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
    return least;
}
// The maximum; a NaN if one of the two is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
    return most;
}
__device__ __forceinline__ float sigmoid(float x) { return reciprocal_fast(1.0f + exp2_fast(-kLog2E * x)); }

// exp(x) to little more than half a unit in the last place; zero where the result is not a normal number.
// The approximate instruction is wrong by up to two units, by the same amount for equal gates, and by |x|
// 2^-24 besides. A product over hundreds of float32 tokens would show that.
__device__ __forceinline__ float exp_exact(float x) {
    const float n = fminf(rintf(x * kLog2E), 127.0f);
    const float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x));  // ln 2 as the sum of two numbers
    float p = 1.98412698e-4f;
    p = fmaf(p, r, 1.38888889e-3f);
    p = fmaf(p, r, 8.33333333e-3f);
    p = fmaf(p, r, 4.16666667e-2f);
    p = fmaf(p, r, 1.66666667e-1f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r * r, r) + 1.0f;
    return n < -126.0f ? 0.0f : p * __int_as_float((static_cast<int>(n) + 127) << 23);
}
__device__ __forceinline__ float sigmoid_exact(float x) {
    const float e = exp_exact(-fabsf(x));
    return __fdiv_rn(x < 0.0f ? e : 1.0f, 1.0f + e);
}

// The relative error of a softplus: 2^-22; or, for sums that become factors of 16-bit operands, 2^-14 or
// 2^-11.
// A factor 2^-x is then wrong by 2^-14 * (x 2^-x ln 2), which is at most 2^-15 (with k11: at most 2^-12),
// however many tokens the sum is over.
enum class GateBits { k22, k14, k11 };

// Softplus in base 2, log2(1 + 2^y) = max(y, 0) + log2(1 + e) with e = 2^-|y| <= 1. The logarithm is e times
// the minimax polynomial of log2(1 + e) / e, so its relative error is the same for every e; the approximate
// instruction is inaccurate for small e.
template <GateBits kBits>
__device__ __forceinline__ float softplus2(float y) {
    const float e = exp2_fast(-fabsf(y));
    if constexpr (kBits == GateBits::k11) {
        float x = -1.0725442377519066e-1f;
        x = fmaf(x, e, 3.6648061144688676e-1f);
        x = fmaf(x, e, -7.0174725937861730e-1f);
        x = fmaf(x, e, 1.4421280942258700f);
        return fmaf(x, e, fmaxf(y, 0.0f));
    }
    if constexpr (kBits == GateBits::k14) {
        float x = 5.965154706981091e-2f;
        x = fmaf(x, e, -2.2711944897776432e-1f);
        x = fmaf(x, e, 4.4189883063345275e-1f);
        x = fmaf(x, e, -7.169874149351245e-1f);
        x = fmaf(x, e, 1.4426132082633483f);
        return fmaf(x, e, fmaxf(y, 0.0f));
    }
    float x = 7.549182046204805e-3f;
    x = fmaf(x, e, -4.256706312298775e-2f);
    x = fmaf(x, e, 1.1285619437694550e-1f);
    x = fmaf(x, e, -1.9711896777153015e-1f);
    x = fmaf(x, e, 2.7564141154289246e-1f);
    x = fmaf(x, e, -3.5840848088264465e-1f);
    x = fmaf(x, e, 4.8069295287132263e-1f);
    x = fmaf(x, e, -7.2134017944335938e-1f);
    x = fmaf(x, e, 1.4426950216293335f);
    return fmaf(x, e, fmaxf(y, 0.0f));
}

// Every gate has the form: log2 decay = out * shape(in * (x + bias)). `in` and `out` belong to the head
// (HeadGate). For gates that decay, shape and -out are not negative.
template <Gate kGate, GateBits kBits>
__device__ __forceinline__ float gate_shape(float x) {
    if constexpr (kGate == Gate::kSoftplus)
        return softplus2<kBits>(x);
    else if constexpr (kGate == Gate::kBounded)
        return reciprocal_fast(1.0f + exp2_fast(x));
    else
        return -x;
}

// The decays whose g has one number per token, and one per token and channel.
inline constexpr Decay kTokenDecay = only_decay(varies_by_token),
                       kChannelDecay = only_decay(varies_by_channel);

// The gate of one value head.
struct HeadGate {
    int value_head;
    Gate kind;
    float in, out;
    float gamma2;  // log2 of the head's constant decay
    float bias;    // dt_bias where there is one per head

    __device__ __forceinline__ HeadGate(const DeviceArgs& a, int head)
        : HeadGate(head, a.gate, a.A_log.data ? a.A_log.data[head * a.A_log.head] : 0.0f, a.lower_bound,
                   a.gamma.data ? a.gamma.data[head * a.gamma.head] : 0.0f) {
        if (a.dt_bias.data && a.algorithm.decay != kChannelDecay)
            bias = a.dt_bias.data[head * a.dt_bias.head];
    }

    // From parameters that have been loaded already. The caller adds the bias itself.
    __device__ __forceinline__ HeadGate(int head, Gate gate, float A_log, float lower_bound, float gamma)
        : value_head(head), kind(gate), in(1.0f), out(-kLog2E), gamma2(gamma * kLog2E), bias(0.0f) {
        float slope = exp2_fast(A_log * kLog2E);
        if (slope > kMostGateSlope) slope = kMostGateSlope;
        if (gate == Gate::kSoftplus) in = kLog2E, out = -slope;
        if (gate == Gate::kBounded) in = -kLog2E * slope, out = lower_bound * kLog2E;
    }

    // x <- log2 decays. x holds raw gates with their bias added, or log decays. There is one branch on the
    // kind of gate for all kCount numbers.
    template <int kCount>
    __device__ __forceinline__ void log2_decays(float (&x)[kCount]) const {
        switch (kind) {
            case Gate::kSoftplus: apply<Gate::kSoftplus>(x); break;
            case Gate::kBounded: apply<Gate::kBounded>(x); break;
            case Gate::kLogDecay: apply<Gate::kLogDecay>(x); break;
        }
    }
    template <int kCount>
    __device__ __forceinline__ void log2_decays(float (&x)[kCount], const float (&bias)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] += bias[i];
        log2_decays(x);
    }
    __device__ __forceinline__ float log2_decay(float x) const {
        float one[1] = {x};
        log2_decays(one);
        return one[0];
    }

private:
    template <Gate kGate, int kCount>
    __device__ __forceinline__ void apply(float (&x)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = out * gate_shape<kGate, GateBits::k22>(in * x[i]);
    }
};

// Returns x, or, if x is a logit, most * sigmoid(x).
__device__ __forceinline__ float beta_exact(float x, bool is_logit, float most) {
    return is_logit ? most * sigmoid_exact(x) : x;
}

// The gate of one value head for float32 inputs, token by token: computes the decay itself, as exactly as
// float32 allows.
struct ExactGate {
    Gate kind;
    float slope, lower_bound, gamma;

    __device__ __forceinline__ ExactGate(Gate gate, float A_log, float bound, float head_decay)
        : kind(gate), slope(exp_exact(A_log)), lower_bound(bound), gamma(head_decay) {
        if (slope > kMostGateSlope) slope = kMostGateSlope;  // a NaN stays a NaN
    }

    // x: a raw gate with its bias added, or a log decay.
    __device__ __forceinline__ float decay(float x) const {
        if (kind == Gate::kSoftplus) x = -slope * (fmaxf(x, 0.0f) + log1pf(exp_exact(-fabsf(x))));
        if (kind == Gate::kBounded) x = lower_bound * sigmoid_exact(slope * x);
        return exp_exact(x + gamma);
    }
};

// log2 of a token's decay, for algorithms with one decay per token, per head or none.
__device__ __forceinline__ float token_log2_decay(const DeviceArgs& a, const HeadGate& gate, std::int64_t b,
                                                  std::int64_t t, int value_head) {
    if (a.algorithm.decay != kTokenDecay) return gate.gamma2;
    return gate.log2_decay(load_float(a.g.data, a.g.dtype, a.g.offset(b, t, value_head)) + gate.bias) +
           gate.gamma2;
}

// A write strength for 16-bit inputs: the approximate sigmoid of a logit, or x itself.
__device__ __forceinline__ float beta_of(const DeviceArgs& a, float x) {
    return a.beta_is_logit ? sigmoid(x) * (a.allow_neg_eigval ? 2.0f : 1.0f) : x;
}
// The write strength that a chunk's solve takes: a backward pass divides by it (DeviceArgs::least_beta).
__device__ __forceinline__ float solved_beta_of(const DeviceArgs& a, float x) {
    const float beta = beta_of(a, x);
    return fabsf(beta) < a.least_beta ? a.least_beta : beta;
}

}  // namespace cula::cuda
