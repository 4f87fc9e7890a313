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
// With erase strengths u = beta v - S'^T e, e the erase key; du as above, and
//
//     dv  = beta du         dbeta += v du               dk += Z u
//     Z  <- Z - e du                                    de -= S' du,        with the Z before this line
//
// With low-rank keys a and b, and r = S^T a, the S before the token, u = v. In the place of S' the walk keeps
// S, which a decay of zero would not give back. With the Z that dv = Z . k is made of
//
//     dr  = Z . b           db += Z r                   da += S dr
//     Z  <- diag(decay) Z + a dr
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
//     with low-rank keys: S              28.0    24.0    16.0      the same registers and CTAs
//                         inputs         23.0    21.5    20.8
//                         sums           10.0    20.0    40.0
#pragma once

#include "cuda/backward/gradients.h"
#include "cuda/recurrent/backward_block.cuh"
#include "cuda/recurrent/backward_derivatives.cuh"
#include "cuda/recurrent/state_row.cuh"
#include "cuda/tile/store_gradient.cuh"

namespace cula::cuda::recurrent {

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
template <int kKey, Keys kKeys>
__device__ __forceinline__ void store_partials(const WalkShared<kKey, kKeys>& s, int place,
                                               const PartialColumns& columns, float* row) {
#pragma unroll
    for (int which = 0; which < WalkShared<kKey, kKeys>::kSums; ++which) {
        const int at = which == 0              ? columns.q
                       : which == 1            ? columns.k
                       : which == 2            ? columns.decay
                       : which == 4            ? columns.b_key
                       : kKeys == Keys::kErase ? columns.erase
                                               : columns.a_key,
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

template <int kKey, Keys kKeys>
__global__ void __launch_bounds__(kStepThreads)
    backward_advance(const __grid_constant__ DeviceArgs a, const __grid_constant__ BackwardPlan plan,
                     const __grid_constant__ Window window) {
    constexpr int kTokens = kBlockTokens<kKey, kKeys>;
    __shared__ BlockInputs<kKey, kKeys> inputs[2];
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
template <int kKey, Keys kKeys>
struct BackwardWalk {
    using Inputs = BlockInputs<kKey, kKeys>;
    static constexpr int kTokens = kBlockTokens<kKey, kKeys>, kPerLane = kKey / kLanesPerRow;

    const DeviceArgs& a;
    const backward::Gradients& d;
    const BackwardPlan& plan;
    const Window& window;
    const WalkHead own;
    WalkShared<kKey, kKeys>& s;
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
                if constexpr (kKeys == Keys::kLowRank) {
                    keep_states(state.x, in, count(j));
                    walk_back_low_rank(state.x, Z.x, in, first(j), count(j));
                } else {
                    keep_decayed(state.x, in, count(j));
                    walk_back(state.x, Z.x, in, first(j), count(j));
                }
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
            if constexpr (kKeys == Keys::kErase) {
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
                s.kept[i][p / 4][threadIdx.x] = float4{x[p], x[p + 1], x[p + 2], x[p + 3]};
            add_write(x, in.k[i], write);
        }
        __syncwarp();  // w is for the lanes of its column
    }

    // With low-rank keys, from the state before a block: S of all its tokens; that of the last stays in x.
    // Also r.
    __device__ __forceinline__ void keep_states(float (&x)[kPerLane], const Inputs& in, int tokens) {
#pragma unroll 1
        for (int i = 0; i < tokens; ++i) {
            float before[kPerLane];
#pragma unroll
            for (int p = 0; p < kPerLane; ++p) before[p] = x[p];
            const float read = row_sum(decay_and_read(x, in, i));
            if (leads()) s.corrections[i][column()] = read;
            if (i + 1 == tokens) {
#pragma unroll
                for (int p = 0; p < kPerLane; ++p) x[p] = before[p];
                break;
            }
#pragma unroll
            for (int p = 0; p < kPerLane; p += 4)
                s.kept[i][p / 4][threadIdx.x] =
                    float4{before[p], before[p + 1], before[p + 2], before[p + 3]};
            add_write(x, in.k[i], in.value[i][column()]);
            add_write(x, in.b[i], read);
        }
        __syncwarp();  // r is for the lanes of its column
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
                for (int p = 0; p < kPerLane; p += 4) load4(x + p, &s.kept[i][p / 4][threadIdx.x].x);
            }
            const float d_o = in.d_o[i][column()];
            const float beta = corrects ? in.beta[i][column()] : 1.0f,
                        w = corrects ? s.corrections[i][column()] : in.value[i][column()],
                        write = kKeys == Keys::kErase ? w : beta * w;
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
            const float d_u = row_sum(d_write[0] + d_write[1]),
                        d_w = kKeys == Keys::kErase ? d_u : beta * d_u;
#pragma unroll
            for (int p = 0; p < kPerLane; ++p) {
                part[p] = z[p] * write;
                if (kKeys != Keys::kErase && corrects) part[p] -= x[p] * d_w;
            }
            if (wants_k) sum_columns(part, s.sums[place][1][warp]);
            if constexpr (kKeys == Keys::kErase) {
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
            const float d_beta = (kKeys == Keys::kErase ? in.value[i][column()] : w) * d_u;
            if (plan.columns.beta >= 0) {
                float all = d_beta;  // every lane of a column has it
                all += __shfl_xor_sync(0xffffffffu, all, 16);
                all += __shfl_xor_sync(0xffffffffu, all, 8);
                if (threadIdx.x % 32 == 0) s.scalars[place][1][warp] = all;
            }
            if (leads() && own.row() < a.value_dim)
                store_values(begin_of + i, kKeys == Keys::kErase ? beta * d_u : d_w, d_beta);
            finish_token(begin_of + i, place);
        }
    }

    // The same with low-rank keys. x: S of the block's last token.
    __device__ __forceinline__ void walk_back_low_rank(float (&x)[kPerLane], float (&z)[kPerLane],
                                                       const Inputs& in, std::int64_t begin_of, int tokens) {
        const PartialColumns& columns = plan.columns;
        const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
        for (int i = tokens - 1; i >= 0; --i) {
            const int place = i % 2;
            if (i + 1 < tokens) {
#pragma unroll
                for (int p = 0; p < kPerLane; p += 4) load4(x + p, &s.kept[i][p / 4][threadIdx.x].x);
            }
            const float d_o = in.d_o[i][column()], value = in.value[i][column()],
                        read = s.corrections[i][column()];
            float part[kPerLane], d_value[2] = {}, d_read[2] = {};
#pragma unroll
            for (int p = 0; p < kPerLane; p += 4) {
                const int c = lane_channel(p);
                float query[4], key[4], of_read[4], decay[4];
                load4(query, in.q[i] + c), load4(key, in.k[i] + c);
                load4(of_read, in.b[i] + c), load4(decay, in.decay[i] + c);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    z[p + e] += query[e] * d_o;
                    d_value[e % 2] += z[p + e] * key[e];
                    d_read[e % 2] += z[p + e] * of_read[e];
                    // The state after the token, with the bits that decay_and_read and add_write give it.
                    const float written = __fmaf_rn(key[e], value, __fmul_rn(x[p + e], decay[e]));
                    part[p + e] = __fmaf_rn(of_read[e], read, written) * d_o;
                }
            }
            if (columns.q >= 0) sum_columns(part, s.sums[place][0][warp]);
            const auto sum_products = [&](int column, int which, const float(&y)[kPerLane], float factor) {
                if (column < 0) return;
#pragma unroll
                for (int p = 0; p < kPerLane; ++p) part[p] = 0.0f + y[p] * factor;  // no -0 of zeros
                sum_columns(part, s.sums[place][which][warp]);
            };
            const float d_v = row_sum(d_value[0] + d_value[1]), d_r = row_sum(d_read[0] + d_read[1]);
            sum_products(columns.k, 1, z, value);
            sum_products(columns.a_key, 3, x, d_r);
            sum_products(columns.b_key, 4, z, read);
#pragma unroll
            for (int p = 0; p < kPerLane; p += 4) {
                float decay[4], key[4];
                load4(decay, in.decay[i] + lane_channel(p)), load4(key, in.a[i] + lane_channel(p));
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    z[p + e] *= decay[e];
                    part[p + e] = z[p + e] * x[p + e];
                    z[p + e] += key[e] * d_r;
                }
            }
            if (columns.decay >= 0) sum_columns(part, s.sums[place][2][warp]);
            if (leads() && own.row() < a.value_dim) store_values(begin_of + i, d_v, 0.0f);
            finish_token(begin_of + i, place);
        }
    }

