// SPDX-License-Identifier: Apache-2.0
// gradient_token: what a chunk of one value head has per token, its log decays and write strengths, and their
// gradients. That of a log decay is a sum by paths (ALGORITHM.md, "Backward").
#pragma once

#include "cuda/backward/derivatives.cuh"
#include "cuda/backward/gradients.h"
#include "cuda/backward/saved.cuh"
#include "cuda/chunked/chunk.cuh"
#include "cuda/tile/scan.cuh"
#include "cuda/tile/store_gradient.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::backward {

// The token of row `first` + i of a chunk, whose tokens are `tokens`.
__device__ __forceinline__ std::int64_t token_at(const chunked::ChunkPlace& place, const RowsAreTokens&,
                                                 int first, int i) {
    return place.begin + first + i;
}
__device__ __forceinline__ std::int64_t token_at(const chunked::ChunkPlace&, const TokensOfWrites& tokens,
                                                 int first, int i) {
    return tokens.first_token + tokens.token(first + i);
}

// A number for each row of a chunk, and the parameters of a value head's gate, by one warp. They are asked
// for long before they are needed. Write strengths have a row for each write, and gates one for each token,
// whose first row decays.
template <int kRows>
struct TokenNumbers {
    static constexpr int kEach = kRows / 32;  // neighbouring tokens of a lane
    RawFloat raw[kEach];
    float A_log = 0.0f, gamma = 0.0f, bias = 0.0f;

    static __device__ __forceinline__ int first() { return static_cast<int>(threadIdx.x) % 32 * kEach; }
    template <class Tokens>
    __device__ __forceinline__ void ask(const TokenRows& rows, const chunked::ChunkPlace& place, int head,
                                        const Tokens& tokens) {
        const std::int64_t bytes = rows.dtype == Dtype::kFloat64 ? 8 : rows.dtype == Dtype::kFloat32 ? 4 : 2;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            raw[i].load(static_cast<const char*>(rows.data) +
                            rows.offset(place.batch, token_at(place, tokens, first(), i), head) * bytes,
                        element(rows.dtype), first() + i < place.count && tokens.is_first(first() + i));
    }
    // Number i of those that have been asked for; it exists.
    template <class Tokens>
    __device__ __forceinline__ float value(int i, const TokenRows& rows, const chunked::ChunkPlace& place,
                                           int head, const Tokens& tokens) const {
        return rows.dtype == Dtype::kFloat64
                   ? load_float(rows.data, Dtype::kFloat64,
                                rows.offset(place.batch, token_at(place, tokens, first(), i), head))
                   : raw[i].value(element(rows.dtype));
    }
    template <class Tokens>
    __device__ __forceinline__ void ask_gates(const DeviceArgs& a, const chunked::ChunkPlace& place,
                                              int value_head, const Tokens& tokens) {
        if (a.algorithm.decay == kTokenDecay) ask(a.g, place, value_head, tokens);
        if (a.A_log.data) A_log = a.A_log.data[value_head * a.A_log.head];
        if (a.gamma.data) gamma = a.gamma.data[value_head * a.gamma.head];
        if (a.dt_bias.data) bias = a.dt_bias.data[value_head * a.dt_bias.head];
    }
};

// log_decay: the running sum of log2 decays of a chunk and value head, as prepare_token takes it. By one
// warp.
template <int kRows, class Tokens>
__device__ __forceinline__ void store_log_decays(const DeviceArgs& a, const chunked::ChunkPlace& place,
                                                 int value_head, const Tokens& tokens,
                                                 const TokenNumbers<kRows>& gates, float* log_decay) {
    const int first = gates.first();
    const bool per_token = a.algorithm.decay == kTokenDecay;
    const HeadGate gate(value_head, a.gate, gates.A_log, a.lower_bound, gates.gamma);
    float sums[kRows / 32];
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) {
        sums[i] = 0.0f;
        if (first + i < place.count && tokens.is_first(first + i)) {
            const float of_gate =
                per_token ? gate.log2_decay(gates.value(i, a.g, place, value_head, tokens) + gates.bias)
                          : 0.0f;
            sums[i] = max_or_nan(of_gate + gate.gamma2, kLeastLog2Decay);
        }
    }
    running_sums(sums);
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) log_decay[first + i] = sums[i];
}

// The terms of dg of one chunk and value head, each where the warp that made it has put it. A path crosses
// token t if it leads from a token before t, or the chunk's start, to t or later, or to the chunk's end.
template <int kRows, int kGroups>
struct DecayPaths {
    static constexpr int kBlocks = kRows / chunked::kBlock, kEach = kRows / 32,
                         kLanes = chunked::kBlock / kEach;  // lanes of a block in sum()
    // Across token t: paths to tokens of its block from t on, and from tokens of its block before t to the
    // chunk's end.
    float inside[kGroups][kRows];
    // Of all tokens of a block: paths from the chunk's start, and paths to its end.
    float2 ends[kBlocks][kGroups];
    // Column j's sum over the rows of a later block, of dA and of dL: [later block][column].
    float between[2][kBlocks * (kBlocks - 1) / 2 * chunked::kBlock];
    static constexpr CULA_HOST_DEVICE int between_begin(int later) {
        return later * (later - 1) / 2 * chunked::kBlock;
    }
    float through[kBlocks][kGroups];  // paths through the whole chunk

