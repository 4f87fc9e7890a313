// SPDX-License-Identifier: Apache-2.0
// backward_walk: gradients token by token, from the end of a window to its start; states in registers.
// backward_advance: the states at the ends of windows, which the walks of later windows start from.
//
// Equations, for one column (value channel) of S and Z, with S' = diag(decay) S, w = v - S'^T k and q, k and
// d_o as backward_prepare leaves them:
//
//     Z  <- Z + q d_o                                   dq += (S' + k u) d_o
//     du  = Z . k                                       delta rule: u = beta w, dw = beta du, dbeta += w du
//     Z  <- Z - k dw        (delta rule)                dk += Z u - S' dw,  with the Z before this line
//     Z  <- diag(decay) Z                               da += Z S',         with the Z before this line
//     dv  = dw              (delta rule; else u = v, dv = du)
//
// With erase strengths (kErases) u = beta v - S'^T e, e the erase key; du as above, and
//
//     dv  = beta du         dbeta += v du               dk += Z u
//     Z  <- Z - e du                                    de -= S' du,        with the Z before this line
//
// Columns meet only in the sums +=: dq, dk, de and da (per key channel, or one), and dbeta, if it is one
// number.
//
// Grid: sequences that may have tokens in the window * value heads * slices of 16 value channels, 128
// threads. Eight lanes hold one column, as in step.cuh (lanes.cuh).
//
// Phases, for every sequence of the CTA:
//   1  forwards over the window, storing the state at the start of each block in the workspace
//   2  the blocks from the last to the first; in each
//        forwards: S' of all tokens into shared memory (each thread its own elements, so no barrier),
//        backwards: Z walks, the state of the token after it is made again from S'
// The inputs of the next block are copied (cp.async) while one block is processed: two places, two barriers a
// block. A token's sums are formed over the four columns of a warp by shuffles, over the four warps through
// shared memory (two places, one barrier a token), and leave as a row of `partials`: the same order always.
//
// Budgets of backward_walk             K = 64    128     256
//     CTAs per multiprocessor, sm_90        3       3       2
//     registers per thread                168     168     255
//     shared memory, KiB: S'             44.0    40.0    48.0
//                         inputs         22.5    20.3    25.5
//                         sums            6.0    12.0    24.0
//     with erase keys: S'                36.0    32.0    32.0      the same registers and CTAs
//                         inputs         23.8    21.9    25.1
//                         sums            8.0    16.0    32.0
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/recurrent/backward_derivatives.cuh"
#include "cuda/recurrent/backward_plan.h"
#include "cuda/recurrent/erase.cuh"
#include "cuda/recurrent/lanes.cuh"
#include "cuda/recurrent/step.cuh"
#include "cuda/rule.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/store_gradient.cuh"

namespace cula::cuda::recurrent {

static_assert(kWalkRows == kRowsPerPass);

// How does a token's write depend on the state and on what it brings?
template <Update kUpdate>
struct BackwardRule {
    static_assert(kIsKnown<kUpdate>, "backward: what does the gradient of a token's write reach?");
};
template <>
struct BackwardRule<Update::kAdditive> {
    static constexpr bool kCorrects = false;  // u = v
};
template <>
struct BackwardRule<Update::kDelta> {
    static constexpr bool kCorrects = true;  // u = beta (v - S' k): reaches v, beta, k and S'
};

__device__ __forceinline__ bool corrects_writes(const DeviceArgs& a) {
    return answer_for(a.algorithm.update, []<Update kUpdate>(UpdateConstant<kUpdate>) {
        return BackwardRule<kUpdate>::kCorrects;
    });
}

// What a slice needs of the tokens of a block. Forward walks need no q and d_o.
template <int kKey, bool kErases>
struct alignas(16) BlockInputs : EraseKeys<kErases, kBlockTokens<kKey, kErases>, kKey> {
    static constexpr int kTokens = kBlockTokens<kKey, kErases>;
    float k[kTokens][kKey], decay[kTokens][kKey], q[kTokens][kKey];
    float value[kTokens][kWalkRows], beta[kTokens][kWalkRows], d_o[kTokens][kWalkRows];

