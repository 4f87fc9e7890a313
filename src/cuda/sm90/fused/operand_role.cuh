// SPDX-License-Identifier: Apache-2.0
// The operand role of the fused prefill: writes a chunk's operands in place of q, k and gates, and computes
// the scores (queries with keys) and the overlaps (keys with keys, times beta). The CTA's operand
// warpgroups take chunks in turn. The tail of a chunk becomes part of `reads` of the next one, which another
// warpgroup prepares (Form::store_tail).
//
// All decays of a chunk count from one reference, its middle, which lies after token 15:
//   x_t    log2 decay from the middle to token t: negative after the middle, positive before it
//   head   log2 decay of tokens 0 to 15;  tail: of tokens 16 to 31
// Rows are Q~ = q exp2(x) and K^ = k exp2(x), columns are K+ = k exp2(-x). The state is multiplied by
// exp2(head) before it is read and added to, and by exp2(tail) at the chunk's end.
//
// kShift is added to all x and to tail, and subtracted from head: S at the middle is smaller by 2^-kShift,
// rows are larger and columns smaller by it, and the tail makes S whole again.
//
// A thread has a pair of channels and one half of the chunk, and takes the tokens from the middle outward.
//
// bf16 and float32 have room for x of half a chunk of gates at -5 (fuses_gate in launch.h). Softplus gates
// have no bound: pairs of channels that decay by more are out of range (out_of_range.cuh).
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fused/out_of_range.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/value_rows.cuh"

namespace cula::cuda::sm90 {

// A 16 x 16 block of a square, as packed accumulators.
using Block = Packed[1];

template <class T, int kKey, class Form, Gate kGate>
struct FusedOperandRole {
    using Shared = FusedShared<kKey, Form>;
    using Stage = typename Shared::Stage;
    using OutOfRange = FusedOutOfRange<T, kKey, Form, kGate>;
    using Products = float[kFusedTokens / 8][4];  // of a warp's 16 rows with all columns
    static constexpr int kHalf = kFusedTokens / 2;
    static constexpr int kPanelBytes = sizeof(FusedPanel), kRowBytes = TmaTile<kFusedTokens>::kRowBytes;
    // x counts from kShift. That makes columns smaller by 2^-kShift, and so leaves room for the state, which
    // is a sum of columns times values. Softplus gates count from 0: kMostHead and kMostTail leave that room,
    // and small numbers are kept.
    static constexpr float kShift = kGate == Gate::kBounded ? 8.0f : 0.0f;
    static constexpr bool kMayLeaveRange = kGate != Gate::kBounded;
    // The offset of channels beyond key_dim. It makes the shape of their gates 0: they do not decay, and are
    // never out of range.
    static constexpr float kNoGate = kGate == Gate::kBounded ? 1e30f : -1e30f;
    // A pair is out of range where one of its channels decays by more than 2^-kMostHead in the chunk's first
    // half, or by more than 2^-kMostTail in its second. Rows may be as large as 2^kMostHead times the largest
    // scale (launch.cuh). The state, where it is read, is as much smaller as rows are larger, and bf16 must
    // still represent it.
    static constexpr float kMostHead = 100.0f, kMostTail = 107.5f;
    // Hysteresis: predict out-of-range above kLikely, keep predicting it above kStillLikely.
    static constexpr float kLikely = 90.0f, kStillLikely = 75.0f;

    const DeviceArgs& a;
    const SegmentCursor<kKey, false>& cursor;
    Shared& shared;
    const int number;  // of the operand warpgroup
    // anew() recomputes these for each part of a chunk, so that nothing derived from them stays in registers
    // from one part to the next.
    const int thread = thread_anew(), lane = thread & 31, warp = thread >> 5;
    const int half = thread >> 6, pair = thread & 63, panel = pair >> 5;  // what the thread has
    FusedScales& scales = shared.scales[number];

    __device__ __forceinline__ FusedOperandRole anew() const { return {a, cursor, shared, number}; }
    __device__ __forceinline__ void sync() const { sync_operand_role<Form>(number); }
    // Zeros the rows from `count` on of the last chunk's TMA tiles. In a packed batch these rows belong to
    // the next sequence.
    __device__ __forceinline__ void clear_rows(Stage& stage, int count) const {
        constexpr int kUnits = sizeof(stage.panels) / 16, kTileUnits = sizeof(TmaTile<kFusedTokens>) / 16;
        auto* const units = reinterpret_cast<uint4*>(stage.panels);
#pragma unroll 1
        for (int i = thread; i < kUnits; i += kWarpgroupThreads)
            if (i % kTileUnits / 8 >= count) units[i] = uint4{};
        sync();
    }

