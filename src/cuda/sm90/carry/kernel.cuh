// SPDX-License-Identifier: Apache-2.0
// carry on Hopper: o, final states <- chunk images, v, initial states; or the affine maps of segments
//
// ALGORITHM.md: read, output, carry.  grid (row blocks * value heads * segments), clusters of row blocks
// warpgroups of 64 value rows, and one that copies
//
// The equations, and what a warp holds, are those of sm80/carry.cuh. Products are a warpgroup's and run on
// their own, with every second operand in shared memory as prepare left it (multiplier.cuh); images come by
// bulk copies, each CTA of the cluster a part of it for all, values, q and k as boxes, and so do outputs
// leave (copier.cuh). Additive algorithms with one decay per token have no prepare but a warpgroup for it
// (scorer.cuh).
#pragma once

#include "cuda/ptx/pdl.cuh"
#include "cuda/sm90/carry/load_store_roles.cuh"
#include "cuda/sm90/carry/score_role.cuh"
#include "cuda/sm90/carry/state_role.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, bool kDelta, bool kPerChannel, bool kMaps>
__global__ void __launch_bounds__(kMaxCarryThreads<kMakesScores<kDelta, kPerChannel>>, 1)
    carry(const __grid_constant__ DeviceArgs a, const Schedule schedule,
          const ChunkOperands<T, kKey, kPerChannel>* operands, const __grid_constant__ CarryParams p,
          const __grid_constant__ RowMaps maps) {
    using Layout = StageLayout<T, kKey, kDelta, kPerChannel, kMaps>;
    using F = Factors<kKey, kPerChannel>;
    constexpr bool kScores = kMakesScores<kDelta, kPerChannel>;
    extern __shared__ __align__(1024) unsigned char memory[];

    const int thread = static_cast<int>(threadIdx.x),
              warp = static_cast<int>(wgmma::uniform(threadIdx.x / 32));
    const int warpgroups = static_cast<int>(blockDim.x) / kWarpgroupThreads - kHelperWarpgroups<kScores>;
    const int role = warp / kWarpgroupWarps - warpgroups;  // negative: multiplies
    unsigned char* const outs = memory + p.stages * Layout::bytes(warpgroups);
    auto& barriers = carry_barriers<T, kKey, kDelta, kPerChannel, kMaps>(memory, p.stages, warpgroups);
    auto* const factors = reinterpret_cast<F*>(&barriers + 1);
    const std::uint32_t full = shared_address(barriers.operands_ready),
                        empty = shared_address(barriers.operands_free);
    for (int stage = 0; stage < p.stages; ++stage)
        Layout::clear_upper(memory + stage * Layout::bytes(warpgroups));
    fence_async_proxy();
    // What needs nothing of the kernels before comes while they end.
    if (thread == 0) {
        if (maps.inputs && !kPerChannel) tma_prefetch_map(maps.k);
        if (maps.inputs && !kPerChannel && !kMaps) tma_prefetch_map(maps.q);
        if (maps.inputs) tma_prefetch_map(maps.v);
        if (maps.outputs) tma_prefetch_map(maps.o);
        for (int stage = 0; stage < p.stages; ++stage) {
            init_barrier(full + stage * 8, 1 + kLoadThreads);
            init_barrier(empty + stage * 8, p.cluster * warpgroups * kWarpgroupThreads);
            init_barrier(shared_address(barriers.scores_ready + stage), kWarpgroupThreads);
        }
        for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
            init_barrier(shared_address(barriers.out_ready + warpgroup), kWarpgroupThreads);
            init_barrier(shared_address(barriers.out_free + warpgroup), kStoreThreads);
        }
        publish_barriers();
    }
    // When maps are done, those before them are, too. A first half needs no map, and what it needs the maps
    // have waited for, as other maps have. Who waits itself does so where images are fetched or the first
    // state is loaded. They all wait before they end.
    const auto needs_map = [&] {
        __threadfence();
        return segment_of(a, schedule, segment_number<kMaps>(a, schedule, p, static_cast<int>(blockIdx.x)))
                   .rank > 0;
    };
    const bool waits_itself = schedule.awaits_operands || schedule.awaits_states;
    const bool waits_last = kMaps ? p.beside_others : p.halves || waits_itself;
    if (kMaps && p.beside_others) {
        __threadfence();
        fence_async_global();  // images come by bulk copies
    } else if (kMaps) {
        pdl_wait();
        pdl_trigger();
    } else if (waits_itself) {
        pdl_trigger();
        __threadfence();
    } else if (!p.halves || needs_map()) {
        pdl_trigger_and_wait();
    }
    // From memory it is read alike by all, and a lane's place among the operands is not computed anew in
    // every chunk.
    if (warp == 0) {
        const Segment segment = own_segment<kKey, kMaps>(a, schedule, p);
        if (thread == 0) barriers.segment = segment;
    }
    __syncthreads();
    const SegmentCursor<kKey, kMaps> cursor(a, schedule, p, barriers.segment, role < 0 ? warp : 0,
                                            warpgroups * kWarpgroupWarps);
    if (role < 0) cursor.zero_skipped(schedule);
    if (cursor.nothing()) {
        if (waits_last) pdl_trigger_and_wait();
        return;
    }
    if (p.cluster > 1) sync_cluster();

    if (kScores && role == 0) {
        if constexpr (kScores) {
            lower_registers<kScoreRegisters>();
            ScoreRole<T, kKey, kMaps>{a, cursor, memory, factors, barriers, warpgroups, p.stages}.run();
        }
    } else if (role >= 0) {
        lower_registers<kLoadRegisters<kScores>>();
        const int copier = warp % kWarpgroupWarps;
        if (copier < kLoadThreads / 32) {
            const std::int64_t first =
                static_cast<std::int64_t>(cursor.segment.slot) * a.value_heads + cursor.value_head;
            const LoadRole<T, kKey, kDelta, kPerChannel, kMaps> fetcher{
                a,       maps,     cursor,     operands + first, p.is_compensated + first, memory,
                factors, barriers, warpgroups, p.stages,         schedule.per_chunk};
            if (!kMaps && schedule.awaits_operands && !schedule.per_chunk) pdl_wait();
            fetcher.run();
        } else if (maps.outputs) {
            if constexpr (!kMaps) StoreRole<T, kKey>{a, maps.o, cursor, outs, barriers, warpgroups}.run();
        }
    } else {
        raise_registers<kStateRegisters<kScores>>();
        if (!kMaps && schedule.awaits_states) pdl_wait();
        StateRole<T, kKey, kDelta, kPerChannel, kMaps> multiplier{a,      schedule, p,        maps,
                                                                  memory, outs,     barriers, warpgroups};
        multiplier.run(cursor);
    }
    if (p.cluster > 1) sync_cluster();
    if (waits_last) pdl_trigger_and_wait();
}

}  // namespace cula::cuda::sm90