    // What reads the state.
    __device__ __forceinline__ const float* reading_key(int i) const {
        if constexpr (kErases)
            return this->e[i];
        else
            return k[i];
    }
};

template <int kKey, bool kErases>
struct alignas(16) WalkShared {
    static constexpr int kTokens = kBlockTokens<kKey, kErases>, kPieces = kKey / kLanesPerRow / 4,
                         kSums = kErases ? 4 : 3;
    BlockInputs<kKey, kErases> inputs[2];
    float4 decayed[kTokens - 1][kPieces][kStepThreads];  // S'; that of the last token stays in registers
    float sums[2][kSums][kStepWarps][kKey];              // dq, dk, da, de
    float scalars[2][2][kStepWarps];                     // da, dbeta
    float corrections[kTokens][kWalkRows];               // w; with erase keys u
};

// The place of a CTA: a slice of one value head.
struct WalkHead {
    int value_head, head, slice;
    std::int64_t states;  // slices of all value heads

    __device__ __forceinline__ WalkHead(const DeviceArgs& a, const BackwardPlan& plan, int index)
        : value_head(index / plan.slices),
          head(value_head / a.group),
          slice(index % plan.slices),
          states(std::int64_t{a.value_heads} * plan.slices) {}

    // The element of [.., HV, slices] that is the CTA's.
    __device__ __forceinline__ std::int64_t at(const BackwardPlan& plan, std::int64_t outer) const {
        return outer * states + value_head * plan.slices + slice;
    }
    __device__ __forceinline__ int row() const {
        return slice * kWalkRows + static_cast<int>(threadIdx.x) / kLanesPerRow;
    }
};

// The CTA's slice of a state in the workspace: whole lines, each thread its own elements.
template <int kPerLane>
__device__ __forceinline__ void load_slice(float (&x)[kPerLane], const float4* states, std::int64_t slice) {
    const float4* const from = states + slice * (kPerLane / 4) * kStepThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kPerLane / 4; ++i) {
        const float4 piece = from[i * kStepThreads];
        x[4 * i] = piece.x, x[4 * i + 1] = piece.y, x[4 * i + 2] = piece.z, x[4 * i + 3] = piece.w;
    }
}
template <int kPerLane>
__device__ __forceinline__ void store_slice(const float (&x)[kPerLane], float4* states, std::int64_t slice) {
    float4* const to = states + slice * (kPerLane / 4) * kStepThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kPerLane / 4; ++i)
        to[i * kStepThreads] = float4{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
}

// Issues the copies of `count` tokens from the window's token `first` on; whole: with q and d_o.
template <int kKey, bool kErases>
__device__ __forceinline__ void fetch_block(BlockInputs<kKey, kErases>& to, const DeviceArgs& a,
                                            const BackwardPlan& plan, const WalkHead& own, std::int64_t first,
                                            int count, bool corrects, bool whole) {
    constexpr int kPieces = kKey / 4, kValuePieces = kWalkRows / 4;
    const auto copy = [](float* shared, const float* global) { copy_async(shared_address(shared), global); };
#pragma unroll 1
    for (int p = static_cast<int>(threadIdx.x); p < count * kPieces; p += kStepThreads) {
        const int i = p / kPieces, c = p % kPieces * 4;
        const float* const keys = plan.keys + ((first + i) * a.heads + own.head) * 2 * kKey + c;
        copy(&to.k[i][c], keys + kKey);
        copy(&to.decay[i][c], plan.decays + ((first + i) * a.value_heads + own.value_head) * kKey + c);
        if (whole) copy(&to.q[i][c], keys);
        if constexpr (kErases)
            copy(&to.e[i][c], plan.erase_keys + ((first + i) * a.value_heads + own.value_head) * kKey + c);
    }
    const int i = static_cast<int>(threadIdx.x) / kValuePieces, c = threadIdx.x % kValuePieces * 4;
    static_assert(kBlockTokens<kKey, kErases> * kValuePieces <= kStepThreads);
    if (i < count) {
        const float* const values = plan.values +
                                    ((first + i) * a.value_heads + own.value_head) * 3 * plan.value_dim +
                                    own.slice * kWalkRows + c;
        copy(&to.value[i][c], values);
        if (corrects) copy(&to.beta[i][c], values + plan.value_dim);
        if (whole) copy(&to.d_o[i][c], values + 2 * plan.value_dim);
    }
    commit_copies();
}

