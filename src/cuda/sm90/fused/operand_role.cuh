// SPDX-License-Identifier: Apache-2.0
// A warpgroup of a fused prefill that prepares: operands in place of q, k and gates, and the products of keys
// with queries and keys. kOperandWarpgroups of them take turns.
//
// Log decays x run from the chunk's middle, after its token 15, to both ends; a thread has two channels of a
// half and goes outward, token by token. Rows are q, k exp2(x), columns k exp2(-x), so that the state is
// multiplied by exp2(head) before it is read and added to, and by exp2(tail) at the end: head and tail are
// what the halves decay. All x are larger by kShift, and so is tail, and head is smaller. There is room for
// half a chunk of gates at -5 (fuses_gate in launch.h); of softplus gates, pairs of channels that take more
// go another way (fused_steep.cuh).
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fused/out_of_range.cuh"
#include "cuda/sm90/value_rows.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::sm90 {

// A 16 x 16 block of a square: packed accumulators to their place.
using Block = Packed[1];

template <class Layout>
__device__ __forceinline__ void put_block(unsigned char* square, const Block& block, int row, int column,
                                          int lane) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair)
        reinterpret_cast<std::uint32_t*>(
            square)[Layout::square_unit(row + lane / 4 + pair % 2 * 8, column / 8 + pair / 2) * 4 +
                    lane % 4] = block[0][pair];
}

template <class T, int kKey, int kStateWarpgroups, Gate kGate>
struct FusedOperandRole {
    using Layout = FusedStageLayout<kKey, kStateWarpgroups>;
    using Memory = FusedMemory<kKey, kStateWarpgroups>;
    using Shared = FusedShared<kKey, kStateWarpgroups>;
    using W = SegmentCursor<kKey, false>;
    using OutOfRange = FusedOutOfRange<T, kKey, kStateWarpgroups, kGate>;
    using Products = float[kFusedTokens / 8][4];  // of a warp's 16 rows with all columns
    static constexpr int kHalf = kFusedTokens / 2;
    // Where x is counted from, in powers of two: columns leave the state, which is a sum of them times
    // values, room. Softplus gates have theirs below, and keep what is small.
    static constexpr float kShift = kGate == Gate::kBounded ? 8.0f : 0.0f;
    static constexpr bool kMayLeaveRange = kGate != Gate::kBounded;
    // What makes no decay at all where there is no channel: none of those is steep.
    static constexpr float kNoGate = kGate == Gate::kBounded ? 1e30f : -1e30f;
    // What the tokens of a half decay at most, in powers of two, or their pair is steep. Rows may be as large
    // as the largest scale more; and the state, where it is read, as much smaller as they are larger, but no
    // smaller than bf16 can tell.
    static constexpr float kMostHead = 100.0f, kMostTail = 107.5f;
    // What decays by more may well be steep in the next chunk; and what was taken to be, by more than the
    // second.
    static constexpr float kLikely = 90.0f, kStillLikely = 75.0f;

    const DeviceArgs& a;
    const W& cursor;
    unsigned char* memory;
    Shared& shared;
    const int number;  // of the warpgroup
    // Anew for every part of a chunk: what follows from them would be kept in registers from one to the next.
    const int thread = thread_anew(), lane = thread & 31, warp = thread >> 5;
    const int half = thread >> 6, pair = thread & 63, panel = pair >> 5;  // the thread's; and its channels
    FusedScales& scales = shared.scales[number];

