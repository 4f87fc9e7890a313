// SPDX-License-Identifier: Apache-2.0
// Launches of a chunked prefill, or of the maps of a segment
// call (docs/design/planning.md). Per slab, in this order:
//
//   schedule         chunks and segments from cu_seqlens; skipped unless the call is packed and not by_warp
//   prepare_*        chunk operands; skipped where the carry prepares them itself or where they were kept
//   carry            of first segments (first_walks only)
//   carry, maps      (M, B) of segments
//   compose          states before segments, or the map of a whole sequence
//   carry            outputs and final states
// A fused kernel (Carry::Fused) replaces everything but schedule.
//
// Template parameter Carry describes the kernel that runs over the chunks: its types,
// the multiple of warps per CTA, whether it prepares additive algorithms itself, whether
// it waits for its inputs itself (Schedule::awaits_operands), and launch<update, maps>().
//
// A segment call with Args::keep is the first half of a prefill, up to the maps. If it is
// asked for the map of the sequence, one compose kernel makes that from the segments' maps.
// The prefill that gets its workspace as `kept` is the second half, from compose on.
#pragma once

#include <optional>

#include "core/carve.h"
#include "cuda/call.h"
#include "cuda/chunked/compose.cuh"
#include "cuda/chunked/cursor.cuh"
#include "cuda/chunked/plan.h"
#include "cuda/chunked/prepare_channel.cuh"
#include "cuda/chunked/prepare_token.cuh"
#include "cuda/chunked/schedule.cuh"
#include "cuda/pipe/launch.h"
#include "cuda/rule.h"

namespace cula::cuda::chunked {

inline States float_states(float* data, std::int64_t slots, std::int64_t heads, std::int64_t rows,
                           std::int64_t columns) {
    return {data, Dtype::kFloat32, slots, heads * rows * columns, rows * columns, columns, 1};
}

// Carry::Fused of a carry without a fused kernel. `pays`: the fused
// kernel takes this call, and takes less time than two kernels.
struct NotFused {
    static constexpr bool pays = false;
    NotFused(const Call&, const PrefillShape&) {}
    template <class ShapeOf>
    void launch(const Call&, const Schedule&, const CarryParams&, const ShapeOf&) const {}
};

// Whether prepare makes an inverse for this rule.
template <Update kUpdate, bool kPerChannel>
inline constexpr bool kSolvesChunk =
    std::conditional_t<kPerChannel, ChannelRule<kUpdate>, TokenRule<kUpdate>>::kSolves;
template <bool kPerChannel>
bool solves_chunk(Update update) {
    return answer_for(
        update, []<Update kUpdate>(UpdateConstant<kUpdate>) { return kSolvesChunk<kUpdate, kPerChannel>; });
}

template <class Carry>
struct PrefillPlan {
    using T = typename Carry::Type;
    static constexpr int kKey = Carry::kKey;
    static constexpr bool kPerChannel = Carry::kPerChannel;

    PrefillPolicy policy;
    std::optional<typename Carry::Fused> fused;
    std::int64_t chunks = 0;
    std::int32_t max_segments = 0;
    bool maps = false;
    bool by_warp = false;  // as in Schedule
    // kept: the workspace is left to a prefill, or is one that a segment call left; found: the latter
    bool kept = false, found = false;
    std::int32_t* first_chunk = nullptr;
    PackedChunk* packed = nullptr;
    Segment* segments = nullptr;
    std::int32_t* is_compensated = nullptr;
    float* fading = nullptr;
    ChunkOperands<T, kKey, kPerChannel>* operands = nullptr;
    float *map_m = nullptr, *map_b = nullptr, *starts = nullptr, *unfinished[2] = {};
    // Of the call that prepares; of a prefill that found a kept workspace.
    std::size_t bytes = 0, own_bytes = 0;

