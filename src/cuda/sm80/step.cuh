// SPDX-License-Identifier: Apache-2.0
// step: o, states <- q, k, v, gate, beta, state; tokens one after another      ALGORITHM.md, "The family"
//
// grid (value blocks * value heads * sequences)   128 threads
//
// A CTA owns kRows * 16 rows of one head's state [V, K] and keeps them in registers while it walks the tokens of its
// sequence. Eight lanes share a row, so that one warp-wide load covers four whole 128-byte lines, and both contractions
// with the state end in three shuffles. S^T q = (alpha S)^T q + u (k . q): one pass reads, decays and contracts, one
// updates. The inputs of a token are asked for first and readied while the state comes in, a warp a token. (One token a
// sequence: decode.cuh.)
//
// Traffic is the state, once in and once out (or once per stored token); everything else is a few hundred bytes per
// head.
#pragma once

#include "cuda/device_args.h"
#include "cuda/sm80/launch.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::sm80 {

inline constexpr int kStepThreads = 128;
inline constexpr int kStepWarps = kStepThreads / 32;
inline constexpr int kLanesPerRow = 8;
inline constexpr int kRowsPerPass = kStepThreads / kLanesPerRow;

template <int kKey>
struct alignas(16) StepInputs {
    float q[kStepWarps][kKey], k[kStepWarps][kKey], decay[kStepWarps][kKey];
    float beta[kStepWarps], key_query[kStepWarps];
    std::int32_t path[kMaxTreeTokens];
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// One warp readies a token: fetch() asks for everything, ready() turns it into q, k and decays in place `slot`.
template <int kKey>
struct TokenInputs {
    static constexpr int kPerLane = kKey / 32;
    RawFloat q[kPerLane], k[kPerLane], g[kPerLane], beta;

    static __device__ __forceinline__ int channel(int i) { return static_cast<int>(threadIdx.x) % 32 + 32 * i; }

    __device__ __forceinline__ void fetch(const DeviceArgs& a, std::int64_t b, std::int64_t t, int head,
                                          int value_head) {
        const std::int64_t q_row = a.q.offset(b, t, head), k_row = a.k.offset(b, t, head),
                           g_row = a.g.offset(b, t, value_head);
        const bool per_channel = a.algorithm.decay == Decay::kPerChannel,
                   per_token = a.algorithm.decay == Decay::kPerToken;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int c = channel(i);
            const bool in = c < a.key_dim;
            q[i].load(a.q.data, a.q.dtype, q_row + c, in);
            k[i].load(a.k.data, a.k.dtype, k_row + c, in);
            g[i].load(a.g.data, a.g.dtype, g_row + (per_channel ? c : 0), per_channel ? in : per_token);
        }
        beta.load(a.beta.data, a.beta.dtype, a.beta.offset(b, t, value_head),
                  a.algorithm.update == Update::kDelta && !a.beta_per_value);
    }

    __device__ __forceinline__ void ready(const DeviceArgs& a, const HeadGate& gate, StepInputs<kKey>& s,
                                          int slot) const {
        float x[kPerLane], y[kPerLane], decay[kPerLane], bias[kPerLane], qq = 0.0f, kk = 0.0f, kq = 0.0f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            x[i] = q[i].value(a.q.dtype), y[i] = k[i].value(a.k.dtype);
            qq += x[i] * x[i], kk += y[i] * y[i], kq += y[i] * x[i];
            decay[i] = g[i].value(a.g.dtype);
            const bool biased = a.algorithm.decay == Decay::kPerChannel && channel(i) < a.key_dim;
            bias[i] = biased ? channel_bias(a, gate.value_head, channel(i)) : 0.0f;
        }
        if (a.algorithm.decay == Decay::kPerChannel) {
            gate.log2_decays(decay, bias);
        } else {
            const float one = a.algorithm.decay == Decay::kPerToken
                                  ? gate.log2_decay(decay[0] + gate.bias) + gate.gamma2
                                  : gate.gamma2;
#pragma unroll
            for (float& d : decay) d = one;
        }
        float q_scale = a.scale, k_scale = 1.0f;
        kq = warp_sum(kq);
        if (a.qk_l2norm) {
            q_scale *= rsqrtf(warp_sum(qq) + 1e-6f);
            k_scale = rsqrtf(warp_sum(kk) + 1e-6f);
        }
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            s.decay[slot][channel(i)] = exp2_fast(decay[i]);
            s.q[slot][channel(i)] = x[i] * q_scale;
            s.k[slot][channel(i)] = y[i] * k_scale;
        }
        if (threadIdx.x % 32 == 0) {
            s.key_query[slot] = kq * q_scale * k_scale;
            s.beta[slot] = beta_of(a, beta.value(a.beta.dtype));
        }
    }
};

