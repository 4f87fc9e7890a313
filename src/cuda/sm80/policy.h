// SPDX-License-Identifier: Apache-2.0
// How a prefill is spread over the device: from shapes alone, so that the same call always gets the same bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace cula::cuda::sm80 {

struct PrefillShape {
    std::int64_t sequences = 1, chunks = 0;  // of all sequences together, at most
    std::int64_t longest = 0;                // chunks that one sequence may have
    int value_heads = 1, value_dim = 0;
    bool maps_pay = true;    // segments are allowed: not in batch-invariant mode
    bool kept = false;       // maps are made anyway, and images stay until a prefill comes for them
    int least_segments = 3;  // that maps pay for
};

struct PrefillPolicy {
    int warps = 8;       // of a carry CTA, 16 value rows each
    int row_blocks = 1;  // CTAs that share the value rows of a head
    int segment_chunks = 0;
    int slab_chunks = 0;  // chunks whose images stand in the workspace at a time
};

inline constexpr std::size_t kSlabBytes = std::size_t{2} << 30, kKeptBytes = std::size_t{16} << 30;
inline constexpr int kMostSpan = 4;      // value heads: a warp sums the gates of each
inline constexpr int kLeastSegment = 8;  // chunks: below it the maps cost more than they free
inline constexpr int kLeastHalf = 128;   // the same, of two

// warp_step: the carry's CTAs have a multiple of so many warps.
inline PrefillPolicy prefill_policy(const PrefillShape& shape, std::size_t image_bytes, int multiprocessors,
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
        image_bytes == 0 || shape.kept
            ? chunks
            : std::max<std::int64_t>(1, static_cast<std::int64_t>(kSlabBytes / image_bytes) / shape.value_heads);
    const std::int64_t slabs = (chunks + longest_slab - 1) / longest_slab;
    policy.slab_chunks = static_cast<int>((chunks + slabs - 1) / slabs);

    const std::int64_t per_sequence =
        std::max<std::int64_t>(1, std::min<std::int64_t>(shape.longest, policy.slab_chunks));
    policy.segment_chunks = static_cast<int>(per_sequence);
    const std::int64_t columns = shape.sequences * shape.value_heads * policy.row_blocks;
    const int least = shape.kept ? 2 : shape.least_segments;
    if (shape.maps_pay && columns > 0 && columns * least <= multiprocessors) {
        const std::int64_t segments = std::min<std::int64_t>(multiprocessors / columns, per_sequence / kLeastSegment);
        const bool long_enough = shape.kept || segments > 2 || per_sequence >= 2 * kLeastHalf;
        if (segments >= least && long_enough)
            policy.segment_chunks = static_cast<int>((per_sequence + segments - 1) / segments);
    }
    return policy;
}

// Of `images` to make, with one decay per token: how many value heads that share q and k one CTA prepares. As many as
// leave a round and a half of CTAs, of which four share a multiprocessor.
inline int prepare_span(std::size_t images, int group, int multiprocessors) {
    int span = kMostSpan;
    while (group % span != 0 || (span > 1 && 2 * images / span < 12 * static_cast<std::size_t>(multiprocessors)))
        span /= 2;
    return span;
}

}  // namespace cula::cuda::sm80
