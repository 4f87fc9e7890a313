// SPDX-License-Identifier: Apache-2.0
// step: o, states <- q, k, v, gate, beta, state; one token after another, states in any layout.
//
// Equation: that of decode.cuh. With kMaps: M and B of S <- M S + B for whole sequences (ALGORITHM.md,
// "Segments").
//
// Grid: (row blocks of V, with kMaps also of M) * value heads * sequences, 128 threads.
// A CTA owns 16 rows of one head's state, eight lanes per row (lanes.cuh), and keeps them in registers while
// it processes the tokens of its sequence. With Keys::kSeveral a token writes several times, and what is
// below is done for each of its writes: only the first decays the state, and only after the last is o read.
//
// Each of the four warps prepares one of four tokens in shared memory (TokenInputs). Its loads are issued
// before those of the state. After a barrier all warps advance the state by the four tokens, while the loads
// of the next four are in flight; a second barrier frees the places.
//
// decode is faster on the calls that it takes. step takes the others: states of any strides, each tensor with
// its own dtype; float64 gates; states of float8 in any layout; trees of draft tokens; intermediate states
// (checkpoints, chunk states); maps.
//
// Budgets                              K = 64    128     256
//     CTAs per multiprocessor               3       3       2
//     registers per thread                168     168     255
//     shared memory, KiB                  4.6     7.6    13.6      trees: K / 16 KiB more
// Design page: docs/design/decode.md.
#pragma once

#include "cuda/device_args.h"
#include "cuda/recurrent/checkpoints.cuh"
#include "cuda/recurrent/instances.h"
#include "cuda/recurrent/keys.cuh"
#include "cuda/recurrent/state_row.cuh"
#include "cuda/rule.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/store_row.cuh"

namespace cula::cuda::recurrent {

template <int kKey, Keys kKeys>
struct alignas(16) StepInputs : OtherKeys<kKeys, kStepWarps, kKey>, OtherSums<kKeys, kStepWarps, 1> {
    float q[kStepWarps][kKey], k[kStepWarps][kKey], decay[kStepWarps][kKey];
    float value[kStepWarps][kRowsPerPass], beta[kStepWarps][kRowsPerPass];
    float qq[kStepWarps], kk[kStepWarps], kq[kStepWarps];
    std::int32_t state_index[kStepWarps];  // the slot that state_indices name for the token
    std::int32_t path[kMaxTreeTokens];

    // What reads the state.
    __device__ __forceinline__ const float* reading_key(int slot) const {
        if constexpr (kKeys == Keys::kErase)
            return this->e[slot];
        else if constexpr (kKeys == Keys::kLowRank)
            return this->a[slot];
        else
            return k[slot];
    }
};

// The state that the sequence of a tree starts from. x[i][thread] is read and written by that thread alone,
// so no barrier is needed.
// It is kept because the slot it came from may be that of one of the sequence's own tokens, as in vLLM's
// convention, and be overwritten before a later token continues from it.
template <int kKey, bool kTree>
struct TreeBase {
    float x[kTree ? kKey / kLanesPerRow : 1][kStepThreads];
};

// One write of a sequence, counted by its writes.
template <Keys kKeys>
struct Write {
    std::int64_t index;

    __device__ __forceinline__ Write(const DeviceArgs&, std::int64_t i) : index(i) {}
    // Tokens of the sequence, rows of k, v and beta.
    __device__ __forceinline__ std::int64_t token() const { return index; }
    __device__ __forceinline__ std::int64_t row(std::int64_t first_token) const {
        return first_token + index;
    }
    __device__ __forceinline__ bool is_first() const { return true; }
    __device__ __forceinline__ bool is_last() const { return true; }
};
template <>
struct Write<Keys::kSeveral> {
    std::int64_t index, writes, of_token, place;