    // A token's sums over the CTA's columns.
    __device__ __forceinline__ void finish_token(std::int64_t token, int place) {
        __syncthreads();
        if (plan.columns.count > 0)
            store_partials(s, place, plan.columns, plan.partials + own.at(plan, token) * plan.columns.count);
    }

    // What belongs to one value channel of a token, counted from the window's start.
    __device__ __forceinline__ void store_values(std::int64_t token, float d_v, float d_beta) {
        const std::int64_t batch = a.cu_seqlens ? 0 : n, at = part.token + token - part.first;
        const int row = own.row();
        if (d.d_v.data)
            store_gradient(d.d_v.data, d.d_v.dtype, d.d_v.offset(batch, at, own.value_head) + row, d_v);
        if (d.d_beta.data && a.beta_per_value)
            store_beta_gradient<kKeys>(a, d.d_beta, batch, at, own.value_head, row, d_beta);
    }
};

template <int kKey, Keys kKeys>
__global__ void __launch_bounds__(kStepThreads, kKey > 128 ? 2 : 3)
    backward_walk(const __grid_constant__ DeviceArgs a, const __grid_constant__ backward::Gradients d,
                  const __grid_constant__ BackwardPlan plan, const __grid_constant__ Window window) {
    using Shared = WalkShared<kKey, kKeys>;
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
        BackwardWalk<kKey, kKeys> walk{
            a, d, plan, window, own, *reinterpret_cast<Shared*>(memory), corrects_writes(a), n, part};
        walk.run();
    }
}

}  // namespace cula::cuda::recurrent
