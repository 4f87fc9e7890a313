// SPDX-License-Identifier: Apache-2.0
// How gradient_channel divides a chunk among warps, and its shared memory.
//
// A warp has a patch: a block of 16 tokens times a group of 32 channels. Its lanes hold the patch as the
// accumulators of a tensor core product (ptx/mma.cuh), or as columns: two neighbouring channels of the eight
// tokens of half a block. What changes from one way to the other stays within the warp.
#pragma once

#include "cuda/backward/saved.cuh"
#include "cuda/chunked/chunk.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/rule.h"
#include "cuda/tile/scan.cuh"

namespace cula::cuda::backward {

using chunked::kBlock;
inline constexpr int kGroup = 32;         // channels of a group
inline constexpr int kHalf = kBlock / 2;  // tokens of half a block

// Do the writes of a chunk depend on the state under this update rule? Then they have gradients dL and dK^.
template <Update kUpdate>
struct GradientRule {
    static_assert(kIsKnown<kUpdate>, "gradient_channel: do writes depend on the state under this rule?");
};
template <>
struct GradientRule<Update::kAdditive> {
    static constexpr bool kSolves = false;
};
template <>
struct GradientRule<Update::kDelta> {
    static constexpr bool kSolves = true;
};

// Index of the pair of blocks (row, column), column < row.
CULA_HOST_DEVICE constexpr int block_pair(int row, int column) { return row * (row - 1) / 2 + column; }

template <int kKey>
struct Patches {
    static constexpr int kRows = chunked::kTokens<kKey>, kBlocks = kRows / kBlock, kGroups = kKey / kGroup;
    static constexpr int kWarps = kBlocks * kGroups, kThreads = 32 * kWarps;
    static constexpr int kPairs = kBlocks * (kBlocks - 1) / 2;  // of two different blocks
    // Squares dA, dL of a block of rows that one warp of the block makes.
    static constexpr int kSquares = kGroups < kBlocks ? kBlocks / kGroups : 1;
    static constexpr int kCtas = kKey <= 64 ? 2 : 1;  // that a multiprocessor has registers for
};

// The operands of a block that pair tokens: word [pair of tokens][channel]. Rows are eight words longer than
// they need be, so that a B operand (four rows, eight channels) has no bank conflict.
template <int kKey>
using BlockWords = std::uint32_t[kBlock / 2][kKey + 8];

// The row of a raw patch of q or k that holds token t of the block: the two halves, of which a warp reads the
// same token at once, fall on different banks.
CULA_HOST_DEVICE constexpr int row_of(int t) { return t ^ t / kHalf; }

// A patch of floats, [token][channel], on its way between accumulators and columns; rows are as above.
inline constexpr int kFloatsPitch = kGroup + 8;
using PatchFloats = float[kBlock][kFloatsPitch];

// The chunk of a CTA, as in ChunkPlace, its number in the slab, and the head of q and k.
struct alignas(16) ChannelPlace {
    std::int32_t batch, count, slot, head;
    std::int64_t begin;

    // From shared memory, anew at every call. A phase so shares no addresses with the phases before it, whose
    // accumulators need the registers.
    __device__ __forceinline__ ChannelPlace again() const {
        std::uint32_t words[4];
        load_words(words, shared_address(&batch));
        const auto first = static_cast<const volatile std::int64_t&>(begin);
        return {static_cast<std::int32_t>(words[0]), static_cast<std::int32_t>(words[1]),
                static_cast<std::int32_t>(words[2]), static_cast<std::int32_t>(words[3]), first};
    }
};
__device__ __forceinline__ int thread_again() {
    unsigned thread;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
    if (thread >= 1024) __builtin_unreachable();  // not negative: what divides it by a power of two shifts
    return static_cast<int>(thread);
}

template <class T, int kKey>
struct GradientChannelSmem {
    using P = Patches<kKey>;
    static constexpr int kSlots = kKey <= 128 ? 3 : 2;  // of the ring of slices

    union {
        SavedSlice<T, kKey> slices[kSlots];
        // q scale and k decayed from the start of their block, of all blocks but the first; k decayed to the
        // end of its block, of all blocks but the last.
        struct {
            BlockWords<kKey> q_rows[P::kBlocks - 1], k_rows[P::kBlocks - 1], k_columns[P::kBlocks - 1];
        } operands;
        struct {
            PatchFloats turned[P::kWarps];
            float bias_sums[P::kBlocks][kKey];  // of ddt_bias
        };
    };
    // Raw, [row_of(token)][channel].
    T q[P::kWarps][kBlock * kGroup], k[P::kWarps][kBlock * kGroup];
    // Of two blocks: A operands of dA and dL.
    std::uint32_t d_scores[P::kPairs][128], d_overlaps[P::kPairs][128];
    // Of a block with itself. Above the diagonal they mean nothing; that of dL is the one of -dV U^T.
    float own_scores[P::kBlocks][kBlock][kBlock], own_overlaps[P::kBlocks][kBlock][kBlock];
    float whole[P::kBlocks][kKey];                // decay of a block
    float rows_crossing[P::kPairs][kKey];         // of rows, the sum over paths from before an earlier block
    float columns_leaving[P::kBlocks - 1][kKey];  // of columns, the sum over paths to the chunk's end
    float passing[kKey];                          // rowsum(S o Z)
    float dots[P::kWarps][2][kBlock];             // over a patch: x . x, and later dy . x, of q and of k
    float inverse_norm[2][P::kRows], factor[2][P::kRows];  // factor: also scale, of q
    float rate_sums[P::kWarps];
    ChannelPlace place;
};

// The launch: threads and bytes of shared memory.
template <class T, int kKey>
struct GradientChannel {
    static constexpr int kThreads = Patches<kKey>::kThreads;
    static constexpr int kSharedBytes = sizeof(GradientChannelSmem<T, kKey>);
    static_assert(kSharedBytes <= 99 * 1024, "the least that a supported GPU has");
};

// The patch of a warp.
template <int kKey>
struct Patch {
    using P = Patches<kKey>;
    const int warp, lane;
    const int block = warp / P::kGroups, group = warp % P::kGroups;
    const int first = block * kBlock;
    // The lane's column: eight tokens and two neighbouring channels.
    const int half = lane / 16, token = first + half * kHalf, channel = group * kGroup + lane % 16 * 2;

    __device__ __forceinline__ explicit Patch(int thread = thread_again())
        : warp(thread >> 5), lane(thread & 31) {}
};

}  // namespace cula::cuda::backward
