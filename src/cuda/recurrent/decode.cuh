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
// PDL: waits at once. Where forks are settled before, CTAs start beside that kernel.
//
// All threads do the same work, in this order:
// 1. Load the indices that name the state's slot.
// 2. Issue the loads of the first tokens' inputs, while the slot is on its way (DecodeInputs::fetch); after
//    3 with kRows > 1, one token, and low-rank keys or states of float32.
// 3. Issue the cp.async copies of the state's rows to shared memory.
// 4. Prepare the tokens in shared memory while the state is on its way: thread c handles channel c of all
//    kTokens tokens (DecodeInputs::ready). One __syncthreads() follows.
// 5. Move the state to registers, advance it token by token, store outputs and states. States of 16 and of
//    8 bits pass through shared memory once more on their way out (state_tile.cuh).
// States of float8 have a scale for each row: it is loaded beside them (3), multiplies them on their way to
// registers (5), and is chosen anew where they are stored.
// q and k stay as they were loaded: l2norm and `scale` multiply sums over channels (SumScales), which saves a
// second barrier.
//
// The kernel is bound by the traffic of the state; with 16-bit states by how much of it the resident CTAs
// have on its way, with float8 states by instructions. There is no double buffering: the other CTAs of the
// multiprocessor keep the memory busy while one computes.
//
// Budgets                    kRows = 256 / K    512 / K (16-bit and float8 states)    kTokens = 4
//     CTAs per multiprocessor       7 *             5 (K = 64: 4)                          4 **
//     registers per thread         72              96 (128)                              128 (168)
//     shared memory, KiB     17.3/17.8/19.2     17.8/18.1/19.3, of float8           21.1/23.2/28.7
//       K = 64/128/256       float32 states      9.8/10.1/11.3                      float32 states
// * 8 with 64 registers where kRows = 1 and K <= 128. Each of these takes a CTA (decode_ctas): K = 256; erase
// keys of these; low-rank keys; 10.0 and later; kTokens = 2 of 256 / K rows, and of 512 / K on 8.0. Of 512 /
// K rows three are left. With kTokens = 2 and kFewCtas 4 with 128 registers. kTokens = 2 takes 1.3 to 2 KiB
// more.
// ** 3 where K = 256, of low-rank keys, and from 10.0 on.
// Design page: docs/design/decode.md.
#pragma once

#include "cuda/ptx/pdl.cuh"
#include "cuda/recurrent/decode_inputs.cuh"
#include "cuda/recurrent/state_tile.cuh"
#include "cuda/tile/store_row.cuh"