    __device__ __forceinline__ FusedOperandRole anew() const { return {a, cursor, memory, shared, number}; }
    __device__ __forceinline__ void sync() const { sync_operand_role(number); }
    // A chunk's tail is the business of whoever prepares the next one. Of a pair that is the peer: what the
    // thread's channels decay goes there, and comes from there.
    __device__ __forceinline__ void send_tail(int i, float2 own) const {
        const int place = i / 2 % Shared::kTails;
        send_to(shared_address(shared.tails[place] + 2 * pair), own,
                shared_address(shared.tail_ready + place), cluster_rank() ^ 1);
    }
    __device__ __forceinline__ float2 received_tail(int i) const {
        const int use = (i - 1) / 2, place = use % Shared::kTails;
        const std::uint32_t tailed = shared_address(shared.tail_ready + place);
        if (pair == 0) arrive_expecting(tailed, kKey * static_cast<int>(sizeof(float)));
        wait_barrier(tailed, use / Shared::kTails & 1);
        return *reinterpret_cast<const float2*>(shared.tails[place] + 2 * pair);
    }
    // Otherwise it is the next warpgroup; and so is that overlaps of the chunk two before it are solved, lest
    // waiting for a later phase of their barrier find an earlier one (docs/fused.md).
    static __device__ __forceinline__ void pass_on(int i) { hand_over<false>(i + 1); }
    static __device__ __forceinline__ void take_over(int i) { hand_over<true>(i); }
    // One barrier for each that takes over: it may be late, and who passed on to it already take over the
    // next.
    template <bool kWaits>
    static __device__ __forceinline__ void hand_over(int i) {
        const int barrier =
            1 + kOperandWarpgroups<kStateWarpgroups> + i % kOperandWarpgroups<kStateWarpgroups>;
        if (kWaits)
            asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(2 * kWarpgroupThreads) : "memory");
        else
            asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(2 * kWarpgroupThreads) : "memory");
    }

    // A packed sequence's last chunk: what follows in memory is nobody's.
    __device__ __forceinline__ void clear_rows(unsigned char* boxes, int count) const {
#pragma unroll 1
        for (int i = thread; i < Layout::kPanels * Layout::kPanelBytes / 16; i += kWarpgroupThreads)
            if (i % (Layout::kTmaBytes / 16) / 8 >= count) reinterpret_cast<uint4*>(boxes)[i] = uint4{};
        sync();
    }

    // Factors of q and k: one over their norms, times the scale. A warp has 16 rows, of q or of k; a lane
    // half of one.
    __device__ __forceinline__ void norms(std::uint32_t stage) const {
        static_assert(Layout::kPanels == 2);
        const int own_panel = lane % 2, row = warp * 16 + lane / 2, token = warp % 2 * kHalf + lane / 2;
        const std::uint32_t from = stage + own_panel * Layout::kPanelBytes + row * Layout::kRowBytes;
        float sums[4] = {};
        const int turn = own_panel * 4 ^ row % 8;
#pragma unroll(kPaired<kStateWarpgroups> ? 2 : 8)
        for (int unit = 0; unit < kTmaChannels / 8; ++unit) {
            std::uint32_t x[4];
            load_words(x, from + (unit ^ turn) * 16);
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

    // Tokens of the thread's half that it turns to together, few where there is least room for code; from its
    // first-th on outward: where the j-th stands in a panel's rows.
    static constexpr int kFew = kMayLeaveRange ? 2 : 4;
    template <class Bool>
    struct Few {
        Bool second;
        std::uint32_t rows;

        __device__ __forceinline__ Few(Bool of_second, std::uint32_t panel_at, int pair, int first)
            : second(of_second) {
            const int row = second ? kHalf + first : kHalf - kFew - first;
            rows = panel_at + row * Layout::kRowBytes + ((pair >> 2 & 7) ^ (row & (8 - kFew))) * 16 +
                   (pair & 3) * 4;
        }
        __device__ __forceinline__ std::uint32_t at(int j) const {
            const int row = second ? j : kFew - 1 - j;
            return (rows ^ row * 16) + row * Layout::kRowBytes;
        }
        // All that is asked for comes before anything that is stored: no load waits for a store.
        __device__ __forceinline__ void load(std::uint32_t (&words)[kFew], int box) const {
#pragma unroll
            for (int j = 0; j < kFew; ++j) words[j] = load_word(at(j) + box);
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
    // Whether the thread's pair is expected to be steep: it stays as it came, but for columns, which are
    // zeros; its decays are written down, where there is room.
    struct Expected {
        bool is = false;
        std::uint32_t decays = 0;
        float most = 0.0f;  // of a token's shape of the gate

        __device__ __forceinline__ void put(int token, float2 x) const {
            store_pair_if(decays != 0, decays + token * static_cast<int>(sizeof(float2)), x);
        }
    };
    // Operands of the thread's half, whether it is the second, and channels, in place; head or tail.
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
            few.load(gates, Layout::kCarried);
            few.load(q_words, Layout::kQuery);
            few.load(k_words, Layout::kKeys);
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
                store_word_if(!left, at + Layout::kQuery, pack2<T>(q.x * fall.x, q.y * fall.y));
                store_word_if(!left, at + Layout::kKeys, pack2<T>(k.x * fall.x, k.y * fall.y));
                store_word(at + Layout::kCarried, left ? 0 : pack2<T>(k.x * rise.x, k.y * rise.y));
                if (any_likely) expected.put(second ? kHalf + first + j : kHalf - 1 - first - j, x[j]);
            }
        }
        if (any_likely && !second) expected.put(OutOfRangeDecays::kBegin, sum);
        return second ? sum : float2{-sum.x, -sum.y};
    }

    // Products of rows, q over k, with all columns.
    static __device__ __forceinline__ void multiply(Products& products, std::uint32_t stage) {
        const wgmma::Operand rows = wgmma::operand<64>(stage + Layout::kQuery),
                             columns = wgmma::operand<64>(stage + Layout::kCarried);
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step) {
            const int at = step / 4 * Layout::kPanelBytes / 16 + step % 4 * 2;
            wgmma::multiply_shared<T>(products, rows + at, columns + at, step > 0);
        }
    }
    // To the squares: scores by the warps of q, with what rounding takes off; overlaps, times beta, by those
    // of k.
    __device__ __forceinline__ void put(const Products& products, unsigned char* stage, const float* beta,
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
                Block rounded, rests;
                pack<T>(rounded, x);
                take_rests<T>(rests, rounded, x);
                put_block<Layout>(stage + Layout::kScores, rounded, row, column, lane);
                put_block<Layout>(stage + Layout::kScoresLow, rests, row, column, lane);
                continue;
            }
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                const float strength = beta[row + lane / 4 + 8 * lower];
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                    *reinterpret_cast<float2*>(
                        overlaps.at(row + 8 * lower, column, lane / 4, 8 * tile + lane % 4 * 2)) =
                        float2{x[tile][2 * lower] * strength, x[tile][2 * lower + 1] * strength};
            }
        }
    }

    // Pairs that the warpgroup takes to be steep, one half or both; and whether the thread's is one of some.
    __device__ __forceinline__ PairMask<kKey> likely() const { return halves(shared.likely[number]); }
    static __device__ __forceinline__ PairMask<kKey> halves(const std::uint32_t* of_warps) {
        const uint4 of = *reinterpret_cast<const uint4*>(of_warps);
        return {{of.x | of.z, of.y | of.w}};
    }
    __device__ __forceinline__ bool has(const PairMask<kKey>& mask) const {
        return (panel ? mask.of[1] : mask.of[0]) >> lane & 1;
    }

    // Of the CTA's n-th chunk, once it is there: norms.
    __device__ __forceinline__ void begin(const HeadGate& gate, int n, int count) const {
        const int stage = n % Shared::kStages;
        unsigned char* const at = memory + Memory::stage(stage);
        wait_barrier(shared_address(shared.inputs_ready + stage), n / Shared::kStages & 1);
        if (count < kFusedTokens) clear_rows(at, count);
        norms(shared_address(at));
        if (thread < kFusedTokens)
            scales.out[FusedScales::place(thread)] = thread >= count  ? 0.0f
                                                     : thread < kHalf ? -gate.out
                                                                      : gate.out;
        sync();
    }
    // Then operands; head or tail of the thread's channels. Of `likely` pairs decays, where there are any.
    template <class AnyLikely>
    __device__ __forceinline__ float2 make(AnyLikely any_likely, const HeadGate& gate, int n,
                                           const PairMask<kKey>& likely) const {
        unsigned char* const at = memory + Memory::stage(n % Shared::kStages);
        const float2 offset = *reinterpret_cast<const float2*>(shared.offsets + 2 * pair);
        const std::uint32_t panel_at = shared_address(at) + panel * Layout::kPanelBytes;
        Expected expected;
        if constexpr (any_likely) {
            auto& decays = *reinterpret_cast<OutOfRangeDecays*>(at + Layout::kInverse);
            const int slot = likely.before(pair);
            expected.is = has(likely);
            expected.most = expected.is ? shared.most_in_range : 1e30f;
            if (expected.is && slot < OutOfRangeDecays::kSlots) {
                expected.decays = shared_address(decays.x[slot]);
                if (half == 0) decays.pair[slot] = pair;
            }
        }
        // There is little room for code where warps of one CTA do so much (docs/fused.md).
        if constexpr (kPaired<kStateWarpgroups>)
            return operands(half == 1, any_likely, gate, offset, panel_at, expected);
        else
            return half == 0 ? operands(std::false_type{}, any_likely, gate, offset, panel_at, expected)
                             : operands(std::true_type{}, any_likely, gate, offset, panel_at, expected);
    }
    // After it, operands are there, to be multiplied; whether some pair is steep that was not expected to be.
    // `own`: what the thread's half decays.
    __device__ __forceinline__ bool unexpected(float2 own, const PairMask<kKey>& expected) const {
        const bool left = has(expected);
        static_assert(!kMayLeaveRange || kShift == 0);
        const float2 sums{-own.x, -own.y};
        const float most = half == 0 ? kMostHead : kMostTail, enough = left ? kStillLikely : kLikely;
        const bool is = !(sums.x <= most && sums.y <= most);
        fence_async_proxy();
        const bool some = any_of_operand_role(number, is && !left);
        const std::uint32_t again = __ballot_sync(0xffffffffu, !(sums.x <= enough && sums.y <= enough)),
                            here = __ballot_sync(0xffffffffu, is || left);
        if (lane == 0) shared.likely[number][warp] = again, shared.out_of_range[number][warp] = here;
        return some;
    }
    // Pairs that go without the products: as they came, but for columns. What was made of one that was not
    // expected is too large.
    __device__ __forceinline__ PairMask<kKey> pairs_out_of_range(const OutOfRange& out_of_range,
                                                                 const PairMask<kKey>& expected,
                                                                 bool others) const {
        if (!others) return expected;
        sync();
        const PairMask<kKey> pairs = halves(shared.out_of_range[number]);
        out_of_range.take_again(pairs);
        fence_async_proxy();
        sync();
        return pairs;
    }
    // Its factors and products; it is the i-th of the walk. kOutOfRange: with steep pairs.
    template <bool kOutOfRange>
    __device__ __forceinline__ void finish(int n, int i, bool last, float2 own,
                                           const PairMask<kKey>& expected, bool others) const {
        const int stage = n % Shared::kStages;
        unsigned char* const at = memory + Memory::stage(stage);
        FusedFactors<kKey>& factors = Layout::factors(at);
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
            if constexpr (!kPaired<kStateWarpgroups>)
                *reinterpret_cast<float2*>(shared.tails[stage] + 2 * pair) = own;
            else if (!last)
                send_tail(i, own);
            if (!kOutOfRange || !has(pairs))
                *reinterpret_cast<float2*>(factors.ends + 2 * pair) = powers(own.x, own.y);
        }
        Products products;
        wgmma::fence();
        multiply(products, wgmma::uniform(shared_address(at)));
        wgmma::commit();
        if constexpr (!kPaired<kStateWarpgroups>)
            if (i > 0) take_over(i);
        if (half == 0) {
            // With what the chunk before decays after its middle.
            float2 since{0.0f, 0.0f};
            if (i > 0) {
                if constexpr (kPaired<kStateWarpgroups>)
                    since = received_tail(i);
                else
                    since =
                        *reinterpret_cast<const float2*>(shared.tails[(i - 1) % Shared::kStages] + 2 * pair);
            }
            const float2 all{since.x + own.x, since.y + own.y};
            const bool apart_x = all.x < kLeastPower, apart_y = all.y < kLeastPower;
            const int place = FusedFactors<kKey>::turned(pair);
            *reinterpret_cast<float2*>(factors.reads + place) =
                powers(apart_x ? own.x : all.x, apart_y ? own.y : all.y);
            *reinterpret_cast<float2*>(factors.brings + place) =
                powers(apart_x ? since.x : 0.0f, apart_y ? since.y : 0.0f);
            factors.apart[panel] = __any_sync(0xffffffffu, apart_x || apart_y);
        }
        Square<kFusedTokens>* overlaps;
        if constexpr (kPaired<kStateWarpgroups>) {
            overlaps = reinterpret_cast<Square<kFusedTokens>*>(at + Layout::kInverse);
        } else {
            const int solver = i % kSolveWarps;
            wait_barrier(shared_address(shared.overlaps_free + solver), i / kSolveWarps & 1 ^ 1);
            if (!last) pass_on(i);
            overlaps = shared.overlaps + solver;
        }
        wgmma::wait<0>();
        wgmma::hold(products);
        if constexpr (kOutOfRange) out_of_range().add(products, pairs);
        put(products, at, factors.beta, *overlaps);
        fence_async_proxy();
        arrive(shared_address(shared.scores_ready + stage));
        arrive(shared_address(shared.operands_ready + stage));
    }

    __device__ __forceinline__ void run() const {
        const HeadGate gate(a, cursor.value_head);
        // A bias of softplus gates stays a number: tokens that are not there have it, too.
        const auto offset = [&](int channel) {
            if (channel >= a.key_dim) return kNoGate;
            if (!a.dt_bias.data) return 0.0f;
            const float bias =
                gate.in * a.dt_bias.data[cursor.value_head * a.dt_bias.head + channel * a.dt_bias.channel];
            return kMayLeaveRange ? min_or_nan(bias, 1e30f) : bias;
        };
        for (int channel = thread; channel < kKey; channel += kWarpgroupThreads)
            shared.offsets[channel] = offset(channel);
        if constexpr (kMayLeaveRange) {
            if (thread == 0) shared.most_in_range = kMostInRange / -gate.out;
            if (thread < kWarpgroupWarps) shared.likely[number][thread] = 0;
        }
        sync();
        // Asked for anew, where registers are few.
        const auto cursor_again = [&] {
            if constexpr (kMayLeaveRange)
                return FusedCursor<kStateWarpgroups>(
                    *const_cast<volatile std::int32_t*>(&shared.rows.tokens));
            else
                return FusedCursor<kStateWarpgroups>(cursor);
        };
        int n = number;
        float2 own;
        PairMask<kKey> expected{};
        bool others = false;  // are steep, too
        const auto next = [&] {
            const FusedCursor<kStateWarpgroups> fused = cursor_again();
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
            const FusedCursor<kStateWarpgroups> fused = cursor_again();
            const int i = fused.chunk(n);
            anew().template finish<decltype(out_of_range)::value>(n, i, i + 1 == fused.chunks, own, expected,
                                                                  others);
            n += kOperandWarpgroups<kStateWarpgroups>;
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
