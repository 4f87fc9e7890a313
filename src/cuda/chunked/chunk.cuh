// SPDX-License-Identifier: Apache-2.0
// How a call is cut: chunks of tokens, segments of chunks, slabs of chunks that share one workspace; and what
// prepare hands to carry for a chunk, laid out as it stands in shared memory, so that both sides move it in
// whole 16-byte pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/device_args.h"
#include "cuda/tile/scan.cuh"

namespace cula::cuda::chunked {

// Tokens of a chunk: fewer where a row of the state takes all the registers.
template <int kKey>
inline constexpr int kTokens = kKey <= 128 ? 64 : 32;
inline constexpr int kBlock = 16;  // tokens of a block: rows of one tensor core product

// A [kRows x kColumns] tile of 16-bit elements: panels of at most kPanel columns one after the other, and in
// a row of a panel the units of 16 bytes permuted by the row, so that eight rows of one column lie in eight
// different bank groups. For whole panels of 64 columns that is what the tensor cores of sm_90 call the
// 128-byte swizzle, of 32 the 64-byte one.
template <int kRows, int kColumns, int kPanel = 64>
struct Tile {
    static constexpr int kUnits = (kColumns < kPanel ? kColumns : kPanel) / 8;  // of a panel's row
    static constexpr int kPanelUnits = kRows * kUnits;
    static constexpr CULA_HOST_DEVICE int unit(int row, int unit) {
        constexpr int kShift = kUnits == 8 ? 0 : kUnits == 4 ? 1 : 2;
        return unit / kUnits * kPanelUnits + row * kUnits + (unit % kUnits ^ (row >> kShift & (kUnits - 1)));
    }
};

// q and k of a chunk as the carry reads them. Those that prepare scales stand in panels of 32 channels, which
// is how it has them: a warp stores eight tokens at a time, and in such panels these are four whole lines.
template <int kKey, bool kPerChannel>
using OperandTile = Tile<kTokens<kKey>, kKey, kPerChannel ? 32 : 64>;

// The lower triangle of a square of 16-bit elements, in blocks of 16 x 16: a panel per 16 columns, each from
// its block on the diagonal down. The two units of 16 bytes of a row are permuted so that eight rows of one
// column lie in eight different bank groups: the 32-byte swizzle of sm_90.
template <int kSize>
struct Triangle {
    static constexpr int kBlocks = kSize / kBlock, kBlockUnits = kBlock * kBlock / 8;
    static constexpr int kElements = (kBlocks + 1) * kBlocks / 2 * kBlock * kBlock;

    // In units: where block (row, panel) begins, and what of a block is where.
    static constexpr CULA_HOST_DEVICE int block_begin(int row, int panel) {
        return (panel * kBlocks - panel * (panel + 1) / 2 + row) * kBlockUnits;
    }
    static constexpr CULA_HOST_DEVICE int in_block(int row, int unit) {
        return 2 * row + (unit ^ (row >> 2 & 1));
    }
};

inline constexpr int kChunkAlignment = 128;

// Decay per channel. The parts stand in the order of how few read them: what rounding left over is read where
// it would show (kMostSquares), additive algorithms begin at k_remaining, and maps end at q_decayed.
template <class T, int kKey>
struct alignas(kChunkAlignment) ChannelChunk {
    static constexpr int kRows = kTokens<kKey>, kTriangle = Triangle<kRows>::kElements;
    T inverse_low[kTriangle], scores_low[kTriangle];
    T inverse[kTriangle];
    T k_decayed[kRows * kKey];
    T k_remaining[kRows * kKey];
    float decay[kKey];  // of the whole chunk
    alignas(kChunkAlignment) T q_decayed[kRows * kKey];
    T scores[kTriangle];

    static constexpr CULA_HOST_DEVICE int begin(bool delta, bool compensated) {
        return compensated ? 0
               : delta     ? offsetof(ChannelChunk, inverse)
                           : offsetof(ChannelChunk, k_remaining);
    }
    static constexpr CULA_HOST_DEVICE int end(bool maps) {
        return maps ? offsetof(ChannelChunk, q_decayed) : offsetof(ChannelChunk, scores) + sizeof(scores);
    }
};

// One decay per token: q and k stay as they are, and the factors go to the products. Additive algorithms
// begin at k_rest, and maps end at q_factor.
template <class T, int kKey>
struct alignas(kChunkAlignment) TokenChunk {
    static constexpr int kRows = kTokens<kKey>, kTriangle = Triangle<kRows>::kElements;
    T inverse_low[kTriangle], scores_low[kTriangle];
    T inverse[kTriangle];
    float k_factor[kRows];
    float k_rest[kRows];
    float decay[kRows];  // of the whole chunk, in decay[0]
    float q_factor[kRows];
    alignas(kChunkAlignment) T scores[kTriangle];