    __device__ __forceinline__ Write(const DeviceArgs& a, std::int64_t i)
        : index(i), writes(a.writes), of_token(i / a.writes), place(i % a.writes) {}
    __device__ __forceinline__ std::int64_t token() const { return of_token; }
    __device__ __forceinline__ std::int64_t row(std::int64_t first_token) const {
        return first_token * writes + index;
    }
    __device__ __forceinline__ bool is_first() const { return place == 0; }
    __device__ __forceinline__ bool is_last() const { return place + 1 == writes; }
};

// The inputs of one write, held by one warp. fetch() issues the loads of everything that the CTA's rows need;
// ready() prepares the write in place `slot` of StepInputs. No load from global memory lies between two of
// them.
template <int kKey, Keys kKeys>
struct TokenInputs : RawKeys<kKeys, kKey / 32> {
    static constexpr int kPerLane = kKey / 32;
    RawFloat q[kPerLane], k[kPerLane], g[kPerLane], value, beta;
    std::int32_t state_index;
    bool decays;  // whether it is the token's first write
    // Of the value head.
    float bias[kPerLane], A_log, gamma;

    static __device__ __forceinline__ int channel(int i) {
        return static_cast<int>(threadIdx.x % 32) + 32 * i;
    }

    // Of q, k and v, which have no float64.
    static __device__ __forceinline__ void load_input(RawFloat& to, const TokenRows& rows, std::int64_t i,
                                                      bool in) {
        const int size = rows.dtype == Dtype::kFloat32 ? 4 : 2;
        to.load(static_cast<const char*>(rows.data) + i * size, element(rows.dtype), in);
    }
    static __device__ __forceinline__ void load(RawFloat& to, const TokenRows& rows, std::int64_t i,
                                                bool in) {
        if (rows.dtype != Dtype::kFloat64)
            load_input(to, rows, i, in);
        else if (in)
            to.wide = __float_as_uint(static_cast<float>(static_cast<const double*>(rows.data)[i]));
    }
    static __device__ __forceinline__ float load(const HeadParameter& x, int head, int c, bool in) {
        return __uint_as_float(load32_if(x.data + (head * x.head + c * x.channel), in && x.data));
    }

    __device__ __forceinline__ void fetch_head(const DeviceArgs& a, int value_head) {
        const bool per_channel = a.algorithm.decay == kChannelDecay;
        A_log = load(a.A_log, value_head, 0, true);
        gamma = load(a.gamma, value_head, 0, !per_channel);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
            bias[i] = load(a.dt_bias, value_head, per_channel ? channel(i) : 0,
                           !per_channel || channel(i) < a.key_dim);
    }

    // Issues the loads of a write. The CTA's value rows start at row0. has_values: false for rows of M, whose
    // values are zero.
    __device__ __forceinline__ void fetch(const DeviceArgs& a, const TokenRange& tokens, std::int64_t n,
                                          const Write<kKeys>& own, int value_head, int row0,
                                          bool has_values) {
        const int head = value_head / a.group;
        const std::int64_t b = tokens.batch, t = own.token(), at = tokens.begin + t,
                           of_write = own.row(tokens.begin), q_row = a.q.offset(b, at, head),
                           k_row = a.k.offset(b, of_write, head), v_row = a.v.offset(b, of_write, value_head),
                           g_row = a.g.offset(b, at, value_head),
                           beta_row = a.beta.offset(b, of_write, value_head);
        decays = own.is_first();
        const bool per_channel = a.algorithm.decay == kChannelDecay,
                   per_token = a.algorithm.decay == kTokenDecay,
                   takes_betas = answer_for(a.algorithm.update, []<Update kUpdate>(UpdateConstant<kUpdate>) {
                       return takes_beta(kUpdate);
                   });
        const bool stores = a.state_indices.data && t < a.state_indices.columns;
        const std::int32_t* const words =
            a.state_indices.data + (n * a.state_indices.row + t * a.state_indices.column);
        state_index = static_cast<std::int32_t>(load32_if(words, stores));
        if (a.state_indices.wide)
            state_index = narrow_index(state_index, static_cast<std::int32_t>(load32_if(words + 1, stores)));
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int c = channel(i);
            const bool in = c < a.key_dim;
            load_input(q[i], a.q, q_row + c, in);
            load_input(k[i], a.k, k_row + c, in);
            load(g[i], a.g, g_row + (per_channel ? c : 0), per_channel ? in : per_token);
            if constexpr (kKeys == Keys::kErase)
                load(this->erase[i], a.erase, a.erase.offset(b, at, value_head) + c, in);
            if constexpr (kKeys == Keys::kLowRank) {
                load(this->a_key[i], a.a_key, a.a_key.offset(b, at, value_head) + c, in);
                load(this->b_key[i], a.b_key, a.b_key.offset(b, at, value_head) + c, in);
            }
        }
        const int row = row0 + channel(0);
        const bool in = row < a.value_dim && channel(0) < kRowsPerPass;
        load_input(value, a.v, v_row + row, in && has_values);
        load(beta, a.beta, beta_row + (a.beta_per_value ? row * a.beta.last : 0),
             takes_betas && (in || !a.beta_per_value));
    }

