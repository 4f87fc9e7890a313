// SPDX-License-Identifier: Apache-2.0
// What the warpgroups of a fused prefill share (fused.cuh): stages of shared memory, and the barriers between
// them.
#pragma once

#include "cuda/chunked/solve.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/carry/config.cuh"

namespace cula::cuda::sm90 {

inline constexpr int kFusedTokens = 32, kSolveWarps = 2;
// CTAs of one warpgroup that multiplies come in pairs, for 128 value rows of a head: each prepares every
// other chunk, for both. A CTA of two is alone.
template <int kStateWarpgroups>
inline constexpr bool kPaired = kStateWarpgroups == 1;
template <int kStateWarpgroups>
inline constexpr int kPeers = kPaired<kStateWarpgroups> ? 2 : 1;
// Warpgroups that prepare: as many as registers are left for.
template <int kStateWarpgroups>
inline constexpr int kOperandWarpgroups = kPaired<kStateWarpgroups> ? 3 : 2;
// Stages of chunks that the CTA prepares; and of those that come from its peer.
template <int kStateWarpgroups>
inline constexpr int kFusedStages = kPaired<kStateWarpgroups> ? 4 : 5;
template <int kStateWarpgroups>
inline constexpr int kPeerStages = kPaired<kStateWarpgroups> ? 2 : 0;

// Bits for pairs of channels.
template <int kKey>
struct PairMask {
    static constexpr int kPanels = kKey / kTmaChannels, kPairs = kKey / 2;
    std::uint32_t of[kPanels];

    __device__ __forceinline__ bool any() const {
        std::uint32_t bits = 0;
#pragma unroll
        for (const std::uint32_t panel : of) bits |= panel;
        return bits != 0;
    }
    __device__ __forceinline__ int count() const { return __popc(of[0]) + __popc(of[1]); }
    // How many there are before the pair.
    __device__ __forceinline__ int before(int pair) const {
        const std::uint32_t lower = (1u << pair % 32) - 1;
        return pair < 32 ? __popc(of[0] & lower) : __popc(of[0]) + __popc(of[1] & lower);
    }
    // body(number of the pair among those there, pair), the same in all lanes.
    template <class Body>
    __device__ __forceinline__ void each(Body body) const {
        static_assert(kPanels == 2);
        int number = 0;
#pragma unroll 1
        for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll 1
            for (std::uint32_t bits = panel ? of[1] : of[0]; bits; bits &= bits - 1)
                body(number++, panel * 32 + __ffs(static_cast<int>(bits)) - 1);
    }
};

// Of a chunk, per channel: what the state is multiplied by to be at the chunk's middle, where it is read and
// added to; and from there to be at its end. The first includes what the chunk before decays after its own
// middle, but where both together would vanish ("apart"), for which `brings` has the former, and ones. Of
// steep pairs (fused_steep.cuh) the middle is the chunk's begin for who reads, and its end for who adds:
// `ends` has what is between.
template <int kKey>
struct FusedFactors {
    static constexpr int kPanels = kKey / kTmaChannels;
    alignas(16) float reads[kKey], brings[kKey];  // turned()
    alignas(16) float ends[kKey];
    float beta[kFusedTokens];
    alignas(16) std::int32_t apart[kPanels];  // whether some channel is
    std::int32_t compensated;  // whether keys are: squares of what rounding takes off are there
    std::int32_t any_out_of_range;
    PairMask<kKey> out_of_range;  // where some are

    // Where a pair of channels stands so that the four of two tiles that a lane of a multiplying warp has
    // come together.
    static constexpr CULA_HOST_DEVICE int turned(int pair) {
        return pair / 8 * 16 + pair % 4 * 4 + pair / 4 % 2 * 2;
    }

