// SPDX-License-Identifier: Apache-2.0
// Out-of-range pairs of channels in a chunk of the fused prefill. Softplus gates have no bound, so half a
// chunk of a channel may decay by more than its operands have range for (kMostHead, kMostTail). Such a
// channel and its neighbour form an out-of-range pair.
//
// An out-of-range pair takes no part in the products of operands: its columns are zeros there.
//
// Scores and overlaps: the pair's part is computed by separate products (mma), eight pairs at a time, in
// blocks of eight columns. x counts from the middle m of the block:
//
//     q or k exp2(x_t - m)  times  k exp2(m - x_s)
//
// A row before m is large by up to four tokens' decay and the scale, a column behind m by up to three tokens'
// decay. So a token may decay by 2^-29.75 at most (kMostInRange); what decays by more is clamped.
//
// State: its channels are read where the chunk begins and added to where it ends. Rows decay from the begin,
// columns to the end, and the state by the whole chunk between the read and the carry (FusedFactors::ends).
//
// Prediction: a channel that is out of range mostly stays so. Pairs that were out of range, or nearly, in the
// warpgroup's last chunk are predicted to be again: operand_role.cuh stores their decays instead of operands.
// If another pair turns out to be out of range, all out-of-range pairs are loaded from global memory again.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm90/fused/config.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::sm90 {

// The largest decay of a token, in powers of two. Four of them, times the largest scale (launch.cuh), are in
// range: 4 * 29.75 + 8 = 127.
inline constexpr float kMostInRange = 29.75f;

template <class T>
__device__ __forceinline__ float2 times(std::uint32_t word, float by) {
    const float2 x = unpack2<T>(word);
    return {x.x * by, x.y * by};
}

// The operand role's part in out-of-range pairs. A lane has a token.
template <class T, int kKey, class Form, Gate kGate>
struct FusedOutOfRange {
    using Shared = FusedShared<kKey, Form>;
    using Stage = typename Shared::Stage;
    using Mask = PairMask<kKey>;
    using Decays = OutOfRangeDecays;
    // The unpaired form has too few registers. It also zeros the blocks above the diagonals once only, which
    // the decays would overwrite.
    static_assert(kGate == Gate::kBounded || (kGate == Gate::kSoftplus && std::is_base_of_v<Paired, Form>));

    const DeviceArgs& a;
    Shared& shared;
    const int number;  // of the operand warpgroup
    const int i;       // of the chunk
    Stage& at;         // its stage
    const int thread = thread_anew(), lane = thread & 31, warp = thread >> 5;
    const std::uint32_t stage_at = shared_address(&at);

    __device__ __forceinline__ FusedOutOfRange anew() const { return {a, shared, number, i, at}; }

    // Before the products, where some pair was not predicted: brings all pairs of `mask` into the state that
    // predicted ones are in. q and k are as the load role brought them, columns are zeros, and decays of as
    // many pairs as there are slots are stored.
    __device__ __forceinline__ void load_again(const Mask& mask) const {
        own_pairs(mask, 0, Mask::kPairs, [&](int which, int pair) {
            const std::uint32_t q = load_global(0, pair), k = load_global(1, pair),
                                gates = load_global(2, pair), word = stage_at + word_at(lane, pair);
            store_word(word + offsetof(FusedPanel, query), q);
            store_word(word + offsetof(FusedPanel, keys), k);
            store_word(word + offsetof(FusedPanel, carried), 0);
            if (which < Decays::kSlots) measure(which, pair, gates);
        });
    }
    // After the products: adds the part of the pairs of `mask` to scores and overlaps, then writes their
    // operands for the state role. It takes kSlots pairs at a time; decays of later ones are computed from
    // global memory.
    template <class Products>
    __device__ __forceinline__ void add(Products& products, const Mask& mask) const {
#pragma unroll 1
        for (int first = 0, count = mask.count(); count > 0;
             first += Decays::kSlots, count -= Decays::kSlots) {
            if (first > 0) {
                own_pairs(mask, first, Decays::kSlots,
                          [&](int slot, int pair) { anew().measure(slot, pair, load_global(2, pair)); });
                sync_operand_role<Form>(number);
            }
#pragma unroll 1
            for (int slot = 0; slot < min(count, Decays::kSlots); slot += 8)
                anew().multiply(products, slot, count);
            // All threads have read the rows of these pairs, and the products of operands are through with
            // the tiles: the pairs' operands can replace the rows.
            sync_operand_role<Form>(number);
            own_pairs(mask, first, Decays::kSlots,
                      [&](int slot, int pair) { anew().store_operands(slot, pair); });
            sync_operand_role<Form>(number);  // all threads have read the decays
        }
    }

private:
    __device__ __forceinline__ Decays& decays() const { return at.solved.decays; }
    __device__ __forceinline__ FusedScales& scales() const { return shared.scales[number]; }
    // Where a token's word of a pair (both channels) stands in a TMA tile.
    static __device__ __forceinline__ std::uint32_t word_at(int token, int pair) {
        return pair / 32 * static_cast<int>(sizeof(FusedPanel)) + token * TmaTile<kFusedTokens>::kRowBytes +
               ((pair / 4 & 7) ^ (token & 7)) * 16 + pair % 4 * 4;
    }
    // The word of q (0), k (1) or gates (2) of the lane's token, from global memory; 0 where there is none.
    __device__ __forceinline__ std::uint32_t load_global(int tensor, int pair) const {
        const int token = i * kFusedTokens + lane;
        if (token >= shared.rows.tokens || 2 * pair >= a.key_dim) return 0;
        return *reinterpret_cast<const std::uint32_t*>(shared.rows.first[tensor] +
                                                       token * shared.rows.token_bytes[tensor] + pair * 4);
    }
    // Calls body(slot, pair) for the warp's share of `slots` pairs, beginning with the first-th of `mask`.
    template <class Body>
    __device__ __forceinline__ void own_pairs(const Mask& mask, int first, int slots, Body body) const {
        mask.each([&](int which, int pair) {
            const int slot = which - first;
            if (slot >= 0 && slot < slots && slot % kWarpgroupWarps == warp) body(slot, pair);
        });
    }
    // Stores the log2 decays of a pair, counted from the chunk's begin to the lane's token.
    __device__ __forceinline__ void measure(int slot, int pair, std::uint32_t gates) const {
        const float out = scales().out[FusedScales::place(lane)] * (lane < kFusedTokens / 2 ? -1.0f : 1.0f);
        const float2 raw = unpack2<T>(gates),
                     offset = *reinterpret_cast<const float2*>(shared.offsets + 2 * pair);
        const auto shape = [&](float x, float bias) {
            x = out * gate_shape<kGate, GateBits::k11>(fmaf(kLog2E, x, bias));
            return x < -kMostInRange ? -kMostInRange : x;  // a NaN stays one
        };
        float2 x{shape(raw.x, offset.x), shape(raw.y, offset.y)};
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const float2 before{__shfl_up_sync(0xffffffffu, x.x, by), __shfl_up_sync(0xffffffffu, x.y, by)};
            if (lane >= by) x = {x.x + before.x, x.y + before.y};
        }
        decays().x[slot][lane] = x;
        if (lane == 0) decays().x[slot][Decays::kBegin] = float2{0.0f, 0.0f}, decays().pair[slot] = pair;
    }
    // Adds the part of slots first to first + 7 to the warp's 16 rows of scores or overlaps, a block of eight
    // columns at a time. Where there are fewer slots, a lane takes slot `first` with zero columns instead.
    // Products above the diagonal may be anything: they are discarded later. Decays of rows are loaded again
    // for each block, since they would not fit into registers.
    template <class Products>
    __device__ __forceinline__ void multiply(Products& products, int first, int count) const {
        const float* const norms = warp < 2 ? scales().q : scales().k;
        const std::uint32_t rows_at =
            stage_at + (warp < 2 ? offsetof(FusedPanel, query) : offsetof(FusedPanel, keys));
        const int row = warp % 2 * 16 + lane / 4;
        constexpr int kBytes = sizeof(float2);
        bool in[2];
        int pairs[2];
        std::uint32_t x[2];  // addresses of the two slots' decays
        float2 rows[2][2];   // [slot][token]: q or k, normalized
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            int slot = first + lane % 4 + 4 * s;
            in[s] = slot < count;
            if (!in[s]) slot = first;
            x[s] = shared_address(decays().x[slot]), pairs[s] = decays().pair[slot];
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                const int token = row + 8 * lower;
                rows[s][lower] =
                    times<T>(load_word(rows_at + word_at(token, pairs[s])), norms[FusedScales::place(token)]);
            }
        }