    // Factors of q and k: one over their norms; for q times the scale. Warps 0 and 1 have 16 rows of q each,
    // warps 2 and 3 of k. A lane has half a row: one panel.
    __device__ __forceinline__ void norms(std::uint32_t stage) const {
        static_assert(Stage::kPanels == 2);
        const int own_panel = lane % 2, row = warp * 16 + lane / 2, token = warp % 2 * kHalf + lane / 2;
        const std::uint32_t from = stage + own_panel * kPanelBytes + row * kRowBytes;
        float sums[4] = {};
        const int swizzle = own_panel * 4 ^ row % 8;
#pragma unroll(Form::kNormUnroll)
        for (int unit = 0; unit < kTmaChannels / 8; ++unit) {
            std::uint32_t x[4];
            load_words(x, from + (unit ^ swizzle) * 16);
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                const float2 two = unpack2<T>(x[word]);
                sums[word] = fmaf(two.y, two.y, fmaf(two.x, two.x, sums[word]));
            }
        }
        float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (own_panel == 0)
            (warp < 2 ? scales.q : scales.k)[FusedScales::place(token)] =
                rsqrtf(sum + 1e-6f) * (warp < 2 ? a.scale : 1.0f);
    }

    // kFew tokens of the thread's half, which it handles together; fewer where instruction cache is scarcest.
    // The group begins `first` tokens from the middle and goes outward. at(j) is the address of its j-th
    // token.
    static constexpr int kFew = kMayLeaveRange ? 2 : 4;
    template <class Bool>
    struct Few {
        Bool second;
        std::uint32_t rows;

        __device__ __forceinline__ Few(Bool of_second, std::uint32_t panel_at, int pair, int first)
            : second(of_second) {
            const int row = second ? kHalf + first : kHalf - kFew - first;
            rows = panel_at + row * kRowBytes + ((pair >> 2 & 7) ^ (row & (8 - kFew))) * 16 + (pair & 3) * 4;
        }
        __device__ __forceinline__ std::uint32_t at(int j) const {
            const int row = second ? j : kFew - 1 - j;
            return (rows ^ row * 16) + row * kRowBytes;
        }
        // All loads of a group come before its stores: a load after a store, in program order, waits for it.
        __device__ __forceinline__ void load(std::uint32_t (&words)[kFew], int tile) const {
#pragma unroll
            for (int j = 0; j < kFew; ++j) words[j] = load_word(at(j) + tile);
        }
    };
    static __device__ __forceinline__ void load_few(float (&x)[kFew], const float* from) {
        if constexpr (kFew == 4) {
            load4(x, from);
        } else {
            const float2 two = *reinterpret_cast<const float2*>(from);
            x[0] = two.x, x[1] = two.y;
        }
    }
    // Whether the thread's pair of channels is predicted to be out of range. q and k of such a pair stay as
    // they are, its columns become zeros, and its decays are stored where there is a slot (OutOfRangeDecays).
    struct Expected {
        bool is = false;
        std::uint32_t decays = 0;  // address of the slot; 0 if there is none
        float most = 0.0f;         // limit of the shape of a token's gate