    // Neither coupled nor with steep pairs.
    __device__ __forceinline__ bool plain() const {
        const int2 flags = *reinterpret_cast<const int2*>(&compensated);
        return (flags.x | flags.y) == 0;
    }
    __device__ __forceinline__ bool any_apart() const { return (apart[0] | apart[1]) != 0; }
};
inline constexpr float kLeastPower = -126.0f;  // exp2 of less is zero

// Where the CTA's q, k and gates are, for those who seldom ask: its first token's, and bytes from one to the
// next.
struct FusedRows {
    const char* first[3];
    std::int64_t token_bytes[3];
    std::int32_t tokens;
};

// A stage, in bytes from its begin. Each panel of 64 channels has the rows of q, those of k, and gates, all
// as they came; preparation leaves Q~, K^ and K+ in their places. Then come squares of 32 x 32 with zeros
// above: scores, the inverse, and what rounding took off them; and factors. One CTA alone has values behind
// them, in whose place outputs come. Of a pair, overlaps lie where the inverse comes to, and values in tiles
// of their own.
template <int kKey, int kStateWarpgroups>
struct FusedStageLayout {
    static constexpr int kPanels = kKey / kTmaChannels, kRowBytes = 2 * kTmaChannels;
    static constexpr int kTmaBytes = kFusedTokens * kRowBytes;
    static constexpr int kQuery = 0, kKeys = kTmaBytes, kCarried = 2 * kTmaBytes, kPanelBytes = 3 * kTmaBytes;
    static constexpr int kSquareBytes = kFusedTokens * kFusedTokens * 2;
    static constexpr int kScores = kPanels * kPanelBytes, kFactors = kScores + kSquareBytes,
                         kInverse = kFactors + kSquareBytes, kInverseLow = kInverse + kSquareBytes,
                         kScoresLow = kPaired<kStateWarpgroups>
                                          ? kInverse + static_cast<int>(sizeof(Square<kFusedTokens>))
                                          : kInverseLow + kSquareBytes,
                         kValues = kScoresLow + kSquareBytes,
                         kBytes = kValues + (kPaired<kStateWarpgroups> ? 0 : kStateWarpgroups * kTmaBytes);
    static_assert(sizeof(FusedFactors<kKey>) <= kSquareBytes && kBytes % 1024 == 0);

    // Unit of 16 bytes `unit` of a square's row.
    static constexpr CULA_HOST_DEVICE int square_unit(int row, int unit) {
        return row * 4 + (unit ^ (row >> 1 & 3));
    }
    // A lane's unit of a square's block above the diagonal.
    static __device__ __forceinline__ void clear_above(unsigned char* square, int lane) {
        reinterpret_cast<uint4*>(square)[square_unit(lane / 2, 2 + lane % 2)] = uint4{};
    }
    static __device__ __forceinline__ FusedFactors<kKey>& factors(unsigned char* stage) {
        return *reinterpret_cast<FusedFactors<kKey>*>(stage + kFactors);
    }
};

// Factors of a chunk's tokens: norms, with the scale; and what a gate's shape is multiplied by, with the sign
// that it has on the way from the middle, zero where there is no token. From the middle to the begin, then to
// the end.
struct FusedScales {
    alignas(16) float q[kFusedTokens], k[kFusedTokens], out[kFusedTokens];

    static constexpr CULA_HOST_DEVICE int place(int token) {
        return token < kFusedTokens / 2 ? kFusedTokens / 2 - 1 - token : token;
    }
};

// What a CTA alone has: overlaps of chunks that are being solved, and when they have been; outputs leave
// their stage.
template <int kStateWarpgroups>
struct FusedAlone {
    static constexpr int kTiles = kFusedStages<kStateWarpgroups>, kTails = kFusedStages<kStateWarpgroups>;
    std::uint64_t overlaps_free[kSolveWarps];
    Square<kFusedTokens> overlaps[kSolveWarps];
};
// What one of a pair has: when tiles of values hold outputs; and when a tail has come from its peer.
// A tail's place is written again kTails of the CTA's chunks later, by whoever prepares in the stage of one
// before that, which both have multiplied: whoever read the tail is done.
template <int kStateWarpgroups>
struct FusedPeer {
    static constexpr int kTiles = 3, kTails = kFusedStages<kStateWarpgroups> + 1;
    std::uint64_t out_ready[kTiles], tail_ready[kTails];
};

template <int kKey, int kStateWarpgroups>
struct alignas(kChunkAlignment) FusedShared
    : std::conditional_t<kPaired<kStateWarpgroups>, FusedPeer<kStateWarpgroups>,
                         FusedAlone<kStateWarpgroups>> {
    static constexpr int kStages = kFusedStages<kStateWarpgroups>;

    std::uint64_t inputs_ready[kStages], scores_ready[kStages],
        operands_ready[kStages + kPeerStages<kStateWarpgroups>], operands_free[kStages];
    std::uint64_t values_ready[FusedShared::kTiles];
    Segment segment;
    FusedRows rows;
    // Of a warpgroup's chunk, halves of pairs that are steep; and that may well be in the next.
    alignas(16) std::uint32_t out_of_range[kOperandWarpgroups<kStateWarpgroups>][kWarpgroupWarps],
        likely[kOperandWarpgroups<kStateWarpgroups>][kWarpgroupWarps];
    FusedScales scales[kOperandWarpgroups<kStateWarpgroups>];
    float offsets[kKey];                     // biases, times the gate's factor
    float tails[FusedShared::kTails][kKey];  // what a chunk decays after its middle, in powers of two
    float most_in_range;                     // the gate's shape that decays by kMostInRange (fused_steep.cuh)
};

// Stages, those of the peer's chunks, tiles of values, and the rest.
template <int kKey, int kStateWarpgroups>
struct FusedMemory {
    using Stage = FusedStageLayout<kKey, kStateWarpgroups>;
    using Shared = FusedShared<kKey, kStateWarpgroups>;
    static constexpr int kTileBytes = kStateWarpgroups * Stage::kTmaBytes,
                         kTiles =
                             (kFusedStages<kStateWarpgroups> + kPeerStages<kStateWarpgroups>)*Stage::kBytes,
                         kShared = kTiles + (kPaired<kStateWarpgroups> ? Shared::kTiles * kTileBytes : 0),
                         kBytes = kShared + static_cast<int>(sizeof(Shared));

