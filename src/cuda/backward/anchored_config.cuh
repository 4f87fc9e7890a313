// SPDX-License-Identifier: Apache-2.0
// The shared memory of gradient_anchored, whose warps have the patches of gradient_channel: a block of 16
// tokens times a group of 32 channels, as accumulators or as columns (channel_config.cuh).
#pragma once

#include "cuda/backward/channel_config.cuh"
#include "cuda/backward/gradients.h"
#include "cuda/pipe/barriers.cuh"

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

// The tensors of which a patch has rows.
struct AnchoredRows {
    enum Name : int { kQ, kK, kG, kDq, kDk, kDg, kErase, kEraseKeys, kDErase, kCount };
};

template <class T, int kKey>
struct alignas(128) AnchoredSmem {
    using P = Patches<kKey>;
    static constexpr int kSquares = square_index(P::kBlocks, 0);

    // Operands, q scale f, -k f (with erase keys -e f) and k / f with the decay f from the anchor of their
    // block, and later the patch between accumulators and columns.
    union {
        struct {
            PatchOperand<T> queries, readers, keys;
        } operands;
        PatchFloats turned;
    } own[P::kWarps];
    float2 log_decays[P::kWarps][kHalf][32];  // to base 2, of a lane's column
    Square d_scores[kSquares], d_overlaps[kSquares];
    float of_halves[2 * P::kBlocks][kKey];  // decays of half blocks
    // Decays from the chunk's start to the anchor of the first block, from each to the next, to the chunk's
    // end.
    float between[P::kBlocks + 1][kKey];
    float passing[P::kBlocks][kKey];    // parts of rowsum(S o Z)
    float entering[P::kBlocks][kKey];   // of the rows of a block, the sum over paths from the chunk's start
    float crossing[P::kBlocks][kKey];   // of a block, the sum of what its tokens add to dg of those before
    float bias_sums[P::kBlocks][kKey];  // of ddt_bias
    float squares[P::kWarps][2][kBlock], dots[P::kWarps][2][kBlock];  // of a patch: x . x; dy . x
    float norms[P::kWarps][2][kBlock], along[P::kWarps][2][kBlock];   // 1 / |x|; dy . x / |x|^2
    float strengths[P::kRows], betas[P::kRows];                       // dV . U; beta as it came
    float rate_sums[P::kWarps];
    std::int32_t is_out_of_range[2];             // in the chunk at hand, and in the one before
    ChannelPlace place[2];                       // likewise
    std::int64_t rows[2][AnchoredRows::kCount];  // and where its first token's rows begin, in elements
    Mbarrier slices_ready;
};

template <class T, int kKey>
struct GradientAnchored {
    static constexpr int kThreads = Patches<kKey>::kThreads;
    using Carried = CarrySlice<T, kKey>;
    using Returned = ReturnSlice<T, kKey>;

    // Whether gradient_anchored takes a call.
    static bool takes(const DeviceArgs& a, const Gradients& d) {
        return a.heads == a.value_heads && (d.keys() || d.decay() || d.others());
    }
    // count: slices of a value head, all of which are in shared memory at once.
    static constexpr std::size_t shared_bytes(int count) {
        return sizeof(AnchoredSmem<T, kKey>) + count * (sizeof(Carried) + sizeof(Returned));
    }
};

}  // namespace cula::cuda::backward