    static PrefillPlan of(const Call& call) {
        const DeviceArgs& a = call.args;
        const PrefillPlan plan(call, call.segment && a.segment_b.data && !a.segment_m.data);
        if (!plan.found || plan.bytes == call.kept_bytes) return plan;
        // A segment call that made B alone lacks what depends on a state before its tokens.
        const PrefillPlan from_zero(call, true);
        if (from_zero.bytes == call.kept_bytes && !a.initial.data) return from_zero;
        throw Error("prefill: kept must be what a segment of the same inputs has kept, " +
                    std::to_string(plan.bytes) + " bytes, got " + std::to_string(call.kept_bytes) +
                    (from_zero.bytes == call.kept_bytes
                         ? ", of one that made b alone, which has no initial_state"
                         : ""));
    }
    PrefillPlan(const Call& call, bool b_alone) {
        const DeviceArgs& a = call.args;
        const std::int64_t per_sequence = ceil_div(a.tokens, kTokens<kKey>);
        chunks = a.cu_seqlens ? a.tokens / kTokens<kKey> + a.sequences : per_sequence * a.sequences;
        const bool solves = solves_chunk<kPerChannel>(a.algorithm.update);
        PrefillShape shape{a.sequences, chunks, a.cu_seqlens ? chunks : per_sequence, a.value_heads,
                           a.value_dim};
        fused.emplace(call, shape);
        const bool prepares = (solves || !Carry::kPreparesAdditive) && !fused->pays;
        const std::size_t operand_bytes = prepares ? sizeof(ChunkOperands<T, kKey, kPerChannel>) : 0;
        kept = (call.keeps || call.kept) &&
               static_cast<std::size_t>(chunks) * a.value_heads * operand_bytes <= kKeptBytes;
        shape.maps_pay = !a.batch_invariant && !fused->pays && (kept || !call.segment);
        shape.kept = kept;
        // With packed sequences the host does not know which segments
        // come first: so neither first_apart nor first_walks.
        shape.from_zero = b_alone && kept && solves && !a.cu_seqlens;
        shape.costs = Carry::cut_costs(solves);
        shape.costs.walks = shape.costs.walks && !a.cu_seqlens;
        policy = prefill_policy(shape, operand_bytes, call.multiprocessors, Carry::kWarpStep);
        maps = policy.segment_chunks <
               std::min<std::int64_t>(policy.slab_chunks, a.cu_seqlens ? chunks : per_sequence);
        by_warp = a.cu_seqlens && a.sequences <= kMostByWarp && slabs() == 1 && !maps;
        if (by_warp) {
            max_segments = a.sequences;
        } else if (a.cu_seqlens) {
            max_segments = a.sequences + ceil_div(policy.slab_chunks, policy.segment_chunks);
        } else {
            const std::int64_t in_slab = std::min<std::int64_t>(per_sequence, policy.slab_chunks);
            const std::int64_t pieces =
                per_sequence > 0 ? ceil_div(policy.slab_chunks, per_sequence) + 1 : a.sequences;
            max_segments =
                static_cast<std::int32_t>(std::min<std::int64_t>(pieces, a.sequences) *
                                          (in_slab > 0 ? ceil_div(in_slab, policy.segment_chunks) : 1));
        }
        if (max_segments < 1) max_segments = 1;  // one CTA must zero the outputs that belong to no sequence

        found = kept && call.kept;
        Carver carver(found ? call.kept : call.workspace), own(call.workspace);
        const std::int64_t heads = a.value_heads, states = heads * a.value_dim * a.key_dim;
        // A prefill only reads the kept workspace and does not
        // trust indices in it: it makes the schedule anew.
        const auto take_schedule = [&](Carver& from) {
            first_chunk = from.take<std::int32_t>(a.sequences + 1);
            packed = from.take<PackedChunk>(policy.slab_chunks);
            segments = from.take<Segment>(max_segments);
        };
        const bool scheduled = a.cu_seqlens && !by_warp;
        if (scheduled) take_schedule(carver);
        if (scheduled && found) take_schedule(own);
        if (prepares) {
            is_compensated = carver.take<std::int32_t>(policy.slab_chunks * heads);
            if (kFades<kKey, kPerChannel> && solves && (maps || call.segment || kept))
                fading = carver.take<float>(policy.slab_chunks * heads);
            operands = carver.take<ChunkOperands<T, kKey, kPerChannel>>(policy.slab_chunks * heads);
        }
        if (maps) {
            // Rows of kKey channels, so that compose reads and writes them in 16-byte pieces.
            const std::int64_t rows = max_segments * heads;
            map_b = carver.take<float>(rows * a.value_dim * kKey);
            if (!policy.halves) {
                const std::int64_t of_head = (has_diagonal_map(a.algorithm.update) ? 1 : a.key_dim) * kKey;
                // With first_apart the very first segment has no M, and no room for one.
                map_m = carver.take<float>((rows - (policy.first_apart ? heads : 0)) * of_head);
                starts = carver.take<float>(rows * a.value_dim * kKey);
            }
            if (found) starts = own.take<float>(rows * a.value_dim * kKey);
        }
        if (slabs() > 1)
            for (float*& x : unfinished) x = carver.take<float>(states);
        bytes = carver.bytes(), own_bytes = own.bytes();
    }