    static constexpr CULA_HOST_DEVICE int stage(int i) { return i * Stage::kBytes; }
    static constexpr CULA_HOST_DEVICE int tile(int i, int warpgroup) {
        return (kPaired<kStateWarpgroups> ? kTiles + i * kTileBytes : stage(i) + Stage::kValues) +
               warpgroup * Stage::kTmaBytes;
    }
};

// A loop over chunks until `next` finds none. Most are plain; the code for others stands behind the loop:
// what a jump passes over is fetched all the same, and takes the place of what is run (docs/fused.md).
enum class Found { kNone, kPlain, kOther };

template <class Next, class Plain, class Other>
__device__ __forceinline__ void each_chunk(Next next, Plain plain, Other other) {
#pragma unroll 1
    for (;;) {
        asm volatile("");  // lest both loops be taken for one
        Found found;
#pragma unroll 1
        while ((found = next()) == Found::kPlain) plain();
        if (found == Found::kNone) return;
        other();
    }
}

// Where someone who takes every chunk stands among so many places, and the phase of its barrier there.
template <int kCount>
struct Ring {
    int at = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == kCount) at = 0, parity ^= 1;
    }
};

// Of a warpgroup that prepares: the thread, asked for anew, lest a loop over chunks keep all that follows
// from it; and its own barrier.
__device__ __forceinline__ int thread_anew() {
    unsigned thread;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
    return static_cast<int>(thread % kWarpgroupThreads);
}
__device__ __forceinline__ void sync_operand_role(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + number), "n"(kWarpgroupThreads) : "memory");
}
// Whether any thread's is.
__device__ __forceinline__ bool any_of_operand_role(int number, bool is) {
    std::uint32_t any;
    asm volatile(
        "{ .reg .pred in, out; setp.ne.u32 in, %1, 0; barrier.cta.red.or.pred out, %2, %3, in; "
        "selp.u32 %0, 1, 0, out; }"
        : "=r"(any)
        : "r"(static_cast<std::uint32_t>(is)), "r"(1 + number), "n"(kWarpgroupThreads)
        : "memory");
    return any != 0;
}

// The chunks that a fused prefill takes; and those that a CTA prepares, of which the n-th is chunk(n).
template <int kStateWarpgroups>
struct FusedCursor {
    int tokens, chunks, rank;

    __device__ __forceinline__ explicit FusedCursor(int of_tokens)
        : tokens(of_tokens),
          chunks((tokens + kFusedTokens - 1) / kFusedTokens),
          rank(kPaired<kStateWarpgroups> ? cluster_rank() : 0) {}
    template <class W>
    __device__ __forceinline__ explicit FusedCursor(const W& cursor)
        : FusedCursor(cursor.segment.chunks > 0 ? (cursor.segment.chunks - 1) * W::kRows + cursor.last_count
                                                : 0) {}

    __device__ __forceinline__ int count(int i) const { return min(tokens - i * kFusedTokens, kFusedTokens); }
    __device__ __forceinline__ int chunk(int n) const { return n * kPeers<kStateWarpgroups> + rank; }
};

}  // namespace cula::cuda::sm90
