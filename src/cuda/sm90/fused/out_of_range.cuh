// SPDX-License-Identifier: Apache-2.0
// OutOfRange pairs of channels of a fused prefill's chunk: what half a chunk of them decays leaves no room in
// operands. Nothing bounds softplus gates, and where a channel is steep it mostly stays so.
//
// A steep pair goes without the products of operands. Its part of scores and overlaps is products of its own,
// eight pairs at a time: blocks of eight tokens, x counted from the middle of the columns' block, for which
// no token may decay by more than 2^-29.75. The state's channels are read where the chunk begins and written
// to where it ends: rows decay from the begin, columns to the end, and the state by the whole chunk in
// between (FusedFactors::ends).
//
// Pairs that were steep, or nearly, in the warpgroup's last chunk are expected to be again: instead of
// operands their decays are written down (fused_preparer.cuh). Where a pair is that was not expected, all
// that are come from memory once more.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm90/fused/config.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::sm90 {

// In the place of the chunk's overlaps, before they are there: log2 decays of pairs, both channels, from
// somewhere to each token, and to the chunk's begin. What is added to a row keeps lanes of four slots and
// tokens apart.
struct OutOfRangeDecays {
    static constexpr int kSlots = 16, kBegin = kFusedTokens, kRow = kFusedTokens + 4;
    float2 x[kSlots][kRow];
    std::int32_t pair[kSlots];
};
// What a token decays at most, in powers of two: four of them, times the largest scale (fused_launch.cuh),
// are in range.
inline constexpr float kMostInRange = 29.75f;

template <class T>
__device__ __forceinline__ float2 times(std::uint32_t word, float by) {
    const float2 x = unpack2<T>(word);
    return {x.x * by, x.y * by};
}

// What a warpgroup that prepares does about them. A lane has a token.
template <class T, int kKey, int kStateWarpgroups, Gate kGate>
struct FusedOutOfRange {
    using Layout = FusedStageLayout<kKey, kStateWarpgroups>;
    using Shared = FusedShared<kKey, kStateWarpgroups>;
    using Mask = PairMask<kKey>;
    using Decays = OutOfRangeDecays;
    static_assert(!kPaired<kStateWarpgroups> || sizeof(Decays) <= Layout::kScoresLow - Layout::kInverse);
    // A CTA alone leaves what stands above diagonals as it is, and has too few registers.
    static_assert(kGate == Gate::kBounded || (kGate == Gate::kSoftplus && kPaired<kStateWarpgroups>));
    static_assert(Layout::kQuery == 0 && Layout::kKeys == Layout::kTmaBytes &&
                  Layout::kCarried == 2 * Layout::kTmaBytes && Mask::kPanels == 2);

    const DeviceArgs& a;
    Shared& shared;
    const int number;         // of the warpgroup
    const int i;              // of the chunk
    unsigned char* const at;  // its stage
    const int thread = thread_anew(), lane = thread & 31, warp = thread >> 5;
    const std::uint32_t stage_at = shared_address(at);

    __device__ __forceinline__ FusedOutOfRange anew() const { return {a, shared, number, i, at}; }