// S <- S'; returns the thread's part of S' . k, with kErases of S' . e.
template <int kKey, bool kErases>
__device__ __forceinline__ float decay_and_read(float (&x)[kKey / kLanesPerRow],
                                                const BlockInputs<kKey, kErases>& in, int i) {
    float read[2] = {};
#pragma unroll
    for (int p = 0; p < kKey / kLanesPerRow; p += 4) {
        float decay[4], key[4];
        load4(decay, in.decay[i] + lane_channel(p)), load4(key, in.reading_key(i) + lane_channel(p));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            x[p + e] *= decay[e];
            read[e % 2] += x[p + e] * key[e];
        }
    }
    return read[0] + read[1];
}

// S <- S' + k u
template <int kKey, bool kErases>
__device__ __forceinline__ void add_write(float (&x)[kKey / kLanesPerRow],
                                          const BlockInputs<kKey, kErases>& in, int i, float write) {
#pragma unroll
    for (int p = 0; p < kKey / kLanesPerRow; p += 4) {
        float key[4];
        load4(key, in.k[i] + lane_channel(p));
#pragma unroll
        for (int e = 0; e < 4; ++e) x[p + e] += key[e] * write;
    }
}

// The state goes over the first `count` tokens of a block.
template <int kKey, bool kErases>
__device__ __forceinline__ void advance_block(float (&x)[kKey / kLanesPerRow],
                                              const BlockInputs<kKey, kErases>& in, int count,
                                              bool corrects) {
    const int own = static_cast<int>(threadIdx.x) / kLanesPerRow;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const float read = decay_and_read(x, in, i);
        float write = in.value[i][own];
        if constexpr (kErases)
            write = in.beta[i][own] * write - row_sum(read);
        else if (corrects)
            write = in.beta[i][own] * (write - row_sum(read));
        add_write(x, in, i, write);
    }
}

// Adds x over the four columns of a warp, in the order (0 + 2) + (1 + 3), and stores the sums.
template <int kPerLane>
__device__ __forceinline__ void sum_columns(const float (&x)[kPerLane], float* to) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float half[kPerLane / 2], quarter[kPerLane / 4];
    const auto exchange = [](auto& out, const auto& in, bool upper, int step) {
        constexpr int kCount = sizeof(out) / sizeof(float);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float kept = upper ? in[i + kCount] : in[i], sent = upper ? in[i] : in[i + kCount];
            out[i] = kept + __shfl_xor_sync(0xffffffffu, sent, step);
        }
    };
    exchange(half, x, lane & 16, 16);
    exchange(quarter, half, lane & 8, 8);
    const int first = lane / kLanesPerRow * (kPerLane / 4);  // of the elements that the lane has now
    if constexpr (kPerLane < 16) {
        *reinterpret_cast<float2*>(to + lane_channel(first)) = float2{quarter[0], quarter[1]};
    } else {
#pragma unroll
        for (int i = 0; i < kPerLane / 4; i += 4)
            *reinterpret_cast<float4*>(to + lane_channel(first + i)) =
                float4{quarter[i], quarter[i + 1], quarter[i + 2], quarter[i + 3]};
    }
}

// The row of partial sums of one token, from the sums of the four warps.
template <int kKey, bool kErases>
__device__ __forceinline__ void store_partials(const WalkShared<kKey, kErases>& s, int place,
                                               const PartialColumns& columns, float* row) {
#pragma unroll
    for (int which = 0; which < WalkShared<kKey, kErases>::kSums; ++which) {
        const int at = which == 0   ? columns.q
                       : which == 1 ? columns.k
                       : which == 2 ? columns.decay
                                    : columns.erase,
                  p = (static_cast<int>(threadIdx.x) + kStepThreads - which * (kKey / 4) % kStepThreads) %
                      kStepThreads;  // other threads for each, where one needs not all of them
        if (at < 0 || p >= kKey / 4) continue;
        float all[4], more[4];
        load4(all, s.sums[place][which][0] + 4 * p);
#pragma unroll
        for (int warp = 1; warp < kStepWarps; ++warp) {
            load4(more, s.sums[place][which][warp] + 4 * p);
#pragma unroll
            for (int e = 0; e < 4; ++e) all[e] += more[e];
        }
        *reinterpret_cast<float4*>(row + at + 4 * p) = float4{all[0], all[1], all[2], all[3]};
    }
    if (threadIdx.x == 0 && columns.token_decay >= 0) row[columns.token_decay] = sum(s.scalars[place][0]);
    if (threadIdx.x == 0 && columns.beta >= 0) row[columns.beta] = sum(s.scalars[place][1]);
}

