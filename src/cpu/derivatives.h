// SPDX-License-Identifier: Apache-2.0
// The derivatives of inputs.h: from the gradients of what the equations take to those of what the call got.
//
//     gate     softplus  dx = -e sigmoid(x) da                   dA_log += da a
//              bounded   dx = lower_bound e s (1 - s) da         dA_log += dx x,  with s = sigmoid(e x)
//              x = g + dt_bias, a the log decay, e = exp(A_log);  dg = dx,  ddt_bias += dx
//     beta     dx = c sigmoid(x) (1 - sigmoid(x)) dbeta,         c = 1 or 2 (allow_neg_eigval); so does erase
//     norm     dx = r (dy - (dy . y) y),                         y = r x,  r = 1 / sqrt(x . x + 1e-6)
//
// 1 - sigmoid(x) is sigmoid(-x), which loses no digits. Sums over the tokens of a chunk are float32; those
// over chunks are float64.
#pragma once

#include "cpu/gemm.h"
#include "cpu/inputs.h"

namespace cula::cpu::CULA_CPU_TARGET {

// The gradient of x and the summand of dA_log without its factor, GateDerivative::log_rate_factor().
struct GateGradient {
    Vec of_x, of_log_rate;
};

struct GateDerivative {
    const HeadInputs& inputs;

    CULA_INLINE GateGradient operator()(Vec g, Vec bias, Vec d_a) const {
        const Vec x = g + bias;
        const float slope = inputs.gate_slope;
        switch (inputs.args.gate) {
            case Gate::kSoftplus: return {d_a * sigmoid(x) * -slope, d_a * softplus(x)};
            case Gate::kBounded: {
                const Vec part = d_a * (sigmoid(x * slope) * sigmoid(x * -slope));
                return {part * bounded_factor(), part * x};
            }
            case Gate::kLogDecay: break;
        }
        return {d_a, Vec{}};
    }

    // A clamped exp(A_log) does not depend on A_log.
    CULA_INLINE float log_rate_factor() const {
        if (inputs.gate_slope >= kMostGateSlope) return 0.0f;
        return inputs.args.gate == Gate::kBounded ? bounded_factor() : -inputs.gate_slope;
    }

private:
    CULA_INLINE float bounded_factor() const {
        return static_cast<float>(inputs.args.lower_bound) * inputs.gate_slope;
    }
};

CULA_INLINE Vec beta_derivative(const HeadInputs& inputs, Vec x, Vec d_beta) {
    if (!inputs.args.beta_is_logit) return d_beta;
    return d_beta * (inputs.beta(x) * sigmoid(-x));
}

CULA_INLINE Vec erase_derivative(const HeadInputs& inputs, Vec x, Vec d_erase) {
    if (!inputs.args.beta_is_logit) return d_erase;
    return d_erase * (inputs.erase(x) * sigmoid(-x));
}

// Writes the gradient of a row of q or k; d_y [padded K], that of the row as the equations take it, is lost.
inline void write_key_gradient(const HeadInputs& inputs, const TensorRef& x, const TensorRef& d_x,
                               std::int64_t token, float scale, float* d_y, float* scratch) {
    if (!d_x) return;
    const int channels = inputs.padded_key_dim;
    if (inputs.args.qk_l2norm) {
        load_token_row(scratch, x, inputs.batch, token, inputs.head, 0, inputs.key_dim, channels);
        Vec squares{}, along{};
        for (int c = 0; c < channels; c += kLanes) {
            squares += load(scratch + c) * load(scratch + c);
            along += load(scratch + c) * load(d_y + c);
        }
        const float r = 1.0f / __builtin_sqrtf(sum(squares) + 1e-6f), back = sum(along) * r;
        for (int c = 0; c < channels; c += kLanes)
            store(d_y + c, (load(d_y + c) - load(scratch + c) * r * back) * (r * scale));
    } else if (scale != 1.0f) {
        for (int c = 0; c < channels; c += kLanes) store(d_y + c, load(d_y + c) * scale);
    }
    store_token_row(d_x, inputs.batch, token, inputs.head, 0, d_y, inputs.key_dim);
}

}  // namespace cula::cpu::CULA_CPU_TARGET