#pragma unroll 1
        for (int block = 0; block < warp % 2 * 2 + 2; ++block) {
            const int column = 8 * block + lane / 4;
            const float norm = scales().k[FusedScales::place(column)];
            std::uint32_t a_words[4], b_words[2];
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const float2 middle = load_pair(x[s] + (8 * block + 4) * kBytes),
                             own = load_pair(x[s] + column * kBytes);
                const std::uint32_t word =
                    load_word(stage_at + offsetof(FusedPanel, keys) + word_at(column, pairs[s]));
                const float2 k = times<T>(in[s] ? word : 0, norm);
                b_words[s] = pack2<T>(k.x * exp2_fast(middle.x - own.x), k.y * exp2_fast(middle.y - own.y));
#pragma unroll
                for (int lower = 0; lower < 2; ++lower) {
                    const float2 of_row = load_pair(x[s] + (row + 8 * lower) * kBytes);
                    a_words[2 * s + lower] = pack2<T>(rows[s][lower].x * exp2_fast(of_row.x - middle.x),
                                                      rows[s][lower].y * exp2_fast(of_row.y - middle.y));
                }
            }
            float sums[4] = {};
            mma_16x8x16<T>(sums, a_words, b_words[0], b_words[1]);
#pragma unroll
            for (int tile = 0; tile < kFusedTokens / 8; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) products[tile][e] += tile == block ? sums[e] : 0.0f;
        }
    }
    // Writes the pair's operands, and its decay over the whole chunk to `ends`.
    __device__ __forceinline__ void store_operands(int slot, int pair) const {
        const std::uint32_t word = stage_at + word_at(lane, pair);
        const int place = FusedScales::place(lane);
        const auto& decay = decays().x[slot];
        const auto between = [](float2 from, float2 to) {
            return float2{exp2_fast(to.x - from.x), exp2_fast(to.y - from.y)};
        };
        const float2 begin = decay[Decays::kBegin], own = decay[lane], end = decay[kFusedTokens - 1];
        const float2 fall = between(begin, own), rest = between(own, end);
        if (lane == 0) *reinterpret_cast<float2*>(at.factors.ends + 2 * pair) = between(begin, end);
        const float2 q = times<T>(load_word(word + offsetof(FusedPanel, query)), scales().q[place]),
                     k = times<T>(load_word(word + offsetof(FusedPanel, keys)), scales().k[place]);
        store_word(word + offsetof(FusedPanel, query), pack2<T>(q.x * fall.x, q.y * fall.y));
        store_word(word + offsetof(FusedPanel, keys), pack2<T>(k.x * fall.x, k.y * fall.y));
        store_word(word + offsetof(FusedPanel, carried), pack2<T>(k.x * rest.x, k.y * rest.y));
    }
};

}  // namespace cula::cuda::sm90