    static constexpr CULA_HOST_DEVICE int begin(bool delta, bool compensated) {
        return compensated ? 0 : delta ? offsetof(TokenChunk, inverse) : offsetof(TokenChunk, k_rest);
    }
    static constexpr CULA_HOST_DEVICE int end(bool maps) {
        return maps ? offsetof(TokenChunk, q_factor) : offsetof(TokenChunk, scores) + sizeof(scores);
    }
};

template <class T, int kKey, bool kPerChannel>
using ChunkOperands = std::conditional_t<kPerChannel, ChannelChunk<T, kKey>, TokenChunk<T, kKey>>;

// A chunk of a delta rule with unit keys takes the norm of any state, and of any map, down by at least the
// slowest decay of every token: prepare leaves the log2 of that bound, `fading`. Chunks that together reach
// kForgotten leave nothing of what was before them in 32-bit floats, unless that was 2^40 times as large as
// what they write.
inline constexpr float kForgotten = -64.0f;
// Not where warps share a block's channels: nobody sees the slowest of them all.
template <int kKey, bool kPerChannel>
inline constexpr bool kFades = !kPerChannel || kKey <= 128;
// What a write strength adds to it: |1 - beta|, where that is more than 1; keys are units up to their
// rounding.
__device__ __forceinline__ float growth(float beta) {
    return log2f(fmaxf(fabsf(1.0f - 1.016f * beta), 1.0f));
}

// Instead of whether its writes are split (is_compensated), of a chunk whose image is not there yet.
inline constexpr std::int32_t kUnprepared = -1;

// Consecutive chunks of one sequence that one CTA of the carry walks.
struct Segment {
    std::int32_t sequence = -1;
    std::int32_t chunk = 0;  // in the sequence
    std::int32_t slot = 0;   // of that chunk, in the slab
    std::int32_t chunks = 0;
    std::int32_t rank = 0, count = 0;  // among the segments of the sequence in this slab
};

// The tokens of a chunk of packed sequences; none: there is no such chunk.
struct alignas(16) PackedChunk {
    std::int64_t begin = 0;
    std::int32_t count = 0;
};

// So many packed sequences every warp finds its way through by itself, where they stay whole: lane n has
// sequence n.
inline constexpr int kMostByWarp = 32;

// Chunks are numbered sequence after sequence. Without cu_seqlens everything follows from shapes; with it
// schedule.cuh has written the slab's chunks and the segments, unless sequences are few.
struct Schedule {
    const PackedChunk* packed = nullptr;
    const Segment* segments = nullptr;
    bool by_warp = false;  // sequences, all whole, in one slab
    std::int32_t chunk_tokens = 64, segment_chunks = 0;
    Divisor by_segment;                         // segment_chunks
    std::int32_t slab_begin = 0, slab_end = 0;  // chunks of this launch
    std::int32_t max_segments = 0;
    // Where the carry has only the kernel before it to wait for, as that lets it start when those before are
    // done: for its images; for each by itself, and then it starts when all CTAs of prepare have; or for the
    // states before segments.
    bool awaits_operands = false, per_chunk = false, awaits_states = false;
    std::int32_t ahead = 0;  // chunks from those that are prepared to those whose inputs are asked for
    // Without cu_seqlens: chunks of a sequence, and how many segments one has in this slab.
    std::int32_t chunks = 0;
    Divisor by_chunks, by_pieces;
};

CULA_HOST_DEVICE std::int32_t ceil_div(std::int64_t x, std::int64_t y) {
    return static_cast<std::int32_t>((x + y - 1) / y);
}

CULA_HOST_DEVICE Segment segment_of_piece(const Schedule& s, std::int32_t sequence, std::int32_t first,
                                          std::int32_t last, std::int32_t rank) {
    const std::int32_t begin = first > s.slab_begin ? first : s.slab_begin,
                       end = last < s.slab_end ? last : s.slab_end;
    Segment segment;
    segment.sequence = sequence;
    segment.rank = rank;
    segment.count = end > begin ? s.by_segment.divide(end - begin + s.segment_chunks - 1) : 1;
    const std::int32_t at = begin + rank * s.segment_chunks;
    segment.chunk = at - first;
    segment.slot = at - s.slab_begin;
    segment.chunks = end - at < s.segment_chunks ? end - at : s.segment_chunks;
    if (segment.chunks < 0) segment.chunks = 0;
    // A sequence without chunks has one empty segment, in the first slab.
    const bool present = first == last ? s.slab_begin == 0 && rank == 0 : at < end;
    if (!present) segment.sequence = -1;
    return segment;
}

// Of few sequences: the tokens and chunks of the lane's, none beyond the last.
template <int kRows>
struct LaneSequence {
    TokenRange tokens{0, 0, 0};
    std::int32_t chunks = 0, first = 0;  // how many, and those before

