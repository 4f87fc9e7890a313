// SPDX-License-Identifier: Apache-2.0
// The shared memory of gradient_anchored, whose warps have the patches of gradient_channel: a block of 16
// tokens times a group of 32 channels, as accumulators or as columns (channel_config.cuh).
#pragma once

#include "cuda/backward/channel_config.cuh"
#include "cuda/backward/gradients.h"
#include "cuda/pipe/barriers.cuh"
#include "cuda/pipe/tensor_maps.h"

namespace cula::cuda::backward {

// A chunk is anchored where in every channel the decays from the middle of a block to each of its tokens, or
// back, lie within 2^-60 and 2^60: bfloat16 holds them and their products with q and k.
inline constexpr float kAnchoredRange = 60.0f;

// An operand of a patch, [token][channel]. Rows of 32 channels are four units of 16 bytes, permuted so that a
// unit of eight tokens, and two tokens of different halves, fall on different banks.
template <class T>
using PatchOperand = T[kBlock * kGroup];
// In elements: where the unit of token t begins.
CULA_HOST_DEVICE constexpr int operand_unit(int t, int unit) {
    const int row = row_of(t);
    return row * kGroup + (unit ^ (row >> 1 & 3)) * 8;
}

// Index of a pair of blocks, column <= row.
CULA_HOST_DEVICE constexpr int square_index(int row, int column) { return row * (row + 1) / 2 + column; }

// A square of 16 x 16 elements: four matrices of 8 x 8, in the order of an A operand (ptx/mma.cuh), each by
// rows. It is an A operand by ldmatrix, and so is its transpose.
using Square = std::uint32_t[4][32];

// The patch of a warp: a warpgroup has a group of channels, and its warps the blocks, of which wgmma gives
// them the rows.
template <int kKey>
struct AnchoredPatch : Patch<kKey> {
    __device__ __forceinline__ AnchoredPatch() : Patch<kKey>(with_patch_of(thread_again())) {}

private:
    // The thread that has this one's patch in gradient_channel.
    static __device__ __forceinline__ int with_patch_of(int thread) {
        using P = Patches<kKey>;
        const unsigned warp = static_cast<unsigned>(thread) / 32, lane = static_cast<unsigned>(thread) % 32;
        return static_cast<int>((warp % P::kBlocks * P::kGroups + warp / P::kBlocks) * 32 + lane);
    }
};

// A patch of floats on its way from accumulators to columns. A unit of 16 bytes has the even or the odd ones
// of eight channels of a token, and is a row of a matrix of stmatrix and ldmatrix. The eight rows of a
// matrix, eight tokens of one half or four units of one token of each half, lie on different banks.
struct alignas(16) TurnedPatch {
    static constexpr int kHalfBytes = kHalf * 32 + 16, kEightChannels = 2 * kHalfBytes;
    // In bytes: token t of a half, channels 8 n and 2, 4, 6 more (odd: 1, 3, 5, 7).
    static CULA_HOST_DEVICE constexpr int unit(int half, int t, int n, int odd) {
        return n * kEightChannels + half * kHalfBytes + t * 32 + (odd ^ t / 4) * 16;
    }
    unsigned char bytes[kGroup / 8 * kEightChannels];
};

// A patch of gradients on its way to rows of words, or lane by lane to elements.
template <class T>
union StagedPatch {
    PatchOperand<T> rows;
    float elements[2 * kHalf][32];
};

static_assert(sizeof(StagedPatch<__nv_bfloat16>) <= sizeof(TurnedPatch));

// Numbers of lanes to sum over the 16 lanes of a half, [half][lane][number]. Pitches are such that neither
// stores of four numbers nor loads of one have bank conflicts.
struct LaneSums {
    static constexpr int kPitch = 2 * kHalf + 4;
    float of_half[2][16 * kPitch + 16];
};

// The tensors of which a patch has rows.
struct AnchoredRows {
    enum Name : int { kQ, kK, kG, kDq, kDk, kDg, kErase, kEraseKeys, kDErase, kCount };
};

template <class T, int kKey>
struct alignas(128) AnchoredSmem {
    using P = Patches<kKey>;
    static constexpr int kSquares = square_index(P::kBlocks, 0);

