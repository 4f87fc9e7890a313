// SPDX-License-Identifier: Apache-2.0
// The score role of the Hopper carry: additive algorithms with one decay per token (simple GLA, Lightning,
// linear attention), which have no prepare kernel.
//
// Per chunk, from q and k in the stage:
//   A[i, j] = scale norm_q[i] norm_k[j] exp2(G_i - G_j) (q_i . k_j)   for j <= i, else 0
//   the factors of every token (Factors)
// G are log2 decays from the chunk's start. One warpgroup computes q k^T by wgmma; warp w holds rows 16 w to
// 16 w + 15 of A.
//
// A reversed walk (DeviceArgs), whose decay is the same for every token and which has no norms:
//   A[i, j] = scale exp2(G_j - G_i) (q_i . k_j)   for j >= i, else 0
// Its state is the gradient of a state. That has the scale from the tokens that it sums, not from the reader.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/carry/config.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/scan.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, bool kMaps>
struct ScoreRole {
    using Shared = CarryShared<T, kKey, false, false, kMaps>;
    using Stage = typename Shared::Stage;
    using F = typename Shared::F;
    static constexpr int kRows = Stage::kRows, kEach = kRows / 32;

    using Products = float[kRows / 8][4];
    using Place = OperandTile<kKey, false>;

    const DeviceArgs& a;
    const CarryCursor<kKey, false, false, kMaps>& cursor;
    const Shared& shared;
    int stages;
    CarryControl& control = shared.control;

    // Reciprocal norms of q and k (qk_l2norm), two threads per token.
    __device__ __forceinline__ void make_norms(const Stage& stage) const {
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads, token = thread / 2;
#pragma unroll
        for (int which = kMaps ? 1 : 0; which < 2; ++which) {
            const unsigned char* tile = reinterpret_cast<const unsigned char*>(&stage) +
                                        (which == 0 ? offsetof(Stage, query) : offsetof(Stage, keys.read));
            float sum = 0.0f;
#pragma unroll 4
            for (int i = 0; i < kKey / 16; ++i) {
                const int unit = thread % 2 * (kKey / 16) + i;
                const uint4 x = *reinterpret_cast<const uint4*>(tile + Place::unit(token, unit) * 16);
                const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const float2 pair = unpack2<T>(words[w]);
                    sum += pair.x * pair.x + pair.y * pair.y;
                }
            }
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            if (thread % 2 == 0) control.norms[which][token] = rsqrtf(sum + 1e-6f);
        }
    }

    // log2 decays from the chunk's start: each lane sums kEach neighbouring tokens, then a scan runs over the
    // lanes. Called by one warp.
    __device__ __forceinline__ void make_decays(const HeadGate& gate, int chunk, int count) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        float sum[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int t = lane * kEach + i;
            sum[i] = t < count ? max_or_nan(token_log2_decay(a, gate, cursor.batch, cursor.token(chunk) + t,
                                                             cursor.value_head),
                                            kLeastLog2Decay)
                               : 0.0f;
        }
        running_sums(sum);
