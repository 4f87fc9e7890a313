// SPDX-License-Identifier: Apache-2.0
// The chunked backward on any GPU: the launches that all walks share (backward/launch.cuh), with those of
// carry.cuh and return.cuh.
#pragma once

#include "cuda/backward/launch.cuh"
#include "cuda/sm80/carry.cuh"
#include "cuda/sm80/launch.h"

namespace cula::cuda::sm80 {

template <class T, int kKeyDim, bool kDecayPerChannel>
struct PortableWalks {
    using Type = T;
    static constexpr int kKey = kKeyDim;
    static constexpr bool kPerChannel = kDecayPerChannel;

    static chunked::CarryTraits traits(const Problem& problem) {
        return {.operand_bytes = sizeof(ChunkOperands<T, kKey, kPerChannel>),
                .family = family(problem.algorithm, problem.gate),
                .chunk_tokens = kTokens<kKey>};
    }

    template <Update kUpdate, bool kMaps>
    static void launch(const backward::WalkLaunch<T, kKey, kPerChannel>& of, const WalkParams<T, kKey>& p) {
        launch_as<kUpdate, kMaps ? CarryMode::kWalkMaps : CarryMode::kSaves>(of, p);
    }
    template <Update kUpdate>
    static void launch_saving_prefill(const backward::WalkLaunch<T, kKey, kPerChannel>& of,
                                      const WalkParams<T, kKey>& p) {
        launch_as<kUpdate, CarryMode::kKeeps>(of, p);
    }

private:
    template <Update kUpdate, CarryMode kMode>
    static void launch_as(const backward::WalkLaunch<T, kKey, kPerChannel>& of, WalkParams<T, kKey> p) {
        using Stage = CarryStage<T, kKey, kPerChannel>;
        constexpr bool kMaps = makes_maps(kMode);
        const int threads = of.rows.warps * 32;
        const int blocks_of_m = kMaps && !has_diagonal_map(kUpdate)
                                    ? chunked::ceil_div(of.a.key_dim, of.rows.warps * kWarpRows)
                                    : 0;
        const std::size_t directions = returns_too(kMode) ? p.directions(kMaps) : 1;
        p.value_blocks = of.rows.blocks;
        p.row_blocks = chunked::divisor(p.value_blocks + blocks_of_m);
        p.stages = 2 * sizeof(Stage) <= of.call.shared_bytes_limit ? 2 : 1;
        cuda::launch<carry<T, kKey, kUpdate, kPerChannel, kMode>>(
            of.early({directions * p.row_blocks.value * of.a.value_heads * of.schedule.max_segments, threads,
                      p.stages * sizeof(Stage)}),
            of.call.stream, of.a, of.schedule, of.operands, p);
    }
};

template <class T, int kKey, bool kPerChannel>
PreparedPtr prepare_backward(const Problem& problem, const Args& args, const BackwardLimits& limits,
                             chunked::StrategyKind wanted) {
    return backward::prepare_backward<PortableWalks<T, kKey, kPerChannel>>(problem, args, limits, wanted);
}

template <class T, int kKey, bool kPerChannel>
Saving saving(const Problem& problem) {
    return backward::saving<PortableWalks<T, kKey, kPerChannel>>(problem);
}

}  // namespace cula::cuda::sm80
