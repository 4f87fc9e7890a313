// SPDX-License-Identifier: Apache-2.0
// decode: o, states <- q, k, v, gate, beta, state; one token per sequence, or a few.
//
// Equation, per token and value head, with S [V, K] (ALGORITHM.md, "The family"):
//     S' = S diag(exp(g))
//     u  = beta (v - S' k)                 delta rules; additive rules: u = v;
//                                          with erase strengths: u = beta v - S' e, e = erase o k
//     S <- S' + u k^T
//     o  = scale (S' q + u (k . q))        which is scale S q
// With low-rank keys a and b u = v, and what a reads of S before it decays, r = S a, is written along b:
// S <- S' + u k^T + r b^T, o = scale (S' q + u (k . q) + r (b . q)).
// Because o is formed from S', one pass over a row decays it and contracts it with k and with q. A second
// pass adds the write u k^T.
//
// Grid: row blocks * value heads * sequences, 128 threads.
// A CTA owns 16 kRows rows of one head's state: eight lanes per row (lanes.cuh), kRows rows per thread.
// kTokens = 1: the call has one token per sequence.
// kTokens = 4: the CTA processes the tokens of its sequence in groups of four, keeps the state in registers,
// and stores it after each token that asks for it.
// Where tokens write several times (Keys::kSeveral) what is said of a token holds for a write: the first of a
// token decays the state, and o and stored states follow the last. kTokens = 4 as above; kTokens = 2: the
// call has one token of two writes per sequence.
//
// All threads do the same work, in this order:
// 1. Load the indices that name the state's slot.
// 2. Issue the loads of the first tokens' inputs, while the slot is on its way (DecodeInputs::fetch).
// 3. Issue the cp.async copies of the state's rows to shared memory.
// 4. Prepare the tokens in shared memory while the state is on its way: thread c handles channel c of all
//    kTokens tokens (DecodeInputs::ready). One __syncthreads() follows.
// 5. Move the state to registers, advance it token by token, store outputs and states.
// States of float8 have a scale for each row: it is loaded beside them (3), multiplies them on their way to
// registers (5), and is chosen anew where they are stored.
// q and k stay as they were loaded: l2norm and `scale` multiply sums over channels (SumScales), which saves a
// second barrier.
//
// The kernel is bound by the traffic of the state. There is no double buffering: the other CTAs of the
// multiprocessor keep the memory busy while one computes.
//
// Budgets                              kTokens = 1, 2     kTokens = 4
//     CTAs per multiprocessor              6 (5)              4 (3)           ( ): K = 256, from 10.0 on, and
//                                                                             with low-rank keys, two writes
//     registers per thread                80 (96)           128 (168)
//     shared memory, KiB, K 64/128/256  17.3/17.8/19.2    21.1/23.2/28.7      float32 states, kRows = 256 / K
// With kRows = 512 / K (16-bit and float8 states, kTokens of 1 and 2): 4 (3) CTAs, 128 (168) registers, and
// 17.8/18.1/19.3 KiB, of float8 9.8/10.1/11.3. kTokens = 2 takes 1.3 to 2 KiB more.
// Design page: docs/design/decode.md.
#pragma once

#include "cuda/recurrent/decode_inputs.cuh"
#include "cuda/tile/store_row.cuh"