// The state that sequence n has at the window's start, or at its own.
template <int kKey>
__device__ __forceinline__ void load_start(StateRow<kKey>& state, const DeviceArgs& a,
                                           const BackwardPlan& plan, const WalkHead& own,
                                           const Window& window, std::int64_t n, const Part& part) {
    if (part.crosses_start)
        load_slice(state.x, plan.window_states, own.at(plan, (window.index - 1) * plan.rows + part.row));
    else if (a.initial.data && (!a.has_initial || a.has_initial[n]))
        state.load(a, a.initial, a.initial.offset(n, own.value_head), own.row(), a.value_dim);
    else
        for (float& x : state.x) x = 0.0f;
}

template <int kKey, bool kErases>
__global__ void __launch_bounds__(kStepThreads)
    backward_advance(const __grid_constant__ DeviceArgs a, const __grid_constant__ BackwardPlan plan,
                     const __grid_constant__ Window window) {
    constexpr int kTokens = kBlockTokens<kKey, kErases>;
    __shared__ BlockInputs<kKey, kErases> inputs[2];
    const int slices = a.value_heads * plan.slices;
    const WalkHead own(a, plan, static_cast<int>(blockIdx.x) % slices);
    const std::int64_t n =
        a.cu_seqlens ? first_sequence_behind(a, window.end) : window.first_row + blockIdx.x / slices;
    if (n >= a.sequences) return;
    const Part part = part_of(a, window, n);
    if (part.first >= part.last) return;  // no sequence crosses the window's end
    const bool corrects = corrects_writes(a);
    const auto count = [&](std::int64_t at) {
        return static_cast<int>(min(part.last - at, std::int64_t{kTokens}));
    };
    const auto fetch = [&](std::int64_t at, int place) {
        fetch_block(inputs[place], a, plan, own, at, count(at), corrects, false);
    };
    StateRow<kKey> state;
    fetch(part.first, 0);
    load_start<kKey>(state, a, plan, own, window, n, part);
    int place = 0;
#pragma unroll 1
    for (std::int64_t at = part.first; at < part.last; at += kTokens, place ^= 1) {
        if (at + kTokens < part.last)
            fetch(at + kTokens, place ^ 1);
        else
            commit_copies();
        wait_copies<1>();
        __syncthreads();
        advance_block(state.x, inputs[place], count(at), corrects);
        __syncthreads();
    }
    store_slice(state.x, plan.window_states, own.at(plan, window.index * plan.rows + part.row));
}

// The walk of one sequence over one window.
template <int kKey, bool kErases>
struct BackwardWalk {
    using Inputs = BlockInputs<kKey, kErases>;
    static constexpr int kTokens = kBlockTokens<kKey, kErases>, kPerLane = kKey / kLanesPerRow;

    const DeviceArgs& a;
    const backward::Gradients& d;
    const BackwardPlan& plan;
    const Window& window;
    const WalkHead own;
    WalkShared<kKey, kErases>& s;
    const bool corrects;
    const std::int64_t n;  // the sequence
    const Part part;

    __device__ __forceinline__ int column() const { return static_cast<int>(threadIdx.x) / kLanesPerRow; }
    __device__ __forceinline__ bool leads() const { return threadIdx.x % kLanesPerRow == 0; }

    // Block j's tokens of the sequence, counted from the window's start.
    __device__ __forceinline__ std::int64_t first(std::int64_t j) const {
        return max(part.first, j * kTokens);
    }
    __device__ __forceinline__ int count(std::int64_t j) const {
        return static_cast<int>(min(part.last, (j + 1) * kTokens) - first(j));
    }

