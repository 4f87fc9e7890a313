// SPDX-License-Identifier: Apache-2.0
// How a call is divided, and what prepare hands to the carry.
//
//   chunk     64 consecutive tokens of one sequence (32 where K > 128)
//   segment   consecutive chunks of one sequence that one CTA of the carry runs through
//   slab      the chunks whose operands share one workspace; a long call is several slabs in turn
//
// The operands of a chunk lie in global memory exactly as they will lie in shared memory.
// Prepare and carry therefore move them in whole 16-byte pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/device_args.h"
#include "cuda/tile/scan.cuh"

namespace cula::cuda::chunked {

// Tokens of a chunk. Fewer where K > 128, since there a row of the state takes all registers of a thread.
template <int kKey>
inline constexpr int kTokens = kKey <= 128 ? 64 : 32;
inline constexpr int kBlock = 16;  // tokens of a block, the rows of one tensor core product

// A [kRows x kColumns] tile of 16-bit elements: panels of at most kPanel columns, one after the other.
// In each row of a panel the 16-byte units are permuted by the row, so
// that eight rows of one column lie in eight different bank groups.
// With panels of 64 columns this is the 128-byte swizzle
// of sm_90, with panels of 32 columns the 64-byte swizzle.
template <int kRows, int kColumns, int kPanel = 64>
struct Tile {
    static constexpr int kUnits = (kColumns < kPanel ? kColumns : kPanel) / 8;  // units in a row of a panel
    static constexpr int kPanelUnits = kRows * kUnits;
    static constexpr CULA_HOST_DEVICE int unit(int row, int unit) {
        constexpr int kShift = kUnits == 8 ? 0 : kUnits == 4 ? 1 : 2;
        return unit / kUnits * kPanelUnits + row * kUnits + (unit % kUnits ^ (row >> kShift & (kUnits - 1)));
    }
};

// Layout of q and k of a chunk as the carry reads them.
// Operands that prepare scales stand in panels of 32 channels: a warp stores
// eight tokens at a time, which in such panels are four whole 128-byte lines.
template <int kKey, bool kPerChannel>
using OperandTile = Tile<kTokens<kKey>, kKey, kPerChannel ? 32 : 64>;

// The lower triangle of a square of 16-bit elements, in blocks of 16 x 16.
// A panel covers 16 columns and holds the blocks from the diagonal down.
// The two 16-byte units of a row are permuted so that eight rows of one
// column lie in eight different bank groups: the 32-byte swizzle of sm_90.
template <int kSize>
struct Triangle {
    static constexpr int kBlocks = kSize / kBlock, kBlockUnits = kBlock * kBlock / 8;
    static constexpr int kElements = (kBlocks + 1) * kBlocks / 2 * kBlock * kBlock;

    // In units of 16 bytes: where block (row, panel) begins, and the position of a unit within its block.
    static constexpr CULA_HOST_DEVICE int block_begin(int row, int panel) {
        return (panel * kBlocks - panel * (panel + 1) / 2 + row) * kBlockUnits;
    }
    static constexpr CULA_HOST_DEVICE int in_block(int row, int unit) {
        return 2 * row + (unit ^ (row >> 2 & 1));
    }
};

inline constexpr int kChunkAlignment = 128;

// Chunk operands, one decay per channel.
// Parts are ordered by how many readers need them, so that
// every reader copies one contiguous range, begin() to end():
// compensated chunks (kMostSquares) begin at the low words, other solved chunks at
// `inverse`, those without an inverse at `k_remaining`; maps end before `q_decayed`.
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

    static constexpr CULA_HOST_DEVICE int begin(bool solved, bool compensated) {
        return compensated ? 0
               : solved    ? offsetof(ChannelChunk, inverse)
                           : offsetof(ChannelChunk, k_remaining);
    }
    static constexpr CULA_HOST_DEVICE int end(bool maps) {
        return maps ? offsetof(ChannelChunk, q_decayed) : offsetof(ChannelChunk, scores) + sizeof(scores);
    }
};