        __device__ __forceinline__ void put(int token, float2 x) const {
            store_pair_if(decays != 0, decays + token * static_cast<int>(sizeof(float2)), x);
        }
    };
    // Writes operands of the thread's channels and half in place. `second` says which half it is. Returns the
    // head or the tail.
    template <class Bool, class AnyLikely>
    __device__ __forceinline__ float2 operands(Bool second, AnyLikely any_likely, const HeadGate& gate,
                                               float2 offset, std::uint32_t panel_at,
                                               const Expected& expected) const {
        const int place = half * kHalf;
        float2 sum{kShift, kShift};
#pragma unroll 1
        for (int first = 0; first < kHalf; first += kFew) {
            const Few<Bool> few(second, panel_at, pair, first);
            std::uint32_t gates[kFew], q_words[kFew], k_words[kFew];
            few.load(gates, offsetof(FusedPanel, carried));
            few.load(q_words, offsetof(FusedPanel, query));
            few.load(k_words, offsetof(FusedPanel, keys));
            float out[kFew], q_norm[kFew], k_norm[kFew];
            load_few(out, scales.out + place + first);
            load_few(q_norm, scales.q + place + first);
            load_few(k_norm, scales.k + place + first);
            float2 x[kFew];
#pragma unroll
            for (int j = 0; j < kFew; ++j) {
                const auto shape = [&](float raw, float bias) {
                    const float in = kGate == Gate::kSoftplus ? kLog2E : gate.in;
                    const float shaped = gate_shape<kGate, GateBits::k11>(fmaf(in, raw, bias));
                    return any_likely ? min_or_nan(shaped, expected.most) : shaped;
                };
                const float2 raw = unpack2<T>(gates[j]);
                const float2 before = sum;
                sum = {fmaf(out[j], shape(raw.x, offset.x), sum.x),
                       fmaf(out[j], shape(raw.y, offset.y), sum.y)};
                x[j] = second ? sum : before;
            }
#pragma unroll
            for (int j = 0; j < kFew; ++j) {
                const std::uint32_t at = few.at(j);
                const float2 fall{exp2_fast(x[j].x), exp2_fast(x[j].y)},
                    rise{exp2_fast(-x[j].x), exp2_fast(-x[j].y)};
                float2 q = unpack2<T>(q_words[j]), k = unpack2<T>(k_words[j]);
                q = {q.x * q_norm[j], q.y * q_norm[j]}, k = {k.x * k_norm[j], k.y * k_norm[j]};
                const bool left = any_likely && expected.is;
                store_word_if(!left, at + offsetof(FusedPanel, query), pack2<T>(q.x * fall.x, q.y * fall.y));
                store_word_if(!left, at + offsetof(FusedPanel, keys), pack2<T>(k.x * fall.x, k.y * fall.y));
                store_word(at + offsetof(FusedPanel, carried),
                           left ? 0 : pack2<T>(k.x * rise.x, k.y * rise.y));
                if (any_likely) expected.put(second ? kHalf + first + j : kHalf - 1 - first - j, x[j]);
            }
        }
        if (any_likely && !second) expected.put(OutOfRangeDecays::kBegin, sum);
        return second ? sum : float2{-sum.x, -sum.y};
    }