    __device__ __forceinline__ void run() {
        const std::int64_t first_block = part.first / kTokens, last_block = (part.last - 1) / kTokens,
                           forward = last_block - first_block, visits = 2 * forward + 1;
        // Visit x: of block first_block + x forwards, then of the blocks from the last on.
        const auto fetch = [&](std::int64_t x) {
            const std::int64_t j = x < forward ? first_block + x : last_block - (x - forward);
            fetch_block(s.inputs[x % 2], a, plan, own, first(j), count(j), corrects, x >= forward);
        };
        fetch(0);
        StateRow<kKey> state, Z;
        load_start<kKey>(state, a, plan, own, window, n, part);
        if (part.crosses_end)
            load_slice(Z.x, plan.carried, own.at(plan, (window.index + 1) % 2 * plan.rows + part.row));
        else if (d.d_final.data)
            Z.load(a, d.d_final, d.d_final.offset(n, own.value_head), own.row(), a.value_dim);
        else
            for (float& x : Z.x) x = 0.0f;
#pragma unroll 1
        for (std::int64_t x = 0; x < visits; ++x) {
            if (x + 1 < visits)
                fetch(x + 1);
            else
                commit_copies();
            wait_copies<1>();
            __syncthreads();
            const Inputs& in = s.inputs[x % 2];
            if (x < forward) {
                // A block that one sequence enters and another leaves: the one that leaves has this place.
                store_slice(state.x, plan.block_states, own.at(plan, first_block + x));
                advance_block(state.x, in, count(first_block + x), corrects);
            } else {
                const std::int64_t j = last_block - (x - forward);
                if (x > forward) load_slice(state.x, plan.block_states, own.at(plan, j));
                keep_decayed(state.x, in, count(j));
                walk_back(state.x, Z.x, in, first(j), count(j));
            }
            __syncthreads();
        }
        if (part.crosses_start)
            store_slice(Z.x, plan.carried, own.at(plan, window.index % 2 * plan.rows + part.row));
        else if (d.d_initial.data) {
            if (a.has_initial && !a.has_initial[n])
                for (float& x : Z.x) x = 0.0f;
            Z.store(a, d.d_initial, d.d_initial.offset(n, own.value_head), own.row(), a.value_dim);
        }
    }

    // From the state before a block: S' of all its tokens; that of the last stays in x. Also w.
    __device__ __forceinline__ void keep_decayed(float (&x)[kPerLane], const Inputs& in, int tokens) {
#pragma unroll 1
        for (int i = 0; i < tokens; ++i) {
            const float read = decay_and_read(x, in, i);
            float write = in.value[i][column()];
            if constexpr (kErases) {
                write = in.beta[i][column()] * write - row_sum(read);
                if (leads()) s.corrections[i][column()] = write;
            } else if (corrects) {
                write -= row_sum(read);
                if (leads()) s.corrections[i][column()] = write;
                write *= in.beta[i][column()];
            }
            if (i + 1 == tokens) break;
#pragma unroll
            for (int p = 0; p < kPerLane; p += 4)
                s.decayed[i][p / 4][threadIdx.x] = float4{x[p], x[p + 1], x[p + 2], x[p + 3]};
            add_write(x, in, i, write);
        }
        __syncwarp();  // w is for the lanes of its column
    }