    // dg of the lane's tokens, kEach neighbouring ones. kSquares: how many kinds of squares there are.
    template <int kSquares>
    __device__ __forceinline__ void sum(float (&d_log_decay)[kEach]) const {
        const int lane = static_cast<int>(threadIdx.x) % 32, first = lane * kEach, block = lane / kLanes;
        float outside = 0.0f;  // what is equal for all tokens of a block
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                const float2 of_block = ends[b][g];
                outside += through[b][g];
                if (b > block) outside += of_block.x;
                if (b < block) outside += of_block.y;
            }
        float columns[kEach] = {};  // sums over all rows of later blocks
#pragma unroll
        for (int later = 1; later < kBlocks; ++later) {
            float of_later[kEach] = {}, total = 0.0f;
            if (block < later) {
#pragma unroll
                for (int x = 0; x < kSquares; ++x)
#pragma unroll
                    for (int i = 0; i < kEach; ++i)
                        of_later[i] += between[x][between_begin(later) + first + i];
            }
#pragma unroll
            for (int i = 0; i < kEach; ++i) columns[i] += of_later[i], total += of_later[i];
            if (later == 1) continue;
            // Over columns of whole blocks, which come before those of the blocks between.
#pragma unroll
            for (int step = 1; step < kLanes; step *= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
#pragma unroll
            for (int earlier = 0; earlier + 1 < later; ++earlier) {
                const float of_block = __shfl_sync(0xffffffffu, total, earlier * kLanes);
                if (earlier < block && block < later) outside += of_block;
            }
        }
        // Over columns of the block before each token.
        float before = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) before += columns[i];
        before = __shfl_up_sync(0xffffffffu, before, 1);
        if (lane % kLanes == 0) before = 0.0f;
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane % kLanes >= step) before += other;
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            d_log_decay[i] = outside + before;
            before += columns[i];
#pragma unroll
            for (int g = 0; g < kGroups; ++g) d_log_decay[i] += inside[g][first + i];
        }
    }
};

// From the gradients of the log decays of a lane's tokens, and the gates as they came, to the gradients of
// the gates and to the chunk's summands of dA_log and ddt_bias. By one warp.
template <int kRows, class Tokens>
__device__ __forceinline__ void store_gate_gradients(const DeviceArgs& a, const Gradients& d,
                                                     const chunked::ChunkPlace& place, int value_head,
                                                     const Tokens& tokens, const TokenNumbers<kRows>& gates,
                                                     const float (&d_log_decay)[kRows / 32],
                                                     float* parameters) {
    const int first = gates.first();
    const GateDerivative derivative(a.gate, gates.A_log, a.lower_bound);
    float of_rate = 0.0f, of_bias = 0.0f, of_gate[kRows / 32];
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) {
        // Rows that do not exist, or do not decay, have finite gates here, and a zero gradient.
        const bool decays = first + i < place.count && tokens.is_first(first + i);
        const float gate = decays ? gates.value(i, a.g, place, value_head, tokens) : 0.0f,
                    d_decay = decays ? d_log_decay[i] : 0.0f;
        const GateGradient x = derivative(gate + gates.bias, d_decay);
        of_rate += x.of_rate, of_bias += x.of_x, of_gate[i] = x.of_x;
    }
    if (d.d_g.data) {
#pragma unroll
        for (int i = 0; i < kRows / 32; ++i)
            if (first + i < place.count && tokens.is_first(first + i))
                store_gradient(d.d_g.data, d.d_g.dtype,
                               d.d_g.offset(place.batch, token_at(place, tokens, first, i), value_head),
                               of_gate[i]);
    }
    if (!parameters) return;
    of_rate = sum_over_warp(of_rate) * derivative.rate_factor, of_bias = sum_over_warp(of_bias);
    if (first == 0) parameters[0] = of_rate, parameters[1] = of_bias;
}

// dbeta_i = (dV_i / beta_i) . (U_i / beta_i), and from there to what the call got. By one warp.
template <int kRows>
__device__ __forceinline__ void store_strength_gradients(const DeviceArgs& a, const Gradients& d,
                                                         const chunked::ChunkPlace& place, int value_head,
                                                         const TokenNumbers<kRows>& strengths,
                                                         const float* products) {
    const int first = strengths.first();
    const RowsAreTokens rows(1, place.begin);
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) {
        if (first + i >= place.count) continue;
        const float given = strengths.value(i, a.beta, place, value_head, rows),
                    over_beta = 1.0f / solved_beta_of(a, given);
        store_gradient(d.d_beta.data, d.d_beta.dtype,
                       d.d_beta.offset(place.batch, place.begin + first + i, value_head),
                       beta_gradient(a, given, products[first + i] * over_beta * over_beta));
    }
}

}  // namespace cula::cuda::backward
