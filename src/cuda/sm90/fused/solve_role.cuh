// SPDX-License-Identifier: Apache-2.0
// The solve role of the fused prefill: T = (I + diag(beta) L)^-1 diag(beta). A CTA has kSolveWarps solve
// warps, and each takes every kSolveWarps-th chunk that the CTA prepares. In the paired form the solve warp
// also sends the chunk to the peer.
#pragma once

#include "cuda/sm90/fused/operand_role.cuh"

namespace cula::cuda::sm90 {

using chunked::invert_diagonals;
using chunked::kMostSquares;

template <class T, int kKey, class Form>
struct FusedSolveRole {
    using Shared = FusedShared<kKey, Form>;
    using Stage = typename Shared::Stage;

    const SegmentCursor<kKey, false>& cursor;
    Shared& shared;
    int number;  // of the solve warp

    // The first chunks of a sequence are always compensated. In a sequence that has no other chunks, rounding
    // the inverse, U and the scores to one word is a quarter of the error, and most of the time is that of a
    // launch.
    static constexpr int kCompensatedChunks = 2;

    // Whether the chunk must be compensated: the squares of some row of the overlaps sum to more than
    // kMostSquares (chunked/solve.cuh), or to NaN. A lane has a row.
    static __device__ __forceinline__ bool compensated(const Square<kFusedTokens>& m, int row) {
        float squares = 0.0f;
#pragma unroll(Form::kRowUnroll)
        for (int column = 0; column < kFusedTokens; column += 4) {
            float x[4];
            load4(x, m.at(0, 0, row, column));
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (column + e < row) squares += x[e] * x[e];
        }
        return __any_sync(0xffffffffu, !(squares <= kMostSquares));
    }

    // Writes the inverse of a chunk. kBoth: both words of it (a compensated chunk), with products of 22 bits
    // instead of 11.
    template <bool kBoth>
    __device__ __forceinline__ void solve(int stage) const {
        const int lane = lane_anew();
        FusedFactors<kKey>& factors = shared.stages[stage].factors;
        typename Form::Solved& solved = shared.stages[stage].solved;
        Square<kFusedTokens>& m = Form::overlaps(shared, stage, number);
        // Multiplies the columns of a block of the inverse by beta and stores its high word; emit_low()
        // stores the low word.
        const auto emit = [&](float(&x)[2][4], int row, int column, Block& low) {
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
            if (kBoth) take_low_words<T>(low, rounded, x);
            solved.inverse.store_block(rounded[0], row, column, lane);
        };
        const auto emit_low = [&](const Block& low, int row, int column) {
            if (kBoth) solved.inverse_low.store_block(low[0], row, column, lane_anew());
        };
        invert_diagonals(m, lane);
        __syncwarp();
        Form::template write_inverse<kBoth>(solved, m, lane, emit, emit_low);
        if (lane == 0) factors.compensated = kBoth;
        fence_async_proxy();
        Form::signal_overlaps_free(shared, number);
        shared.operands_ready[stage].arrive();
    }

    __device__ __forceinline__ void run() const {
        const FusedCursor<Form> fused(cursor);
        unsigned n = static_cast<unsigned>(number);
        typename Form::Sender sender{};
        const auto next = [&] {
            const int i = fused.chunk(static_cast<int>(n)), stage = n % Shared::kStages;
            if (i >= fused.chunks) return Found::kNone;
            shared.scores_ready[stage].wait(n / Shared::kStages & 1);
            sender.send_early(shared, n);
            return (i < kCompensatedChunks && cursor.starts_sequence) ||
                           compensated(Form::overlaps(shared, stage, number), lane_anew())
                       ? Found::kOther
                       : Found::kPlain;
        };
        const auto take = [&](auto both) {
            solve<decltype(both)::value>(n % Shared::kStages);
            sender.send_rest(shared);
            n += kSolveWarps;
        };
        each_chunk(next, [&] { take(std::false_type{}); }, [&] { take(std::true_type{}); });
    }
};

}  // namespace cula::cuda::sm90
