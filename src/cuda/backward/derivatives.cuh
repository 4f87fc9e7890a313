// SPDX-License-Identifier: Apache-2.0
// From the gradients of what the equations take to those of what the call got, in float32:
//
//     gate     softplus  dx = -e sigmoid(x) da                   dA_log += da a
//              bounded   dx = lower_bound e s (1 - s) da         dA_log += dx x,  with s = sigmoid(e x)
//              x = g + dt_bias, a the log decay, e = exp(A_log);  dg = dx,  ddt_bias += dx
//     beta     dx = beta sigmoid(-x) dbeta                       where beta = c sigmoid(x)
//     norm     dx = r (dy - (dy . y) y),                         y = r x,  r = 1 / sqrt(x . x + 1e-6)
//
// 1 - sigmoid(x) is sigmoid(-x), which loses no digits.
#pragma once

#include "cuda/tile/gate.cuh"

namespace cula::cuda::backward {

// The gradient of x = g + bias, and the summand of dA_log without its factor, GateDerivative::rate_factor.
struct GateGradient {
    float of_x, of_rate;
};

// The derivatives of one value head's gate.
struct GateDerivative {
    Gate kind;
    float slope;        // exp(A_log), clamped
    float factor;       // of of_x
    float rate_factor;  // of the sum of of_rate; zero where a clamped exp(A_log) does not depend on A_log

    __device__ __forceinline__ GateDerivative(Gate gate, float A_log, float lower_bound) : kind(gate) {
        slope = fminf(exp2_fast(A_log * kLog2E), kMostGateSlope);
        factor = gate == Gate::kSoftplus ? -slope : gate == Gate::kBounded ? lower_bound * slope : 1.0f;
        rate_factor = gate == Gate::kLogDecay || slope >= kMostGateSlope ? 0.0f : factor;
    }
    __device__ __forceinline__ GateDerivative(const DeviceArgs& a, int value_head)
        : GateDerivative(a.gate, a.A_log.data ? a.A_log.data[value_head * a.A_log.head] : 0.0f,
                         a.lower_bound) {}

    // x: the raw gate with its bias, or the log decay. d_a: the gradient of the (natural) log decay.
    __device__ __forceinline__ GateGradient operator()(float x, float d_a) const {
        switch (kind) {
            case Gate::kSoftplus:
                return {d_a * (factor * sigmoid(x)),
                        d_a * ((1.0f / kLog2E) * softplus2<GateBits::k22>(kLog2E * x))};
            case Gate::kBounded: {
                const float part = d_a * (sigmoid(slope * x) * sigmoid(-slope * x));
                return {factor * part, part * x};
            }
            case Gate::kLogDecay: break;
        }
        return {d_a, 0.0f};
    }
};

// given: beta as it came.
__device__ __forceinline__ float beta_gradient(const DeviceArgs& a, float given, float d_beta) {
    return a.beta_is_logit ? d_beta * (beta_of(a, given) * sigmoid(-given)) : d_beta;
}

}  // namespace cula::cuda::backward
