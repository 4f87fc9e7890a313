// SPDX-License-Identifier: Apache-2.0
// What an instance of the chunked prefill is made of: sm_80's launches with Hopper's carry.
#pragma once

#include "cuda/sm80/slabs.cuh"
#include "cuda/sm90/carry.cuh"
#include "cuda/sm90/gate_boxes.cuh"
#include "cuda/sm90/launch.h"

namespace cula::cuda::sm90 {

template <class T, int kKeyDim, bool kDecayPerChannel>
struct WarpgroupCarry {
    using Type = T;
    static constexpr int kKey = kKeyDim, kWarpStep = kGroupWarps;
    static constexpr bool kPerChannel = kDecayPerChannel, kPreparesAdditive = !kDecayPerChannel, kWaitsItself = true;

    using GateBoxes = sm90::GateBoxes<T, kKey>;
    static GateBoxes gate_boxes(const DeviceArgs& a) { return GateBoxes(a); }

    // Of GDN, whose images are small: elsewhere memory sets the pace of a carry that fills the device.
    static constexpr CutCosts cut_costs(bool delta) {
        if (!delta || kPerChannel) return {};
        return {.whole = 1.2, .map = 0.9, .narrow = 1.33, .wide = 2.05, .halves = 0.85};
    }

    template <bool kDelta, bool kMaps, class ShapeOf>
    static void launch(const Call& call, const PrefillPlan<WarpgroupCarry>& plan, const Schedule& schedule,
                       CarryParams p, const ShapeOf& shape) {
        const DeviceArgs& a = call.args;
        const std::int64_t columns = std::int64_t{a.value_heads} * schedule.max_segments;
        const auto blocks = [&](int groups, int rows) { return ceil_div(rows, groups * kGroupRows); };
        const auto map_blocks = [&](int groups) {
            return kMaps && kDelta && p.wants_m ? blocks(groups, a.key_dim) : 0;
        };
        int groups = plan.policy.warps / kGroupWarps;
        // Maps have the rows of M besides: two warpgroups a CTA where one would take twice the rounds.
        if (map_blocks(1) && columns * (blocks(1, a.value_dim) + map_blocks(1)) > call.multiprocessors)
            groups = kMaxGroups;
        const int row_blocks = blocks(groups, a.value_dim) + map_blocks(groups);
        p.value_blocks = blocks(groups, a.value_dim), p.row_blocks = divisor(row_blocks);
        const auto shared_bytes = [&] {
            return carry_shared_bytes<T, kKey, kDelta, kPerChannel, kMaps>(groups, p.stages);
        };
        for (p.stages = kMaxStages; shared_bytes() > call.shared_bytes_limit;) --p.stages;
        constexpr bool kScores = kMakesScores<kDelta, kPerChannel>;
        // Row blocks of one head read the same images: a cluster fetches them once.
        p.cluster = kScores ? 1 : row_blocks % 4 == 0 ? 4 : row_blocks % 2 == 0 ? 2 : 1;
        cuda::launch<carry<T, kKey, kDelta, kPerChannel, kMaps>>(
            shape({.blocks = static_cast<std::size_t>(row_blocks * columns),
                   .threads = (groups + kHelperGroups<kScores>)*kGroupThreads,
                   .shared_bytes = shared_bytes(),
                   .most_shared_bytes = call.shared_bytes_limit,
                   .cluster = p.cluster}),
            call.stream, a, schedule, plan.images, p, row_maps(a, kDtype<T>, !kPerChannel, !kMaps, kTokens<kKey>));
    }
};

template <class T, int kKey, bool kPerChannel>
std::size_t prefill_workspace_bytes(const Call& call) {
    return PrefillPlan<WarpgroupCarry<T, kKey, kPerChannel>>(call).workspace_bytes();
}

template <class T, int kKey, bool kPerChannel>
std::size_t prefill_kept_bytes(const Call& call) {
    return PrefillPlan<WarpgroupCarry<T, kKey, kPerChannel>>(call).kept_bytes();
}

template <class T, int kKey, bool kPerChannel>
void launch_prefill(const Call& call) {
    launch_slabs<WarpgroupCarry<T, kKey, kPerChannel>>(call);
}

}  // namespace cula::cuda::sm90
