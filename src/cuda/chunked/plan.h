// SPDX-License-Identifier: Apache-2.0
// How a prefill is spread over the device (docs/design/planning.md).
// Decisions follow from shapes and the device alone, so that the same call always gives the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace cula::cuda::chunked {

// Costs in microseconds on an H200 with K = V = 128, per chunk.
// whole: the carry of a whole sequence.
// map: a map of a segmented sequence, of which many run over the last chunks only.
// narrow, wide: the carry of a segmented sequence in CTAs of four and of eight warps.
// halves: everything but prepare, per chunk of the sequence, where it is cut in two (PrefillPolicy::halves).
// If `whole` is zero, every sequence that can be is segmented, with narrow CTAs.
struct CutCosts {
    double whole = 0.0, map = 0.0, narrow = 0.0, wide = 0.0, halves = 0.0;
    // Ratio of the first of two segments to the second, where both maps run at once and the first has no M.
    double first = 1.0;
    bool walks = false;  // whether first segments may be carried beside maps (PrefillPolicy::first_walks)
};

struct PrefillShape {
    std::int64_t sequences = 1, chunks = 0;  // chunks: upper bound over all sequences together
    std::int64_t longest = 0;                // upper bound of the chunks of one sequence
    int value_heads = 1, value_dim = 0;
    bool maps_pay = true;    // segments are allowed: not in batch-invariant mode
    bool kept = false;       // maps are made in any case, and chunk operands stay until a prefill reads them
    bool from_zero = false;  // no one needs the M of a sequence's first segment
    CutCosts costs = {};
};

struct PrefillPolicy {
    int warps = 8;       // of a carry CTA, 16 value rows each
    int row_blocks = 1;  // CTAs that share the value rows of a head
    int segment_chunks = 0;
    int slab_chunks = 0;  // chunks of a slab: those whose operands share one workspace
    // Two segments per sequence. The second starts from the B of
    // the first one's map, which starts from the sequence's state.
    // The first segment's carry runs at the same time as its map. A map takes less time per
    // chunk than a carry that also writes outputs, so the first segment is the longer one (5/8).
    bool halves = false;
    // One segment more than fill the device. The first is
    // carried beside the maps of the others and needs no map.
    bool first_walks = false;
    // Maps of first segments have no M. They are launched on
    // their own, and run at the same time as those of the others.
    bool first_apart = false;
};

inline constexpr std::size_t kSlabBytes = std::size_t{2} << 30, kKeptBytes = std::size_t{16} << 30;
// CTAs of prepare per multiprocessor on sm_90: as many as
// fit its shared memory, with registers that do not spill.
// Fewer on other architectures.
inline constexpr int kChannelCtas = 3, kTokenCtas = 4;
inline constexpr int kMostSpan = 4;       // value heads per CTA: a warp sums the gates of each
inline constexpr int kLeastSegment = 8;   // chunks: in shorter segments the maps cost more than they save
inline constexpr int kLeastSegments = 3;  // below this many segments likewise
inline constexpr int kLeastHalved = 64;   // chunks of a sequence from which halves pay
// Chunks per segment from which first_walks pays for its extra launch.
inline constexpr int kLeastWalked = 32;
// Microseconds. kMapStarts: start and end of maps and compose, which do not
// overlap with their predecessors. kComposed: compose, per value head and segment.
inline constexpr double kMapStarts = 12.0, kComposed = 0.19;