#pragma unroll
        for (int i = 0; i < kEach; ++i) control.log_decay[lane * kEach + i] = sum[i];
    }

    __device__ __forceinline__ float norm(int which, int token) const {
        return a.qk_l2norm ? control.norms[which][token] : 1.0f;
    }

    // Writes the Factors of a chunk of `count` tokens in a stage: one thread per token. The log decays may be
    // those of more tokens.
    template <bool kReversed>
    __device__ __forceinline__ void store_factors(F& of, int count) const {
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
        if (thread >= kRows) return;
        const float whole = control.log_decay[count - 1],
                    log_decay = control.log_decay[min(thread, count - 1)];
        const float from_start = exp2_fast(log_decay), to_end = exp2_fast(whole - log_decay);
        if constexpr (kReversed) {
            of.q_factor[thread] = to_end;
            of.k_rest[thread] = thread < count ? a.scale * from_start : 0.0f;
        } else {
            of.q_factor[thread] = a.scale * norm(0, thread) * from_start;
            of.k_rest[thread] = thread < count ? norm(1, thread) * to_end : 0.0f;
        }
        of.decay[thread] = exp2_fast(whole);
    }

    // Issues product = q k^T of the chunk in a stage; store_scores() waits for it.
    __device__ __forceinline__ void multiply(Products& product, const Stage& stage) const {
        const std::uint32_t at = wgmma::uniform(shared_address(&stage));
        const wgmma::Operand rows = wgmma::operand<Place::kUnits * 8>(at + offsetof(Stage, query)),
                             columns = wgmma::operand<Place::kUnits * 8>(at + offsetof(Stage, keys.read));
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step) {
            const int x = Place::unit(0, 2 * step);
            wgmma::multiply_shared<T>(product, rows + x, columns + x, step > 0);
        }
        wgmma::commit();
    }

    // Waits for the products, multiplies each by factor(tile, half, second), zeros those of later tokens
    // (with kReversed: of earlier ones), and writes the scores to the stage. `half` selects the lane's row
    // (l/4 or l/4 + 8 of the warp's 16 rows), `second` the first or second of its two columns in an 8-column
    // tile.
    template <bool kReversed, class Factor>
    __device__ __forceinline__ void store_scores(Stage& stage, Products& product, Factor factor) const {
        wgmma::wait<0>();
        wgmma::hold(product);
        const int lane = static_cast<int>(threadIdx.x) % 32,
                  first = static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * 16;
        auto* const words = reinterpret_cast<std::uint32_t*>(stage.scores.element);
#pragma unroll
        for (int tile = 0; tile < kRows / 8; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // On the side of the diagonal that is zero; uniform in the warp.
                if (kReversed ? tile * 8 + 8 <= first : tile * 8 >= first + 16) continue;
                const int i = first + lane / 4 + 8 * half, j = tile * 8 + lane % 4 * 2;
                float2 pair{product[tile][2 * half] * factor(tile, half, 0),
                            product[tile][2 * half + 1] * factor(tile, half, 1)};
                if (kReversed ? j < i : j > i) pair.x = 0.0f;
                if (kReversed ? j + 1 < i : j + 1 > i) pair.y = 0.0f;
                words[Panels<kRows>::unit(i, tile) * 4 + lane % 4] = pack2<T>(pair.x, pair.y);
            }
        fence_async_proxy();
    }

    // Calls body(chunk, stage, factors of the stage, wait_for_operands) for each chunk, then arrives at
    // scores_ready. The body calls wait_for_operands(), which waits for operands.ready, before it reads q and
    // k.
    template <class Body>
    __device__ __forceinline__ void each_chunk(Body body) const {
        auto stage = RingPosition::of_reader();
#pragma unroll 1
        for (int chunk = 0; chunk < cursor.segment.chunks; ++chunk) {
            body(chunk, shared.stage(stage.at), shared.factors(stage.at),
                 [&] { control.operands.ready[stage.at].wait(stage.parity); });
            control.scores_ready[stage.at].arrive();
            stage.next(stages);
        }
    }

    // Heads whose decay is the same for every token: the factor of a pair depends only on the distance i - j.
    // Each lane keeps its 18 factors in registers for the whole segment.
    template <bool kReversed>
    __device__ __forceinline__ void run_alike(const HeadGate& gate) const {
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads, lane = thread % 32;
        if (thread < 32) make_decays(gate, 0, kRows);
        sync_role();
        float by_distance[kRows / 8 + 1][2];  // [tile - half + 1][second column]
#pragma unroll
        for (int x = 0; x <= kRows / 8; ++x)
#pragma unroll
            for (int second = 0; second < 2; ++second) {
                const int behind = thread / 32 * 16 + lane / 4 - 8 * (x - 1) - lane % 4 * 2 - second,
                          distance = kReversed ? -behind : behind;
                by_distance[x][second] = distance < 0 ? 0.0f
                                         : distance == 0
                                             ? a.scale
                                             : a.scale * exp2_fast(control.log_decay[distance - 1]);
            }
        each_chunk([&](int chunk, Stage& at, F& of, auto wait_for_operands) {
            const int count = cursor.count(chunk);
            [[maybe_unused]] Products product;
            wait_for_operands();
            if constexpr (!kMaps) multiply(product, at);
            // Once per stage, where they stay valid, but for a chunk that is not full: the last one, or the
            // first one of a reversed walk, which comes back to its stage.
            if (chunk < stages + kReversed || count < kRows) store_factors<kReversed>(of, count);
            if constexpr (!kMaps)
                store_scores<kReversed>(at, product, [&](int tile, int half, int second) {
                    return by_distance[tile - half + 1][second];
                });
        });
    }

    __device__ __forceinline__ void run() const {
        const HeadGate gate(a, cursor.value_head);
        if (cursor.reversed()) return run_alike<true>(gate);
        if (a.algorithm.decay != kTokenDecay && !a.qk_l2norm) return run_alike<false>(gate);
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
        each_chunk([&](int chunk, Stage& at, F& of, auto wait_for_operands) {
            const int count = cursor.count(chunk);
            [[maybe_unused]] Products product;
            sync_role();  // the previous chunk's log_decay and norms have been read
            if (thread < 32) make_decays(gate, chunk, count);
            wait_for_operands();
            if (a.qk_l2norm) make_norms(at);
            if constexpr (!kMaps) multiply(product, at);
            sync_role();
            store_factors<false>(of, count);
            if constexpr (!kMaps) {
                const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
                const float decays[2] = {control.log_decay[row], control.log_decay[row + 8]};
                const float scales[2] = {a.scale * norm(0, row), a.scale * norm(0, row + 8)};
                store_scores<false>(at, product, [&](int tile, int half, int second) {
                    const int column = tile * 8 + lane % 4 * 2 + second;
                    return scales[half] * norm(1, column) *
                           exp2_fast(decays[half] - control.log_decay[column]);
                });
            }
        });
    }

    static __device__ __forceinline__ void sync_role() {
        named_barrier_sync<CarryNamedBarrier::kScoreRole, kWarpgroupThreads>();
    }
};

}  // namespace cula::cuda::sm90