// kRows rows of a state a lane, kKey / 8 channels of each.
// kPacked: every state is of type State with K contiguous, whole and aligned, so that accesses are 16 bytes wide;
// otherwise they go element by element, of whatever dtype each tensor has.
template <class State, int kKey, int kRows, bool kPacked>
struct StateRows {
    static constexpr int kFours = kKey / (kLanesPerRow * 4);

    float x[kRows][kKey / kLanesPerRow];

    // The same for every type and layout, so that sums run in the same order.
    static __device__ __forceinline__ int channel(int i) {
        return (i / 4 * kLanesPerRow + static_cast<int>(threadIdx.x) % kLanesPerRow) * 4 + i % 4;
    }

    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kKey / kLanesPerRow; ++i) x[r][i] = 0.0f;
    }

    __device__ __forceinline__ void load(const DeviceArgs& a, const States& s, std::int64_t offset, int row0,
                                         int row_end) {
        if constexpr (kPacked) {
            const auto* base = static_cast<const State*>(s.data) + offset;
            Four<State> fours[kRows][kFours];
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int p = 0; p < kFours; ++p) {
                    const int row = row0 + r * kRowsPerPass;
                    if (row < row_end) fours[r][p].load(base + row * s.v + channel(p * 4));
                }
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int i = 0; i < kKey / kLanesPerRow; ++i) x[r][i] = fours[r][i / 4].get(i % 4);
        } else {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int i = 0; i < kKey / kLanesPerRow; ++i) {
                    const int row = row0 + r * kRowsPerPass, c = channel(i);
                    x[r][i] = row < row_end && c < a.key_dim ? load_float(s.data, s.dtype, offset + row * s.v + c * s.k)
                                                             : 0.0f;
                }
        }
    }

    __device__ __forceinline__ void store(const DeviceArgs& a, const States& s, std::int64_t offset, int row0,
                                          int row_end) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row0 + r * kRowsPerPass;
            if (row >= row_end) continue;
            if constexpr (kPacked) {
                auto* base = static_cast<State*>(s.data) + offset;
#pragma unroll
                for (int p = 0; p < kFours; ++p) {
                    Four<State> four;
#pragma unroll
                    for (int e = 0; e < 4; ++e) four.set(e, x[r][p * 4 + e]);
                    four.store(base + row * s.v + channel(p * 4));
                }
            } else {
#pragma unroll
                for (int i = 0; i < kKey / kLanesPerRow; ++i)
                    if (channel(i) < a.key_dim)
                        store_float(s.data, s.dtype, offset + row * s.v + channel(i) * s.k, x[r][i]);
            }
        }
    }

    // Sum of x * y over a row, in every lane of the row.
    static __device__ __forceinline__ float row_sum(float part) {
#pragma unroll
        for (int step = kLanesPerRow / 2; step > 0; step /= 2) part += __shfl_xor_sync(0xffffffffu, part, step);
        return part;
    }
};

