// SPDX-License-Identifier: Apache-2.0
// carry on Hopper: o, final states <- chunk images, v, initial states; or the affine maps of segments
//
// ALGORITHM.md: read, output, carry.  grid (row blocks * value heads * segments), clusters of row blocks   warpgroups
// of 64 value rows, and one that copies
//
// The equations, and what a warp holds, are those of sm80/carry.cuh. Products are a warpgroup's and run on their own,
// with every second operand in shared memory as prepare left it (multiplier.cuh); images come by bulk copies, each CTA
// of the cluster a part of it for all, values, q and k as boxes, and so do outputs leave (copier.cuh). Additive
// algorithms with one decay per token have no prepare but a warpgroup for it (scorer.cuh).
#pragma once

#include "cuda/ptx/overlap.cuh"
#include "cuda/sm90/carry/copier.cuh"
#include "cuda/sm90/carry/multiplier.cuh"
#include "cuda/sm90/carry/scorer.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, bool kDelta, bool kPerChannel, bool kMaps>
__global__ void __launch_bounds__(kMaxCarryThreads<kMakesScores<kDelta, kPerChannel>>, 1)
    carry(const __grid_constant__ DeviceArgs a, const Schedule schedule, const Image<T, kKey, kPerChannel>* images,
          const __grid_constant__ CarryParams p, const __grid_constant__ RowMaps maps) {
    using S = Stage<T, kKey, kDelta, kPerChannel, kMaps>;
    using F = Factors<kKey, kPerChannel>;
    constexpr bool kScores = kMakesScores<kDelta, kPerChannel>;
    extern __shared__ __align__(1024) unsigned char memory[];

    const int thread = static_cast<int>(threadIdx.x), warp = static_cast<int>(wgmma::uniform(threadIdx.x / 32));
    const int groups = static_cast<int>(blockDim.x) / kGroupThreads - kHelperGroups<kScores>;
    const int role = warp / kGroupWarps - groups;  // negative: multiplies
    unsigned char* const outs = memory + p.stages * S::bytes(groups);
    auto& barriers = carry_barriers<T, kKey, kDelta, kPerChannel, kMaps>(memory, p.stages, groups);
    auto* const factors = reinterpret_cast<F*>(&barriers + 1);
    const std::uint32_t full = shared_address(barriers.full), empty = shared_address(barriers.empty);
    for (int stage = 0; stage < p.stages; ++stage) S::clear_upper(memory + stage * S::bytes(groups));
    fence_async_proxy();
    // What needs nothing of the kernels before comes while they end.
    if (thread == 0) {
        if (maps.inputs && !kPerChannel) prefetch_map(maps.k);
        if (maps.inputs && !kPerChannel && !kMaps) prefetch_map(maps.q);
        if (maps.inputs) prefetch_map(maps.v);
        if (maps.outputs) prefetch_map(maps.o);
        for (int stage = 0; stage < p.stages; ++stage) {
            init_barrier(full + stage * 8, 1 + kFetchThreads);
            init_barrier(empty + stage * 8, p.cluster * groups * kGroupThreads);
            init_barrier(shared_address(barriers.made + stage), kGroupThreads);
        }
        for (int group = 0; group < groups; ++group) {
            init_barrier(shared_address(barriers.turned + group), kGroupThreads);
            init_barrier(shared_address(barriers.taken + group), kPutThreads);
        }
        publish_barriers();
    }
    // When maps are done, those before them are, too. A first half needs no map, and what it needs the maps have waited
    // for, as other maps have. Who waits itself does so where images are fetched or the first state is loaded. They all
    // wait before they end.
    const auto needs_map = [&] {
        __threadfence();
        return segment_of(a, schedule, segment_number<kMaps>(a, schedule, p, static_cast<int>(blockIdx.x))).rank > 0;
    };
    const bool waits_itself = schedule.awaits_images || schedule.awaits_states;
    const bool waits_last = kMaps ? p.beside_others : p.halves || waits_itself;
    if (kMaps && p.beside_others) {
        __threadfence();
        fence_async_global();  // images come by bulk copies
    } else if (kMaps) {
        wait_for_kernels();
        lead_kernel();
    } else if (waits_itself) {
        lead_kernel();
        __threadfence();
    } else if (!p.halves || needs_map()) {
        follow_kernels();
    }
    // From memory it is read alike by all, and a lane's place among the operands is not computed anew in every chunk.
    if (warp == 0) {
        const Segment segment = own_segment<kKey, kMaps>(a, schedule, p);
        if (thread == 0) barriers.segment = segment;
    }
    __syncthreads();
    const Walk<kKey, kMaps> walk(a, schedule, p, barriers.segment, role < 0 ? warp : 0, groups * kGroupWarps);
    if (role < 0) walk.zero_skipped(schedule);
    if (walk.nothing()) {
        if (waits_last) follow_kernels();
        return;
    }
    if (p.cluster > 1) sync_cluster();

    if (kScores && role == 0) {
        if constexpr (kScores) {
            lower_registers<kScoreRegisters>();
            Scorer<T, kKey, kMaps>{a, walk, memory, factors, barriers, groups, p.stages}.run();
        }
    } else if (role >= 0) {
        lower_registers<kCopyRegisters<kScores>>();
        const int copier = warp % kGroupWarps;
        if (copier < kFetchThreads / 32) {
            const std::int64_t first = static_cast<std::int64_t>(walk.segment.image) * a.value_heads + walk.value_head;
            const Fetcher<T, kKey, kDelta, kPerChannel, kMaps> fetcher{
                a,       maps,     walk,   images + first, p.exact_writes + first, memory,
                factors, barriers, groups, p.stages,       schedule.per_chunk};
            if (!kMaps && schedule.awaits_images && !schedule.per_chunk) wait_for_kernels();
            fetcher.run();
        } else if (maps.outputs) {
            if constexpr (!kMaps) Putter<T, kKey>{a, maps.o, walk, outs, barriers, groups}.run();
        }
    } else {
        raise_registers<kMultiplyRegisters<kScores>>();
        if (!kMaps && schedule.awaits_states) wait_for_kernels();
        Multiplier<T, kKey, kDelta, kPerChannel, kMaps> multiplier{a,      schedule, p,        maps,
                                                                   memory, outs,     barriers, groups};
        multiplier.run(walk);
    }
    if (p.cluster > 1) sync_cluster();
    if (waits_last) follow_kernels();
}

}  // namespace cula::cuda::sm90
