// SPDX-License-Identifier: Apache-2.0
// The solve role of the fused prefill: T = (I + diag(beta) L)^-1 diag(beta). A CTA has kSolveWarps solve
// warps, and each takes every kSolveWarps-th chunk that the CTA prepares. In the paired form the solve warp
// also sends the chunk to the peer.
#pragma once

#include "cuda/chunked/block.cuh"
#include "cuda/sm90/fused/operand_role.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, int kStateWarpgroups>
struct FusedSolveRole {
    using Layout = FusedStageLayout<kKey, kStateWarpgroups>;
    using Memory = FusedMemory<kKey, kStateWarpgroups>;
    using Shared = FusedShared<kKey, kStateWarpgroups>;

    const SegmentCursor<kKey, false>& cursor;
    unsigned char* memory;
    Shared& shared;
    int number;  // of the solve warp

    // The first chunks of a sequence are always compensated. In a sequence that has no other chunks, rounding
    // the inverse, U and the scores to one word is a quarter of the error, and most of the time is that of a
    // launch.
    static constexpr int kCompensatedChunks = 2;

    // Whether the chunk must be compensated: the squares of some row of the overlaps sum to more than
    // kMostSquares (chunked/block.cuh), or to NaN. A lane has a row.
    static __device__ __forceinline__ bool compensated(const Square<kFusedTokens>& m, int row) {
        float squares = 0.0f;
#pragma unroll(kPaired<kStateWarpgroups> ? 1 : 8)
        for (int column = 0; column < kFusedTokens; column += 4) {
            float x[4];
            load4(x, m.at(0, 0, row, column));
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (column + e < row) squares += x[e] * x[e];
        }
        return __any_sync(0xffffffffu, !(squares <= kMostSquares));
    }

    __device__ __forceinline__ Square<kFusedTokens>& overlaps(unsigned char* stage) const {
        if constexpr (kPaired<kStateWarpgroups>)
            return *reinterpret_cast<Square<kFusedTokens>*>(stage + Layout::kInverse);
        else
            return shared.overlaps[number];
    }

