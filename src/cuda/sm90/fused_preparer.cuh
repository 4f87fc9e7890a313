// SPDX-License-Identifier: Apache-2.0
// A warpgroup of a fused prefill that prepares: operands in place of q, k and gates, and the products of keys with
// queries and keys. kPreparers of them take turns.
//
// Log decays x run from the chunk's middle, after its token 15, to both ends; a thread has two channels of a half and
// goes outward, token by token. Rows are q, k exp2(x), columns k exp2(-x), so that the state is multiplied by
// exp2(head) before it is read and added to, and by exp2(tail) at the end: head and tail are what the halves decay.
// All x are larger by kShift, and so is tail, and head is smaller. This takes gates with a bound: no half decays by
// more than 2^-kMostLog2 (fused_launch.cuh).
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fused_stage.cuh"
#include "cuda/sm90/value_rows.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::sm90 {

__device__ __forceinline__ std::uint32_t load_word(std::uint32_t at) {
    std::uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at));
    return word;
}
__device__ __forceinline__ void load_words(std::uint32_t (&words)[4], std::uint32_t at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at));
}
__device__ __forceinline__ void store_word(std::uint32_t at, std::uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}

// A 16 x 16 block of a square: packed accumulators to their place.
using Block = Packed[1];

template <class S>
__device__ __forceinline__ void put_block(unsigned char* square, const Block& block, int row, int column, int lane) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair)
        reinterpret_cast<std::uint32_t*>(
            square)[S::square_unit(row + lane / 4 + pair % 2 * 8, column / 8 + pair / 2) * 4 + lane % 4] =
            block[0][pair];
}

template <class T, int kKey, int kGroups>
struct FusedPreparer {
    using S = FusedStage<kKey, kGroups>;
    using Memory = FusedMemory<kKey, kGroups>;
    using Shared = FusedShared<kKey, kGroups>;
    using W = Walk<kKey, false>;
    using Products = float[kFusedTokens / 8][4];  // of a warp's 16 rows with all columns
    static constexpr int kHalf = kFusedTokens / 2;
    // Where x is counted from, in powers of two: columns leave the state, which is a sum of them times values, room.
    static constexpr float kShift = 8.0f;

    const DeviceArgs& a;
    const W& walk;
    unsigned char* memory;
    Shared& shared;
    const int number;  // of the warpgroup
    // Anew for every part of a chunk: what follows from them would be kept in registers from one to the next.
    const int thread = own_thread(), lane = thread & 31, warp = thread >> 5;
    const int half = thread >> 6, pair = thread & 63, panel = pair >> 5;  // the thread's; and its channels
    FusedScales& scales = shared.scales[number];