// warp_step: a CTA of the carry has a multiple of this many warps.
inline PrefillPolicy prefill_policy(const PrefillShape& shape, std::size_t operand_bytes, int multiprocessors,
                                    int warp_step) {
    PrefillPolicy policy;
    const int tiles = static_cast<int>((shape.value_dim + 15) / 16);
    const auto blocks = [&](int warps) { return (tiles + warps - 1) / warps; };
    // Rounds of CTAs times the cost of one. A CTA of eight warps takes 1.48 times as long as one of four.
    const auto cost = [&](int warps) {
        const std::int64_t ctas = shape.sequences * shape.value_heads * blocks(warps);
        const std::int64_t rounds = (ctas + multiprocessors - 1) / multiprocessors;
        return static_cast<double>(rounds) * (1.0 + 0.12 * (warps - 4));
    };
    const auto whole = [&](int warps) { return (warps + warp_step - 1) / warp_step * warp_step; };
    policy.warps = whole(std::min(tiles, 8));
    if (const int half = whole((policy.warps + 1) / 2); policy.warps > 4 && cost(half) < cost(policy.warps))
        policy.warps = half;
    policy.row_blocks = blocks(policy.warps);

    const std::int64_t chunks = std::max<std::int64_t>(shape.chunks, 1);
    const std::int64_t longest_slab =
        operand_bytes == 0 || shape.kept
            ? chunks
            : std::max<std::int64_t>(
                  1, static_cast<std::int64_t>(kSlabBytes / operand_bytes) / shape.value_heads);
    const std::int64_t slabs = (chunks + longest_slab - 1) / longest_slab;
    policy.slab_chunks = static_cast<int>((chunks + slabs - 1) / slabs);

    const std::int64_t per_sequence =
        std::max<std::int64_t>(1, std::min<std::int64_t>(shape.longest, policy.slab_chunks));
    policy.segment_chunks = static_cast<int>(per_sequence);
    const std::int64_t heads = shape.sequences * shape.value_heads;
    if (!shape.maps_pay || heads == 0) return policy;
    struct Cut {
        int warps;
        std::int64_t segments;
        double cost;
    };
    const CutCosts& costs = shape.costs;
    const bool by_cost = costs.whole > 0;
    const double all = static_cast<double>(per_sequence);
    const Cut none{policy.warps, 1,
                   by_cost ? (costs.whole + (shape.kept ? costs.map : 0.0)) * all : HUGE_VAL};
    // As many equal segments as fill the device, if they pay for their maps.
    const auto equal_segments = [&](int warps, double carry) {
        const std::int64_t count =
            std::min<std::int64_t>(multiprocessors / (heads * blocks(warps)), per_sequence / kLeastSegment);
        if (count < (shape.kept ? 2 : kLeastSegments)) return none;
        const std::int64_t maps = shape.kept ? count : count - 1;
        const std::int64_t map_ctas = maps * heads * 2 * blocks(8);  // M has about as many rows as B
        const std::int64_t rounds = (map_ctas + multiprocessors - 1) / multiprocessors;
        return Cut{warps, count,
                   (costs.map * static_cast<double>(rounds) + carry) * all / static_cast<double>(count) +
                       kMapStarts + kComposed * static_cast<double>(maps * heads)};
    };
    const auto cheaper = [](const Cut& one, const Cut& other) { return other.cost < one.cost ? other : one; };
    Cut cut = cheaper(none, equal_segments(policy.warps, costs.narrow));
    if (by_cost) cut = cheaper(cut, equal_segments(whole(std::min(tiles, 8)), costs.wide));
    if (by_cost && !shape.kept && per_sequence >= kLeastHalved &&
        2 * heads * policy.row_blocks <= multiprocessors && costs.halves * all < cut.cost) {
        policy.halves = true;
        policy.segment_chunks = static_cast<int>((5 * per_sequence + 7) / 8);
    } else if (cut.segments > 1) {
        policy.warps = cut.warps, policy.row_blocks = blocks(cut.warps);
        policy.first_walks =
            costs.walks && !shape.kept && per_sequence >= kLeastWalked * (cut.segments + 1) &&
            (slabs == 1 || shape.sequences == 1) &&
            heads * (policy.row_blocks + 2 * blocks(8) * (cut.segments - 1)) <= multiprocessors;
        if (policy.first_walks) ++cut.segments;
        policy.segment_chunks = static_cast<int>((per_sequence + cut.segments - 1) / cut.segments);
        policy.first_apart = shape.from_zero && heads * blocks(8) * (1 + 2 * (cut.segments - 1)) <=
                                                    std::int64_t{multiprocessors};
        if (policy.first_apart && cut.segments == 2)
            policy.segment_chunks = static_cast<int>(std::ceil(all * costs.first / (1.0 + costs.first)));
    }
    return policy;
}