// Chunk operands, one decay per token. The carry reads q and
// k themselves, and applies these factors to the products.
// Chunks without an inverse begin at `k_rest`, and maps end before `q_factor`.
template <class T, int kKey>
struct alignas(kChunkAlignment) TokenChunk {
    static constexpr int kRows = kTokens<kKey>, kTriangle = Triangle<kRows>::kElements;
    T inverse_low[kTriangle], scores_low[kTriangle];
    T inverse[kTriangle];
    float k_factor[kRows];
    float k_rest[kRows];
    float decay[kRows];  // of the whole chunk; all entries equal, the carry reads decay[0]
    float q_factor[kRows];
    alignas(kChunkAlignment) T scores[kTriangle];

    static constexpr CULA_HOST_DEVICE int begin(bool solved, bool compensated) {
        return compensated ? 0 : solved ? offsetof(TokenChunk, inverse) : offsetof(TokenChunk, k_rest);
    }
    static constexpr CULA_HOST_DEVICE int end(bool maps) {
        return maps ? offsetof(TokenChunk, q_factor) : offsetof(TokenChunk, scores) + sizeof(scores);
    }
};

template <class T, int kKey, bool kPerChannel>
using ChunkOperands = std::conditional_t<kPerChannel, ChannelChunk<T, kKey>, TokenChunk<T, kKey>>;

// log2 bounds (`fading`) by which the carry of a map may skip chunks.
// With unit keys a chunk of a delta rule shrinks the norm of any state, and of any map, by at
// least the slowest decay of every token; prepare stores the log2 of that bound per chunk.
// Chunks whose bounds sum to kForgotten or less leave nothing visible in float32
// of what was before them, unless that was 2^40 times as large as what they write.
inline constexpr float kForgotten = -64.0f;
// Not where two warps share a block's channels: neither sees the slowest channel of all.
template <int kKey, bool kPerChannel>
inline constexpr bool kFades = !kPerChannel || kKey <= 128;
// What a write strength adds to the bound: log2 of |1 - beta|
// where that exceeds 1. 1.016: keys are units up to rounding only.
__device__ __forceinline__ float growth(float beta) {
    return log2f(fmaxf(fabsf(1.0f - 1.016f * beta), 1.0f));
}

// Value of is_compensated while the operands of the chunk are not ready yet (CarryWaits::per_chunk).
inline constexpr std::int32_t kUnprepared = -1;

// Consecutive chunks of one sequence that one CTA of the carry runs through.
struct Segment {
    std::int32_t sequence = -1;
    std::int32_t chunk = 0;  // the first, counted in the sequence
    std::int32_t slot = 0;   // of that chunk, in the slab
    std::int32_t chunks = 0;
    std::int32_t rank = 0, count = 0;  // among the segments of the sequence in this slab
};

// The tokens of one chunk of packed sequences. count = 0: there is no such chunk.
struct alignas(16) PackedChunk {
    std::int64_t begin = 0;
    std::int32_t count = 0, sequence = 0;
};

// What the segments of Joined leave to one another (sm90/fused/join.cuh). A slot is of the 16 rows of a warp.
struct SegmentNotes {
    void* entry = nullptr;    // entry queries, of the type of q: [chunks of 32 tokens, HV, K x 32]
    float* maps = nullptr;    // M of each: [segments, HV, K, K], as MapImage has it
    float* states = nullptr;  // B of each: [segments, HV, 16 rows of each slot of V, K], as StateImage has it
    float* largest = nullptr;  // [segments, HV, 8 slots]: the largest magnitude of M behind its first chunk
    std::uint64_t* broken = nullptr;  // [segments, HV, slots of V]: lanes with a NaN or an infinity in B
    std::int32_t* ended = nullptr;    // [segments, HV, row blocks]: not 0: the CTA's stores are done

    static constexpr int kMapSlots = 8;
    static constexpr std::int64_t value_slots(std::int64_t value_dim) { return (value_dim + 127) / 128 * 8; }
};

// PDL of a carry that waits by itself. The kernel before it triggers only
// after its own wait, so the carry has to wait for that kernel alone.
struct CarryWaits {
    bool operands = false;   // the load role waits before it loads operands
    bool per_chunk = false;  // for each chunk's flag: the carry starts as soon as all CTAs of prepare have
    bool states = false;     // the state role waits before it loads the composed state of its segment
};