// kMaps: the affine maps of whole sequences instead of outputs. Rows from zero with the values give B, rows from the
// identity without values give M, of which an additive rule keeps the diagonal.
template <class State, int kKey, int kRows, bool kPacked, bool kTree, bool kMaps = false>
__global__ void __launch_bounds__(kStepThreads, 3) step(const __grid_constant__ DeviceArgs a) {
    using Rows = StateRows<State, kKey, kRows, kPacked>;
    __shared__ StepInputs<kKey> s;

    const int value_blocks = (a.value_dim + kRows * kRowsPerPass - 1) / (kRows * kRowsPerPass);
    const int blocks = value_blocks + (kMaps ? (a.key_dim + kRows * kRowsPerPass - 1) / (kRows * kRowsPerPass) : 0);
    const int value_head = blockIdx.x / blocks % a.value_heads, head = value_head / a.group;
    const bool of_m = kMaps && static_cast<int>(blockIdx.x % blocks) >= value_blocks;
    const int block = blockIdx.x % blocks - (of_m ? value_blocks : 0), row_end = of_m ? a.key_dim : a.value_dim;
    const std::int64_t n = blockIdx.x / blocks / a.value_heads;
    const int warp = threadIdx.x / 32,
              row0 = block * kRows * kRowsPerPass + static_cast<int>(threadIdx.x) / kLanesPerRow;
    const TokenRange tokens = a.sequences > 0 ? tokens_of(a, n) : TokenRange{};
    // A warp readies a token. What it reads does not depend on the state, nor waits for it.
    TokenInputs<kKey> inputs;
    if (!kTree && warp < tokens.length) inputs.fetch(a, tokens.batch, tokens.begin + warp, head, value_head);

    const auto zero_outputs = [&](std::int64_t begin, std::int64_t end) {
        if constexpr (!kMaps) {
            if (threadIdx.x % kLanesPerRow != 0) return;
            for (std::int64_t t = begin; t < end; ++t)
                for (int row = row0; row < row0 + kRows * kRowsPerPass && row < a.value_dim; row += kRowsPerPass)
                    store_float(a.o.data, a.o.dtype, a.o.offset(tokens.batch, t, value_head) + row, 0.0f);
        }
    };
    // Tokens after the last sequence belong to nobody.
    if (a.cu_seqlens && n + 1 >= a.sequences) zero_outputs(tokens.begin + tokens.length, a.tokens);
    if (a.sequences == 0) return;

    // Where the row starts and ends.
    StateSlots slots;
    if (a.state_indices.data) {
        std::int32_t accepted = a.num_accepted.data ? a.num_accepted.at(n) : 1;
        accepted = min(max(accepted, 1), a.state_indices.columns);
        const std::int64_t from =
            a.initial_indices.data ? a.initial_indices.at(n) : a.state_indices.at(n, accepted - 1);
        slots.skipped = is_null(a, a.initial.data ? a.initial : a.final, from);
        if (a.initial.data && (!a.has_initial || a.has_initial[n])) slots.initial = from;
    } else {
        slots = states_of(a, n);
    }
    if (slots.skipped) return zero_outputs(tokens.begin, tokens.begin + tokens.length);

    Rows state;
    const auto load_base = [&] {
        if (slots.initial >= 0)
            state.load(a, a.initial, a.initial.offset(slots.initial, value_head), row0, row_end);
        else
            state.zero();
    };
    load_base();
    if (of_m) {
#pragma unroll
        for (int i = 0; i < kKey / kLanesPerRow; ++i)
#pragma unroll
            for (int r = 0; r < kRows; ++r) state.x[r][i] = row0 + r * kRowsPerPass == Rows::channel(i) ? 1.0f : 0.0f;
    }

    const HeadGate gate(a, value_head);
    const bool delta = a.algorithm.update == Update::kDelta;

    // The state after token t, whose inputs stand in place `slot`; its output where asked.
    const auto advance = [&](std::int64_t t, int slot, bool output) {
        RawFloat raw_value[kRows], raw_beta[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row0 + r * kRowsPerPass;
            const bool in = row < a.value_dim && !of_m;
            raw_value[r].load(a.v.data, a.v.dtype, a.v.offset(tokens.batch, tokens.begin + t, value_head) + row, in);
            raw_beta[r].load(a.beta.data, a.beta.dtype,
                             a.beta.offset(tokens.batch, tokens.begin + t, value_head) + row * a.beta.last,
                             in && a.beta_per_value);
        }
        float value[kRows], read[kRows], out[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) read[r] = out[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < kKey / kLanesPerRow; ++i) {
            const int c = Rows::channel(i);
            const float decay = s.decay[slot][c], k = s.k[slot][c], q = s.q[slot][c];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                state.x[r][i] *= decay;
                read[r] += state.x[r][i] * k;
                out[r] += state.x[r][i] * q;
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            out[r] = Rows::row_sum(out[r]);
            value[r] = raw_value[r].value(a.v.dtype);
            if (delta) {
                const float beta = a.beta_per_value ? beta_of(a, raw_beta[r].value(a.beta.dtype)) : s.beta[slot];
                value[r] = beta * (value[r] - Rows::row_sum(read[r]));
            }
        }
#pragma unroll
        for (int i = 0; i < kKey / kLanesPerRow; ++i) {
            const float k = s.k[slot][Rows::channel(i)];
#pragma unroll
            for (int r = 0; r < kRows; ++r) state.x[r][i] += k * value[r];
        }
        if (!output || threadIdx.x % kLanesPerRow != 0) return;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row0 + r * kRowsPerPass;
            if (row < a.value_dim)
                store_float(a.o.data, a.o.dtype, a.o.offset(tokens.batch, tokens.begin + t, value_head) + row,
                            out[r] + value[r] * s.key_query[slot]);
        }
    };

    // Prefill: the states that were asked for after so many tokens.
    const ChunkStates dense = a.chunk_states.data ? chunk_states_of(a, n, value_head) : ChunkStates{};
    const auto store_prefix = [&](std::int64_t done) {
        if (a.num_checkpoints && (done % kChunkTokens == 0 || done == tokens.length))
            for_each_checkpoint(a, n, done, [&](std::int64_t slot) {
                state.store(a, a.checkpoints, a.checkpoints.offset(slot, value_head), row0, row_end);
            });
        if (dense.room > 0 && done % a.chunk_tokens == 0 && done < tokens.length && done / a.chunk_tokens < dense.room)
            state.store(a, a.chunk_states, dense.offset + done / a.chunk_tokens * a.chunk_states.slot, row0, row_end);
    };
    const auto store_token = [&](std::int64_t t) {
        store_prefix(t + 1);
        if (a.state_indices.data && a.final.data && t < a.state_indices.columns) {
            const std::int64_t slot = a.state_indices.at(n, t);
            if (!is_null(a, a.final, slot)) state.store(a, a.final, a.final.offset(slot, value_head), row0, row_end);
        }
        if (a.snapshots.data) {
            const std::int64_t slot = a.snapshot_indices.data ? a.snapshot_indices.at(n) : n;
            const bool skip =
                slot < 0 || slot >= a.snapshots.slots || (a.snapshot_indices.data && slot == a.null_index);
            if (!skip)
                state.store(a, a.snapshots, a.snapshots.offset(slot, value_head) + t * a.snapshots_token, row0,
                            row_end);
        }
    };

    if constexpr (!kTree) {
        store_prefix(0);
#pragma unroll 1
        for (std::int64_t t0 = 0; t0 < tokens.length; t0 += kStepWarps) {
            if (t0 + warp < tokens.length) inputs.ready(a, gate, s, warp);
            __syncthreads();
            const std::int64_t next = t0 + kStepWarps + warp;
            if (next < tokens.length) inputs.fetch(a, tokens.batch, tokens.begin + next, head, value_head);
#pragma unroll 1
            for (int slot = 0; slot < kStepWarps && t0 + slot < tokens.length; ++slot) {
                advance(t0 + slot, slot, !kMaps);
                store_token(t0 + slot);
            }
            __syncthreads();
        }
    } else {
        // A token continues its parent: where that is not the token just done, the path from the base is walked again,
        // which costs arithmetic and no memory.
        const auto visit = [&](std::int64_t t, bool output) {
            if (warp == 0) {
                inputs.fetch(a, tokens.batch, tokens.begin + t, head, value_head);
                inputs.ready(a, gate, s, 0);
            }
            __syncthreads();
            advance(t, 0, output);
            __syncthreads();
        };
        std::int64_t done = -1;
        for (std::int64_t t = 0; t < tokens.length && t < a.parents.columns && t < kMaxTreeTokens; ++t) {
            std::int64_t parent = a.parents.at(n, t);
            if (parent >= t) parent = -1;
            if (parent != done) {
                load_base();
                int depth = 0;
                for (std::int64_t p = parent; p >= 0; ++depth) {
                    if (threadIdx.x == 0) s.path[depth] = static_cast<std::int32_t>(p);
                    const std::int64_t above = a.parents.at(n, p);
                    p = above < p ? above : -1;
                }
                __syncthreads();
                while (depth > 0) visit(s.path[--depth], false);
            }
            visit(t, true);
            store_token(t);
            done = t;
        }
    }
    if constexpr (kMaps) {
        if (!of_m || delta) {
            const States& to = of_m ? a.segment_m : a.segment_b;
            state.store(a, to, to.offset(n, value_head), row0, row_end);
        } else {
#pragma unroll
            for (int i = 0; i < kKey / kLanesPerRow; ++i)
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const int c = Rows::channel(i);
                    if (c == row0 + r * kRowsPerPass && c < a.key_dim)
                        store_float(a.segment_m.data, a.segment_m.dtype,
                                    a.segment_m.offset(n, value_head) + c * a.segment_m.k, state.x[r][i]);
                }
        }
        return;
    }
    if (slots.final >= 0) state.store(a, a.final, a.final.offset(slots.final, value_head), row0, row_end);
}

}  // namespace cula::cuda::sm80