    int slabs() const { return std::max(1, ceil_div(chunks, policy.slab_chunks)); }
    std::size_t workspace_bytes() const { return found ? own_bytes : bytes; }
    std::size_t kept_bytes() const { return kept ? bytes : 0; }
};

inline Divisor divisor(std::int32_t by) { return Divisor(static_cast<std::uint32_t>(by)); }

template <class Carry, Update kUpdate>
void launch_slabs(const Call& call) {
    using T = typename Carry::Type;
    constexpr int kKey = Carry::kKey;
    constexpr bool kDiagonal = has_diagonal_map(kUpdate),
                   kPrepares = kSolvesChunk<kUpdate, Carry::kPerChannel> || !Carry::kPreparesAdditive;
    const DeviceArgs& a = call.args;
    const auto plan = PrefillPlan<Carry>::of(call);
    const bool found = plan.found;
    const std::int64_t heads = a.value_heads;
    CarryParams p;
    p.is_compensated = plan.is_compensated, p.fading = plan.fading;
    p.starts = float_states(plan.starts, 0, heads, a.value_dim, kKey);
    p.map_b = float_states(plan.map_b, 0, heads, a.value_dim, kKey);
    p.map_m = float_states(plan.map_m, 0, heads, kDiagonal ? 1 : a.key_dim, kKey);
    if (plan.policy.first_apart) p.map_m.data = plan.map_m - p.map_m.slot;
    p.halves = plan.policy.halves, p.first_walks = plan.policy.first_walks;
    p.wants_m = !p.halves, p.first_m = !plan.policy.first_apart;

    Schedule schedule_of;
    schedule_of.chunk_tokens = kTokens<kKey>;
    schedule_of.segment_chunks = plan.policy.segment_chunks;
    schedule_of.by_segment = divisor(plan.policy.segment_chunks);
    schedule_of.chunks = ceil_div(a.tokens, kTokens<kKey>);
    schedule_of.by_chunks = divisor(schedule_of.chunks);
    schedule_of.max_segments = plan.max_segments;
    schedule_of.ahead = std::max(1, call.multiprocessors / a.value_heads);
    schedule_of.by_warp = plan.by_warp;
    schedule_of.packed = plan.packed;
    schedule_of.segments = plan.segments;
    // PDL: every launch but the first of a call may start before the previous kernel ends.
    // Where maps are composed, only a carry that waits for compose itself may: waiting
    // CTAs of other kernels would occupy multiprocessors that maps still need.
    const bool composes = plan.maps && !p.halves,
               waits_itself = call.follows && Carry::kWaitsItself && !call.segment;
    schedule_of.awaits_operands = waits_itself && plan.operands && plan.chunks > 0 && !plan.maps && !found;
    bool first = true;
    const auto shape = [&](LaunchShape of) {
        of.early = call.follows && !first && (!composes || schedule_of.awaits_states);
        first = first && of.blocks == 0;  // an empty launch launches nothing
        return of;
    };
    for (int slab = 0; slab < plan.slabs(); ++slab) {
        schedule_of.slab_begin = slab * plan.policy.slab_chunks;
        schedule_of.slab_end = static_cast<std::int32_t>(std::min<std::int64_t>(
            plan.chunks, schedule_of.slab_begin + std::int64_t{plan.policy.slab_chunks}));
        schedule_of.by_pieces =
            divisor(ceil_div(std::min(schedule_of.chunks, schedule_of.slab_end - schedule_of.slab_begin),
                             plan.policy.segment_chunks));
        p.ranks = schedule_of.by_pieces;
        if (plan.packed)
            launch<schedule<kScheduleThreads>>(shape({1, kScheduleThreads}), call.stream, a, schedule_of,
                                               plan.first_chunk, plan.packed, plan.segments);
        if (plan.fused->pays) return plan.fused->launch(call, schedule_of, p, shape);
        const std::size_t blocks =
            static_cast<std::size_t>(schedule_of.slab_end - schedule_of.slab_begin) * a.value_heads;
        constexpr int kPrepareCtas = Carry::kPerChannel ? kChannelCtas : kTokenCtas;
        const int span =
            kPrepares && !Carry::kPerChannel ? prepare_span(blocks, a.group, call.multiprocessors) : 1;
        schedule_of.per_chunk =
            schedule_of.awaits_operands && pays_per_chunk(blocks / span, kPrepareCtas, call.multiprocessors);
        if constexpr (kPrepares && Carry::kPerChannel) {
            if (!found)
                launch<prepare_channel<T, kKey, kUpdate, typename Carry::GateTiles>>(
                    shape({blocks, kPrepareThreads, sizeof(ChannelSmem<kKey>)}), call.stream, a,
                    Carry::gate_tiles(a), schedule_of, plan.operands, plan.is_compensated, plan.fading);
        } else if constexpr (kPrepares) {
            if (!found)
                launch<prepare_token<T, kKey>>(
                    shape({blocks / span, kPrepareThreads, sizeof(TokenSmem<kKey>)}), call.stream, a,
                    schedule_of, span, plan.operands, plan.is_compensated, plan.fading);
        }
        const auto launch_compose = [&]<bool kTotal>(std::bool_constant<kTotal>, int row_tiles) {
            launch<compose<kKey, kTotal>>(
                shape({static_cast<std::size_t>(row_tiles) * a.value_heads * a.sequences,
                       kComposeThreads<kKey>, sizeof(ComposeSmem<kKey>)}),
                call.stream, a, schedule_of, p, !kDiagonal);
        };
        const int value_tiles = ceil_div(a.value_dim, kComposeRows);
        if (call.segment) {
            // Without segments: one map per sequence and slab, directly into
            // the call's own m and b; the next slab continues from there.
            if (!plan.maps) p.map_m = a.segment_m, p.map_b = a.segment_b, p.wants_m = a.segment_m.data;
            p.last_map = a.segment_b.data;
            if (plan.maps || p.last_map)
                Carry::template launch<kUpdate, true>(call, plan, schedule_of, p, shape);
            const int map_tiles = !a.segment_m.data ? 0 : kDiagonal ? 1 : ceil_div(a.key_dim, kComposeRows);
            if (plan.maps && p.last_map) launch_compose(std::true_type{}, value_tiles + map_tiles);
            continue;
        }
        p.slab_start = float_states(plan.unfinished[slab % 2], 1, heads, a.value_dim, a.key_dim);
        States slab_end = float_states(plan.unfinished[(slab + 1) % 2], 1, heads, a.value_dim, a.key_dim);
        slab_end.slot = 0;  // one slot, since only one sequence can continue into the next slab
        p.slab_end = slab_end;
        const int pieces = static_cast<int>(schedule_of.by_pieces.value);
        p.first_rank = 0;
        if (plan.maps) {
            if (p.first_walks) {
                p.first_only = true, p.slab_end = p.map_b, p.slab_end.slot *= pieces;
                Carry::template launch<kUpdate, false>(call, plan, schedule_of, p, shape);
                p.first_only = false, p.slab_end = slab_end;
                p.first_rank = 1, p.ranks = divisor(std::max(1, pieces - 2)), p.beside_others = call.follows;
            }
            if (!found) Carry::template launch<kUpdate, true>(call, plan, schedule_of, p, shape);
            if (!p.halves) launch_compose(std::false_type{}, value_tiles);
            // The last launch need not cover first segments again.
            // With several sequences their CTAs return at once.
            p.first_rank = p.first_walks && a.sequences == 1 ? 1 : 0;
        }
        schedule_of.awaits_states = waits_itself && composes;
        Carry::template launch<kUpdate, false>(call, plan, schedule_of, p, shape);
        schedule_of.awaits_states = false;
    }
}

template <class Carry>
void launch_slabs(const Call& call) {
    with_update(call.args.algorithm.update,
                [&]<Update kUpdate>(UpdateConstant<kUpdate>) { launch_slabs<Carry, kUpdate>(call); });
}

}  // namespace cula::cuda::chunked
