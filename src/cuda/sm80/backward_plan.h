// SPDX-License-Identifier: Apache-2.0
// How a backward call is divided: into slabs, whose chunks share one workspace, and among the CTAs of the two
// walks. Host code; all follows from shapes and the device, so that the same call always gives the same bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/chunked/plan.h"
#include "cula/cula.h"

namespace cula::cuda::sm80 {

// The most that chunk operands and saved slices of one slab take.
inline constexpr std::size_t kBackwardSlabBytes = std::size_t{9} << 28;

// Whether gradients are wanted for which chunks have to be differentiated, and which scratch they need.
struct WantedGradients {
    bool keys, parameters, any;

    explicit WantedGradients(const Args& args)
        : keys(args.d_q || args.d_k),
          parameters(args.d_A_log || args.d_dt_bias),
          any(keys || parameters || args.d_g || args.d_beta) {}
    bool operator==(const WantedGradients&) const = default;
};

// What a chunk takes of the workspace: of one value head, and of one head.
struct ChunkBytes {
    std::size_t of_value_head = 0, of_head = 0;
};

struct BackwardPlan {
    chunked::PrefillShape shape;
    WantedGradients wanted;
    chunked::CarryRows rows = {};
    bool by_warp = false;         // as in Schedule
    bool cuts_sequences = false;  // a sequence may go on from one slab to the next
    std::int32_t slab_chunks = 1, segment_chunks = 1, max_segments = 1;

    int slabs() const {
        return static_cast<int>(std::max<std::int64_t>(1, (shape.chunks + slab_chunks - 1) / slab_chunks));
    }
};

// Sequences are never cut but by slabs, and batched ones that a slab holds not even by those. slab_bytes: the
// most that the chunks of a slab take.
inline BackwardPlan plan_backward(const Problem& problem, const Args& args, const chunked::CarryTraits& carry,
                                  const ChunkBytes& bytes, std::size_t slab_bytes) {
    const auto divide_up = [](std::int64_t x, std::int64_t y) { return (x + y - 1) / y; };
    BackwardPlan plan{.shape = chunked::shape_of(problem, carry.chunk_tokens),
                      .wanted = WantedGradients(args)};
    // The walks are planned like a carry of twice the heads.
    chunked::PrefillShape walks = plan.shape;
    if (plan.wanted.any) walks.value_heads *= 2;
    const chunked::Candidates candidates = chunked::Planner(walks, carry, problem.device).candidates(false);
    plan.rows = chunked::rows_of(candidates.choose(chunked::StrategyKind::kWhole)->strategy);
    plan.shape.costs = {};  // the caller's, for as long as it plans

    const chunked::PrefillShape& shape = plan.shape;
    const std::size_t of_chunk = bytes.of_value_head * static_cast<std::size_t>(problem.value_heads) +
                                 bytes.of_head * static_cast<std::size_t>(problem.heads);
    const std::int64_t chunks = std::max<std::int64_t>(shape.chunks, 1),
                       longest = std::max<std::int64_t>(1, static_cast<std::int64_t>(slab_bytes / of_chunk)),
                       of_sequence = shape.packed ? 0 : shape.longest;
    // What slabs have a multiple of.
    const bool whole = of_sequence > 0 && of_sequence <= longest;
    const std::int64_t unit = whole ? of_sequence : 1, units = divide_up(chunks, unit),
                       slab_chunks = divide_up(units, divide_up(units, longest / unit)) * unit;
    plan.cuts_sequences = !whole && slab_chunks < chunks;
    const std::int64_t segment_chunks =
        std::max<std::int64_t>(1, std::min<std::int64_t>(shape.longest, slab_chunks));
    plan.slab_chunks = static_cast<std::int32_t>(slab_chunks);
    plan.segment_chunks = static_cast<std::int32_t>(segment_chunks);
    plan.by_warp = shape.packed && shape.sequences <= chunked::kMostByWarp && plan.slabs() == 1;
    std::int64_t segments = shape.sequences;
    if (shape.packed && !plan.by_warp)
        segments += divide_up(slab_chunks, segment_chunks);
    else if (!shape.packed && shape.longest > 0)
        segments = std::min(segments, divide_up(slab_chunks, shape.longest) + 1);
    plan.max_segments = static_cast<std::int32_t>(segments);
    return plan;
}

}  // namespace cula::cuda::sm80