    // Writes the inverse of a chunk. kBoth: both words of it (a compensated chunk), with products of 22 bits
    // instead of 11.
    template <bool kBoth>
    __device__ __forceinline__ void solve(int stage) const {
        const int lane = lane_anew();
        unsigned char* const at = memory + Memory::stage(stage);
        FusedFactors<kKey>& factors = Layout::factors(at);
        Square<kFusedTokens>& m = overlaps(at);
        // Multiplies the columns of a block of the inverse by beta and stores its high word; emit_rests()
        // stores the low word.
        const auto emit = [&](float(&x)[2][4], int row, int column, Block& rests) {
            const int lane = lane_anew();
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const auto scale =
                    *reinterpret_cast<const float2*>(factors.beta + column + 8 * tile + lane % 4 * 2);
#pragma unroll
                for (int e = 0; e < 4; ++e) x[tile][e] *= e % 2 ? scale.y : scale.x;
            }
            Block rounded;
            pack<T>(rounded, x);
            if (kBoth) take_rests<T>(rests, rounded, x);
            put_block<Layout>(at + Layout::kInverse, rounded, row, column, lane);
        };
        const auto emit_rests = [&](const Block& rests, int row, int column) {
            if (kBoth) put_block<Layout>(at + Layout::kInverseLow, rests, row, column, lane_anew());
        };
        float x[2][4];
        Block rests;
        invert_diagonals(m, lane);
        __syncwarp();
        if constexpr (kPaired<kStateWarpgroups>) {
            // The inverse overwrites the overlaps that it is computed from. Its first 16 rows and the lower
            // left block are read before anything is written; rows from 16 on of the overlaps lie behind the
            // high words. Low words would overwrite them, so these are written last.
            float joining[2][4];
            Block upper_rests, joining_rests;
            invert_lower<kBoth>(m, 0, joining, lane);
            load_block(x, m, 0, 0, lane);
            __syncwarp();
            emit(joining, 16, 0, joining_rests);
            emit(x, 0, 0, upper_rests);
            load_block(x, m, 16, 16, lane);
            __syncwarp();
            emit(x, 16, 16, rests);
            emit_rests(upper_rests, 0, 0);
            emit_rests(joining_rests, 16, 0);
            emit_rests(rests, 16, 16);
            Layout::clear_above(at + Layout::kInverse, lane_anew());
            if (kBoth) Layout::clear_above(at + Layout::kInverseLow, lane_anew());
        } else {
            const auto emit_both = [&](int row, int column) {
                emit(x, row, column, rests);
                emit_rests(rests, row, column);
            };
            load_block(x, m, 0, 0, lane);
            emit_both(0, 0);
            load_block(x, m, 16, 16, lane);
            emit_both(16, 16);
            invert_lower<kBoth>(m, 0, x, lane);
            emit_both(16, 0);
        }
        if (lane == 0) factors.compensated = kBoth;
        fence_async_proxy();
        if constexpr (!kPaired<kStateWarpgroups>) arrive(shared_address(shared.overlaps_free + number));
        arrive(shared_address(shared.operands_ready + stage));
    }

    // Paired form: the copy of a chunk to the peer's stage `place()`. The place is free when both CTAs have
    // multiplied the chunk that it held, the CTA's chunk kPlaces before; operands_free of that chunk's own
    // stage says so.
    //   send_early   before the chunk is solved: operands and scores (26 KiB), if the place is free by then
    //   send_rest    after it is solved: factors and inverse (4 KiB), what was not sent early, and low words
    //                of a compensated chunk (5 KiB more)
    struct Sent {
        static constexpr int kPlaces = kPeerStages<kStateWarpgroups>, kEarly = Layout::kFactors;
        unsigned n;  // the CTA's n-th chunk
        int peer = cluster_rank() ^ 1;
        bool early = false;  // whether send_early() has sent its part

        __device__ __forceinline__ unsigned stage() const { return n % Shared::kStages; }
        __device__ __forceinline__ unsigned place() const { return Shared::kStages + n % kPlaces; }
    };
    // The barrier and the parity that say that the place is free.
    __device__ __forceinline__ std::uint32_t turned(const Sent& to) const {
        return shared_address(shared.operands_free + (to.n - Sent::kPlaces) % Shared::kStages);
    }
    __device__ __forceinline__ int parity(const Sent& to) const {
        return (to.n - Sent::kPlaces) / Shared::kStages & 1;
    }
    __device__ __forceinline__ void copy(const Sent& to, int begin, int bytes) const {
        copy_bulk_to(shared_address(memory + Memory::stage(to.place()) + begin),
                     shared_address(memory + Memory::stage(to.stage()) + begin), bytes,
                     shared_address(shared.operands_ready + to.place()), to.peer);
    }
    __device__ __forceinline__ void send_early(Sent& to) const {
        to.early = to.n < Sent::kPlaces || test_barrier(turned(to), parity(to));
        if (!to.early) return;
        expect_at(shared_address(shared.operands_ready + to.place()), Sent::kEarly, to.peer);
        copy(to, 0, Sent::kEarly);
    }
    __device__ __forceinline__ void send_rest(const Sent& to) const {
        if (!to.early) wait_barrier(turned(to), parity(to));
        const int begin = to.early ? Sent::kEarly : 0,
                  end = Layout::factors(memory + Memory::stage(to.stage())).compensated ? Layout::kBytes
                                                                                        : Layout::kInverseLow;
        wait_barrier(shared_address(shared.operands_ready + to.stage()), to.n / Shared::kStages & 1);
        arrive_expecting_at(shared_address(shared.operands_ready + to.place()), end - begin, to.peer);
        copy(to, begin, end - begin);
    }

    __device__ __forceinline__ void run() const {
        const FusedCursor<kStateWarpgroups> fused(cursor);
        unsigned n = static_cast<unsigned>(number);
        Sent to{};
        const auto next = [&] {
            const int i = fused.chunk(static_cast<int>(n)), stage = n % Shared::kStages;
            if (i >= fused.chunks) return Found::kNone;
            wait_barrier(shared_address(shared.scores_ready + stage), n / Shared::kStages & 1);
            if constexpr (kPaired<kStateWarpgroups>) {
                to.n = n;
                if (lane_anew() == 0) send_early(to);
            }
            return i < kCompensatedChunks || compensated(overlaps(memory + Memory::stage(stage)), lane_anew())
                       ? Found::kOther
                       : Found::kPlain;
        };
        const auto take = [&](auto both) {
            solve<decltype(both)::value>(n % Shared::kStages);
            if constexpr (kPaired<kStateWarpgroups>)
                if (lane_anew() == 0) send_rest(to);
            n += kSolveWarps;
        };
        each_chunk(next, [&] { take(std::false_type{}); }, [&] { take(std::true_type{}); });
    }
};

}  // namespace cula::cuda::sm90
