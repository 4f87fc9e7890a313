// SPDX-License-Identifier: Apache-2.0
// What hybrid layers have around linear attention, on CPUs: the short causal convolution (depthwise, over the
// last few tokens of each channel) and the gated RMSNorm. Each function throws Error, which names the
// argument, before it writes a tensor. Scratch comes from the heap: the workspace of a Context is not used.
//
// Floats are float32, bfloat16 and float16. Sums are taken in float32; those of d_weight and d_bias over
// pieces of up to 256 tokens or 128 rows, and then over the pieces in float64.
#pragma once

#include <cstdint>
#include <string_view>

#include "cula/cula.h"
#include "cula/tensor.h"

namespace cula {

inline constexpr std::int64_t kMostWidth = 16;  // of a convolution

// y[t] = act(bias + sum over j < W of weight[j] * x[t - (W - 1) + j]), within each sequence. The tokens
// before a sequence's first are the last columns of its initial state, or zero. The final state is the last
// tokens, those of the initial state included.
//
// Outputs, and gradients of convolve_backward, share memory with nothing else of the call, not even y with x
// or the final state with the initial one. What does is refused.
struct Convolution {
    TensorRef x;              // [B, T, D], any strides
    TensorRef weight;         // [D, W]
    TensorRef bias;           // [D]; absent: 0
    TensorRef initial_state;  // [N, D, S], S >= W - 1, the latest token last; absent: 0
    // Sequences n of a packed batch, B = 1, are tokens [cu_seqlens[n], cu_seqlens[n + 1]), int32 or int64.
    // What follows the last has y = 0.
    TensorRef cu_seqlens;  // [N + 1]
    // Or a number per token: neighbours with the same number are one sequence, and tokens with a negative one
    // are padding, whose y is 0. Without states.
    TensorRef seq_idx;  // [B, T], int32 or int64
    bool silu = false;  // act(z) = z * sigmoid(z), otherwise z

    TensorRef y;            // [B, T, D], output
    TensorRef final_state;  // [N, D, S'], output; absent: not wanted

    // Of convolve_backward, which makes the gradients that are present and needs no y.
    TensorRef d_y;              // [B, T, D]
    TensorRef d_final_state;    // [N, D, S']; absent: 0
    TensorRef d_x;              // as x
    TensorRef d_weight;         // as weight
    TensorRef d_bias;           // as bias
    TensorRef d_initial_state;  // as initial_state
};

// backend: a target such as "cpu:avx2"; nothing or "cpu" for the best one of this machine.
void convolve(const Convolution& call, const Context& context = {}, std::string_view backend = {});
void convolve_backward(const Convolution& call, const Context& context = {}, std::string_view backend = {});

// The next tokens of sequences whose last ones are in a pool, which is updated in place. y may be x, element
// for element. Beyond that y and the pool share memory with nothing else of the call; what does is refused.
struct ConvolutionStep {
    TensorRef x;       // [N, T, D]; with cu_seqlens [1, all tokens, D]
    TensorRef state;   // [slots, D, S], S >= max(W - 1, 1), the latest token last
    TensorRef weight;  // [D, W]
    TensorRef bias;    // [D]; absent: 0
    // Slots, one for each sequence; absent: slot n. A negative one and null_index have y = 0 and no state.
    TensorRef state_indices;  // [N], int32 or int64
    std::int64_t null_index = -1;
    TensorRef cu_seqlens;  // [N + 1], int32 or int64
    // The state is a ring: token p of a sequence is in column p mod S, and this many came before.
    TensorRef tokens_before;  // [N], int32 or int64
    // How many of the tokens of the step before were accepted, at least 1: the window ends with the last of
    // them. W - 2 columns before the new tokens are kept, so a later step can begin behind any of these.
    TensorRef num_accepted;  // [N], int32 or int64
    bool silu = false;

    TensorRef y;  // as x, output
};

void convolve_step(const ConvolutionStep& call, const Context& context = {}, std::string_view backend = {});

enum class GateActivation : std::uint8_t { kSilu, kSigmoid };

// n(x) = x / sqrt(mean(x^2) + eps) * weight + bias, the mean over `group` channels;
// y = n(x) * act(gate), or n(x * act(gate)) without norm_before_gate.
struct GatedNorm {
    TensorRef x;                 // [.., N], up to five dimensions, channels contiguous
    TensorRef gate;              // as x; absent: y = n(x)
    TensorRef weight;            // [N]; absent: 1
    TensorRef bias;              // [N]; absent: 0
    bool zero_centered = false;  // the weight is 1 + weight
    GateActivation activation = GateActivation::kSilu;
    bool norm_before_gate = true;
    std::int64_t group = 0;  // divides N; 0: N
    double eps = 1e-5;

    TensorRef y;  // as x, output

    // Of gated_norm_backward, which makes the gradients that are present and needs no y.
    TensorRef d_y, d_x, d_gate;  // as x
    TensorRef d_weight, d_bias;  // [N]
};

void gated_norm(const GatedNorm& call, const Context& context = {}, std::string_view backend = {});
void gated_norm_backward(const GatedNorm& call, const Context& context = {}, std::string_view backend = {});

}  // namespace cula
