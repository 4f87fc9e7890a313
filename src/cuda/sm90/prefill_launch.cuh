// SPDX-License-Identifier: Apache-2.0
// The chunked prefill on Hopper: the launches that all carries share (chunked/launch.cuh), with the carry of
// sm90/carry.
#pragma once

#include "cuda/chunked/launch.cuh"
#include "cuda/sm90/carry/kernel.cuh"
#include "cuda/sm90/carry/rule.cuh"
#include "cuda/sm90/fused/launch.cuh"
#include "cuda/sm90/gate_tiles.cuh"
#include "cuda/sm90/launch.h"

namespace cula::cuda::sm90 {

template <class T, int kKeyDim, bool kDecayPerChannel>
struct WarpgroupCarry {
    using Type = T;
    static constexpr int kKey = kKeyDim, kWarpStep = kWarpgroupWarps;
    static constexpr bool kPerChannel = kDecayPerChannel, kPreparesAdditive = !kDecayPerChannel,
                          kWaitsItself = true;
    // The fused prefill needs bf16: fp16's range is too small for decay factors over half a chunk. It needs
    // K = 128: with 64 channels half of its threads would have none.
    using Fused = std::conditional_t<kDecayPerChannel && kKeyDim == 128 && std::is_same_v<T, __nv_bfloat16>,
                                     FusedPrefill<T, kKeyDim>, NotFused>;

    using GateTiles = sm90::GateTiles<T, kKey>;
    static GateTiles gate_tiles(const DeviceArgs& a) { return GateTiles(a); }

    // us per chunk. Cutting by cost is for GDN and its relatives, whose chunk operands are small; elsewhere a
    // carry that fills the device is bound by memory. `first` is 1.11 / 0.89: two CTAs of two warpgroups take
    // 1.11 us for a chunk of a map, two CTAs of one warpgroup 0.89 us for a chunk of a first segment's B.
    static constexpr CutCosts cut_costs(bool delta) {
        if (!delta || kPerChannel) return {.first = 1.25, .walks = delta};
        return {.whole = 1.2, .map = 0.9, .narrow = 1.33, .wide = 2.05, .halves = 0.85, .first = 1.25};
    }

    // Row blocks of a head: CTAs of `warpgroups` state warpgroups for its value rows and for the rows of M.
    struct Rows {
        int warpgroups, of_values, of_m;
        int blocks() const { return of_values + of_m; }
    };
    static Rows rows(const DeviceArgs& a, int warpgroups, bool m) {
        const auto blocks = [&](int of) { return ceil_div(of, warpgroups * kWarpgroupRows); };
        return {warpgroups, blocks(a.value_dim), m ? blocks(a.key_dim) : 0};
    }