// Where chunks and segments are. Chunks are numbered sequence after sequence.
// Without cu_seqlens everything follows from shapes.
// With cu_seqlens the schedule kernel has written the slab's chunks and segments, unless by_warp.
struct Schedule {
    const PackedChunk* packed = nullptr;
    const Segment* segments = nullptr;
    bool by_warp = false;  // scheduled by warps: at most kMostByWarp sequences, all whole, in one slab
    std::int32_t chunk_tokens = 64, segment_chunks = 0;
    Divisor by_segment;                         // segment_chunks
    std::int32_t slab_begin = 0, slab_end = 0;  // chunks of this launch
    std::int32_t max_segments = 0;
    CarryWaits waits;
    std::int32_t ahead = 0;  // distance in chunks from those being prepared to those being prefetched
    // Without cu_seqlens: chunks of a sequence, and how many segments a sequence has in this slab.
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

// Scheduled by warps: tokens and chunks of the lane's sequence; none in lanes beyond the last sequence.
template <int kRows>
struct LaneSequence {
    TokenRange tokens{0, 0, 0};
    std::int32_t chunks = 0, first = 0;  // its chunks, and the chunks of the sequences before it

    __device__ __forceinline__ explicit LaneSequence(const Offsets& offsets) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        if (lane < offsets.sequences) tokens = offsets.tokens_of(lane);
        chunks = ceil_div(tokens.length, kRows);
        first = sum_before_in_warp(chunks).before;
    }
};

// Segment i of a call that is scheduled by warps. The longest
// sequence is first: a CTA that starts late should end early.
// Warp-collective.
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

// Segment i of any other call.
__device__ __forceinline__ Segment segment_of(const DeviceArgs& a, const Schedule& s, std::int32_t i) {
    if (a.sequences == 0) return {};
    if (s.segments) return s.segments[i];
    const std::int32_t piece = s.by_pieces.divide(i), sequence = s.by_chunks.divide(s.slab_begin) + piece;
    if (sequence >= a.sequences) return {};
    return segment_of_piece(s, sequence, sequence * s.chunks, (sequence + 1) * s.chunks,
                            i - piece * static_cast<std::int32_t>(s.by_pieces.value));
}

struct ChunkPlace {
    int batch = 0, count = 0, sequence = 0;  // count: tokens; 0: no such chunk
    std::int64_t begin = 0;                  // the first token
};

// Chunk `chunk` of a call that is scheduled by warps. Warp-collective.
// A function of its own (noinline): inlined, it made calls without cu_seqlens up to 2 us longer.
template <int kRows, bool kReversed>
__device__ __noinline__ PackedChunk chunk_by_warp(Offsets offsets, std::int32_t chunk) {
    const LaneSequence<kRows> of(offsets);
    const int n = 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, of.first <= chunk)));
    std::int32_t own = chunk - __shfl_sync(0xffffffffu, of.first, n);
    if (kReversed) {
        own = __shfl_sync(0xffffffffu, of.chunks, n) - 1 - own;
        if (own < 0) return {};  // behind the last chunk of the call
    }
    const std::int64_t done = std::int64_t{own} * kRows,
                       left = __shfl_sync(0xffffffffu, of.tokens.length, n) - done;
    return {__shfl_sync(0xffffffffu, of.tokens.begin, n) + done,
            static_cast<std::int32_t>(left < kRows ? left : kRows), n};
}

// Tokens of the chunk (of kRows tokens) whose operands have number `slot` in the slab. kReversed: the chunks
// of a sequence are numbered from the last one on, in the order of a reversed walk.
// Warp-collective where the call is scheduled by warps.
template <int kRows, bool kReversed = false>
__device__ __forceinline__ ChunkPlace place_of(const DeviceArgs& a, const Schedule& s, std::int32_t slot) {
    if (s.packed || s.by_warp) {
        const PackedChunk chunk =
            s.packed ? s.packed[slot] : chunk_by_warp<kRows, kReversed>(Offsets(a), slot);
        return {0, chunk.count, chunk.sequence, chunk.begin};
    }
    const std::int32_t chunk = s.slab_begin + slot, n = s.by_chunks.divide(chunk);
    if (n >= a.sequences) return {};
    const std::int32_t own = kReversed ? (n + 1) * s.chunks - 1 - chunk : chunk - n * s.chunks;
    const std::int64_t begin = std::int64_t{own} * kRows, left = a.tokens - begin;
    return {n, static_cast<int>(left < kRows ? left : kRows), n, begin};
}

}  // namespace cula::cuda::chunked
