// SPDX-License-Identifier: Apache-2.0
// What the roles of the fused prefill share: the layout of shared memory, the barriers between the roles, and
// the cursor over chunks. kernel.cuh has the table of roles and barriers.
#pragma once

#include "cuda/chunked/solve.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/carry/config.cuh"

namespace cula::cuda::sm90 {

inline constexpr int kFusedTokens = 32, kSolveWarps = 2;
// Paired form: a CTA has one state warpgroup (64 value rows) and is one of a cluster of two, which together
// hold 128 value rows of a head. Each of the two prepares every other chunk and sends its operands to its
// peer.
// Unpaired form: a CTA has two state warpgroups (128 value rows) and prepares every chunk itself.
template <int kStateWarpgroups>
inline constexpr bool kPaired = kStateWarpgroups == 1;
// CTAs of a cluster.
template <int kStateWarpgroups>
inline constexpr int kPeers = kPaired<kStateWarpgroups> ? 2 : 1;
// Operand warpgroups: as many as the state role leaves registers for.
template <int kStateWarpgroups>
inline constexpr int kOperandWarpgroups = kPaired<kStateWarpgroups> ? 3 : 2;
// Stages for the chunks that the CTA prepares itself, and further stages for the chunks that its peer sends.
template <int kStateWarpgroups>
inline constexpr int kFusedStages = kPaired<kStateWarpgroups> ? 4 : 5;
template <int kStateWarpgroups>
inline constexpr int kPeerStages = kPaired<kStateWarpgroups> ? 2 : 0;

// A bit for each pair of neighbouring channels (2 p, 2 p + 1).
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
    // How many bits are set below that of `pair`.
    __device__ __forceinline__ int before(int pair) const {
        const std::uint32_t lower = (1u << pair % 32) - 1;
        return pair < 32 ? __popc(of[0] & lower) : __popc(of[0]) + __popc(of[1] & lower);
    }
    // Calls body(number, pair) for each pair whose bit is set, where `number` counts them from 0. All lanes
    // make the same calls.
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

// A chunk's factors of the state, one per channel, and its flags.
//
// The state is read and added to at the chunk's middle (operand_role.cuh):
//   reads    takes the state from the middle of the chunk before to the middle of this one: exp2(tail of the
//            chunk before + head of this one)
//   ends     takes it from the middle to the chunk's end: exp2(tail)
// Where a `reads` would be zero in float32 (below 2^kLeastPower) the two steps are taken one by one, since S
// may be large by as much. Such a channel is `apart`:
//   brings   exp2(tail of the chunk before); `reads` is then exp2(head) alone
// All other channels of such a chunk have 1 in `brings`.
//
// Out-of-range pairs (out_of_range.cuh) are read at the chunk's begin and added to at its end. Their head and
// tail are 0, and `ends` is the decay of the whole chunk, applied between the read and the carry.
template <int kKey>
struct FusedFactors {
    static constexpr int kPanels = kKey / kTmaChannels;
    alignas(16) float reads[kKey], brings[kKey];  // in the order of turned()
    alignas(16) float ends[kKey];
    float beta[kFusedTokens];
    alignas(16) std::int32_t apart[kPanels];  // whether some channel of the panel is apart
    // Whether the chunk is compensated: the inverse and the scores are two words each, and the stage holds
    // their low words (kInverseLow, kScoresLow).
    std::int32_t compensated;
    std::int32_t any_out_of_range;
    PairMask<kKey> out_of_range;  // valid only where any_out_of_range

    // Where the factors of a pair of channels stand. A lane of the state role holds a pair of each
    // accumulator tile of 8 channels; the order puts the four factors of two neighbouring tiles next to each
    // other, so that one load of 16 bytes reads them.
    static constexpr CULA_HOST_DEVICE int turned(int pair) {
        return pair / 8 * 16 + pair % 4 * 4 + pair / 4 % 2 * 2;
    }

    // Neither compensated nor with out-of-range pairs. Both flags are read by one load.
    __device__ __forceinline__ bool plain() const {
        const int2 flags = *reinterpret_cast<const int2*>(&compensated);
        return (flags.x | flags.y) == 0;
    }
    __device__ __forceinline__ bool any_apart() const { return (apart[0] | apart[1]) != 0; }
};
inline constexpr float kLeastPower = -126.0f;  // exp2_fast of less is zero

// Where the CTA's q, k and gates lie in global memory. Only kernels of softplus gates read this, and the
// addresses only where some pair is out of range: in shared memory it takes no registers.
struct FusedRows {
    const char* first[3];         // of the first token of q, k, g
    std::int64_t token_bytes[3];  // from one token to the next
    std::int32_t tokens;
};

// A stage holds one chunk. Offsets are in bytes from its begin:
//   panels 0, 1    64 channels each: TMA tiles of 32 tokens of q, k and gates. The operand role replaces
//                  them by Q~, K^ and K+.
//   scores         a square of 32 x 32 16-bit elements, with zeros above the diagonal
//   factors        FusedFactors
//   inverse        a square, and one for its low words
//   scores low     the low words of the scores
//   values         unpaired form: a tile per state warpgroup; the outputs replace the values
// Low words are those of a compensated chunk.
//
// Unpaired form: 42 KiB. The overlaps (diag(beta) L, in float32) are not part of a stage (FusedAlone).
// Paired form: 35 KiB. The overlaps share their place with the inverse and its low words, which replace them.
// Values have tiles of their own (FusedMemory).
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

