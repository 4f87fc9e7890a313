// SPDX-License-Identifier: Apache-2.0
// How a prefill is spread over the device: from shapes alone, so that the same call always gets the same
// bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace cula::cuda::chunked {

// What a chunk takes, in microseconds of an H200 with K = V = 128: the carry of a whole sequence; of one that
// is cut its map, of which many walk the last chunks only, and its carry, in CTAs of four warps and of eight;
// and its part of all where the sequence is cut in two (PrefillPolicy::halves). Without a cost for whole
// sequences all that can be are cut, in narrow CTAs.
struct CutCosts {
    double whole = 0.0, map = 0.0, narrow = 0.0, wide = 0.0, halves = 0.0;
    double first =
        1.0;  // how much longer the first of two segments is that are mapped at once, itself without an M
    bool walks = false;  // whether first segments may be walked beside maps (PrefillPolicy::first_walks)
};

struct PrefillShape {
    std::int64_t sequences = 1, chunks = 0;  // of all sequences together, at most
    std::int64_t longest = 0;                // chunks that one sequence may have
    int value_heads = 1, value_dim = 0;
    bool maps_pay = true;    // segments are allowed: not in batch-invariant mode
    bool kept = false;       // maps are made anyway, and images stay until a prefill comes for them
    bool from_zero = false;  // nobody needs the M of a sequence's first segment
    CutCosts costs = {};
};

struct PrefillPolicy {
    int warps = 8;       // of a carry CTA, 16 value rows each
    int row_blocks = 1;  // CTAs that share the value rows of a head
    int segment_chunks = 0;
    int slab_chunks = 0;  // chunks whose images stand in the workspace at a time
    // Two segments, of which the second starts from what the map of the first makes of its state. The first
    // is walked beside its map, which takes less time a chunk, and is longer.
    bool halves = false;
    // One segment more than fill the device: the first is walked beside the maps of the others, and needs
    // none.
    bool first_walks = false;
    // Maps of first segments have no M, and are made beside those of the others, all of them at once.
    bool first_apart = false;
};

inline constexpr std::size_t kSlabBytes = std::size_t{2} << 30, kKeptBytes = std::size_t{16} << 30;
// CTAs of prepare on a multiprocessor: as many as fit its shared memory, and their registers without spills.
// Fewer where that is not sm_90's.
inline constexpr int kChannelCtas = 3, kTokenCtas = 4;
inline constexpr int kMostSpan = 4;       // value heads: a warp sums the gates of each
inline constexpr int kLeastSegment = 8;   // chunks: below it the maps cost more than they free
inline constexpr int kLeastSegments = 3;  // the same
inline constexpr int kLeastHalved = 64;   // chunks that are worth cutting in two
inline constexpr int kLeastWalked = 32;   // of the first segment, for which a kernel more pays
// Microseconds: of maps and compose, which do not follow early, and their ends; of compose, a head and
// segment.
inline constexpr double kMapStarts = 12.0, kComposed = 0.19;

// warp_step: the carry's CTAs have a multiple of so many warps.
inline PrefillPolicy prefill_policy(const PrefillShape& shape, std::size_t operand_bytes, int multiprocessors,
                                    int warp_step) {
    PrefillPolicy policy;
    const int tiles = static_cast<int>((shape.value_dim + 15) / 16);
    const auto blocks = [&](int warps) { return (tiles + warps - 1) / warps; };
    // Rounds of CTAs times the cost of one: eight warps keep a multiprocessor little longer than four do.
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

// What a chunk takes, in microseconds of an H200 with K = V = 128: its image, of which the device's
// multiprocessors make as many at a time; its carry in CTAs of four warps and of eight; and one kernel that
// does both (sm90/fused.cuh), in pairs of CTAs of four warps that multiply, and in CTAs of eight. And what
// begins take: of a round of CTAs, and of a second kernel.
struct FusedCosts {
    double prepare = 3.9, carry[2] = {1.2, 2.6}, fused[2] = {2.3, 3.75}, round = 8.0, kernel = 10.0;
};

// Softplus gates take pairs: two warpgroups a CTA that multiply leave too few registers for steep channels.
// Without any they take 2.4; what those cost, up to as much as half of it, is reckoned with in part
// (docs/fused.md).
inline constexpr FusedCosts kSoftplusCosts{.prepare = 4.3, .fused = {2.82, 1e9}};

// How many warpgroups a CTA of that one kernel has that multiply, or 0 where two kernels take less time
// (`always`: they are out of the question). It goes by the mean length, so that a batch and the same
// sequences packed get the same bits: one long sequence with many short ones may take it, which cuts nothing,
// kMostRegret times as long as two. A batch-invariant call looks at one sequence, as if it were endless.
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

// Of `images` to make, with one decay per token: how many value heads that share q and k one CTA prepares. As
// many as leave a round and a half of CTAs, of which four share a multiprocessor.
inline int prepare_span(std::size_t chunks_of_heads, int group, int multiprocessors) {
    int span = kMostSpan;
    while (group % span != 0 ||
           (span > 1 && 2 * chunks_of_heads / span < 12 * static_cast<std::size_t>(multiprocessors)))
        span /= 2;
    return span;
}

// Whether a carry that only waits for images should wait for each chunk by itself, not for all `blocks` CTAs
// of prepare, of which `resident` share a multiprocessor: 1.4 us more a CTA, but a chain that begins up to 11
// us earlier. Few CTAs leave it room from the start, and of more than fit at once some end early; those that
// just fit end together.
inline bool pays_per_chunk(std::size_t blocks, int resident, int multiprocessors) {
    const auto all = static_cast<std::size_t>(multiprocessors);
    return 2 * blocks <= all || (blocks > static_cast<std::size_t>(resident) * all && blocks <= 12 * all);
}

}  // namespace cula::cuda::chunked