    // Before products, where some pair was not expected: all as if they had been. q and k as they came, zeros
    // for columns, and decays of as many as there is room for.
    __device__ __forceinline__ void take_again(const Mask& mask) const {
        own_pairs(mask, 0, Mask::kPairs, [&](int which, int pair) {
            const std::uint32_t q = from_memory(0, pair), k = from_memory(1, pair),
                                gates = from_memory(2, pair), word = stage_at + word_at(lane, pair);
            store_word(word + Layout::kQuery, q);
            store_word(word + Layout::kKeys, k);
            store_word(word + Layout::kCarried, 0);
            if (which < Decays::kSlots) measure(which, pair, gates);
        });
    }
    // After them: what pairs add to the products of q and k with k, and their operands.
    template <class Products>
    __device__ __forceinline__ void add(Products& products, const Mask& mask) const {
#pragma unroll 1
        for (int first = 0, count = mask.count(); count > 0;
             first += Decays::kSlots, count -= Decays::kSlots) {
            if (first > 0) {
                own_pairs(mask, first, Decays::kSlots,
                          [&](int slot, int pair) { anew().measure(slot, pair, from_memory(2, pair)); });
                sync_operand_role(number);
            }
#pragma unroll 1
            for (int slot = 0; slot < min(count, Decays::kSlots); slot += 8)
                anew().multiply(products, slot, count);
            sync_operand_role(number);  // nobody reads rows, or multiplies them
            own_pairs(mask, first, Decays::kSlots, [&](int slot, int pair) { anew().put(slot, pair); });
            sync_operand_role(number);  // nobody reads decays
        }
    }

private:
    __device__ __forceinline__ Decays& decays() const {
        return *reinterpret_cast<Decays*>(at + Layout::kInverse);
    }
    __device__ __forceinline__ FusedScales& scales() const { return shared.scales[number]; }
    // Where a token's word of a pair stands in a box.
    static __device__ __forceinline__ std::uint32_t word_at(int token, int pair) {
        return pair / 32 * Layout::kPanelBytes + token * Layout::kRowBytes +
               ((pair / 4 & 7) ^ (token & 7)) * 16 + pair % 4 * 4;
    }
    // The lane's token's of q, k or gates.
    __device__ __forceinline__ std::uint32_t from_memory(int tensor, int pair) const {
        const int token = i * kFusedTokens + lane;
        if (token >= shared.rows.tokens || 2 * pair >= a.key_dim) return 0;
        return *reinterpret_cast<const std::uint32_t*>(shared.rows.first[tensor] +
                                                       token * shared.rows.token_bytes[tensor] + pair * 4);
    }
    // body(slot, pair) of the warp's part of the pairs from the first-th on.
    template <class Body>
    __device__ __forceinline__ void own_pairs(const Mask& mask, int first, int slots, Body body) const {
        mask.each([&](int which, int pair) {
            const int slot = which - first;
            if (slot >= 0 && slot < slots && slot % kWarpgroupWarps == warp) body(slot, pair);
        });
    }
    // From the chunk's begin to the lane's token.
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
    // Of eight slots; where there are fewer, of the first instead, with zeros for columns. Above the diagonal
    // nobody looks. What is loaded again for every block would not fit into registers.
    template <class Products>
    __device__ __forceinline__ void multiply(Products& products, int first, int count) const {
        const float* const norms = warp < 2 ? scales().q : scales().k;
        const std::uint32_t rows_at = stage_at + (warp < 2 ? Layout::kQuery : Layout::kKeys);
        const int row = warp % 2 * 16 + lane / 4;
        constexpr int kBytes = sizeof(float2);
        bool in[2];
        int pairs[2];
        std::uint32_t x[2];  // where both slots have them
        float2 rows[2][2];   // of two tokens
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
                const std::uint32_t word = load_word(stage_at + Layout::kKeys + word_at(column, pairs[s]));
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
    // Operands, and what the pair decays.
    __device__ __forceinline__ void put(int slot, int pair) const {
        const std::uint32_t word = stage_at + word_at(lane, pair);
        const int place = FusedScales::place(lane);
        const auto& decay = decays().x[slot];
        const auto between = [](float2 from, float2 to) {
            return float2{exp2_fast(to.x - from.x), exp2_fast(to.y - from.y)};
        };
        const float2 begin = decay[Decays::kBegin], own = decay[lane], end = decay[kFusedTokens - 1];
        const float2 fall = between(begin, own), rest = between(own, end);
        if (lane == 0) *reinterpret_cast<float2*>(Layout::factors(at).ends + 2 * pair) = between(begin, end);
        const float2 q = times<T>(load_word(word + Layout::kQuery), scales().q[place]),
                     k = times<T>(load_word(word + Layout::kKeys), scales().k[place]);
        store_word(word + Layout::kQuery, pack2<T>(q.x * fall.x, q.y * fall.y));
        store_word(word + Layout::kKeys, pack2<T>(k.x * fall.x, k.y * fall.y));
        store_word(word + Layout::kCarried, pack2<T>(k.x * rest.x, k.y * rest.y));
    }
};

}  // namespace cula::cuda::sm90