    // Where unit `unit` (16 bytes) of a square's row stands: the 64-byte swizzle of sm_90.
    static constexpr CULA_HOST_DEVICE int square_unit(int row, int unit) {
        return row * 4 + (unit ^ (row >> 1 & 3));
    }
    // Zeros the 16 x 16 block above the diagonal of a square. Each lane of one warp zeroes a unit.
    static __device__ __forceinline__ void clear_above(unsigned char* square, int lane) {
        reinterpret_cast<uint4*>(square)[square_unit(lane / 2, 2 + lane % 2)] = uint4{};
    }
    static __device__ __forceinline__ FusedFactors<kKey>& factors(unsigned char* stage) {
        return *reinterpret_cast<FusedFactors<kKey>*>(stage + kFactors);
    }
};

// Factors of a chunk's tokens:
//   q, k   one over the norm; for q times the scale
//   out    what the shape of a gate is multiplied by (HeadGate::out): positive in the chunk's first half,
//          where x grows away from the middle; 0 where there is no token
// The order is that in which threads go through tokens, from the chunk's middle outward: tokens 15 to 0, then
// 16 to 31 (place()).
struct FusedScales {
    alignas(16) float q[kFusedTokens], k[kFusedTokens], out[kFusedTokens];

    static constexpr CULA_HOST_DEVICE int place(int token) {
        return token < kFusedTokens / 2 ? kFusedTokens / 2 - 1 - token : token;
    }
};

// What only the unpaired form has: the overlaps that each solve warp works on. Values and outputs lie in the
// stages, so there are as many tiles as stages. The place of chunk i's tail is written again by chunk i + 5,
// which belongs to the operand warpgroup of chunk i + 1, the one that has read the tail.
template <int kStateWarpgroups>
struct FusedAlone {
    static constexpr int kTiles = kFusedStages<kStateWarpgroups>, kTails = kFusedStages<kStateWarpgroups>;
    std::uint64_t overlaps_free[kSolveWarps];
    Square<kFusedTokens> overlaps[kSolveWarps];
};
// What only the paired form has: barriers for tiles that hold outputs, and for tails that the peer sends.
//
// kTails = kStages + 1 places make it safe to send a tail without asking for a free place. A place is written
// again kTails of the sender's chunks later. The stage of that later chunk held the sender's chunk that
// follows the tail's, and it is free only once both CTAs have multiplied that chunk. They take chunks in
// order, so they have also multiplied the receiver's chunk in between, which is the one that read the tail.
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
    // Per operand warpgroup and warp, a bit per lane: the pair of channels is out of range in the warp's half
    // of the current chunk; it is predicted to be so in the warpgroup's next chunk.
    alignas(16) std::uint32_t out_of_range[kOperandWarpgroups<kStateWarpgroups>][kWarpgroupWarps],
        likely[kOperandWarpgroups<kStateWarpgroups>][kWarpgroupWarps];
    FusedScales scales[kOperandWarpgroups<kStateWarpgroups>];
    float offsets[kKey];                     // dt_bias times the gate's factor (HeadGate::in)
    float tails[FusedShared::kTails][kKey];  // log2 decay of a chunk after its middle
    float most_in_range;  // the shape of a gate whose token decays by 2^-kMostInRange (out_of_range.cuh)
};

// Shared memory of a CTA: the stages of its own chunks, the stages of its peer's chunks, tiles of values
// (paired form), FusedShared. With K = 128 that is 229,504 bytes unpaired and 232,064 paired, of 232,448.
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

// A loop over chunks until next() finds none. Most chunks are plain. The code of the others stands behind the
// inner loop, not in it: instructions that a jump skips are fetched all the same, and displace the ones that
// run from the instruction cache (docs/design/fused-sm90.md).
enum class Found { kNone, kPlain, kOther };

template <class Next, class Plain, class Other>
__device__ __forceinline__ void each_chunk(Next next, Plain plain, Other other) {
#pragma unroll 1
    for (;;) {
        asm volatile("");  // keeps the compiler from merging the two loops
        Found found;
#pragma unroll 1
        while ((found = next()) == Found::kPlain) plain();
        if (found == Found::kNone) return;
        other();
    }
}

// The position in a ring of kCount places, and the parity of the phase to wait for there, of a role that
// takes every chunk.
template <int kCount>
struct Ring {
    int at = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == kCount) at = 0, parity ^= 1;
    }
};

// The thread's number in its operand warpgroup. It is read from the special register each time, so that the
// compiler keeps nothing that is derived from it in registers throughout the loop over chunks.
__device__ __forceinline__ int thread_anew() {
    unsigned thread;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
    return static_cast<int>(thread % kWarpgroupThreads);
}
// The named barrier of operand warpgroup `number`. Barrier 0 is that of __syncthreads().
__device__ __forceinline__ void sync_operand_role(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + number), "n"(kWarpgroupThreads) : "memory");
}
// The same barrier; returns whether `is` holds in any thread of the warpgroup.
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

// The chunks of the CTA's sequence, in the 32 tokens of this kernel. The n-th chunk that this CTA prepares is
// chunk(n).
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