    template <Update kUpdate, bool kMaps, class ShapeOf>
    static void launch(const Call& call, const PrefillPlan<WarpgroupCarry>& plan, const Schedule& schedule,
                       CarryParams p, const ShapeOf& shape) {
        constexpr bool kDelta = CarryRule<kUpdate>::kReadsState;
        const DeviceArgs& a = call.args;
        const int warpgroups = plan.policy.warps / kWarpgroupWarps;
        const int pieces = static_cast<int>(schedule.by_pieces.value);
        const std::int64_t firsts = std::int64_t{a.value_heads} * a.sequences;
        std::int64_t columns = std::int64_t{a.value_heads} * (schedule.max_segments - p.first_rank);
        if (p.first_walks && kMaps) columns = firsts * p.ranks.value;
        if (p.first_only) columns = std::int64_t{a.value_heads} * ((a.sequences - 1) * pieces + 1);
        if (!kMaps || !kDelta || !p.wants_m)
            return launch_rows<kDelta, kMaps>(call, plan, schedule, p, rows(a, warpgroups, false), columns,
                                              shape);
        // Two warpgroups per CTA where CTAs of the carry's size would not all be resident at once.
        const auto fewer_rounds = [&](std::int64_t of, int room) {
            const Rows as_the_carry = rows(a, warpgroups, true);
            return of * as_the_carry.blocks() > room ? rows(a, kMaxStateWarpgroups, true) : as_the_carry;
        };
        const auto beside_others = [&](LaunchShape of) {
            of = shape(of);
            of.early |= p.beside_others;
            return of;
        };
        int room = call.multiprocessors;
        if (p.first_walks) {
            room -= static_cast<int>(firsts) * rows(a, warpgroups, false).blocks();
            return launch_rows<kDelta, kMaps>(call, plan, schedule, p, fewer_rounds(columns, room), columns,
                                              beside_others);
        }
        if (!plan.kept || a.cu_seqlens)
            return launch_rows<kDelta, kMaps>(call, plan, schedule, p, fewer_rounds(columns, room), columns,
                                              shape);
        // A segment call with `keep` leaves out maps that nobody needs: M of first segments (first_m false),
        // and the maps of last segments (last_map false).
        if (!p.first_m) {
            const Rows others = rows(a, kMaxStateWarpgroups, true);
            Rows first = rows(a, warpgroups, false);
            if (firsts * first.blocks() + firsts * (pieces - 1) * others.blocks() > room)
                first = rows(a, kMaxStateWarpgroups, false);
            p.first_rank = 0, p.ranks = divisor(1);
            launch_rows<kDelta, kMaps>(call, plan, schedule, p, first, firsts, shape);
            p.first_rank = 1, p.beside_others = call.follows;
            room -= static_cast<int>(firsts * first.blocks());
        }
        const int ranks = pieces - p.first_rank - (p.last_map ? 0 : 1);
        p.ranks = divisor(ranks);
        launch_rows<kDelta, kMaps>(call, plan, schedule, p, fewer_rounds(firsts * ranks, room),
                                   firsts * ranks, beside_others);
    }

private:
    template <bool kDelta, bool kMaps, class ShapeOf>
    static void launch_rows(const Call& call, const PrefillPlan<WarpgroupCarry>& plan,
                            const Schedule& schedule, CarryParams p, const Rows& rows, std::int64_t columns,
                            const ShapeOf& shape) {
        const DeviceArgs& a = call.args;
        p.value_blocks = rows.of_values, p.row_blocks = divisor(rows.blocks());
        const auto shared_bytes = [&] {
            return carry_shared_bytes<T, kKey, kDelta, kPerChannel, kMaps>(rows.warpgroups, p.stages);
        };
        for (p.stages = kMaxStages; shared_bytes() > call.shared_bytes_limit;) --p.stages;
        constexpr bool kScores = kMakesScores<kDelta, kPerChannel>;
        // Row blocks of one head read the same chunk operands: a cluster loads them once. Maps take clusters
        // of four only where these leave a fifth of the multiprocessors free: with fewer, the last clusters
        // find no four multiprocessors side by side.
        const bool in_fours =
            rows.blocks() % 4 == 0 && (!kMaps || 5 * columns * rows.blocks() < 4 * call.multiprocessors);
        p.cluster = kScores ? 1 : in_fours ? 4 : rows.blocks() % 2 == 0 ? 2 : 1;
        cuda::launch<carry<T, kKey, kDelta, kPerChannel, kMaps>>(
            shape({.blocks = static_cast<std::size_t>(rows.blocks() * columns),
                   .threads = (rows.warpgroups + kHelperWarpgroups<kScores>)*kWarpgroupThreads,
                   .shared_bytes = shared_bytes(),
                   .most_shared_bytes = call.shared_bytes_limit,
                   .cluster = p.cluster}),
            call.stream, a, schedule, plan.operands, p,
            row_maps(a, kDtype<T>, !kPerChannel, !kMaps, kTokens<kKey>));
    }
};

template <class T, int kKey, bool kPerChannel>
std::size_t prefill_workspace_bytes(const Call& call) {
    return PrefillPlan<WarpgroupCarry<T, kKey, kPerChannel>>::of(call).workspace_bytes();
}

template <class T, int kKey, bool kPerChannel>
std::size_t prefill_kept_bytes(const Call& call) {
    return PrefillPlan<WarpgroupCarry<T, kKey, kPerChannel>>::of(call).kept_bytes();
}

template <class T, int kKey, bool kPerChannel>
void launch_prefill(const Call& call) {
    launch_slabs<WarpgroupCarry<T, kKey, kPerChannel>>(call);
}

}  // namespace cula::cuda::sm90
