// SPDX-License-Identifier: Apache-2.0
// The chunked prefill on any GPU: the launches that all carries share (chunked/launch.cuh), with the carry of
// sm80/carry.cuh. And the walks of a backward call that are such prefills, reversed (backward/three_walks.h).
// And the prefill of tokens that write several times.
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

// What a carry walks over.
enum class Over : std::uint8_t {
    kTokens,
    kReversedTokens,  // from the last to the first
    kWrites,          // of tokens that write several times
};

template <class T, int kKeyDim, bool kDecayPerChannel, Over kOver = Over::kTokens>
struct PortableCarry {
    using Type = T;
    static constexpr std::string_view kTarget = "sm80";
    static constexpr double kFirstApart = 1.0;
    static constexpr int kKey = kKeyDim, kWarpStep = 1;
    static constexpr bool kPerChannel = kDecayPerChannel, kScoresItself = false, kWaitsItself = false,
                          kWarpgroups = false, kFirstBesideMaps = false,
                          kReversed = kOver == Over::kReversedTokens, kSeveral = kOver == Over::kWrites;

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
        if (maps) return CarryMode::kMaps;  // which needs no more than rows
        return kSeveral ? CarryMode::kOutputsOfSeveral : CarryMode::kOutputs;
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
    return chunked::prepare_as<PortableCarry<T, kKey, false, Over::kReversedTokens>, Update::kAdditive>(
        problem, Args{}, StrategyKind::kAny);
}

template <class T, int kKey>
PreparedCallPtr prepare_several(const Problem& problem, const Args& args, StrategyKind wanted) {
    return chunked::prepare_as<PortableCarry<T, kKey, false, Over::kWrites>, kKernelsOf<Update::kProduct>>(
        problem, args, wanted);
}

}  // namespace cula::cuda::sm80
