// SPDX-License-Identifier: Apache-2.0
// step: o, states <- q, k, v, gate, beta, state; tokens one after another      ALGORITHM.md, "The family"
//
// grid (value blocks * value heads * sequences)   128 threads
//
// A CTA owns kRows * 16 rows of one head's state [V, K] and keeps them in registers while it walks the tokens of its sequence.
// Eight lanes share a row, so that one warp-wide load covers four whole 128-byte lines, and both contractions with the state
// end in three shuffles. S^T q = (alpha S)^T q + u (k . q): one pass reads, decays and contracts, one updates. The loads of the
// state are issued before anything else and wait for nothing; the inputs of a token are prepared meanwhile, a warp a token.
//
// Traffic is the state, once in and once out (or once per stored token); everything else is a few hundred bytes per head.
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
struct StepInputs {
    float q[kStepWarps][kKey], k[kStepWarps][kKey], decay[kStepWarps][kKey];
    float beta[kStepWarps], key_query[kStepWarps];
    std::int32_t path[kMaxTreeTokens];
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// One warp readies token t in place `slot`.
template <int kKey>
__device__ __forceinline__ void prepare_token(const DeviceArgs& a, const HeadGate& gate, StepInputs<kKey>& s, int slot, std::int64_t b,
                                              std::int64_t t, int head, int value_head) {
    constexpr int kPerLane = kKey / 32;
    const int lane = threadIdx.x % 32;
    const std::int64_t q_row = a.q.offset(b, t, head), k_row = a.k.offset(b, t, head), g_row = a.g.offset(b, t, value_head);
    float q[kPerLane], k[kPerLane], qq = 0.0f, kk = 0.0f, kq = 0.0f;
    const float token_decay =
        a.algorithm.decay == Decay::kPerChannel ? 0.0f : exp2_fast(token_log2_decay(a, gate, b, t, value_head));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int c = lane + 32 * i;
        const bool in = c < a.key_dim;
        q[i] = in ? load_float(a.q.data, a.q.dtype, q_row + c) : 0.0f;
        k[i] = in ? load_float(a.k.data, a.k.dtype, k_row + c) : 0.0f;
        float decay = token_decay;
        if (in && a.algorithm.decay == Decay::kPerChannel)
            decay = exp2_fast(gate.log2_decay(load_float(a.g.data, a.g.dtype, g_row + c) + channel_bias(a, value_head, c)));
        s.decay[slot][c] = decay;
        qq += q[i] * q[i], kk += k[i] * k[i], kq += k[i] * q[i];
    }
    float q_scale = a.scale, k_scale = 1.0f;
    kq = warp_sum(kq);
    if (a.qk_l2norm) {
        q_scale *= rsqrtf(warp_sum(qq) + 1e-6f);
        k_scale = rsqrtf(warp_sum(kk) + 1e-6f);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        s.q[slot][lane + 32 * i] = q[i] * q_scale;
        s.k[slot][lane + 32 * i] = k[i] * k_scale;
    }
    if (lane == 0) {
        s.key_query[slot] = kq * q_scale * k_scale;
        if (a.algorithm.update == Update::kDelta && !a.beta_per_value)
            s.beta[slot] = beta_of(a, load_float(a.beta.data, a.beta.dtype, a.beta.offset(b, t, value_head)));
    }
}

// kRows rows of a state a lane, kKey / 8 channels of each.
// kPacked: every state is of type State with K contiguous, whole and aligned, so that accesses are 16 bytes wide; otherwise they
// go element by element, of whatever dtype each tensor has.
template <class State, int kKey, int kRows, bool kPacked>
struct StateRows {
    static constexpr int kPack = Pack<State>::kCount;
    static constexpr int kPacks = kKey / (kLanesPerRow * kPack);

    float x[kRows][kKey / kLanesPerRow];

