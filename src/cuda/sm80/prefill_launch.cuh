// SPDX-License-Identifier: Apache-2.0
// The chunked prefill on any GPU: the launches that all carries share (chunked/launch.cuh), with the carry of
// sm80/carry.cuh. And the walks of a backward call that are such prefills, reversed (backward/three_walks.h).
#pragma once

#include "cuda/chunked/launch.cuh"
#include "cuda/sm80/carry.cuh"
#include "cuda/sm80/launch.h"

namespace cula::cuda::sm80 {

using chunked::CarryRows;
using chunked::ceil_div;
using chunked::divisor;
using chunked::NoGateTiles;
using chunked::rows_of;
using chunked::SlabOf;
using chunked::StrategyKind;

// kFromLast: from the last token to the first.
template <class T, int kKeyDim, bool kDecayPerChannel, bool kFromLast = false>
struct PortableCarry {
    using Type = T;
    static constexpr std::string_view kTarget = "sm80";
    static constexpr double kFirstApart = 1.0;
    static constexpr int kKey = kKeyDim, kWarpStep = 1;
    static constexpr bool kPerChannel = kDecayPerChannel, kScoresItself = false, kWaitsItself = false,
                          kWarpgroups = false, kFirstBesideMaps = false, kReversed = kFromLast;

    using GateTiles = NoGateTiles;
    static GateTiles gate_tiles(const DeviceArgs&) { return {}; }

    static constexpr bool kFuses = false;
    static bool fuses(const Problem&) { return false; }
    static std::string declines_fused(const Args&) { return "there is no fused kernel"; }
    static void launch_fused(const SlabOf<PortableCarry>&, const CarryParams&) {}

    template <Update kUpdate, bool kMaps>
    static void launch(const SlabOf<PortableCarry>& slab, CarryParams p) {
        const Call& call = slab.call;
        const DeviceArgs& a = call.args;
        using Stage = CarryStage<T, kKey, kPerChannel>;
        const CarryRows rows = rows_of(slab.plan.strategy);
        p.value_blocks = rows.blocks;
        p.row_blocks = divisor(p.value_blocks + (kMaps && !has_diagonal_map(kUpdate) && p.wants_m
                                                     ? ceil_div(a.key_dim, rows.warps * kWarpRows)
                                                     : 0));
        p.stages = 2 * sizeof(Stage) <= call.shared_bytes_limit ? 2 : 1;
        cuda::launch<carry<T, kKey, kUpdate, kPerChannel, mode_of(kMaps)>>(
            slab.early({std::size_t{p.row_blocks.value} * a.value_heads * slab.schedule.max_segments,
                        rows.warps * 32, p.stages * sizeof(Stage)}),
            call.stream, a, slab.schedule, slab.operands, p);
    }

private:
    static constexpr CarryMode mode_of(bool maps) {
        if (kReversed) return maps ? CarryMode::kReversedMaps : CarryMode::kReversedOutputs;
        return maps ? CarryMode::kMaps : CarryMode::kOutputs;
    }
};

template <class T, int kKey, bool kPerChannel>
chunked::Candidates prefill_candidates(const Problem& problem) {
    return chunked::prefill_candidates<PortableCarry<T, kKey, kPerChannel>>(problem);
}

template <class T, int kKey, bool kPerChannel>
PreparedCallPtr prepare_prefill(const Problem& problem, const Args& args, StrategyKind wanted) {
    return chunked::prepare_prefill<PortableCarry<T, kKey, kPerChannel>>(problem, args, wanted);
}

template <class T, int kKey>
PreparedCallPtr prepare_reversed_walk(const Problem& problem) {
    return chunked::prepare_as<PortableCarry<T, kKey, false, true>, Update::kAdditive>(problem, Args{},
                                                                                       StrategyKind::kAny);
}

}  // namespace cula::cuda::sm80