namespace cula::cuda::recurrent {

// CTAs per multiprocessor. ptxas needs a few registers more for compute capability 10.0 and 12.0, and the
// shared memory of 12.0 would not hold more CTAs. So it does for low-rank keys.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr bool kFewerCtas = true;
#else
inline constexpr bool kFewerCtas = false;
#endif
template <int kKey, int kTokens, int kRows = 1, Keys kKeys = Keys::kOne>
inline constexpr int kDecodeCtas = (kOneToken<kTokens> && kRows * kKey <= 256 ? 6 : 4) -
                                   (kKey > 128 || kFewerCtas || kKeys == Keys::kLowRank || kTokens == 2);

// Prefetches the state of CTA `block`, which starts later, to the second-level cache, where its loads will
// take less time.
template <class State, int kKey, int kBlockRows>
__device__ __forceinline__ void prefetch_state(const DecodeArgs& a, unsigned block) {
    if (block >= gridDim.x || !a.initial.data) return;
    const DecodePlace place = decode_place<kBlockRows>(a, block);
    const std::int32_t slot = a.initial_indices.data ? load(a.initial_indices, place.n) : place.n;
    if (is_null(a, a.initial, slot)) return;
    constexpr int kRowBytes = kKey * static_cast<int>(sizeof(State)), kLine = 128;
    if (std::is_same_v<State, Float8E4M3> && threadIdx.x % 32 == 0 && threadIdx.x < kBlockRows) {
        const int row = min(place.row0 + static_cast<int>(threadIdx.x), a.value_dim - 1);
        prefetch(scale_of(a.initial_scales, slot, place.value_head, row));
    }
    const char* const head = advanced(a.initial.data, place.value_head, a.initial.head);
#pragma unroll
    for (int at = static_cast<int>(threadIdx.x) * kLine; at < kBlockRows * kRowBytes;
         at += kStepThreads * kLine) {
        const int row = min(place.row0 + at / kRowBytes, a.value_dim - 1);
        prefetch(advanced(advanced(head, row, a.initial.v) + at % kRowBytes, slot, a.initial.slot));
    }
}

// kKeys: the keys that a token has (keys.h).
template <class State, int kKey, int kRows, int kTokens, Keys kKeys>
__global__ void __launch_bounds__(kStepThreads, kDecodeCtas<kKey, kTokens, kRows, kKeys>)
    decode(const __grid_constant__ DecodeArgs a) {
    constexpr int kBlockRows = kRows * kRowsPerPass, kFours = kKey / (kLanesPerRow * 4);
    constexpr bool kOne = kOneToken<kTokens>, kScaled = std::is_same_v<State, Float8E4M3>;
    __shared__ DecodeTokens<kKey, kBlockRows, kTokens, kKeys> s;
    // The state between global memory and registers. A thread reads only what it copied itself, so no barrier
    // is needed.
    // cp.async rather than loads to registers: those share six scoreboard counters, and ptxas gave the state
    // the counter of the token's inputs, so that preparing the token waited for the state.
    alignas(16) __shared__ std::uint32_t state[kRows][kFours][kStepThreads][sizeof(State)];

    const unsigned thread = threadIdx.x;
    const auto [n, value_head, row0] = decode_place<kBlockRows>(a, blockIdx.x);
    const int own = static_cast<int>(
        thread / kLanesPerRow);  // the thread's first row within the CTA; its next are kRowsPerPass apart

    // The indices that name the slots of the state, and whether there is an initial state.
    // Without sequences the grid has the CTAs of one, which zero the outputs.
    const bool exists = kOne || n < a.sequences;
    std::int32_t from = load(a.initial_indices, n, 0, exists), to = load(a.final_indices, n, 0, exists);
    const std::uint32_t has_initial = load8_if(a.has_initial + n, a.has_initial && exists);
    constexpr bool kSeveral = kKeys == Keys::kSeveral;
    DecodeRange range{n, 0, kOne ? 1 : a.tokens};
    bool reads_at = a.initial_indices.data != nullptr;
    if constexpr (!kOne) {
        if (a.cu_seqlens) {
            range = {0, 0, 0};
            if (exists) {
                range.begin = clamped_offset(a, n);
                range.length = max(clamped_offset(a, n + 1) - range.begin, 0);
            }
        }
    }
    // The same in writes, as `fetch` and the loop below count.
    const int writes = kOne ? kTokens : kSeveral ? static_cast<int>(a.writes.value) : 1;
    const DecodeRange steps{range.batch, range.begin * writes, range.length * writes};
    DecodeInputs<kKey, kBlockRows, kTokens, kKeys> inputs;
    inputs.fetch_head(a, value_head);
    inputs.fetch(a, n, steps, 0, value_head, row0);

    const auto put_output = [&](int t, int r, float x) {
        char* at = advanced(advanced(a.o.data, range.batch, a.o.batch), value_head, a.o.head);
        if constexpr (!kOne) at = advanced(at, range.begin + t, a.o.token);
        const int row = row0 + own + r * kRowsPerPass;
        store_row_if(advanced(at, row, a.o.last), a.o.type, x,
                     thread % kLanesPerRow == 0 && row < a.value_dim);
    };
    if constexpr (!kOne) {
        if (a.state_indices.data && exists && !reads_at) {
            const int accepted = a.num_accepted.data ? load(a.num_accepted, n) : 1;
            from = load(a.state_indices, n, min(max(accepted, 1), a.state_indices.columns) - 1);
            reads_at = true;
        }
        // Tokens after the last sequence belong to none: their outputs are zero.
        if (a.cu_seqlens && n + 1 >= a.sequences)
            for (int t = range.length; range.begin + t < a.tokens; ++t)
#pragma unroll
                for (int r = 0; r < kRows; ++r) put_output(t, r, 0.0f);
        if (!exists) return;
    }
    const bool writes_at = a.final_indices.data != nullptr,
               skipped = (reads_at & is_null(a, a.initial, from)) | (writes_at & is_null(a, a.final, to)),
               starts =
                   (a.initial.data != nullptr) & !skipped & (a.has_initial == nullptr | has_initial != 0);
    from = reads_at ? from : n, to = writes_at ? to : n;

    // Rows beyond the last are clamped to it for loads, and not stored. The slot's offset is added last
    // because the slot is the last number to arrive.
    const auto row_of = [&](const DecodeStates& states, std::int32_t slot, int r) {
        const int row = min(row0 + own + r * kRowsPerPass, a.value_dim - 1);
        char* at = advanced(advanced(states.data, value_head, states.head), row, states.v);
        at += thread % kLanesPerRow * 4 * sizeof(State);
        return reinterpret_cast<State*>(advanced(at, slot, states.slot));
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const State* at = row_of(a.initial, from, r);
#pragma unroll
        for (int p = 0; p < kFours; ++p)
            Four<State>::copy_async_if(state[r][p][thread], at + p * 4 * kLanesPerRow, starts);
    }
    commit_copies();
    float scale[kRows];
    if constexpr (kScaled) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = min(row0 + own + r * kRowsPerPass, a.value_dim - 1);
            scale[r] = __uint_as_float(
                load32_coherent_if(scale_of(a.initial_scales, from, value_head, row), starts));
        }
    }
    if (kOne || (kSeveral && !a.state_indices.data))
        prefetch_state<State, kKey, kBlockRows>(a, blockIdx.x + a.ahead);
    float x[kRows][kKey / kLanesPerRow];
    // Called by all threads.
    const auto put_state = [&](const DecodeStates& states, std::int32_t slot, int t = 0,
                               std::int32_t token = 0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row0 + own + r * kRowsPerPass;
            if constexpr (kScaled) {
                float most = 0.0f;
#pragma unroll
                for (int i = 0; i < 4 * kFours; ++i) most = larger_magnitude(most, x[r][i]);
                const RowScale chosen = row_scale(row_largest(most));
                if (row >= a.value_dim) continue;  // not out of the loop: all lanes compare
                if (thread % kLanesPerRow == 0)
                    *scale_of(a.final_scales, slot, value_head, row) = chosen.scale;
                State* const at = row_of(states, slot, r);
#pragma unroll
                for (int p = 0; p < kFours; ++p) {
                    float scaled[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) scaled[e] = x[r][4 * p + e] * chosen.inverse;
                    Four<State> four;
                    four.set(scaled);
                    four.store(at + p * 4 * kLanesPerRow);
                }
            } else {
                if (row >= a.value_dim) break;
                State* at = advanced(row_of(states, slot, r), t, token);
#pragma unroll
                for (int p = 0; p < kFours; ++p) {
                    Four<State> four;
#pragma unroll
                    for (int e = 0; e < 4; ++e) four.set(e, x[r][4 * p + e]);
                    four.store(at + p * 4 * kLanesPerRow);
                }
            }
        }
    };

    // Advances the state by what is prepared in place j: token t, or a write of it. Stores the output of t if
    // `last`.
    const auto advance = [&](int t, int j, bool last = true) {
        const SumScales scales(a.scale, a.qk_l2norm, sum(s.qq[j]), sum(s.kk[j]), sum(s.kq[j]));
        float write[kRows], read[kRows] = {}, out[kRows] = {};
#pragma unroll
        for (int p = 0; p < kFours; ++p) {
            const int c = lane_channel(4 * p);
            float decay[4], key[4], query[4];
            load4(decay, s.decay[j] + c), load4(key, s.reading_key(j) + c), load4(query, s.q[j] + c);
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if constexpr (kKeys == Keys::kLowRank) read[r] += x[r][4 * p + e] * key[e];
                    if (kTokens != 2 || j == 0) x[r][4 * p + e] *= decay[e];
                    if constexpr (kKeys != Keys::kLowRank) read[r] += x[r][4 * p + e] * key[e];
                    out[r] += x[r][4 * p + e] * query[e];
                }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) write[r] = s.value[j][own + r * kRowsPerPass];
        if (a.corrects) {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                write[r] = scales.write(s.beta[j][own + r * kRowsPerPass], write[r], row_sum(read[r]));
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if constexpr (kKeys == Keys::kLowRank) {
                read[r] = row_sum(read[r]);
                const float output = scales.output(row_sum(out[r]), write[r]);
                put_output(t, r, skipped ? 0.0f : __fmaf_rn(read[r], sum(s.bq[j]) * scales.q, output));
            } else if constexpr (kSeveral) {
                const float output = scales.output(row_sum(out[r]), write[r]);
                if (last) put_output(t, r, skipped ? 0.0f : output);
            } else {
                put_output(t, r, skipped ? 0.0f : scales.output(row_sum(out[r]), write[r]));
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) write[r] *= scales.k;
#pragma unroll
        for (int p = 0; p < kFours; ++p) {
            float key[4];
            load4(key, s.k[j] + lane_channel(4 * p));
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[r][4 * p + e] += key[e] * write[r];
            if constexpr (kKeys == Keys::kLowRank) {
                load4(key, s.b[j] + lane_channel(4 * p));
#pragma unroll
                for (int r = 0; r < kRows; ++r)
#pragma unroll
                    for (int e = 0; e < 4; ++e) x[r][4 * p + e] += key[e] * read[r];
            }
        }
    };

    inputs.ready(a, value_head, s);
    __syncthreads();
    wait_copies<0>();
    asm volatile("" ::: "memory");
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int p = 0; p < kFours; ++p) {
            const Four<State> four(state[r][p][thread]);
            if constexpr (kScaled) {
#pragma unroll
                for (int e = 0; e < 4; e += 2) {
                    const float2 pair = four.pair(e / 2);
                    x[r][4 * p + e] = pair.x * scale[r], x[r][4 * p + e + 1] = pair.y * scale[r];
                }
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) x[r][4 * p + e] = four.get(e);
            }
        }
    if constexpr (kOne) {
#pragma unroll
        for (int j = 0; j < kTokens; ++j) advance(0, j, j + 1 == kTokens);
    } else {
        std::int32_t snapshot = a.snapshot_indices.data ? load(a.snapshot_indices, n) : n;
        if (!a.snapshots.data || (a.snapshot_indices.data && is_null(a, a.snapshots, snapshot)))
            snapshot = -1;
#pragma unroll 1
        for (int t0 = 0; t0 < steps.length; t0 += kTokens) {
            const bool more = t0 + kTokens < steps.length;
            if (more) inputs.fetch(a, n, steps, t0 + kTokens, value_head, row0);
#pragma unroll 1
            for (int j = 0; j < kTokens && t0 + j < steps.length; ++j) {
                const int t = kSeveral ? a.writes.divide(t0 + j) : t0 + j;
                const bool last = !kSeveral || (t + 1) * writes == t0 + j + 1;
                advance(t, j, last);
                if (skipped || !last) continue;
                const std::int32_t slot = s.state_index[j];
                if (a.state_indices.data && a.final.data && t < a.state_indices.columns &&
                    !is_null(a, a.final, slot))
                    put_state(a.final, slot);
                // Snapshots are of no states of float8.
                if (!kScaled && snapshot >= 0) put_state(a.snapshots, snapshot, t, a.snapshots_token);
            }
            if (!more) break;
            __syncthreads();
            inputs.ready(a, value_head, s);
            __syncthreads();
        }
        if (a.state_indices.data) return;
    }
    if (a.final.data && !skipped) put_state(a.final, to);
}

}  // namespace cula::cuda::recurrent