    __device__ __forceinline__ void ready(const DeviceArgs& a, int value_head, StepInputs<kKey, kKeys>& s,
                                          int slot) const {
        const HeadGate gate(value_head, a.gate, A_log, a.lower_bound, gamma);
        const Element type = element(a.q.dtype), g_type = element(a.g.dtype),
                      beta_type = element(a.beta.dtype);
        // The sums are formed in decode's order: per thread over one channel, or over two that lie 128 apart;
        // then over a warp; then over the warps in order.
        constexpr int kSums = kPerLane < kStepWarps ? kPerLane : kStepWarps;
        float decay[kPerLane], qq[kSums] = {}, kk[kSums] = {}, kq[kSums] = {}, bq[kSums] = {};
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const float x = q[i].value(type), y = k[i].value(type);
            qq[i % kSums] += x * x, kk[i % kSums] += y * y, kq[i % kSums] += y * x;
            s.q[slot][channel(i)] = x, s.k[slot][channel(i)] = y;
            if constexpr (kKeys == Keys::kLowRank) {
                const float z = this->b_key[i].value(element(a.b_key.dtype));
                bq[i % kSums] += z * x;
                s.a[slot][channel(i)] = this->a_key[i].value(element(a.a_key.dtype));
                s.b[slot][channel(i)] = z;
            }
            decay[i] = g[i].value(g_type);
        }
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            kq[i] = warp_sum(kq[i]);
            if constexpr (kKeys == Keys::kLowRank) bq[i] = warp_sum(bq[i]);
            if (a.qk_l2norm) qq[i] = warp_sum(qq[i]), kk[i] = warp_sum(kk[i]);
        }
        const bool per_channel = a.algorithm.decay == kChannelDecay;
        const float most_erase = a.allow_neg_eigval ? 2.0f : 1.0f;
        if (type == Element::kFloat32) {
            const ExactGate exact(a.gate, A_log, a.lower_bound, per_channel ? 0.0f : gamma);
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                s.decay[slot][channel(i)] = decay[i] + bias[i];
                if constexpr (kKeys == Keys::kErase)
                    s.e[slot][channel(i)] = this->erase[i].value(element(a.erase.dtype));
            }
#pragma unroll 1  // few calls have float32 inputs
            for (int i = 0; i < kPerLane; ++i) {
                float& own = s.decay[slot][channel(i)];
                own = exact.decay(own);
                if constexpr (kKeys == Keys::kErase) {
                    float& e = s.e[slot][channel(i)];
                    e = s.k[slot][channel(i)] * beta_exact(e, a.beta_is_logit, most_erase);
                }
            }
        } else {
            if (per_channel) {
                gate.log2_decays(decay, bias);
            } else {
                const float one = a.algorithm.decay == kTokenDecay
                                      ? gate.log2_decay(decay[0] + bias[0]) + gate.gamma2
                                      : gate.gamma2;
#pragma unroll
                for (float& d : decay) d = one;
            }
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                s.decay[slot][channel(i)] = exp2_fast(decay[i]);
                if constexpr (kKeys == Keys::kErase)
                    s.e[slot][channel(i)] =
                        k[i].value(type) * erase_strength(this->erase[i].value(element(a.erase.dtype)),
                                                          a.beta_is_logit, most_erase);
            }
        }
        if constexpr (kKeys == Keys::kSeveral) {
            if (!decays)
#pragma unroll
                for (int i = 0; i < kPerLane; ++i) s.decay[slot][channel(i)] = 1.0f;
        }
        if (channel(0) < kRowsPerPass) {
            s.value[slot][channel(0)] = value.value(type);
            s.beta[slot][channel(0)] = beta_exact(beta.value(beta_type), a.beta_is_logit,
                                                  kKeys != Keys::kErase && a.allow_neg_eigval ? 2.0f : 1.0f);
            if constexpr (kKeys == Keys::kErase) {  // beta v - S' e is 1 (beta v - S' e)
                s.value[slot][channel(0)] *= s.beta[slot][channel(0)];
                s.beta[slot][channel(0)] = 1.0f;
            }
        }
        if (threadIdx.x % 32 == 0) {
            s.qq[slot] = sum(qq), s.kk[slot] = sum(kk), s.kq[slot] = sum(kq);
            if constexpr (kKeys == Keys::kLowRank) s.bq[slot][0] = sum(bq);
            s.state_index[slot] = state_index;
        }
    }
};

