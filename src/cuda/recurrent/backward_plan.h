// SPDX-License-Identifier: Apache-2.0
// How a token-by-token backward cuts a call, and what lies where in its workspace. Plain data, passed by
// value at launch.
//
// Rows of the batch are processed in groups, which know nothing of each other, and a group in windows: a
// range of tokens of all its rows. What a window needs besides the inputs is kept for one window at a time.
// Only the state at a window's start and Z at its end go from one window to another: those of every row, or,
// of packed sequences, which are one row, those of the one sequence that crosses the border. Inside a window
// states are kept at the start of every block of kBlockTokens, and those of one block in shared memory.
// This cutting changes no bit of a gradient, except of A_log and dt_bias, which are sums over whole calls.
// Where a token writes several times, each of its writes is a token here: only the first decays (the decay of
// the others is 1), and only the last has a query and an output (those of the others are zero).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/backward/gradients.h"
#include "cuda/call.h"
#include "cuda/device_args.h"
#include "cuda/recurrent/keys.h"

namespace cula::cuda::recurrent {

inline constexpr int kWalkRows = 16;  // value channels of a slice, which is what one CTA walks

// Tokens of a block. Their decayed states take 40 to 48 KiB of shared memory (backward_walk.cuh), so that
// three CTAs fit on a multiprocessor of sm_90 (K = 256: two), and one where a CTA has 99 KiB.
// With erase or low-rank keys they are fewer, so that as many CTAs fit.
template <int kKey, Keys kKeys>
inline constexpr int kBlockTokens = kKeys == Keys::kLowRank ? 512 / kKey
                                    : kKeys == Keys::kErase ? (kKey > 128 ? 3 : 640 / kKey)
                                    : kKey > 128            ? 4
                                                            : 768 / kKey;

// Tokens whose summands of dA_log and ddt_bias are added in float32.
inline constexpr int kParameterTokens = 64;

// The row of sums over a slice's value channels that one token of one value head leaves: where they begin, in
// floats; -1: not wanted.
struct PartialColumns {
    std::int32_t q = -1, k = -1, decay = -1;  // one per key channel
    std::int32_t token_decay = -1, beta = -1;
    std::int32_t count = 0;                           // floats of the row, a multiple of four
    std::int32_t erase = -1, a_key = -1, b_key = -1;  // of other keys, one per key channel
};

struct BackwardPlan {
    std::int32_t rows = 1;                           // of a group
    std::int64_t groups = 0;                         // of rows
    std::int64_t window_tokens = 1;                  // of a row
    std::int64_t windows = 0;                        // of a group
    std::int32_t slices = 1, value_dim = kWalkRows;  // value_dim: that of all slices
    PartialColumns columns;

    // Of the tokens of one window, row after row, in float32: inputs as the equations take them; padded
    // channels are zero.
    float* keys = nullptr;           // [tokens, H, 2, kKey]: q and k, normalised
    float* decays = nullptr;         // [tokens, HV, kKey]
    float* values = nullptr;         // [tokens, HV, 3, V]: v, beta and scale * d_o
    float* partials = nullptr;       // [tokens, HV, slices, columns]
    float4* block_states = nullptr;  // [blocks, HV, slices, a slice's state]
    // Of a group: the states at the ends of windows, [windows - 1, rows, HV, slices, a slice's state], and Z
    // at the end of one window, [2, rows, ..], the two by turns.
    float4 *window_states = nullptr, *carried = nullptr;
    // Of the call, [rows, HV, 1 + channels]: the gradients of A_log and dt_bias, a row per kParameterTokens
    // of a window.
    float* parameters = nullptr;
    // Of a window: the erase keys [tokens, HV, kKey], or the low-rank keys [tokens, HV, 2, kKey].
    float* other_keys = nullptr;
};

// key: the instance's K. workspace may be null; then bytes alone are meant.
BackwardPlan backward_plan(const Args& args, const Context& context, int key, void* workspace,
                           std::size_t& bytes);

// Tokens [begin, end) of rows [first_row, first_row + rows). They are counted row after row.
struct Window {
    std::int64_t index = 0, begin = 0, end = 0;  // index: in its group
    std::int64_t first_row = 0, rows = 1;
    std::int64_t first_parameters = 0;  // the first of its rows of `parameters`

    CULA_HOST_DEVICE std::int64_t length() const { return end - begin; }
    CULA_HOST_DEVICE std::int64_t tokens() const { return rows * length(); }
};

// The rows of k, v and beta of a call, the tokens of what is below.
CULA_HOST_DEVICE std::int64_t rows_of_writes(const DeviceArgs& a) { return a.tokens * a.writes; }

// The tokens [first, last) of a sequence that are in a window, as the window counts them.
struct Part {
    std::int64_t first = 0, last = 0;
    std::int64_t row = 0;                             // of the group
    std::int64_t token = 0;                           // that of `first`, in its row of k, v and beta
    bool crosses_start = false, crosses_end = false;  // the window's
};

CULA_HOST_DEVICE Part part_of(const DeviceArgs& a, const Window& window, std::int64_t n) {
    const TokenRange range = tokens_of(a, n);
    const std::int64_t begin = range.begin * a.writes, end = begin + range.length * a.writes,
                       row = range.batch - window.first_row, offset = row * window.length() - window.begin;
    Part part;
    part.row = row;
    part.crosses_start = begin < window.begin;
    part.crosses_end = end > window.end;
    part.token = part.crosses_start ? window.begin : begin;
    part.first = offset + part.token;
    part.last = offset + (part.crosses_end ? window.end : end);
    return part;
}

// The first packed sequence that ends behind `token`; a.sequences if there is none.
CULA_HOST_DEVICE std::int64_t first_sequence_behind(const DeviceArgs& a, std::int64_t token) {
    const Offsets offsets(a);
    std::int64_t from = 0, to = a.sequences;
    while (from < to) {
        const std::int64_t middle = (from + to) / 2;
        if (offsets.at(middle + 1) * a.writes > token)
            to = middle;
        else
            from = middle + 1;
    }
    return from;
}

// Where a window's token stands in the tensors, and whether a sequence has it.
struct TokenPlace {
    std::int64_t batch, token, row;  // token: of q, g and o; row: of k, v and beta
    bool in_sequence, first, last;   // of the writes of a token

    CULA_HOST_DEVICE TokenPlace(const DeviceArgs& a, std::int64_t b, std::int64_t own_row)
        : batch(b), token(own_row), row(own_row), in_sequence(true), first(true), last(true) {
        if (a.writes != 1) {
            token = row / a.writes;
            first = token * a.writes == row;
            last = (token + 1) * a.writes == row + 1;
        }
        if (!a.cu_seqlens) return;
        const Offsets offsets(a);
        in_sequence = a.sequences > 0 && token >= offsets.at(0) && token < offsets.at(a.sequences);
    }
};

CULA_HOST_DEVICE TokenPlace place_of_token(const DeviceArgs& a, const Window& window, std::int64_t own) {
    if (a.cu_seqlens) return {a, 0, window.begin + own};
    return {a, window.first_row + own / window.length(), window.begin + own % window.length()};
}

// Launches all kernels of a backward (launch_backward.cuh).
template <int kKey, Keys kKeys>
void launch_backward(const Call& call, const backward::Gradients& d, const BackwardPlan& plan);

}  // namespace cula::cuda::recurrent
