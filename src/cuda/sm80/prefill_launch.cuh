// SPDX-License-Identifier: Apache-2.0
// The chunked prefill on any GPU: the launches that all carries share (chunked/launch.cuh), with the carry of
// sm80/carry.cuh.
#pragma once

#include "cuda/chunked/launch.cuh"
#include "cuda/sm80/carry.cuh"

namespace cula::cuda::sm80 {

using chunked::ceil_div, chunked::CutCosts, chunked::divisor, chunked::launch_slabs, chunked::NoGateTiles,
    chunked::NotFused, chunked::PrefillPlan;

template <class T, int kKeyDim, bool kDecayPerChannel>
struct PortableCarry {
    using Type = T;
    static constexpr int kKey = kKeyDim, kWarpStep = 1;
    static constexpr bool kPerChannel = kDecayPerChannel, kPreparesAdditive = false, kWaitsItself = false;

    using GateTiles = NoGateTiles;
    static GateTiles gate_tiles(const DeviceArgs&) { return {}; }
    using Fused = NotFused;

    // No costs: sequences are cut into equal segments wherever at least three segments fit the device
    // (kLeastSegments), since a cut costs more than twice the carry of the whole sequence.
    static constexpr CutCosts cut_costs(bool) { return {}; }

    template <Update kUpdate, bool kMaps, class ShapeOf>
    static void launch(const Call& call, const PrefillPlan<PortableCarry>& plan, const Schedule& schedule,
                       CarryParams p, const ShapeOf& shape) {
        const DeviceArgs& a = call.args;
        using Stage = CarryStage<T, kKey, kPerChannel>;
        p.value_blocks = plan.policy.row_blocks;
        p.row_blocks = divisor(p.value_blocks + (kMaps && !has_diagonal_map(kUpdate) && p.wants_m
                                                     ? ceil_div(a.key_dim, plan.policy.warps * kWarpRows)
                                                     : 0));
        p.stages = 2 * sizeof(Stage) <= call.shared_bytes_limit ? 2 : 1;
        cuda::launch<carry<T, kKey, kUpdate, kPerChannel, kMaps>>(
            shape({std::size_t{p.row_blocks.value} * a.value_heads * schedule.max_segments,
                   plan.policy.warps * 32, p.stages * sizeof(Stage)}),
            call.stream, a, schedule, plan.operands, p);
    }
};

template <class T, int kKey, bool kPerChannel>
std::size_t prefill_workspace_bytes(const Call& call) {
    return PrefillPlan<PortableCarry<T, kKey, kPerChannel>>::of(call).workspace_bytes();
}

template <class T, int kKey, bool kPerChannel>
std::size_t prefill_kept_bytes(const Call& call) {
    return PrefillPlan<PortableCarry<T, kKey, kPerChannel>>::of(call).kept_bytes();
}

template <class T, int kKey, bool kPerChannel>
void launch_prefill(const Call& call) {
    launch_slabs<PortableCarry<T, kKey, kPerChannel>>(call);
}

}  // namespace cula::cuda::sm80