    __device__ __forceinline__ explicit LaneSequence(const Offsets& offsets) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        if (lane < offsets.sequences) tokens = offsets.tokens_of(lane);
        chunks = ceil_div(tokens.length, kRows);
        first = sum_before_in_warp(chunks).before;
    }
};

// The longest goes first: what starts late ends late. By whole warps.
template <int kRows>
__device__ __forceinline__ Segment segment_by_warp(const DeviceArgs& a, const Schedule& s, std::int32_t i) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const LaneSequence<kRows> of{Offsets(a)};
    int longer = 0;
#pragma unroll 4
    for (int other = 0; other < a.sequences; ++other)
        longer += __shfl_sync(0xffffffffu, of.chunks, other) > of.chunks - (other < lane ? 1 : 0);
    const unsigned found = __ballot_sync(0xffffffffu, lane < a.sequences && longer == i);
    if (!found) return {};
    const int n = __ffs(static_cast<int>(found)) - 1;
    const std::int32_t first = __shfl_sync(0xffffffffu, of.first, n);
    return segment_of_piece(s, n, first, first + __shfl_sync(0xffffffffu, of.chunks, n), 0);
}

// Where sequences are not few.
__device__ __forceinline__ Segment segment_of(const DeviceArgs& a, const Schedule& s, std::int32_t i) {
    if (a.sequences == 0) return {};
    if (s.segments) return s.segments[i];
    const std::int32_t piece = s.by_pieces.divide(i), sequence = s.by_chunks.divide(s.slab_begin) + piece;
    if (sequence >= a.sequences) return {};
    return segment_of_piece(s, sequence, sequence * s.chunks, (sequence + 1) * s.chunks,
                            i - piece * static_cast<std::int32_t>(s.by_pieces.value));
}

struct ChunkPlace {
    int batch = 0, count = 0;  // tokens; 0: no such chunk
    std::int64_t begin = 0;    // the first
};

// Of few sequences, by whole warps. Out of line: in the way of calls without cu_seqlens it costs those up to
// 2 us.
template <int kRows>
__device__ __noinline__ PackedChunk chunk_by_warp(Offsets offsets, std::int32_t chunk) {
    const LaneSequence<kRows> of(offsets);
    const int n = 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, of.first <= chunk)));
    const std::int64_t done = std::int64_t{chunk - __shfl_sync(0xffffffffu, of.first, n)} * kRows,
                       left = __shfl_sync(0xffffffffu, of.tokens.length, n) - done;
    return {__shfl_sync(0xffffffffu, of.tokens.begin, n) + done,
            static_cast<std::int32_t>(left < kRows ? left : kRows)};
}

// The chunk of kRows tokens whose image is number `image` of the slab. Of few sequences by whole warps.
template <int kRows>
__device__ __forceinline__ ChunkPlace place_of(const DeviceArgs& a, const Schedule& s, std::int32_t slot) {
    if (s.packed || s.by_warp) {
        const PackedChunk chunk = s.packed ? s.packed[slot] : chunk_by_warp<kRows>(Offsets(a), slot);
        return {0, chunk.count, chunk.begin};
    }
    const std::int32_t chunk = s.slab_begin + slot, n = s.by_chunks.divide(chunk);
    if (n >= a.sequences) return {};
    const std::int64_t begin = std::int64_t{chunk - n * s.chunks} * kRows, left = a.tokens - begin;
    return {n, static_cast<int>(left < kRows ? left : kRows), begin};
}

}  // namespace cula::cuda::chunked