    // Products of all rows with all columns. The tiles of Q~ and K^ are adjacent and serve as one operand of
    // 64 rows, and K+ is the other factor of both: warps 0 and 1 get the scores, 2 and 3 the overlaps.
    static __device__ __forceinline__ void multiply(Products& products, std::uint32_t stage) {
        const wgmma::Operand rows = wgmma::operand<64>(stage + offsetof(FusedPanel, query)),
                             columns = wgmma::operand<64>(stage + offsetof(FusedPanel, carried));
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step) {
            const int at = step / 4 * kPanelBytes / 16 + step % 4 * 2;
            wgmma::multiply_shared<T>(products, rows + at, columns + at, step > 0);
        }
    }
    // Stores the products: the warps of Q~ store the scores as two words, the warps of K^ the overlaps times
    // beta in float32. Products above the diagonal, which may have overflowed, are replaced by zeros.
    __device__ __forceinline__ void store_products(const Products& products, Stage& stage,
                                                   Square<kFusedTokens>& overlaps) const {
        const int row = warp % 2 * 16;
#pragma unroll
        for (int column = 0; column < kFusedTokens; column += 16) {
            if (column > row) break;
            float x[2][4];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int below = row + lane / 4 + e / 2 * 8 - (column + tile * 8 + lane % 4 * 2 + e % 2);
                    x[tile][e] =
                        below > 0 || (below == 0 && warp < 2) ? products[column / 8 + tile][e] : 0.0f;
                }
            if (warp < 2) {
                Block rounded, low;
                pack<T>(rounded, x);
                take_low_words<T>(low, rounded, x);
                stage.scores.store_block(rounded[0], row, column, lane);
                stage.solved.scores_low.store_block(low[0], row, column, lane);
                continue;
            }
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                const float strength = stage.factors.beta[row + lane / 4 + 8 * lower];
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                    *reinterpret_cast<float2*>(
                        overlaps.at(row + 8 * lower, column, lane / 4, 8 * tile + lane % 4 * 2)) =
                        float2{x[tile][2 * lower] * strength, x[tile][2 * lower + 1] * strength};
            }
        }
    }

    // Pairs that the warpgroup predicts to be out of range in one half of the chunk or both. halves() merges
    // the bits of the two halves; has() says whether the thread's pair is in a mask.
    __device__ __forceinline__ PairMask<kKey> likely() const { return halves(shared.likely[number]); }
    static __device__ __forceinline__ PairMask<kKey> halves(const std::uint32_t* of_warps) {
        const uint4 of = *reinterpret_cast<const uint4*>(of_warps);
        return {{of.x | of.z, of.y | of.w}};
    }
    __device__ __forceinline__ bool has(const PairMask<kKey>& mask) const {
        return (panel ? mask.of[1] : mask.of[0]) >> lane & 1;
    }

    // First part of the CTA's n-th chunk: waits for its inputs and computes norms.
    __device__ __forceinline__ void begin(const HeadGate& gate, int n, int count) const {
        const int stage = n % Shared::kStages;
        Stage& at = shared.stages[stage];
        shared.inputs_ready[stage].wait(n / Shared::kStages & 1);
        if (count < kFusedTokens) clear_rows(at, count);
        norms(shared_address(&at));
        if (thread < kFusedTokens)
            scales.out[FusedScales::place(thread)] = thread >= count  ? 0.0f
                                                     : thread < kHalf ? -gate.out
                                                                      : gate.out;
        sync();
    }
    // Second part: operands. Returns head or tail of the thread's channels. `likely` are the pairs predicted
    // to be out of range, whose decays are stored instead.
    template <class AnyLikely>
    __device__ __forceinline__ float2 make(AnyLikely any_likely, const HeadGate& gate, int n,
                                           const PairMask<kKey>& likely) const {
        Stage& at = shared.stages[n % Shared::kStages];
        const float2 offset = *reinterpret_cast<const float2*>(shared.offsets + 2 * pair);
        const std::uint32_t panel_at = shared_address(&at) + panel * kPanelBytes;
        Expected expected;
        if constexpr (any_likely) {
            OutOfRangeDecays& decays = at.solved.decays;
            const int slot = likely.before(pair);
            expected.is = has(likely);
            expected.most = expected.is ? shared.most_in_range : 1e30f;
            if (expected.is && slot < OutOfRangeDecays::kSlots) {
                expected.decays = shared_address(decays.x[slot]);
                if (half == 0) decays.pair[slot] = pair;
            }
        }
        // One loop serves both halves where the instruction cache is scarce (docs/design/fused-sm90.md).
        if constexpr (Form::kLoopPerHalf)
            return half == 0 ? operands(std::false_type{}, any_likely, gate, offset, panel_at, expected)
                             : operands(std::true_type{}, any_likely, gate, offset, panel_at, expected);
        else
            return operands(half == 1, any_likely, gate, offset, panel_at, expected);
    }
    // A barrier of the warpgroup, after which operands can be multiplied. Returns whether some pair is out of
    // range that was not predicted to be, and updates the prediction. `own` is the head or the tail of the
    // thread's channels.
    __device__ __forceinline__ bool unexpected(float2 own, const PairMask<kKey>& expected) const {
        const bool left = has(expected);
        static_assert(!kMayLeaveRange || kShift == 0);
        const float2 sums{-own.x, -own.y};
        const float most = half == 0 ? kMostHead : kMostTail, enough = left ? kStillLikely : kLikely;
        const bool is = !(sums.x <= most && sums.y <= most);
        fence_async_proxy();
        const bool some = any_of_operand_role<Form>(number, is && !left);
        const std::uint32_t again = __ballot_sync(0xffffffffu, !(sums.x <= enough && sums.y <= enough)),
                            here = __ballot_sync(0xffffffffu, is || left);
        if (lane == 0) shared.likely[number][warp] = again, shared.out_of_range[number][warp] = here;
        return some;
    }
    // The pairs that are left out of the products. If some were not predicted (`others`), their operands are
    // too large: all pairs out of range are loaded from global memory again.
    __device__ __forceinline__ PairMask<kKey> pairs_out_of_range(const OutOfRange& out_of_range,
                                                                 const PairMask<kKey>& expected,
                                                                 bool others) const {
        if (!others) return expected;
        sync();
        const PairMask<kKey> pairs = halves(shared.out_of_range[number]);
        out_of_range.load_again(pairs);
        fence_async_proxy();
        sync();
        return pairs;
    }
    // Last part: factors and products of chunk i of the sequence. kOutOfRange: it has pairs out of range.
    template <bool kOutOfRange>
    __device__ __forceinline__ void finish(int n, int i, bool last, float2 own,
                                           const PairMask<kKey>& expected, bool others) const {
        const int stage = n % Shared::kStages;
        Stage& at = shared.stages[stage];
        FusedFactors<kKey>& factors = at.factors;
        const auto powers = [](float x, float y) { return float2{exp2_fast(x), exp2_fast(y)}; };
        const auto out_of_range = [&] { return OutOfRange{a, shared, number, i, at}; };
        PairMask<kKey> pairs{};
        if constexpr (kOutOfRange) {
            pairs = pairs_out_of_range(out_of_range(), expected, others);
            if (has(pairs)) own = float2{0.0f, 0.0f};
            if (thread == 0) factors.out_of_range = pairs;
        }
        if (thread == 0) factors.any_out_of_range = kOutOfRange;
        if (half == 1) {
            Form::store_tail(shared, i, pair, own, last);
            if (!kOutOfRange || !has(pairs))
                *reinterpret_cast<float2*>(factors.ends + 2 * pair) = powers(own.x, own.y);
        }
        Products products;
        wgmma::fence();
        multiply(products, wgmma::uniform(shared_address(&at)));
        wgmma::commit();
        Form::take_over(i);
        if (half == 0) {
            // `since` is the tail of the chunk before.
            float2 since{0.0f, 0.0f};
            if (i > 0) since = Form::tail_before(shared, i, pair);
            const float2 all{since.x + own.x, since.y + own.y};
            const bool apart_x = all.x < kLeastPower, apart_y = all.y < kLeastPower;
            const int place = FusedFactors<kKey>::state_order(pair);
            *reinterpret_cast<float2*>(factors.reads + place) =
                powers(apart_x ? own.x : all.x, apart_y ? own.y : all.y);
            *reinterpret_cast<float2*>(factors.brings + place) =
                powers(apart_x ? since.x : 0.0f, apart_y ? since.y : 0.0f);
            factors.apart[panel] = __any_sync(0xffffffffu, apart_x || apart_y);
        }
        Square<kFusedTokens>& overlaps = Form::free_overlaps(shared, stage, i, last);
        wgmma::wait<0>();
        wgmma::hold(products);
        if constexpr (kOutOfRange) out_of_range().add(products, pairs);
        store_products(products, at, overlaps);
        fence_async_proxy();
        shared.scores_ready[stage].arrive();
        shared.operands_ready[stage].arrive();
    }

    __device__ __forceinline__ void run() const {
        const HeadGate gate(a, cursor.value_head);
        // A bias of softplus gates is made finite: rows beyond the last token have it, too, and multiply the
        // gate's shape by 0.
        const auto offset = [&](int channel) {
            if (channel >= a.key_dim) return kNoGate;
            if (!a.dt_bias.data) return 0.0f;
            const float bias =
                gate.in * a.dt_bias.data[cursor.value_head * a.dt_bias.head + channel * a.dt_bias.channel];
            return kMayLeaveRange ? min_or_nan(bias, 1e30f) : bias;
        };
        if (number == 0) {
            static_assert(kKey == kWarpgroupThreads);
            shared.offsets[thread] = offset(thread);
            if (kMayLeaveRange && thread == 0) shared.most_in_range = kMostInRange / -gate.out;
        }
        if (kMayLeaveRange && thread < kWarpgroupWarps) shared.likely[number][thread] = 0;
        named_barrier_sync<Form::kOperandWarpgroups * kWarpgroupThreads>(Form::NamedBarrier::kOperandRoles);
        // Softplus gates leave few registers: the cursor is made again from shared memory each time.
        const auto cursor_again = [&] {
            if constexpr (kMayLeaveRange)
                return FusedCursor<Form>(*const_cast<volatile std::int32_t*>(&shared.rows.tokens));
            else
                return FusedCursor<Form>(cursor);
        };
        int n = number;
        float2 own;
        PairMask<kKey> expected{};
        bool others = false;  // whether pairs that were not predicted are out of range
        const auto next = [&] {
            const FusedCursor<Form> fused = cursor_again();
            if (fused.chunk(n) >= fused.chunks) return Found::kNone;
            anew().begin(gate, n, fused.count(fused.chunk(n)));
            if constexpr (kMayLeaveRange) {
                expected = anew().likely();
                if (expected.any()) return Found::kOther;
            }
            own = anew().make(std::false_type{}, gate, n, expected);
            if constexpr (kMayLeaveRange) {
                others = anew().unexpected(own, expected);
                if (others) return Found::kOther;
            } else {
                fence_async_proxy();
                sync();
            }
            return Found::kPlain;
        };
        const auto finish_one = [&](auto out_of_range) {
            const FusedCursor<Form> fused = cursor_again();
            const int i = fused.chunk(n);
            anew().template finish<decltype(out_of_range)::value>(n, i, i + 1 == fused.chunks, own, expected,
                                                                  others);
            n += Form::kOperandWarpgroups;
        };
        each_chunk(
            next, [&] { finish_one(std::false_type{}); },
            [&] {
                if constexpr (kMayLeaveRange) {
                    if (expected.any()) {
                        own = anew().make(std::true_type{}, gate, n, expected);
                        others = anew().unexpected(own, expected);
                    }
                    finish_one(std::true_type{});
                }
            });
    }
};

}  // namespace cula::cuda::sm90
