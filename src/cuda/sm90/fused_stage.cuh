// SPDX-License-Identifier: Apache-2.0
// What the warpgroups of a fused prefill share (fused.cuh): stages of shared memory, and the barriers between them.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/sm80/solve.cuh"
#include "cuda/sm90/stage.cuh"

namespace cula::cuda::sm90 {

inline constexpr int kFusedTokens = 32, kFusedStages = 5, kSolvers = 2;
// Warpgroups that prepare, by those that multiply: as many as registers are left for.
template <int kGroups>
inline constexpr int kPreparers = kGroups == 1 ? 3 : 2;

// A stage, in bytes from its begin. Each panel of 64 channels has the rows of q, those of k, and gates, all as they
// came; preparation leaves Q~, K^ and K+ in their places. Then come squares of 32 x 32 with zeros above: inverse and
// scores, and what rounding took off them; and values, in whose place outputs come.
template <int kKey, int kGroups>
struct FusedStage {
    static constexpr int kPanels = kKey / kBoxChannels, kRowBytes = 2 * kBoxChannels;
    static constexpr int kBoxBytes = kFusedTokens * kRowBytes;
    static constexpr int kQuery = 0, kKeys = kBoxBytes, kCarried = 2 * kBoxBytes, kPanelBytes = 3 * kBoxBytes;
    static constexpr int kInverse = kPanels * kPanelBytes;  // and squares
    static constexpr int kSquareBytes = kFusedTokens * kFusedTokens * 2;
    static constexpr int kScores = kInverse + kSquareBytes, kInverseLow = kScores + kSquareBytes,
                         kScoresLow = kInverseLow + kSquareBytes, kValues = kScoresLow + kSquareBytes;
    static constexpr int kBytes = kValues + kGroups * kBoxBytes;

    // Unit of 16 bytes `unit` of a square's row.
    static constexpr CULA_HOST_DEVICE int square_unit(int row, int unit) { return row * 4 + (unit ^ (row >> 1 & 3)); }
};

// Factors of a chunk's tokens: norms, with the scale; and what a gate's shape is multiplied by, with the sign that it
// has on the way from the middle, zero where there is no token. From the middle to the begin, then to the end.
struct FusedScales {
    alignas(16) float q[kFusedTokens], k[kFusedTokens], out[kFusedTokens];

    static constexpr CULA_HOST_DEVICE int place(int token) {
        return token < kFusedTokens / 2 ? kFusedTokens / 2 - 1 - token : token;
    }
};

// Of a chunk, per channel: what the state is multiplied by to be at the chunk's middle, where it is read and added to;
// and from there to be at its end. The first includes what the chunk before decays after its own middle, but where both
// together would vanish ("apart"), for which `brings` has the former, and ones.
template <int kKey>
struct FusedFactors {
    static constexpr int kPanels = kKey / kBoxChannels;
    alignas(16) float reads[kKey], brings[kKey];  // turned()
    float after[kKey];
    std::int32_t apart[kPanels];  // whether some channel is

    // Where a pair of channels stands so that the four of two tiles that a lane of a multiplying warp has come
    // together.
    static constexpr CULA_HOST_DEVICE int turned(int pair) { return pair / 8 * 16 + pair % 4 * 4 + pair / 4 % 2 * 2; }

    __device__ __forceinline__ bool any_apart() const {
        std::int32_t any = 0;
#pragma unroll
        for (const std::int32_t x : apart) any |= x;
        return any != 0;
    }
};
inline constexpr float kLeastPower = -126.0f;  // exp2 of less is zero

template <int kKey, int kGroups>
struct alignas(kImageAlignment) FusedShared {
    std::uint64_t full[kFusedStages], values[kFusedStages], made[kFusedStages], turned[kFusedStages];
    std::uint64_t scored[kSolvers], solved[kSolvers];
    std::int32_t coupled[kFusedStages];
    Segment segment;
    alignas(16) float beta[kFusedStages][kFusedTokens];
    FusedScales scales[kPreparers<kGroups>];
    float offsets[kKey];              // biases, times the gate's factor
    float tails[kFusedStages][kKey];  // log2 of factors.after
    FusedFactors<kKey> factors[kFusedStages];
    Square<kFusedTokens> overlaps[kSolvers];
};

template <int kKey, int kGroups>
struct FusedMemory {
    static constexpr int kShared = kFusedStages * FusedStage<kKey, kGroups>::kBytes,
                         kBytes = kShared + static_cast<int>(sizeof(FusedShared<kKey, kGroups>));
};

// The chunks that a fused prefill takes.
struct FusedWalk {
    int tokens, chunks;

    template <class W>
    __device__ __forceinline__ explicit FusedWalk(const W& walk)
        : tokens((walk.segment.chunks - 1) * W::kRows + walk.last_count),
          chunks(walk.segment.chunks > 0 ? (tokens + kFusedTokens - 1) / kFusedTokens : 0) {}

    __device__ __forceinline__ int count(int i) const { return min(tokens - i * kFusedTokens, kFusedTokens); }
};

}  // namespace cula::cuda::sm90
