// SPDX-License-Identifier: Apache-2.0
// What the roles of the fused prefill share: its shared memory and the cursor over chunks. kernel.cuh has the
// table of roles and barriers, forms.cuh what differs between the forms.
#pragma once

#include "cuda/chunked/solve.cuh"
#include "cuda/sm90/fused/forms.cuh"

namespace cula::cuda::sm90 {

// A bit for each pair of neighbouring channels (2 p, 2 p + 1).
template <int kKey>
struct PairMask {
    static constexpr int kPanels = kKey / kTmaChannels, kPairs = kKey / 2;
    static_assert(kPanels == 2);  // count(), before() and each() take two words
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
    alignas(16) float reads[kKey], brings[kKey];  // in the order of state_order()
    alignas(16) float ends[kKey];
    float beta[kFusedTokens];
    alignas(16) std::int32_t apart[kPanels];  // whether some channel of the panel is apart
    // Whether the chunk is compensated: the inverse and the scores are two words each, and the stage holds
    // their low words.
    std::int32_t compensated;
    std::int32_t any_out_of_range;
    PairMask<kKey> out_of_range;  // valid only where any_out_of_range

    // Where the factors of a pair of channels stand. A lane of the state role holds a pair of each
    // accumulator tile of 8 channels; the order puts the four factors of two neighbouring tiles next to each
    // other, so that one load of 16 bytes reads them.
    static constexpr CULA_HOST_DEVICE int state_order(int pair) {
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

// 64 channels of a chunk: TMA tiles of q, k and gates, which the operand role replaces by Q~, K^ and K+. The
// tiles of Q~ and K^ are adjacent: together they are one operand of 64 rows.
struct FusedPanel {
    TmaTile<kFusedTokens> query, keys, carried;
};
static_assert(offsetof(FusedPanel, keys) == sizeof(TmaTile<kFusedTokens>));

// A stage holds one chunk: 42 KiB unpaired, values included, and 35 KiB paired. The inverse and the scores
// have low words for compensated chunks.
template <int kKey, class Form>
struct FusedStage {
    static constexpr int kPanels = kKey / kTmaChannels;
    FusedPanel panels[kPanels];
    SquareTile scores;
    FusedFactors<kKey> factors;
    typename Form::Solved solved;  // the inverse, low words, and what the form has besides
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

// The dynamic shared memory of a CTA. kernel.cuh lists who waits for which barrier and who arrives.
template <int kKey, class Form>
struct FusedShared {
    static constexpr int kStages = Form::kStages;
    using Stage = FusedStage<kKey, Form>;

    Stage stages[kStages + Form::kPeerStages];  // of the CTA's own chunks, then of those that its peer sends
    [[no_unique_address]] typename Form::Tiles tiles;
    typename Form::Own own;
    Mbarrier inputs_ready[kStages], scores_ready[kStages], operands_ready[kStages + Form::kPeerStages],
        operands_free[kStages];
    Mbarrier values_ready[Form::kTiles];
    Segment segment;
    FusedRows rows;
    // Per operand warpgroup and warp, a bit per lane: the pair of channels is out of range in the warp's half
    // of the current chunk; it is predicted to be so in the warpgroup's next chunk.
    alignas(16) std::uint32_t out_of_range[Form::kOperandWarpgroups][kWarpgroupWarps],
        likely[Form::kOperandWarpgroups][kWarpgroupWarps];
    FusedScales scales[Form::kOperandWarpgroups];
    float offsets[kKey];              // dt_bias times the gate's factor (HeadGate::in)
    float tails[Form::kTails][kKey];  // log2 decay of a chunk after its middle
    float most_in_range;  // the shape of a gate whose token decays by 2^-kMostInRange (out_of_range.cuh)
};
// Tiles must begin where their swizzle's pattern does (1024 bytes; 512 for squares), which alignas sees to.
// 227 KiB is what a CTA of sm_90 can have.
static_assert(sizeof(FusedStage<128, Unpaired>) == 42 * 1024 && sizeof(FusedStage<128, Paired>) == 35 * 1024);
static_assert(sizeof(FusedShared<128, Unpaired>) <= 227 * 1024 &&
              sizeof(FusedShared<128, Paired>) <= 227 * 1024 &&
              sizeof(FusedShared<128, PairedWithMap>) <= 227 * 1024);

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

// The thread's number in its warpgroup. It is read from the special register each time, so that the
// compiler keeps nothing that is derived from it in registers throughout the loop over chunks.
__device__ __forceinline__ int thread_anew() {
    unsigned thread;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
    return static_cast<int>(thread % kWarpgroupThreads);
}
// Synchronises operand warpgroup `number`. The second returns whether `is` holds in any of its threads.
template <class Form>
__device__ __forceinline__ void sync_operand_role(int number) {
    named_barrier_sync<kWarpgroupThreads>(nth(Form::NamedBarrier::kOperandRole, number));
}
template <class Form>
__device__ __forceinline__ bool any_of_operand_role(int number, bool is) {
    return named_barrier_any<kWarpgroupThreads>(nth(Form::NamedBarrier::kOperandRole, number), is);
}

// The chunks of the CTA's sequence, in the 32 tokens of this kernel. The n-th chunk that this CTA prepares is
// chunk(n).
template <class Form>
struct FusedCursor {
    int tokens, chunks, rank;

    __device__ __forceinline__ explicit FusedCursor(int of_tokens)
        : tokens(of_tokens), chunks((tokens + kFusedTokens - 1) / kFusedTokens), rank(Form::rank()) {}
    template <class W>
    __device__ __forceinline__ explicit FusedCursor(const W& cursor)
        : FusedCursor(cursor.segment.chunks > 0 ? (cursor.segment.chunks - 1) * W::kRows + cursor.last_count
                                                : 0) {}

    __device__ __forceinline__ int count(int i) const { return min(tokens - i * kFusedTokens, kFusedTokens); }
    __device__ __forceinline__ int chunk(int n) const { return n * Form::kPeers + rank; }
};

}  // namespace cula::cuda::sm90