// Costs in microseconds on an H200 with K = V = 128, per chunk.
// prepare: operands of as many chunks as there are multiprocessors.
// carry: in CTAs of four warps, of eight.
// fused: prepare and carry in one kernel (sm90/fused/kernel.cuh),
// in pairs of CTAs with four state warps each, in CTAs of eight.
// Fixed costs: round of a round of CTAs, kernel of a second kernel.
struct FusedCosts {
    double prepare = 3.9, carry[2] = {1.2, 2.6}, fused[2] = {2.3, 3.75}, round = 8.0, kernel = 10.0;
};

// Softplus gates take pairs only: two state warpgroups in
// a CTA leave too few registers for out-of-range channels.
// Without any out-of-range channel a chunk takes 2.4. They cost up to
// half of that again, which 2.82 includes in part (docs/design/fused-sm90.md).
inline constexpr FusedCosts kSoftplusCosts{.prepare = 4.3, .fused = {2.82, 1e9}};

// Number of state warpgroups per CTA of the fused kernel, or 0 where
// two kernels take less time. `always`: two kernels are not considered.
// The choice goes by the mean length, so that a batch and the same sequences packed get the same bits.
// The fused kernel cuts no sequence: one long sequence among many
// short ones may take kMostRegret times as long as with two kernels.
// A batch-invariant call considers one endless sequence.
inline int fused_groups(const PrefillShape& shape, std::int64_t tokens, bool batch_invariant,
                        int multiprocessors, bool always = false, const FusedCosts& costs = {}) {
    constexpr double kMostRegret = 1.75, kEndless = 1e6;
    const auto rounds = [&](std::int64_t sequences, std::int64_t blocks) {
        const std::int64_t all =
            (shape.value_heads * sequences * blocks + multiprocessors - 1) / multiprocessors;
        return static_cast<double>(all);
    };
    const auto blocks = [&](std::int64_t rows) { return (shape.value_dim + rows - 1) / rows; };
    const auto one = [&](std::int64_t sequences, double chunks, int group) {
        return rounds(sequences, blocks(128) * (2 - group)) * (costs.round + costs.fused[group] * chunks);
    };
    const auto two = [&](std::int64_t sequences, double chunks) {
        const auto carry = [&](int group) {
            return rounds(sequences, blocks(64 * (group + 1))) * (costs.round + costs.carry[group] * chunks);
        };
        const double chunks_of_heads = static_cast<double>(shape.value_heads * sequences) / multiprocessors;
        return costs.kernel + chunks_of_heads * costs.prepare * chunks + std::min(carry(0), carry(1));
    };
    const std::int64_t sequences = batch_invariant ? 1 : std::max<std::int64_t>(shape.sequences, 1);
    const double all = batch_invariant ? kEndless : static_cast<double>(tokens) / 64.0,
                 mean = all / static_cast<double>(sequences);
    const int group = one(sequences, mean, 0) <= one(sequences, mean, 1) ? 0 : 1;
    const bool pays =
        one(sequences, mean, group) < two(sequences, mean) && one(1, all, group) <= kMostRegret * two(1, all);
    return always || pays ? group + 1 : 0;
}

// prepare_token: how many value heads that share q and k one CTA prepares.
// The most that still leave a round and a half of CTAs, of which four share a multiprocessor.
inline int prepare_span(std::size_t chunks_of_heads, int group, int multiprocessors) {
    int span = kMostSpan;
    while (group % span != 0 ||
           (span > 1 && 2 * chunks_of_heads / span < 12 * static_cast<std::size_t>(multiprocessors)))
        span /= 2;
    return span;
}

// Whether a carry that only waits for chunk operands should wait for
// every chunk by itself (Schedule::per_chunk) rather than for all
// `blocks` CTAs of prepare, of which `resident` share a multiprocessor.
// It costs each CTA of prepare 1.4 us more, but the carry begins up to 11 us earlier.
// It pays where prepare leaves multiprocessors free from the start,
// and where more CTAs than fit at once end at different times.
// It does not where all CTAs just fit, since those end together.
inline bool pays_per_chunk(std::size_t blocks, int resident, int multiprocessors) {
    const auto all = static_cast<std::size_t>(multiprocessors);
    return 2 * blocks <= all || (blocks > static_cast<std::size_t>(resident) * all && blocks <= 12 * all);
}

}  // namespace cula::cuda::chunked