    // Z goes from the end of a block to its start. x: S' of its last token. begin_of: its first token.
    __device__ __forceinline__ void walk_back(float (&x)[kPerLane], float (&z)[kPerLane], const Inputs& in,
                                              std::int64_t begin_of, int tokens) {
        const bool wants_q = plan.columns.q >= 0, wants_k = plan.columns.k >= 0,
                   wants_channels = plan.columns.decay >= 0, wants_decay = plan.columns.token_decay >= 0;
        const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
        for (int i = tokens - 1; i >= 0; --i) {
            const int place = i % 2;
            if (i + 1 < tokens) {
#pragma unroll
                for (int p = 0; p < kPerLane; p += 4) load4(x + p, &s.decayed[i][p / 4][threadIdx.x].x);
            }
            const float d_o = in.d_o[i][column()];
            const float beta = corrects ? in.beta[i][column()] : 1.0f,
                        w = corrects ? s.corrections[i][column()] : in.value[i][column()],
                        write = kErases ? w : beta * w;
            float part[kPerLane], d_write[2] = {};
#pragma unroll
            for (int p = 0; p < kPerLane; p += 4) {
                float query[4], key[4];
                load4(query, in.q[i] + lane_channel(p)), load4(key, in.k[i] + lane_channel(p));
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    z[p + e] += query[e] * d_o;
                    d_write[e % 2] += z[p + e] * key[e];
                    part[p + e] = (x[p + e] + key[e] * write) * d_o;
                }
            }
            if (wants_q) sum_columns(part, s.sums[place][0][warp]);
            // d_w: of what the read is taken from.
            const float d_u = row_sum(d_write[0] + d_write[1]), d_w = kErases ? d_u : beta * d_u;
#pragma unroll
            for (int p = 0; p < kPerLane; ++p) {
                part[p] = z[p] * write;
                if (!kErases && corrects) part[p] -= x[p] * d_w;
            }
            if (wants_k) sum_columns(part, s.sums[place][1][warp]);
            if constexpr (kErases) {
#pragma unroll
                for (int p = 0; p < kPerLane; ++p) part[p] = 0.0f - x[p] * d_w;  // no -0 of a state of zeros
                if (plan.columns.erase >= 0) sum_columns(part, s.sums[place][3][warp]);
            }
            float of_decay = 0.0f;
#pragma unroll
            for (int p = 0; p < kPerLane; p += 4) {
                float decay[4], key[4];
                load4(decay, in.decay[i] + lane_channel(p)), load4(key, in.reading_key(i) + lane_channel(p));
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (corrects) z[p + e] -= key[e] * d_w;
                    part[p + e] = z[p + e] * x[p + e];
                    of_decay += part[p + e];
                    z[p + e] *= decay[e];
                }
            }
            if (wants_channels) sum_columns(part, s.sums[place][2][warp]);
            if (wants_decay) {
                of_decay = warp_sum(of_decay);
                if (threadIdx.x % 32 == 0) s.scalars[place][0][warp] = of_decay;
            }
            const float d_beta = (kErases ? in.value[i][column()] : w) * d_u;
            if (plan.columns.beta >= 0) {
                float all = d_beta;  // every lane of a column has it
                all += __shfl_xor_sync(0xffffffffu, all, 16);
                all += __shfl_xor_sync(0xffffffffu, all, 8);
                if (threadIdx.x % 32 == 0) s.scalars[place][1][warp] = all;
            }
            if (leads() && own.row() < a.value_dim)
                store_values(begin_of + i, kErases ? beta * d_u : d_w, d_beta);
            __syncthreads();
            if (plan.columns.count > 0)
                store_partials(s, place, plan.columns,
                               plan.partials + own.at(plan, begin_of + i) * plan.columns.count);
        }
    }

    // What belongs to one value channel of a token, counted from the window's start.
    __device__ __forceinline__ void store_values(std::int64_t token, float d_v, float d_beta) {
        const std::int64_t batch = a.cu_seqlens ? 0 : n, at = part.token + token - part.first;
        const int row = own.row();
        if (d.d_v.data)
            store_gradient(d.d_v.data, d.d_v.dtype, d.d_v.offset(batch, at, own.value_head) + row, d_v);
        if (d.d_beta.data && a.beta_per_value)
            store_beta_gradient<kErases>(a, d.d_beta, batch, at, own.value_head, row, d_beta);
    }
};

template <int kKey, bool kErases>
__global__ void __launch_bounds__(kStepThreads, kKey > 128 ? 2 : 3)
    backward_walk(const __grid_constant__ DeviceArgs a, const __grid_constant__ backward::Gradients d,
                  const __grid_constant__ BackwardPlan plan, const __grid_constant__ Window window) {
    using Shared = WalkShared<kKey, kErases>;
    static_assert(sizeof(Shared) <= 99 * 1024);  // what a CTA has on sm_86, sm_89 and sm_120
    extern __shared__ __align__(16) unsigned char memory[];
    const int slices = a.value_heads * plan.slices;
    const WalkHead own(a, plan, static_cast<int>(blockIdx.x) % slices);
    const std::int64_t step = gridDim.x / slices,
                       first = a.cu_seqlens ? first_sequence_behind(a, window.begin) : window.first_row,
                       end = a.cu_seqlens ? a.sequences : window.first_row + window.rows;
#pragma unroll 1
    for (std::int64_t n = first + blockIdx.x / slices; n < end; n += step) {
        const Part part = part_of(a, window, n);
        if (part.token >= window.end) break;  // so do those behind it
        if (part.first >= part.last) continue;
        BackwardWalk<kKey, kErases> walk{
            a, d, plan, window, own, *reinterpret_cast<Shared*>(memory), corrects_writes(a), n, part};
        walk.run();
    }
}

}  // namespace cula::cuda::recurrent