    static __device__ __forceinline__ int own_thread() {
        unsigned thread;
        asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
        return static_cast<int>(thread % kGroupThreads);
    }
    __device__ __forceinline__ FusedPreparer anew() const { return {a, walk, memory, shared, number}; }
    __device__ __forceinline__ void sync() const {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + number), "n"(kGroupThreads) : "memory");
    }
    // A chunk's tail is the business of whoever prepares the next one. Of a pair that is the peer: what the thread's
    // channels decay goes there, and comes from there.
    __device__ __forceinline__ void send_tail(int i, float2 own) const {
        const int place = i / 2 % Shared::kTails;
        send_to(shared_address(shared.tails[place] + 2 * pair), own, shared_address(shared.tailed + place),
                cluster_rank() ^ 1);
    }
    __device__ __forceinline__ float2 received_tail(int i) const {
        const int use = (i - 1) / 2, place = use % Shared::kTails;
        const std::uint32_t tailed = shared_address(shared.tailed + place);
        if (pair == 0) arrive_expecting(tailed, kKey * static_cast<int>(sizeof(float)));
        wait_barrier(tailed, use / Shared::kTails & 1);
        return *reinterpret_cast<const float2*>(shared.tails[place] + 2 * pair);
    }
    // Otherwise it is the next warpgroup; and so is that overlaps of the chunk two before it are solved, lest waiting
    // for a later phase of their barrier find an earlier one (docs/fused.md).
    static __device__ __forceinline__ void pass_on(int i) { hand_over<false>(i + 1); }
    static __device__ __forceinline__ void take_over(int i) { hand_over<true>(i); }
    // One barrier for each that takes over: it may be late, and who passed on to it already take over the next.
    template <bool kWaits>
    static __device__ __forceinline__ void hand_over(int i) {
        const int barrier = 1 + kPreparers<kGroups> + i % kPreparers<kGroups>;
        if (kWaits)
            asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(2 * kGroupThreads) : "memory");
        else
            asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(2 * kGroupThreads) : "memory");
    }

    // A packed sequence's last chunk: what follows in memory is nobody's.
    __device__ __forceinline__ void clear_rows(unsigned char* boxes, int count) const {
        for (int i = thread; i < S::kPanels * S::kPanelBytes / 16; i += kGroupThreads)
            if (i % (S::kBoxBytes / 16) / 8 >= count) reinterpret_cast<uint4*>(boxes)[i] = uint4{};
        sync();
    }

    // Factors of q and k: one over their norms, times the scale. A warp has 16 rows, of q or of k; a lane half of one.
    __device__ __forceinline__ void norms(std::uint32_t stage) const {
        static_assert(S::kPanels == 2);
        const int own_panel = lane % 2, row = warp * 16 + lane / 2, token = warp % 2 * kHalf + lane / 2;
        const std::uint32_t from = stage + own_panel * S::kPanelBytes + row * S::kRowBytes;
        float sums[4] = {};
        const int turn = own_panel * 4 ^ row % 8;
#pragma unroll(kPaired<kGroups> ? 2 : 8)
        for (int unit = 0; unit < kBoxChannels / 8; ++unit) {
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

    // Four tokens of the thread's half, from its first-th on outward: where the j-th stands in a panel's rows.
    template <class Bool>
    struct Four {
        Bool second;
        std::uint32_t rows;

        __device__ __forceinline__ Four(Bool of_second, std::uint32_t panel_at, int pair, int first)
            : second(of_second) {
            const int row = second ? kHalf + first : kHalf - 4 - first;
            rows = panel_at + row * S::kRowBytes + ((pair >> 2 & 7) ^ (row & 4)) * 16 + (pair & 3) * 4;
        }
        __device__ __forceinline__ std::uint32_t at(int j) const {
            const int row = second ? j : 3 - j;
            return (rows ^ row * 16) + row * S::kRowBytes;
        }
        // All that is asked for comes before anything that is stored: no load waits for a store.
        __device__ __forceinline__ void load(std::uint32_t (&words)[4], int box) const {
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j] = load_word(at(j) + box);
        }
    };
    // Operands of the thread's half, whether it is the second, and channels, in place; head or tail.
    template <class Bool>
    __device__ __forceinline__ float2 operands(Bool second, const HeadGate& gate, float2 offset,
                                               std::uint32_t panel_at) const {
        const int place = half * kHalf;
        float2 sum{kShift, kShift};
#pragma unroll 1
        for (int first = 0; first < kHalf; first += 4) {
            const Four<Bool> four(second, panel_at, pair, first);
            std::uint32_t gates[4], q_words[4], k_words[4];
            four.load(gates, S::kCarried);
            four.load(q_words, S::kQuery);
            four.load(k_words, S::kKeys);
            float out[4], q_norm[4], k_norm[4];
            load4(out, scales.out + place + first);
            load4(q_norm, scales.q + place + first);
            load4(k_norm, scales.k + place + first);
            float2 x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto shape = [&](float raw, float bias) {
                    return gate_shape<Gate::kBounded, GateBits::k14>(fmaf(gate.in, raw, bias));
                };
                const float2 raw = unpack2<T>(gates[j]);
                const float2 before = sum;
                sum = {fmaf(out[j], shape(raw.x, offset.x), sum.x), fmaf(out[j], shape(raw.y, offset.y), sum.y)};
                x[j] = second ? sum : before;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const std::uint32_t at = four.at(j);
                const float2 fall{exp2_fast(x[j].x), exp2_fast(x[j].y)}, rise{exp2_fast(-x[j].x), exp2_fast(-x[j].y)};
                float2 q = unpack2<T>(q_words[j]), k = unpack2<T>(k_words[j]);
                q = {q.x * q_norm[j], q.y * q_norm[j]}, k = {k.x * k_norm[j], k.y * k_norm[j]};
                store_word(at + S::kQuery, pack2<T>(q.x * fall.x, q.y * fall.y));
                store_word(at + S::kKeys, pack2<T>(k.x * fall.x, k.y * fall.y));
                store_word(at + S::kCarried, pack2<T>(k.x * rise.x, k.y * rise.y));
            }
        }
        return second ? sum : float2{-sum.x, -sum.y};
    }

    // Products of rows, q over k, with all columns.
    static __device__ __forceinline__ void multiply(Products& products, std::uint32_t stage) {
        const wgmma::Operand rows = wgmma::operand<64>(stage + S::kQuery),
                             columns = wgmma::operand<64>(stage + S::kCarried);
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step) {
            const int at = step / 4 * S::kPanelBytes / 16 + step % 4 * 2;
            wgmma::multiply_shared<T>(products, rows + at, columns + at, step > 0);
        }
    }
    // To the squares: scores by the warps of q, with what rounding takes off; overlaps, times beta, by those of k.
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
                    x[tile][e] = below > 0 || (below == 0 && warp < 2) ? products[column / 8 + tile][e] : 0.0f;
                }
            if (warp < 2) {
                Block rounded, rests;
                pack<T>(rounded, x);
                take_rests<T>(rests, rounded, x);
                put_block<S>(stage + S::kScores, rounded, row, column, lane);
                put_block<S>(stage + S::kScoresLow, rests, row, column, lane);
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

    // Of the CTA's n-th chunk: operands; head or tail of the thread's channels.
    __device__ __forceinline__ float2 make(const HeadGate& gate, int n, int count) const {
        const int stage = n % Shared::kStages;
        unsigned char* const at = memory + Memory::stage(stage);
        const std::uint32_t stage_at = shared_address(at);
        wait_barrier(shared_address(shared.full + stage), n / Shared::kStages & 1);
        if (count < kFusedTokens) clear_rows(at, count);
        norms(stage_at);
        if (thread < kFusedTokens)
            scales.out[FusedScales::place(thread)] = thread >= count ? 0.0f : thread < kHalf ? -gate.out : gate.out;
        sync();
        const float2 offset = *reinterpret_cast<const float2*>(shared.offsets + 2 * pair);
        const std::uint32_t panel_at = stage_at + panel * S::kPanelBytes;
        // There is little room for code where warps of one CTA do so much (docs/fused.md).
        if constexpr (kPaired<kGroups>)
            return operands(half == 1, gate, offset, panel_at);
        else
            return half == 0 ? operands(std::false_type{}, gate, offset, panel_at)
                             : operands(std::true_type{}, gate, offset, panel_at);
    }
    // Its factors and products; it is the i-th of the walk.
    __device__ __forceinline__ void finish(int n, int i, bool last, float2 own) const {
        const int stage = n % Shared::kStages;
        unsigned char* const at = memory + Memory::stage(stage);
        FusedFactors<kKey>& factors = S::factors(at);
        const auto powers = [](float x, float y) { return float2{exp2_fast(x), exp2_fast(y)}; };
        if (half == 1) {
            if constexpr (!kPaired<kGroups>)
                *reinterpret_cast<float2*>(shared.tails[stage] + 2 * pair) = own;
            else if (!last)
                send_tail(i, own);
            *reinterpret_cast<float2*>(factors.after + 2 * pair) = powers(own.x, own.y);
        }
        fence_async_proxy();
        sync();
        Products products;
        wgmma::fence();
        multiply(products, wgmma::uniform(shared_address(at)));
        wgmma::commit();
        if constexpr (!kPaired<kGroups>)
            if (i > 0) take_over(i);
        if (half == 0) {
            // With what the chunk before decays after its middle.
            float2 since{0.0f, 0.0f};
            if (i > 0) {
                if constexpr (kPaired<kGroups>)
                    since = received_tail(i);
                else
                    since = *reinterpret_cast<const float2*>(shared.tails[(i - 1) % Shared::kStages] + 2 * pair);
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
        if constexpr (kPaired<kGroups>) {
            overlaps = reinterpret_cast<Square<kFusedTokens>*>(at + S::kInverse);
        } else {
            const int solver = i % kSolvers;
            wait_barrier(shared_address(shared.solved + solver), i / kSolvers & 1 ^ 1);
            if (!last) pass_on(i);
            overlaps = shared.overlaps + solver;
        }
        wgmma::wait<0>();
        wgmma::hold(products);
        put(products, at, factors.beta, *overlaps);
        fence_async_proxy();
        arrive(shared_address(shared.scored + stage));
        arrive(shared_address(shared.made + stage));
    }

    __device__ __forceinline__ void run() const {
        const HeadGate gate(a, walk.value_head);
        for (int channel = thread; channel < kKey; channel += kGroupThreads)
            shared.offsets[channel] =
                a.dt_bias.data && channel < a.key_dim
                    ? gate.in * a.dt_bias.data[walk.value_head * a.dt_bias.head + channel * a.dt_bias.channel]
                    : 0.0f;
        sync();
        const FusedWalk<kGroups> fused(walk);
#pragma unroll 1
        for (int n = number; fused.chunk(n) < fused.chunks; n += kPreparers<kGroups>) {
            const int i = fused.chunk(n);
            const float2 own = anew().make(gate, n, fused.count(i));
            anew().finish(n, i, i + 1 == fused.chunks, own);
        }
    }
};

}  // namespace cula::cuda::sm90