    static __device__ __forceinline__ int channel(int i) {
        return (i / kPack * kLanesPerRow + static_cast<int>(threadIdx.x) % kLanesPerRow) * kPack + i % kPack;
    }

    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < kKey / kLanesPerRow; ++i) x[r][i] = 0.0f;
    }

    __device__ __forceinline__ void load(const DeviceArgs& a, const States& s, std::int64_t offset, int row0) {
        if constexpr (kPacked) {
            const auto* base = static_cast<const State*>(s.data) + offset;
            Pack<State> packs[kRows][kPacks];
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int p = 0; p < kPacks; ++p) {
                    const int row = row0 + r * kRowsPerPass;
                    if (row < a.value_dim) packs[r][p].load(base + row * s.v + channel(p * kPack));
                }
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int i = 0; i < kKey / kLanesPerRow; ++i) x[r][i] = packs[r][i / kPack].get(i % kPack);
        } else {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int i = 0; i < kKey / kLanesPerRow; ++i) {
                    const int row = row0 + r * kRowsPerPass, c = channel(i);
                    x[r][i] = row < a.value_dim && c < a.key_dim
                                  ? load_float(s.data, s.dtype, offset + row * s.v + c * s.k)
                                  : 0.0f;
                }
        }
    }

    __device__ __forceinline__ void store(const DeviceArgs& a, const States& s, std::int64_t offset, int row0) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row0 + r * kRowsPerPass;
            if (row >= a.value_dim) continue;
            if constexpr (kPacked) {
                auto* base = static_cast<State*>(s.data) + offset;
#pragma unroll
                for (int p = 0; p < kPacks; ++p) {
                    Pack<State> pack;
#pragma unroll
                    for (int e = 0; e < kPack; ++e) pack.set(e, x[r][p * kPack + e]);
                    pack.store(base + row * s.v + channel(p * kPack));
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

template <class State, int kKey, int kRows, bool kPacked, bool kTree>
__global__ void __launch_bounds__(kStepThreads, kRows > 1 ? 3 : kKey > 128 ? 3 : 4) step(const __grid_constant__ DeviceArgs a) {
    using Rows = StateRows<State, kKey, kRows, kPacked>;
    __shared__ StepInputs<kKey> s;

    const int blocks = (a.value_dim + kRows * kRowsPerPass - 1) / (kRows * kRowsPerPass);
    const int block = blockIdx.x % blocks, value_head = blockIdx.x / blocks % a.value_heads, head = value_head / a.group;
    const std::int64_t n = blockIdx.x / blocks / a.value_heads;
    const int warp = threadIdx.x / 32, row0 = block * kRows * kRowsPerPass + static_cast<int>(threadIdx.x) / kLanesPerRow;
    const TokenRange tokens = tokens_of(a, n);

    // Where the row starts and ends.
    StateSlots slots;
    if (a.state_indices.data) {
        std::int32_t accepted = a.num_accepted.data ? a.num_accepted.at(n) : 1;
        accepted = min(max(accepted, 1), a.state_indices.columns);
        const std::int64_t from = a.initial_indices.data ? a.initial_indices.at(n) : a.state_indices.at(n, accepted - 1);
        slots.skipped = is_null(a, a.initial.data ? a.initial : a.final, from);
        if (a.initial.data && (!a.has_initial || a.has_initial[n])) slots.initial = from;
    } else {
        slots = states_of(a, n);
    }
    const auto zero_outputs = [&](std::int64_t begin, std::int64_t end) {
        if (threadIdx.x % kLanesPerRow != 0) return;
        for (std::int64_t t = begin; t < end; ++t)
            for (int row = row0; row < row0 + kRows * kRowsPerPass && row < a.value_dim; row += kRowsPerPass)
                store_float(a.o.data, a.o.dtype, a.o.offset(tokens.batch, t, value_head) + row, 0.0f);
    };
    // Tokens after the last sequence belong to nobody.
    if (a.cu_seqlens && n == a.sequences - 1) zero_outputs(tokens.begin + tokens.length, a.tokens);
    if (slots.skipped) return zero_outputs(tokens.begin, tokens.begin + tokens.length);

    Rows state;
    const auto load_base = [&] {
        if (slots.initial >= 0)
            state.load(a, a.initial, a.initial.offset(slots.initial, value_head), row0);
        else
            state.zero();
    };
    load_base();

    const HeadGate gate(a, value_head);
    const bool delta = a.algorithm.update == Update::kDelta;

    // The state after token t, whose inputs stand in place `slot`; its output where asked.
    const auto advance = [&](std::int64_t t, int slot, bool output) {
        float value[kRows], beta[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row0 + r * kRowsPerPass;
            const bool in = row < a.value_dim;
            value[r] = in ? load_float(a.v.data, a.v.dtype, a.v.offset(tokens.batch, tokens.begin + t, value_head) + row) : 0.0f;
            beta[r] = 0.0f;
            if (delta && a.beta_per_value && in)
                beta[r] = beta_of(a, load_float(a.beta.data, a.beta.dtype,
                                                a.beta.offset(tokens.batch, tokens.begin + t, value_head) + row * a.beta.last));
            else if (delta && in)
                beta[r] = s.beta[slot];
        }
        float read[kRows], out[kRows];
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
            if (delta) value[r] = beta[r] * (value[r] - Rows::row_sum(read[r]));
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
                state.store(a, a.checkpoints, a.checkpoints.offset(slot, value_head), row0);
            });
        if (dense.room > 0 && done % a.chunk_tokens == 0 && done < tokens.length && done / a.chunk_tokens < dense.room)
            state.store(a, a.chunk_states, dense.offset + done / a.chunk_tokens * a.chunk_states.slot, row0);
    };
    const auto store_token = [&](std::int64_t t) {
        store_prefix(t + 1);
        if (a.state_indices.data && a.final.data && t < a.state_indices.columns) {
            const std::int64_t slot = a.state_indices.at(n, t);
            if (!is_null(a, a.final, slot)) state.store(a, a.final, a.final.offset(slot, value_head), row0);
        }
        if (a.snapshots.data) {
            const std::int64_t slot = a.snapshot_indices.data ? a.snapshot_indices.at(n) : n;
            const bool skip = slot < 0 || slot >= a.snapshots.slots || (a.snapshot_indices.data && slot == a.null_index);
            if (!skip) state.store(a, a.snapshots, a.snapshots.offset(slot, value_head) + t * a.snapshots_token, row0);
        }
    };

    if constexpr (!kTree) {
        store_prefix(0);
#pragma unroll 1
        for (std::int64_t t0 = 0; t0 < tokens.length; t0 += kStepWarps) {
            if (t0 + warp < tokens.length)
                prepare_token(a, gate, s, warp, tokens.batch, tokens.begin + t0 + warp, head, value_head);
            __syncthreads();
#pragma unroll 1
            for (int slot = 0; slot < kStepWarps && t0 + slot < tokens.length; ++slot) {
                advance(t0 + slot, slot, true);
                store_token(t0 + slot);
            }
            __syncthreads();
        }
    } else {
        // A token continues its parent: where that is not the token just done, the path from the base is walked again, which
        // costs arithmetic and no memory.
        const auto visit = [&](std::int64_t t, bool output) {
            if (warp == 0) prepare_token(a, gate, s, 0, tokens.batch, tokens.begin + t, head, value_head);
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
    if (slots.final >= 0) state.store(a, a.final, a.final.offset(slots.final, value_head), row0);
}

}  // namespace cula::cuda::sm80