// What does a token write?
template <Update kUpdate>
struct StepRule {
    static_assert(kIsKnown<kUpdate>, "step: what does a token write under this update rule?");
};
template <>
struct StepRule<Update::kAdditive> {
    static constexpr bool kCorrects = false;  // u = v
};
template <>
struct StepRule<Update::kDelta> {
    static constexpr bool kCorrects = true;  // u = beta (v - S' k)
};

// kMaps: computes the affine maps of whole sequences instead of outputs. Rows that start from zero and read
// the values give B; rows that start from the identity and read zeros as values give M. Of a diagonal M
// the diagonal is stored.
// kKeys: the keys of a token.
template <int kKey, bool kTree, bool kMaps = false, Keys kKeys = Keys::kOne>
__global__ void __launch_bounds__(kStepThreads, kKey > 128 ? 2 : 3)
    step(const __grid_constant__ DeviceArgs a) {
    __shared__ StepInputs<kKey, kKeys> s;
    __shared__ TreeBase<kKey, kTree> base;
    constexpr bool kSeveral = kKeys == Keys::kSeveral;

    const int value_blocks = (a.value_dim + kRowsPerPass - 1) / kRowsPerPass;
    const int blocks =
        value_blocks + (kMaps && a.segment_m.data ? (a.key_dim + kRowsPerPass - 1) / kRowsPerPass : 0);
    const int value_head = blockIdx.x / blocks % a.value_heads;
    const bool of_m = kMaps && static_cast<int>(blockIdx.x % blocks) >= value_blocks;
    const int block = blockIdx.x % blocks - (of_m ? value_blocks : 0),
              row_end = of_m ? a.key_dim : a.value_dim;
    const std::int64_t n = blockIdx.x / blocks / a.value_heads;
    const int warp = threadIdx.x / 32, row0 = block * kRowsPerPass,
              own = static_cast<int>(threadIdx.x) / kLanesPerRow, row = row0 + own;
    const TokenRange tokens = a.sequences > 0 ? tokens_of(a, n) : TokenRange{};
    // Each warp prepares one token. Its inputs do not depend on the state, so their loads are issued first.
    TokenInputs<kKey, kKeys> inputs;
    const auto fetch = [&](std::int64_t write) {
        inputs.fetch(a, tokens, n, Write<kKeys>(a, write), value_head, row0, !of_m);
    };
    const std::int64_t writes = kSeveral ? tokens.length * a.writes : tokens.length;
    if (!kTree && warp < writes) fetch(warp);
    inputs.fetch_head(a, value_head);

    const auto zero_outputs = [&](std::int64_t begin, std::int64_t end) {
        if constexpr (!kMaps) {
            if (threadIdx.x % kLanesPerRow != 0 || row >= a.value_dim) return;
            for (std::int64_t t = begin; t < end; ++t)
                store_row(a.o.data, a.o.dtype, a.o.offset(tokens.batch, t, value_head) + row, 0.0f);
        }
    };
    // Tokens after the last sequence belong to none: their outputs are zero.
    if (a.cu_seqlens && n + 1 >= a.sequences) zero_outputs(tokens.begin + tokens.length, a.tokens);
    if (a.sequences == 0) return;

    // The slots that the sequence starts from and ends in.
    const StateSlots slots = states_of_drafts(a, n);
    if (slots.skipped) return zero_outputs(tokens.begin, tokens.begin + tokens.length);

    StateRow<kKey> state;
    if (slots.initial >= 0)
        state.load_initial(a, slots.initial, value_head, row, row_end);
    else
        for (float& x : state.x) x = 0.0f;
    if (of_m) {
#pragma unroll
        for (int i = 0; i < StateRow<kKey>::kPerLane; ++i) state.x[i] = row == lane_channel(i) ? 1.0f : 0.0f;
    }

    const bool corrects = answer_for(a.algorithm.update, []<Update kUpdate>(UpdateConstant<kUpdate>) {
        static_assert(StepRule<kUpdate>::kCorrects != has_diagonal_map(kUpdate));  // it mixes channels
        return StepRule<kUpdate>::kCorrects;
    });

    // Advances the state by a write of token t, which is prepared in place `slot`, and stores the token's
    // output if `output`.
    const auto advance = [&](std::int64_t t, int slot, bool output) {
        const SumScales scales(a.scale, a.qk_l2norm, s.qq[slot], s.kk[slot], s.kq[slot]);
        float read = 0.0f, out = 0.0f, write = s.value[slot][own];
#pragma unroll
        for (int p = 0; p < StateRow<kKey>::kPerLane; p += 4) {
            const int c = lane_channel(p);
            float decay[4], key[4], query[4];
            load4(decay, s.decay[slot] + c), load4(key, s.reading_key(slot) + c), load4(query, s.q[slot] + c);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if constexpr (kKeys == Keys::kLowRank) read += state.x[p + e] * key[e];
                state.x[p + e] *= decay[e];
                if constexpr (kKeys != Keys::kLowRank) read += state.x[p + e] * key[e];
                out += state.x[p + e] * query[e];
            }
        }
        if (corrects) write = scales.write(s.beta[slot][own], write, row_sum(read));
        float output_row = scales.output(row_sum(out), write), found = 0.0f;
        if constexpr (kKeys == Keys::kLowRank) {
            found = row_sum(read);
            output_row = __fmaf_rn(found, s.bq[slot][0] * scales.q, output_row);
        }
        write *= scales.k;
#pragma unroll
        for (int p = 0; p < StateRow<kKey>::kPerLane; p += 4) {
            float key[4];
            load4(key, s.k[slot] + lane_channel(p));
#pragma unroll
            for (int e = 0; e < 4; ++e) state.x[p + e] += key[e] * write;
            if constexpr (kKeys == Keys::kLowRank) {
                load4(key, s.b[slot] + lane_channel(p));
#pragma unroll
                for (int e = 0; e < 4; ++e) state.x[p + e] += key[e] * found;
            }
        }
        if (output && threadIdx.x % kLanesPerRow == 0 && row < a.value_dim)
            store_row(a.o.data, a.o.dtype, a.o.offset(tokens.batch, tokens.begin + t, value_head) + row,
                      output_row);
    };

    // Prefill: stores the checkpoints and chunk states that the call asks for after `done` tokens.
    const ChunkStates dense =
        a.chunk_states.data ? chunk_states_of(a, n, value_head, chunk_states_before(a, n)) : ChunkStates{};
    const auto store_prefix = [&](std::int64_t done) {
        if (a.num_checkpoints && (done % kChunkTokens == 0 || done == tokens.length))
            for (std::int64_t m = 0; (m = next_checkpoint(a, m, n, done)) < a.num_checkpoints; ++m)
                if (const std::int64_t slot = checkpoint_slot(a, m); slot >= 0)
                    state.store(a, a.checkpoints, a.checkpoints.offset(slot, value_head), row, row_end);
        if (dense.room > 0 && done % a.chunk_tokens == 0 && done < tokens.length &&
            done / a.chunk_tokens < dense.room)
            state.store(a, a.chunk_states, dense.offset + done / a.chunk_tokens * a.chunk_states.slot, row,
                        row_end);
    };
    std::int64_t snapshot = a.snapshots.data ? n : -1;
    if (a.snapshots.data && a.snapshot_indices.data) {
        snapshot = a.snapshot_indices.at(n);
        if (is_null(a, a.snapshots, snapshot)) snapshot = -1;
    }
    // Verify: stores the state after token t in slot `index`, which state_indices name for it, and in the
    // snapshots.
    const auto store_token = [&](std::int64_t t, std::int32_t index) {
        store_prefix(t + 1);
        if (a.state_indices.data && a.final.data && t < a.state_indices.columns &&
            !is_null(a, a.final, index))
            state.store_final(a, index, value_head, row, row_end);
        if (snapshot >= 0)
            state.store(a, a.snapshots, a.snapshots.offset(snapshot, value_head) + t * a.snapshots_token, row,
                        row_end);
    };

    if constexpr (!kTree) {
        store_prefix(0);
#pragma unroll 1
        for (std::int64_t first = 0; first < writes; first += kStepWarps) {
            if (first + warp < writes) inputs.ready(a, value_head, s, warp);
            __syncthreads();
            if (first + kStepWarps + warp < writes) fetch(first + kStepWarps + warp);
#pragma unroll 1
            for (int slot = 0; slot < kStepWarps && first + slot < writes; ++slot) {
                const Write<kKeys> own(a, first + slot);
                advance(own.token(), slot, !kMaps && own.is_last());
                if (own.is_last()) store_token(own.token(), s.state_index[slot]);
            }
            __syncthreads();
        }
    } else {
        // A token continues from the state of its parent. If that is not the token just processed, the path
        // from the base state to the parent is computed again: this costs arithmetic and inputs, but no
        // memory for a state per token.
        const auto visit_write = [&](std::int64_t t, std::int64_t write, bool output) {
            if (warp == 0) {
                fetch(write);
                inputs.ready(a, value_head, s, 0);
            }
            __syncthreads();
            advance(t, 0, output);
            const std::int32_t index = s.state_index[0];
            __syncthreads();
            return index;
        };
        const auto visit = [&](std::int64_t t, bool output) {
            if constexpr (kSeveral)
                for (int before = 0; before + 1 < a.writes; ++before)
                    visit_write(t, t * a.writes + before, false);
            return visit_write(t, kSeveral ? (t + 1) * a.writes - 1 : t, output);
        };
#pragma unroll
        for (int i = 0; i < StateRow<kKey>::kPerLane; ++i) base.x[i][threadIdx.x] = state.x[i];
        std::int64_t done = -1;
        for (std::int64_t t = 0; t < tokens.length && t < a.parents.columns && t < kMaxTreeTokens; ++t) {
            std::int64_t parent = a.parents.at(n, t);
            if (parent >= t) parent = -1;
            if (parent != done) {
#pragma unroll
                for (int i = 0; i < StateRow<kKey>::kPerLane; ++i) state.x[i] = base.x[i][threadIdx.x];
                int depth = 0;
                for (std::int64_t p = parent; p >= 0; ++depth) {
                    if (threadIdx.x == 0) s.path[depth] = static_cast<std::int32_t>(p);
                    const std::int64_t above = a.parents.at(n, p);
                    p = above < p ? above : -1;
                }
                __syncthreads();
                while (depth > 0) visit(s.path[--depth], false);
            }
            store_token(t, visit(t, true));
            done = t;
        }
    }
    if constexpr (kMaps) {
        if (!of_m || corrects || kKeys == Keys::kLowRank) {
            const States& to = of_m ? a.segment_m : a.segment_b;
            state.store(a, to, to.offset(n, value_head), row, row_end);
        } else {
            bool found = false;
            float diagonal = 0.0f;
#pragma unroll
            for (int i = 0; i < StateRow<kKey>::kPerLane; ++i)
                if (lane_channel(i) == row) found = row < a.key_dim, diagonal = state.x[i];
            if (found)
                store_float(a.segment_m.data, a.segment_m.dtype,
                            a.segment_m.offset(n, value_head) + row * a.segment_m.k, diagonal);
        }
        return;
    }
    if (slots.final >= 0) state.store_final(a, slots.final, value_head, row, row_end);
}

}  // namespace cula::cuda::recurrent
