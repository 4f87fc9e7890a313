// SPDX-License-Identifier: Apache-2.0
// The interface between the host side of the short convolution and the gated RMSNorm (conv_entry.cc,
// norm_entry.cc) and the code that is compiled once per instruction set (conv.h, norm.h). Plain data, as in
// task.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cpu/task.h"
#include "cula/layers.h"

namespace cula::cpu {

// A matrix: row r, column c is element r * row + c * column. data == nullptr: absent.
struct Matrix {
    void* data = nullptr;
    Dtype dtype = Dtype::kFloat32;
    std::int64_t row = 0, column = 0;
};

inline constexpr int kConvChannels = 128;  // of a task
inline constexpr int kConvTile = 32;       // tokens that pass through the scratch together
inline constexpr int kConvTokens = 256;    // of a task

// Tokens [begin, end) of one sequence of `length` tokens, some of its channels. Columns are channels; rows
// are tokens of the sequence, taps of the weight, or columns of a state.
struct ConvTask {
    Matrix x, y, weight, bias;
    Matrix initial, final;
    std::int64_t begin, end, length;
    std::int64_t initial_rows, final_rows;  // S, S'
    int width, channels;
    bool silu;

    Matrix d_y, d_x, d_final, d_initial;
    float* sums;  // [W + 1, channels]: what the task adds to d_weight, then to d_bias
};

// All tokens of one sequence, some of its channels.
struct ConvStepTask {
    Matrix x, y, weight, bias, state;
    std::int64_t tokens, state_rows;  // S
    // The row of the state with the first token of the window; rows go on at 0 behind the last.
    std::int64_t window;
    // What becomes of the state: row `kept_from` and `kept` - 1 more move to row 0, and the new tokens go to
    // rows from `new_from` on, in a ring.
    std::int64_t kept_from, kept, new_from;
    int width, channels;
    bool silu;
};

// Rows of the gated norm, with leading dimensions merged where the strides allow.
inline constexpr int kNormDims = 4;
inline constexpr int kNormRows = 128;  // of a task of the backward pass, whose sums are kept apart

struct NormRows {
    void* data = nullptr;
    Dtype dtype = Dtype::kFloat32;
    std::int64_t stride[kNormDims] = {};
};

struct NormCall {
    NormRows x, gate, y, d_y, d_x, d_gate;
    const void* weight;
    const void* bias;
    Dtype weight_dtype, bias_dtype;
    std::int64_t weight_stride, bias_stride;
    std::int64_t size[kNormDims];  // of the leading dimensions
    int dims, channels, group;
    float eps;
    bool sigmoid, norm_before_gate, zero_centered;
};

// The functions of one instruction set. Scratch is aligned to a float and may hold anything.
struct LayerIsa {
    std::size_t (*conv_scratch_bytes)(int width);
    void (*conv)(const ConvTask&, std::byte* scratch);
    void (*conv_backward)(const ConvTask&, std::byte* scratch);
    std::size_t (*conv_step_scratch_bytes)(int width, std::int64_t tokens);
    void (*conv_step)(const ConvStepTask&, std::byte* scratch);
    std::size_t (*norm_scratch_bytes)(int channels, int group);
    void (*norm)(const NormCall&, std::int64_t begin, std::int64_t end, std::byte* scratch);
    // sums: [2, channels], what the rows add to d_weight and d_bias.
    void (*norm_backward)(const NormCall&, std::int64_t begin, std::int64_t end, float* sums,
                          std::byte* scratch);
};

#define CULA_DECLARE_LAYER_ISA(target) \
    namespace target {                 \
    extern const LayerIsa kLayerIsa;   \
    }
#if defined(__x86_64__)
CULA_FOR_EACH_X86_TARGET(CULA_DECLARE_LAYER_ISA)
#endif
CULA_DECLARE_LAYER_ISA(portable)
#undef CULA_DECLARE_LAYER_ISA

// The named target's functions, "cpu:avx2", or the best one's of this machine. Throws Error where the machine
// does not have it. (entry.cc)
const LayerIsa& layer_isa(std::string_view op, std::string_view backend);

}  // namespace cula::cpu
