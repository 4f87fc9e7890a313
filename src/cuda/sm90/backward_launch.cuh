// SPDX-License-Identifier: Apache-2.0
// The chunked backward on Hopper: the launches that all walks share (backward/launch.cuh), with those of
// sm90/walks.
#pragma once

#include "cuda/backward/launch.cuh"
#include "cuda/sm90/carry/launch.cuh"
#include "cuda/sm90/gradients/launch.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/walks/carry_saver.cuh"
#include "cuda/sm90/walks/kernel.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKeyDim, bool kDecayPerChannel>
struct WarpgroupWalks {
    using Type = T;
    static constexpr int kKey = kKeyDim;
    static constexpr bool kPerChannel = kDecayPerChannel;

    static chunked::CarryTraits traits(const Problem& problem) {
        return {.warp_step = kWarpgroupWarps,
                .operand_bytes = sizeof(ChunkOperands<T, kKey, kPerChannel>),
                .warpgroups = true,
                .family = family(problem.algorithm, problem.gate),
                .chunk_tokens = kTokens<kKey>};
    }

    // Whether this target has gradients of its own.
    template <Update kUpdate>
    static constexpr bool kDifferentiates = gradients::DifferentiatedRule<kUpdate>::kHas && !kPerChannel &&
                                            kKey == 128 && std::is_same_v<T, __nv_bfloat16>;
    template <Update kUpdate>
    static void launch_gradients(const backward::WalkLaunch<T, kKey, kPerChannel>& of,
                                 const WalkParams<T, kKey>& p, const backward::GradientScratch& scratch,
                                 const backward::FromRows& rows, bool several) {
        gradients::launch_token<T>(of.call, of.a, of.schedule, p.d, p.saved, scratch, rows, of.early,
                                   several);
    }

    // Whether gradient kernels may read dV and dO from the tensors of a call, if its tokens write once; and
    // whether they do, by the maps that this encodes.
    template <Update kUpdate>
    static constexpr bool kMayReadRows =
        kPerChannel ? backward::kHasAnchored<T, kKey> : kDifferentiates<kUpdate>;
    template <Update kUpdate>
    static bool find_rows(backward::FromRows& rows, const backward::WalkLaunch<T, kKey, kPerChannel>& of,
                          const WalkParams<T, kKey>& p, const backward::GradientScratch& scratch) {
        if constexpr (kPerChannel)
            return gradients::find_anchored_rows<T>(rows, of.call, of.a, p.d, scratch, p.saved.count,
                                                    ReturnRule<kUpdate>::kSolves);
        else
            return gradients::find_token_rows<T>(rows, of.a, p.d);
    }
    // gradient_anchored of a slab, by rows.
    template <Update kUpdate>
    static void launch_anchored(const backward::WalkLaunch<T, kKey, kPerChannel>& of,
                                const WalkParams<T, kKey>& p, const backward::GradientScratch& scratch,
                                const backward::FromRows& rows, bool erases) {
        gradients::launch_anchored<T>(of.call, of.a, of.schedule, p.d, p.saved, scratch, rows, of.early,
                                      kUpdate, erases);
    }

    template <Update kUpdate, bool kMaps>
    static void launch(const backward::WalkLaunch<T, kKey, kPerChannel>& of, WalkParams<T, kKey> p) {
        constexpr bool kReadsState = CarryRule<kUpdate>::kReadsState;
        const Call& call = of.call;
        const int warpgroups = of.rows.warps / kWarpgroupWarps, rows = warpgroups * kWarpgroupRows;
        p.value_blocks = of.rows.blocks;
        p.row_blocks = chunked::divisor(p.value_blocks +
                                        (kMaps && kReadsState ? chunked::ceil_div(of.a.key_dim, rows) : 0));
        DeviceArgs back = of.a;
        back.v = p.d.d_o, back.o = p.d.d_v;

        WalkTiles tiles;
        const auto maps = [&](const DeviceArgs& a, bool returns) {
            return carry_maps(a, kDtype<T>,
                              {.keys = !kPerChannel,
                               .outputs = returns,
                               .rows = kTokens<kKey>,
                               .several = kSeveral<kReadsState, kPerChannel>,
                               .returns = returns});
        };
        tiles.forwards = maps(of.a, false);
        tiles.backwards = maps(back, true);
        if (kMaps) tiles.backwards.outputs = false;
        // Lowers `stages` to as many as fit; returns the bytes. buffer: bytes of a state warp that saves.
        const auto take_stages = [&](auto bytes, std::size_t buffer, int& stages) {
            const std::size_t buffers = kMaps ? 0 : of.rows.warps * buffer;
            while (bytes(warpgroups, stages) + buffers > call.shared_bytes_limit) --stages;
            return bytes(warpgroups, stages) + buffers;
        };
        if (!kMaps && p.directions(kMaps) == 2) tiles.stages_forwards = kStagesBesideReturn;
        const std::size_t forwards = take_stages(CarryShared<T, kKey, kReadsState, kPerChannel, true>::bytes,
                                                 StateBuffer<T, kKey>::kBytes, tiles.stages_forwards),
                          backwards =
                              take_stages(CarryShared<T, kKey, kReadsState, kPerChannel, false>::bytes,
                                          sizeof(ReturnBuffer<T, kKey, kReadsState>), tiles.stages_backwards);
        cuda::launch<walks<T, kKey, kUpdate, kPerChannel, kMaps>>(
            of.early({.blocks = p.directions(kMaps) * p.row_blocks.value * of.a.value_heads *
                                of.schedule.max_segments,
                      .threads = (warpgroups + 1) * kWarpgroupThreads,
                      .shared_bytes = std::max(forwards, backwards),
                      .most_shared_bytes = call.shared_bytes_limit}),
            call.stream, of.a, back, of.schedule, of.operands, p, tiles);
    }

    template <Update kUpdate>
    static void launch_saving_prefill(const backward::WalkLaunch<T, kKey, kPerChannel>& of,
                                      const WalkParams<T, kKey>& p) {
        constexpr bool kReadsState = CarryRule<kUpdate>::kReadsState;
        // Others have been declined (entry.cc): factors of their own would give S other bits than walks do.
        if constexpr (!kMakesScores<kReadsState, kPerChannel>)
            launch_carry<T, kKey, kReadsState, kPerChannel, false, CarrySaver<T, kKey>>(
                of.call, of.a, of.schedule, of.operands, p,
                CarryRowBlocks(of.a, of.rows.warps / kWarpgroupWarps, false),
                std::int64_t{of.a.value_heads} * of.schedule.max_segments,
                [&](const LaunchShape& shape) { return of.early(shape); });
    }
};

template <class T, int kKey, bool kPerChannel>
PreparedPtr prepare_backward(const Problem& problem, const Args& args, const backward::BackwardLimits& limits,
                             chunked::StrategyKind wanted) {
    return backward::prepare_backward<WarpgroupWalks<T, kKey, kPerChannel>>(problem, args, limits, wanted);
}

template <class T, int kKey, bool kPerChannel>
Saving saving(const Problem& problem) {
    return backward::saving<WarpgroupWalks<T, kKey, kPerChannel>>(problem);
}

}  // namespace cula::cuda::sm90
