// SPDX-License-Identifier: Apache-2.0
// The workspace of a chunked prefill or segment call: what lies in it, and where.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/carve.h"
#include "cuda/chunked/chunk.cuh"
#include "cuda/chunked/plan.h"
#include "cuda/chunked/prepare_channel.cuh"
#include "cuda/chunked/prepare_erase.h"
#include "cuda/chunked/prepare_token.cuh"
#include "cuda/chunked/timeline.h"

namespace cula::cuda::chunked {

// Whether prepare makes an inverse for this rule.
template <Update kUpdate, bool kPerChannel>
inline constexpr bool kSolvesChunk =
    std::conditional_t<kPerChannel, ChannelRule<kUpdate>, TokenRule<kUpdate>>::kSolves;

template <class T, int kKey, bool kPerChannel, Update kUpdate>
struct Workspace {
    using Operands = ChunkOperands<T, kKey, kPerChannel>;

    std::int32_t* first_chunk = nullptr;  // the schedule's: [N + 1], [chunks of a slab], [segments]
    PackedChunk* packed = nullptr;
    Segment* segments = nullptr;
    std::int32_t* is_compensated = nullptr;  // of operands: [chunks of a slab, HV]
    float* fading = nullptr;
    Operands* operands = nullptr;
    EraseOperands<T> erase;                                       // of rules with erase strengths
    Timeline timeline;                                            // of tokens that write several times
    float *map_m = nullptr, *map_b = nullptr, *starts = nullptr;  // of segments
    SegmentNotes notes;                                           // of Joined
    float* unfinished[2] = {};  // states of the sequence that one slab leaves to the next
    // Of the call that prepares; of a prefill that found a kept workspace.
    std::size_t bytes = 0, own_bytes = 0;

    // base: the call's own workspace. kept: what a segment call has kept (Args::kept), or null. Both may be
    // null to count the bytes; `found` says then whether there will be a kept one.
    Workspace(const PrefillPlan& plan, void* base, void* kept, bool found) {
        const PrefillShape& shape = plan.shape;
        Carver carver(found ? kept : base), own(base);
        const std::int64_t heads = shape.value_heads;
        // A prefill only reads the kept workspace and does not
        // trust indices in it: it makes the schedule anew.
        const auto take_schedule = [&](Carver& from) {
            first_chunk = from.take<std::int32_t>(shape.sequences + 1);
            packed = from.take<PackedChunk>(plan.slab_chunks);
            segments = from.take<Segment>(plan.max_segments);
        };
        if (shape.several_writes) {
            timeline.carve_ends(carver, shape);
            if (found) timeline.carve_ends(own, shape);  // likewise
            timeline.carve_plan(found ? own : carver, shape);
        }
        const bool scheduled = shape.packed && !plan.by_warp;
        if (scheduled) take_schedule(carver);
        if (scheduled && found) take_schedule(own);
        if (kind(plan.strategy) == StrategyKind::kJoined) {
            const std::int64_t rows = plan.max_segments * heads,
                               slots = SegmentNotes::value_slots(shape.value_dim);
            notes.largest = carver.take<float>(rows * SegmentNotes::kMapSlots);
            notes.broken = carver.take<std::uint64_t>(rows * slots);
            notes.ended = carver.take<std::int32_t>(rows * slots / 4);  // the slots of a CTA
            notes.entry = carver.take<T>(shape.chunks * kTokens<kKey> * heads * kKey);
            notes.states = carver.take<float>(rows * slots * 16 * kKey);
            notes.maps = carver.take<float>(rows * kKey * kKey);
        }
        if (plan.prepares) {
            is_compensated = carver.take<std::int32_t>(plan.slab_chunks * heads);
            if (kFades<kKey, kPerChannel> && kSolvesChunk<kUpdate, kPerChannel> && !shape.erases &&
                !shape.low_rank && (plan.makes_maps() || shape.segment || shape.kept))
                fading = carver.take<float>(plan.slab_chunks * heads);
            operands = carver.take<Operands>(plan.slab_chunks * heads);
            if (shape.erases) erase.carve(carver, shape.tokens * heads, shape, false);
        }
        if (plan.makes_maps()) {
            // Rows of kKey channels, so that compose reads and writes them in 16-byte pieces.
            const std::int64_t rows = plan.max_segments * heads;
            map_b = carver.take<float>(rows * shape.value_dim * kKey);
            if (const auto* cut = std::get_if<Segments>(&plan.strategy)) {
                const std::int64_t of_head = (has_diagonal_map(kUpdate) ? 1 : shape.key_dim) * kKey;
                // With first_apart the very first segment has no M, and no room for one.
                map_m = carver.take<float>((rows - (cut->first_apart ? heads : 0)) * of_head);
                starts = carver.take<float>(rows * shape.value_dim * kKey);
            }
            if (found) starts = own.take<float>(rows * shape.value_dim * kKey);
        }
        if (plan.slabs() > 1)
            for (float*& states : unfinished)
                states = carver.take<float>(heads * shape.value_dim * shape.key_dim);
        bytes = carver.bytes(), own_bytes = own.bytes();
    }
};

}  // namespace cula::cuda::chunked
