// SPDX-License-Identifier: Apache-2.0
// What an instance of the chunked prefill is made of: sm_80's launches with Hopper's carry.
#pragma once

#include "cuda/chunked/launch.cuh"
#include "cuda/sm90/carry/kernel.cuh"
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
    // fp16's range is too small for factors of whole halves; 64 channels would leave half of the threads
    // without any.
    using Fused = std::conditional_t<kDecayPerChannel && kKeyDim == 128 && std::is_same_v<T, __nv_bfloat16>,
                                     FusedPrefill<T, kKeyDim>, NotFused>;

    using GateTiles = sm90::GateTiles<T, kKey>;
    static GateTiles gate_tiles(const DeviceArgs& a) { return GateTiles(a); }

    // Of GDN, whose images are small: elsewhere memory sets the pace of a carry that fills the device. Of a
    // first segment's B two CTAs of one warpgroup make a chunk in 0.89 us, of another's map two of two
    // warpgroups in 1.11.
    static constexpr CutCosts cut_costs(bool delta) {
        if (!delta || kPerChannel) return {.first = 1.25, .walks = delta};
        return {.whole = 1.2, .map = 0.9, .narrow = 1.33, .wide = 2.05, .halves = 0.85, .first = 1.25};
    }

    // CTAs of one or two warpgroups that the rows of a head's values, and those of its M, are for.
    struct Rows {
        int warpgroups, of_values, of_m;
        int blocks() const { return of_values + of_m; }
    };
    static Rows rows(const DeviceArgs& a, int warpgroups, bool m) {
        const auto blocks = [&](int of) { return ceil_div(of, warpgroups * kWarpgroupRows); };
        return {warpgroups, blocks(a.value_dim), m ? blocks(a.key_dim) : 0};
    }

    template <bool kDelta, bool kMaps, class ShapeOf>
    static void launch(const Call& call, const PrefillPlan<WarpgroupCarry>& plan, const Schedule& schedule,
                       CarryParams p, const ShapeOf& shape) {
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
        // Two warpgroups a CTA where one would take twice the rounds.
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
        // What a segment call keeps lacks some: M of the first segments, the maps of the last ones.
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
        // Row blocks of one head read the same images: a cluster fetches them once. Where clusters of four
        // would take nearly all multiprocessors, the last ones find no four side by side.
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