    // Operands, q scale f, -k f (with erase keys -e f) and k / f with the decay f from the anchor of their
    // block; before and after them what has been given, what a sum over lanes adds, and the patch between
    // accumulators and columns.
    union {
        struct {
            union {
                struct {
                    PatchOperand<T> queries, readers;
                };
                struct {
                    PatchOperand<T> q, k;  // as they came
                };
                TurnedPatch turned;
                StagedPatch<T> staged;
            };
            union {
                PatchOperand<T> keys;
                PatchOperand<T> gates;  // as they came
            };
        };
        LaneSums sums;  // over all of the above
    } own[P::kWarps];
    // Decays f of a lane's column, and at the end gradients.
    union {
        float2 decays[kHalf][32];
        StagedPatch<T> staged;
    } columns[P::kWarps];
    Square d_scores[kSquares], d_overlaps[kSquares];
    float of_halves[2 * P::kBlocks][kKey];  // decays of half blocks
    // Decays from the chunk's start to the anchor of the first block, from each to the next, to the chunk's
    // end.
    float between[P::kBlocks + 1][kKey];
    float passing[P::kBlocks][kKey];    // parts of rowsum(S o Z)
    float entering[P::kBlocks][kKey];   // of the rows of a block, the sum over paths from the chunk's start
    float crossing[P::kBlocks][kKey];   // of a block, the sum of what its tokens add to dg of those before
    float bias_sums[P::kBlocks][kKey];  // of ddt_bias
    union {
        float squares[P::kWarps][2][kBlock];  // of a patch: x . x
        float along[P::kWarps][2][kBlock];    // later, of all channels: dy . x / |x|^2
    };
    float dots[P::kWarps][2][kBlock], norms[P::kWarps][2][kBlock];  // of a patch: dy . x; 1 / |x|
    float strengths[P::kRows], betas[P::kRows];                     // dV . U; beta as it came
    float rate_sums[P::kWarps];
    std::int32_t is_out_of_range[2];             // in the chunk at hand, and in the one before
    ChannelPlace place[2];                       // likewise
    std::int64_t rows[2][AnchoredRows::kCount];  // and where its first token's rows begin, in elements
    Mbarrier slices_ready;
};

// What a chunk and head has in shared memory behind AnchoredSmem, all value channels at once: by rows tiles
// [64 tokens x 64 value channels] of dO and then of dV, two of each; slices.
template <class T, int kKey, class From>
struct AnchoredSlices {
    using Carried = CarrySlice<T, kKey>;
    using Returned = ReturnSlice<T, kKey>;
    static constexpr bool kByRows = std::is_same_v<From, FromRows>;
    // In bytes. Of what the return has saved: a slice here, and where its Z begins.
    static constexpr int kCarried = sizeof(Carried),
                         kReturned = kByRows ? sizeof(Returned::d_state) : sizeof(Returned),
                         kDState = kByRows ? 0 : offsetof(Returned, d_state);
    static constexpr int kTiles = 2, kMost = kTiles * kTmaChannels / kSliceValues;  // slices by rows
    struct Rows {
        TmaTile<Patches<kKey>::kRows> d_outputs[kTiles], d_values[kTiles];
    };
    struct Nothing {};
    struct Memory {
        AnchoredSmem<T, kKey> s;
        [[no_unique_address]] std::conditional_t<kByRows, Rows, Nothing> rows;
    };
    static constexpr int kBegin = sizeof(Memory), kRowsAt = offsetof(Memory, rows);

    int count;  // of slices that exist

    // By rows there is room for kMost, of which those that do not exist are zero.
    CULA_HOST_DEVICE constexpr int room() const { return kByRows ? kMost : count; }
    CULA_HOST_DEVICE constexpr int returned() const { return room() * kCarried; }
    CULA_HOST_DEVICE constexpr int tiles() const { return (count * kSliceValues - 1) / kTmaChannels + 1; }
    constexpr std::size_t shared_bytes() const {
        return kBegin + static_cast<std::size_t>(room()) * (kCarried + kReturned);
    }
};

}  // namespace cula::cuda::backward
