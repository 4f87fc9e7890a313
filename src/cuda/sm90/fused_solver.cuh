// SPDX-License-Identifier: Apache-2.0
// A warp of a fused prefill that solves: every kSolvers-th chunk's inverse, times beta.
#pragma once

#include "cuda/sm80/block.cuh"
#include "cuda/sm90/fused_preparer.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, int kGroups>
struct FusedSolver {
    using S = FusedStage<kKey, kGroups>;

    const Walk<kKey, false>& walk;
    unsigned char* memory;
    FusedShared<kKey, kGroups>& shared;
    int number;

    // Whether a row's squares say that keys are coupled (sm80/block.cuh). A lane has a row.
    static __device__ __forceinline__ bool coupled(const Square<kFusedTokens>& m, int row) {
        float squares = 0.0f;
#pragma unroll
        for (int column = 0; column < kFusedTokens; column += 4) {
            float x[4];
            load4(x, m.at(0, 0, row, column));
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (column + e < row) squares += x[e] * x[e];
        }
        return __any_sync(0xffffffffu, !(squares <= kMostSquares));
    }

    __device__ __forceinline__ void run() const {
        const int chunks = FusedWalk(walk).chunks;
        Square<kFusedTokens>& m = shared.overlaps[number];
#pragma unroll 1
        for (int i = number; i < chunks; i += kSolvers) {
            const int stage = i % kFusedStages, lane = lane_anew();
            unsigned char* const at = memory + stage * S::kBytes;
            wait_barrier(shared_address(shared.scored + number), i / kSolvers & 1);
            const bool both = coupled(m, lane);
            unsigned char* const low = both ? at + S::kInverseLow : nullptr;
            const auto emit = [&](float(&x)[2][4], int row, int column) {
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    const auto scale =
                        *reinterpret_cast<const float2*>(shared.beta[stage] + column + 8 * tile + lane % 4 * 2);
#pragma unroll
                    for (int e = 0; e < 4; ++e) x[tile][e] *= e % 2 ? scale.y : scale.x;
                }
                put_square<T, S>(at + S::kInverse, low, x, row, column, lane);
            };
            float x[2][4];
            invert_diagonals(m, lane);
            __syncwarp();
            load_block(x, m, 0, 0, lane);
            emit(x, 0, 0);
            load_block(x, m, 16, 16, lane);
            emit(x, 16, 16);
            if (both)
                invert_lower<true>(m, 0, x, lane);
            else
                invert_lower<false>(m, 0, x, lane);
            emit(x, 16, 0);
            if (lane == 0) shared.coupled[stage] = both;
            fence_async_proxy();
            arrive(shared_address(shared.solved + number));
            arrive(shared_address(shared.made + stage));
        }
    }
};

}  // namespace cula::cuda::sm90