namespace cula::cuda::recurrent {

// CTAs per multiprocessor: as many as registers allow without a spill. ptxas needs a few registers more for
// compute capability 10.0 and 12.0, and the shared memory of 12.0 would not hold more CTAs. So it does for
// low-rank keys, for 256 channels, once more for erase keys of those, and for two writes (of many rows
// on 8.0).
#if defined(__CUDA_ARCH__)
inline constexpr int kDecodeArch = __CUDA_ARCH__;
#else
inline constexpr int kDecodeArch = 0;
#endif
template <int kKey, int kTokens, int kRows, Keys kKeys, bool kFewCtas>
constexpr int decode_ctas() {
    constexpr bool kWide = kKey > 128, kFewer = kDecodeArch >= 1000, kLowRank = kKeys == Keys::kLowRank;
    if (!kOneToken<kTokens>) return 4 - (kWide || kFewer || kLowRank);
    constexpr int kLess = (kWide || kLowRank) + kFewer + (kWide && kKeys == Keys::kErase);
    if (kRows == 1 && kKey <= 128) return kFewCtas ? 4 : 8 - kLess;
    if (kRows * kKey <= 256) return 7 - (kTokens == 2) - kLess;
    return std::max(3, 5 - (kFewCtas || kRows == 8 || (kTokens == 2 && kDecodeArch < 900)) - kLess);
}

// Prefetches the state of CTA `block`, which starts later, to the second-level cache, where its loads will
// take less time. slot_of: of a place, its index of a slot. Not called for float8, whose decodes are bound by
// instructions.
template <class State, int kKey, int kBlockRows, class SlotOf>
__device__ __forceinline__ void prefetch_state(const DecodeArgs& a, unsigned block, const SlotOf& slot_of) {
    if (block >= gridDim.x || !a.initial.data) return;
    const DecodePlace place = decode_place<kBlockRows>(a, block);
    const std::int32_t slot = a.initial_indices.data ? slot_of(place) : place.n;
    if (is_null(a, a.initial, slot)) return;
    constexpr unsigned kLine = 128, kRowBytes = kKey * sizeof(State), kLines = kBlockRows * kRowBytes / kLine;
    static_assert(kLines <= kStepThreads);
    const unsigned at = threadIdx.x * kLine, own = at / kRowBytes;
    if (threadIdx.x >= kLines || place.row0 + static_cast<int>(own) >= a.value_dim) return;
    const char* const head = advanced(a.initial.data, place.value_head, a.initial.head);
    prefetch(advanced(advanced(head, place.row0 + static_cast<int>(own), a.initial.v) + at % kRowBytes, slot,
                      a.initial.slot));
}

// kKeys: the keys that a token has (keys.h). kFewCtas: the grid has few for each multiprocessor, and threads
// may have more registers.
template <class State, int kKey, int kRows, int kTokens, Keys kKeys, bool kFewCtas = false>
__global__ void __launch_bounds__(kStepThreads, decode_ctas<kKey, kTokens, kRows, kKeys, kFewCtas>())
    decode(const __grid_constant__ DecodeArgs a) {
    constexpr int kBlockRows = kRows * kRowsPerPass, kFours = kKey / (kLanesPerRow * 4);
    using Tile = StateTile<State, kKey, kRows>;
    constexpr bool kOne = kOneToken<kTokens>, kScaled = std::is_same_v<State, Float8E4M3>;
    __shared__ DecodeTokens<kKey, kBlockRows, kTokens, kKeys> s;
    // The state between global memory and registers. A warp reads only what it copied itself, so no barrier
    // of the CTA is needed. cp.async rather than loads to registers: those share six scoreboard counters, and
    // ptxas gave the state the counter of the token's inputs, so that preparing the token waited for the
    // state.
    __shared__ Tile state;

    pdl_wait();
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
    // A warp has six scoreboard counters, most of which guard address registers. With low-rank keys, which
    // have the most inputs, ptxas gives the slot's load the counter of the inputs, so that the state would
    // wait for all of these. There slots, also that of the CTA ahead, are waited for first; with states of
    // float32, too, which gain less. CTAs of 16 rows lose more by later inputs than they gain.
    constexpr bool kSlotsFirst =
        kOne && kRows > 1 && (kKeys == Keys::kLowRank || std::is_same_v<State, float>);
    std::int32_t slot_ahead = 0;
    if constexpr (kSlotsFirst) {
        const unsigned ahead = blockIdx.x + a.ahead;
        slot_ahead = load(a.initial_indices, decode_place<kBlockRows>(a, ahead).n, 0, ahead < gridDim.x);
    }
    DecodeInputs<kKey, kBlockRows, kTokens, kKeys> inputs;
    const auto fetch_inputs = [&] {
        inputs.fetch_head(a, value_head);
        inputs.fetch(a, n, steps, 0, value_head, row0);
    };
    if constexpr (!kSlotsFirst) fetch_inputs();

    // Lane r of a row's eight lanes stores what all of them have of their row r.
    const auto put_outputs = [&](int t, const float(&output)[kRows]) {
        static_assert(kRows <= kLanesPerRow);
        const int r = static_cast<int>(thread % kLanesPerRow), row = row0 + own + r * kRowsPerPass;
        float x = output[0];
#pragma unroll
        for (int other = 1; other < kRows; ++other) x = r == other ? output[other] : x;
        char* at = advanced(advanced(a.o.data, range.batch, a.o.batch), value_head, a.o.head);
        if constexpr (!kOne) at = advanced(at, range.begin + t, a.o.token);
        store_row_if(advanced(at, row, a.o.last), a.o.type, x, r < kRows && row < a.value_dim);
    };
    if constexpr (!kOne) {
        if (a.state_indices.data && exists && !reads_at) {
            const int accepted = a.num_accepted.data ? load(a.num_accepted, n) : 1;
            from = load(a.state_indices, n, min(max(accepted, 1), a.state_indices.columns) - 1);
            reads_at = true;
        }
        // Tokens after the last sequence belong to none: their outputs are zero.
        if (a.cu_seqlens && n + 1 >= a.sequences)
            for (int t = range.length; range.begin + t < a.tokens; ++t) put_outputs(t, {});
        if (!exists) return;
    }
    const bool writes_at = a.final_indices.data != nullptr,
               skipped = (reads_at & is_null(a, a.initial, from)) | (writes_at & is_null(a, a.final, to)),
               starts =
                   (a.initial.data != nullptr) & !skipped & (a.has_initial == nullptr | has_initial != 0);
    from = reads_at ? from : n, to = writes_at ? to : n;

    // The thread's first row. The slot's offset is added last because the slot is the last number to arrive.
    const auto first_row = [&](const DecodeStates& states, std::int32_t slot) {
        char* const at = advanced(advanced(states.data, value_head, states.head), row0 + own, states.v);
        return advanced(at, slot, states.slot);
    };
    const auto has_row = [&](int r) { return row0 + own + r * kRowsPerPass < a.value_dim; };
    const TileLane<Tile> loaded(state, thread);
    const char* const first = first_row(a.initial, from);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (unsigned p = 0; p < Tile::kPieces; ++p)
            loaded.copy_async_if(r, p, advanced(first, r * kRowsPerPass, a.initial.v), starts && has_row(r));
    commit_copies();
    float scale[kRows];
    if constexpr (kScaled) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row0 + own + r * kRowsPerPass;
            scale[r] = __uint_as_float(
                load32_coherent_if(scale_of(a.initial_scales, from, value_head, row), starts && has_row(r)));
        }
    }
    if constexpr (kSlotsFirst) fetch_inputs();
    if (!kScaled && (kOne || (kSeveral && !a.state_indices.data)))
        prefetch_state<State, kKey, kBlockRows>(a, blockIdx.x + a.ahead, [&](const DecodePlace& place) {
            return kSlotsFirst ? slot_ahead : load(a.initial_indices, place.n);
        });
    float x[kRows][kKey / kLanesPerRow];
    // Called by all threads.
    const auto put_state = [&](const DecodeStates& states, std::int32_t slot, int t = 0,
                               std::int32_t token = 0) {
        unsigned here = thread;
        if constexpr (!kOne)
            asm volatile("" : "+r"(here));  // addresses wait in no register for a later token
        const TileLane<Tile> stored(state, here);
        char* const first = advanced(first_row(states, slot), t, token);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const bool exists = has_row(r);
            float inverse = 1.0f;
            if constexpr (kScaled) {
                float most = 0.0f;
#pragma unroll
                for (int i = 0; i < 4 * kFours; ++i) most = larger_magnitude(most, x[r][i]);
                const RowScale chosen = row_scale(row_largest(most));
                inverse = chosen.inverse;
                if (thread % kLanesPerRow == 0 && exists)
                    *scale_of(a.final_scales, slot, value_head, row0 + own + r * kRowsPerPass) = chosen.scale;
            }
            char* const at = advanced(first, r * kRowsPerPass, states.v);
#pragma unroll
            for (int p = 0; p < kFours; ++p) {
                Four<State> four;
                if constexpr (kScaled) {
                    float scaled[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) scaled[e] = x[r][4 * p + e] * inverse;
                    four.set(scaled);
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e) four.set(e, x[r][4 * p + e]);
                }
                if constexpr (!Tile::kPiecesAreFours)
                    four.put(stored.four(r, p));
                else if (exists)
                    four.put(at + stored.piece_offset(p));
            }
            if constexpr (Tile::kPiecesAreFours) continue;
            __syncwarp();  // the lanes of a row have put their fours
#pragma unroll
            for (unsigned p = 0; p < Tile::kPieces; ++p)
                if (exists) stored.store_piece(r, p, at);
        }
        if constexpr (!Tile::kPiecesAreFours && !kOne) __syncwarp();  // before fours of a later token
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
            if constexpr (kKeys == Keys::kLowRank) read[r] = row_sum(read[r]);
            if (last) out[r] = scales.output(row_sum(out[r]), write[r]);
            if constexpr (kKeys == Keys::kLowRank)
                out[r] = __fmaf_rn(read[r], sum(s.bq[j]) * scales.q, out[r]);
        }
        if (last) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) out[r] = skipped ? 0.0f : out[r];
            put_outputs(t, out);
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
    __syncwarp();  // the lanes of a row have copied their pieces
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int p = 0; p < kFours; ++p) {
            const Four<State> four(loaded.four(r, p));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x[r][4 * p + e] = four.get(e);
                if constexpr (kScaled) x[r][4 * p + e] *= scale[r];
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
