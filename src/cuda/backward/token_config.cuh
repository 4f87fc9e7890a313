// SPDX-License-Identifier: Apache-2.0
// How gradient_token divides a chunk among warps, and its shared memory.
//
// A warp has a block of 16 tokens and a group of channels: its rows of dq and dk. It also has 16 x 16 blocks
// of its rows of dA or of dL, which its lanes hold as accumulators of tensor core products (ptx/mma.cuh).
#pragma once

#include "cuda/backward/saved.cuh"
#include "cuda/backward/token_gates.cuh"
#include "cuda/chunked/chunk.cuh"
#include "cuda/rule.h"

namespace cula::cuda::backward {

// Do the writes of a chunk depend on the state under this update rule? Then they have gradients dL and dbeta.
template <Update kUpdate>
struct GradientTokenRule {
    static_assert(kIsKnown<kUpdate>, "gradient_token: do writes depend on the state under this rule?");
};
template <>
struct GradientTokenRule<Update::kAdditive> {
    static constexpr bool kSolves = false;
};
template <>
struct GradientTokenRule<Update::kDelta> {
    static constexpr bool kSolves = true;
};

// The lower triangle of a square of floats in blocks of 16 x 16, each pair of neighbouring columns where the
// lane reads it that has it in an accumulator. Half rows of diagonal blocks that are all above the diagonal
// are left out.
template <int kSize>
struct LaneTriangle {
    static constexpr int kBlocks = kSize / chunked::kBlock, kPairs = 2 * kBlocks * kBlocks + kBlocks;
    float2 pairs[kPairs * 32];

    // The lane's place in a row of blocks, and its pair of a block there: columns 8 tile to 8 tile + 7, rows
    // 8 half to 8 half + 7.
    static __device__ __forceinline__ int begin(int row, int lane) {
        return (2 * row * row + row) * 32 + lane;
    }
    __device__ __forceinline__ float2& at(int begin, int column, bool diagonal, int tile, int half) {
        return pairs[begin + (4 * column + 2 * tile + half - (diagonal ? tile : 0)) * 32];
    }
    static __device__ __forceinline__ bool has(bool diagonal, int tile, int half) {
        return !diagonal || tile == 0 || half == 1;
    }
};

template <class T, int kKey>
struct GradientToken {
    static constexpr int kRows = chunked::kTokens<kKey>, kBlocks = kRows / chunked::kBlock;
    static constexpr int kWarps = 16, kThreads = 32 * kWarps;
    static constexpr int kGroups = kWarps / kBlocks;  // warps of a block
    static constexpr int kChannels = kKey / kGroups, kTiles = kChannels / 8;
    using Slice = SavedSlice<T, kKey>;

    struct Shared {
        alignas(128) T q[kRows * kKey];
        T k[kRows * kKey];
        // dA and dL, summed over the value heads so far; after the last one, tiles of T.
        union {
            LaneTriangle<kRows> sums[2];
            T squares[2][kRows * kRows];
        };
        union {
            DecayPaths<kRows, kGroups> paths;
            float dots[2][kGroups][kRows];  // after the last value head
        };
        float norms[2][kRows];                     // of q and of k
        float log_decay[kRows], strengths[kRows];  // strengths: dV_i . U_i
        // scale (q_i . k_j) and (k_i . k_j). After the last value head normalised rows of q and k, here and
        // in the ring of slices that follows.
        alignas(128) LaneTriangle<kRows> pairs[2];
    };
    static_assert(sizeof(Shared) % alignof(Slice) == 0);

    // Slices of the ring: many where there is as much shared memory, else few.
    static constexpr int kFewStages = kKey == 64 ? 4 : 2, kManyStages = kKey == 256 ? 5 : 6;
    static_assert(2 * kRows * kKey * sizeof(T) <= sizeof(Shared::pairs) + kFewStages * sizeof(Slice));

    static constexpr std::size_t shared_bytes(int stages) { return sizeof(Shared) + stages * sizeof(Slice); }
    static constexpr int stages(std::size_t shared_bytes_limit) {
        return shared_bytes(kManyStages) <= shared_bytes_limit ? kManyStages : kFewStages;
    }
    static constexpr std::size_t kSharedBytes = shared_bytes(kFewStages);
    static_assert(kSharedBytes <= 99 * 1024);
};

// What a warp has.
template <class T, int kKey, bool kSolves>
struct TokenRole {
    using Of = GradientToken<T, kKey>;
    // Squares: every kSharers-th block of its rows of dA (kind 0) or dL (kind 1).
    static constexpr int kKinds = kSolves ? 2 : 1, kSharers = Of::kGroups / kKinds,
                         kSquares = Of::kBlocks > kSharers ? Of::kBlocks / kSharers : 1;
    int group, block, kind;

    // Later blocks have more squares than earlier ones, and warps w and w + 4 run on the same scheduler. So
    // every other group counts blocks from the last.
    __device__ __forceinline__ explicit TokenRole(int warp) {
        group = warp / Of::kBlocks, block = warp % Of::kBlocks;
        if (group % 2) block = Of::kBlocks - 1 - block;
        kind = group / kSharers;
    }
    __device__ __forceinline__ int column(int square) const { return square * kSharers + group % kSharers; }
};

}  // namespace cula::cuda::backward
