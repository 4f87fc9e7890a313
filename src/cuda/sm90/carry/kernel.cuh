// SPDX-License-Identifier: Apache-2.0
// The carry on Hopper: outputs and final states from chunk operands, values and initial states; or, with
// kMaps, the affine map (M, B) of each segment. A Saver stores S before every chunk and U besides, for a
// backward pass (walks/carry_saver.cuh). Design page: docs/design/carry-sm90.md.
//
// Equation. A chunk of C = 64 tokens; S is the recurrent state [V, K]; R, U, O and V are [V, C]:
//   read     R = S K^^T         U = (V - R) T^T       additive algorithms: U = V
//   output   O = S Q~^T + U A^T                       not for maps
//   carry    S = S diag(decay) + U K+
// With one decay per token K^, K+ and Q~ are k and q as they came, and factors per token multiply the columns
// of R, S q^T and U instead. Maps: B is the final S from zero; M is the final S from the identity where all
// values are zero. (ALGORITHM.md writes the transposes.)
//
// Kernels that make the scores themselves may be launched reversed (DeviceArgs), for walks of a backward
// call: from the last chunk of a sequence to its first, with A an upper triangle. Only the segment cursor and
// the score role know.
//
// By the delta rule with one decay per token, or none, tokens may write several times. A chunk is then 64
// rows of writes, of which those that are a token's last read and store O (design page:
// docs/design/several-writes-cuda.md).
//
// Grid: row blocks x value heads x segments, row blocks fastest. A row block is 64 or 128 value rows; for
// maps of delta rules further row blocks are rows of M. Clusters of 1, 2 or 4 row blocks of one head share
// the copies of chunk operands.
//
// Roles: w = 1 or 2 state warpgroups. (s): kernels with a score warpgroup, additive with one decay per token.
//   role    threads  registers    waits for                         signals
//   state   128 w    216, 176 (s) operands.ready, scores_ready (s), operands.free of all CTAs of the
//                                 out.free                          cluster, out.ready
//   score   128 (s)  96           operands.ready                    scores_ready
//   load    96       72, 64 (s)   operands.free                     operands.ready
//   store   32       72, 64 (s)   out.ready                         out.free
//
// Barriers: mbarriers in shared memory (CarryControl), named after what may be read or overwritten.
//   barrier                  arrivals that complete a phase
//   operands.ready[stage]    1 + 96 load threads, and the bytes of all bulk and TMA copies
//   operands.free[stage]     128 w x cluster size state threads
//   scores_ready[stage]      128 score threads
//   out.ready[warpgroup]     128 state threads
//   out.free[warpgroup]      32 store threads
// Named barriers: CarryNamedBarrier. barrier.cluster synchronises the CTAs of a cluster at the
// start, so that all mbarriers are initialised before their first use, and at the end, so that no CTA exits
// while others multicast to it or arrive at its barriers.
//
// Shared memory, K = 128: as many stages as fit 227 KiB, at most four. KiB a stage, stages, for w = 1; 2:
//                                   prefill                 maps
//   delta, decay per channel        72, three; 80, two      48, four; 56, four
//   delta, decay per token          56, three; 64, three    32, four; 40, four
//   additive                        48, four;  56, three    24, four; 32, four
// Besides, 8 KiB of outputs per state warpgroup (not for maps), 0.5 or 1 KiB of factors per stage, and 1 KiB
// of barriers. Maps of a delta rule with decay per channel, w = 2, take 227 KiB exactly.
//
// Registers: at most 168 per thread at the start, 128 with a score warpgroup (__launch_bounds__ of the
// largest CTA); setmaxnreg then moves them to the state role.
//
// PDL (programmatic dependent launch). Every CTA waits for the kernels before it, at the latest before it
// exits, so that a kernel which waits for this one has waited for them as well. When it waits and triggers:
//   maps, carry of first segments   wait, then trigger: the next kernel starts after prepare has ended
//   maps, beside_others             wait at the end: the launch before has other maps or first segments, and
//                                   started when prepare had ended
//   carry after prepare             trigger; the load role waits before its first copy (CarryWaits), or
//                                   polls a flag per chunk (per_chunk); all wait at the end
//   carry after compose             trigger; the state role waits before its first state (CarryWaits); all
//                                   wait at the end
//   carry of halves, first segment  no wait before the end: it needs no map, and the maps' kernel had waited
//                                   for prepare before it triggered this one
//   any other                       trigger, wait
#pragma once

#include "cuda/ptx/pdl.cuh"
#include "cuda/sm90/carry/load_store_roles.cuh"
#include "cuda/sm90/carry/score_role.cuh"
#include "cuda/sm90/carry/state_role.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kMaps, class Saver = NoSaver>
__global__ void __launch_bounds__(kMaxCarryThreads<kMakesScores<kReadsState, kPerChannel>>, 1)
    carry(const __grid_constant__ DeviceArgs a, const Schedule schedule,
          const ChunkOperands<T, kKey, kPerChannel>* operands,
          const __grid_constant__ typename Saver::Params p, const __grid_constant__ CarryMaps maps) {
    constexpr bool kScores = kMakesScores<kReadsState, kPerChannel>;
    extern __shared__ __align__(1024) unsigned char memory[];

    const int thread = static_cast<int>(threadIdx.x),
              warp = static_cast<int>(wgmma::uniform(threadIdx.x / 32));
    const int warpgroups = static_cast<int>(blockDim.x) / kWarpgroupThreads - kHelperWarpgroups<kScores>;
    const int role = warp / kWarpgroupWarps - warpgroups;  // negative: state
    const CarryShared<T, kKey, kReadsState, kPerChannel, kMaps> shared(memory, p.stages, warpgroups);
    CarryControl& control = shared.control;
    for (int stage = 0; stage < p.stages; ++stage) shared.stage(stage).clear_squares();
    fence_async_proxy();
    // Setup that reads nothing of the kernels before runs before the PDL wait, while they end.
    if (thread == 0) {
        if (maps.inputs && !kPerChannel) tma_prefetch_map(maps.k);
        if (maps.inputs && !kPerChannel && !kMaps) tma_prefetch_map(maps.q);
        if (maps.inputs) tma_prefetch_map(maps.v);
        if (maps.outputs) tma_prefetch_map(maps.o);
        for (int stage = 0; stage < p.stages; ++stage) {
            control.operands.ready[stage].init(1 + kLoadThreads);
            control.operands.free[stage].init(p.cluster * warpgroups * kWarpgroupThreads);
            control.scores_ready[stage].init(kWarpgroupThreads);
        }
        for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
            control.out.ready[warpgroup].init(kWarpgroupThreads);
            control.out.free[warpgroup].init(kStoreThreads);
        }
        publish_barriers();
    }
    // PDL, as listed at the top of this file. The map kernel has itself waited for prepare, so waiting for it
    // is enough. Where there is no wait here, fences keep this CTA from reading stale lines: of the L1 cache,
    // and by bulk copies of chunk operands, which go through the async proxy.
    const auto acquire = [] {
        __threadfence();
        fence_async_global();
    };
    const auto needs_map = [&] {
        acquire();
        return segment_of(a, schedule, segment_number<kMaps>(a, schedule, p, static_cast<int>(blockIdx.x)))
                   .rank > 0;
    };
    const bool waits_itself = schedule.waits.operands || schedule.waits.states;
    const bool waits_last = kMaps ? p.beside_others : p.halves || waits_itself;
    if (kMaps && p.beside_others) {
        acquire();
    } else if (kMaps) {
        pdl_wait();
        pdl_trigger();
    } else if (waits_itself) {
        pdl_trigger();
        acquire();
    } else if (p.first_only) {  // the maps beside it do not wait for prepare
        pdl_wait();
        pdl_trigger();
    } else if (!p.halves || needs_map()) {
        pdl_trigger_and_wait();
    }
    // One warp finds the segment and all read it from shared memory. From registers, ptxas recomputes a
    // lane's operand addresses in every chunk (GDN's loop: 874 instructions instead of 838).
    if (warp == 0) {
        const Segment segment = own_segment<kKey, kMaps>(a, schedule, p);
        if (thread == 0) control.segment = segment;
    }
    __syncthreads();
    const CarryCursor<kKey, kReadsState, kPerChannel, kMaps> cursor(
        a, schedule, p, control.segment, role < 0 ? warp : 0, warpgroups * kWarpgroupWarps);
    if (role < 0) cursor.template zero_skipped<kSeveral<kReadsState, kPerChannel>>(schedule);
    // nothing() must be uniform in a cluster, whose CTAs meet in sync_cluster() below: they are row blocks of
    // one segment and head, and differ only in `of_m`. Of that nothing() asks where first_m is false, and a
    // launch of such maps has rows of M or first segments, not both.
    if (cursor.nothing()) {
        if (waits_last) pdl_trigger_and_wait();
        return;
    }
    if (p.cluster > 1) sync_cluster();

    if (kScores && role == 0) {
        if constexpr (kScores) {
            lower_registers<kScoreRegisters>();
            ScoreRole<T, kKey, kMaps>{a, cursor, shared, p.stages}.run();
        }
    } else if (role >= 0) {
        lower_registers<kLoadRegisters<kScores>>();
        if (warp % kWarpgroupWarps < kLoadThreads / 32) {
            const std::int64_t first =
                static_cast<std::int64_t>(cursor.segment.slot) * a.value_heads + cursor.value_head;
            const LoadRole<T, kKey, kReadsState, kPerChannel, kMaps> load{a,
                                                                          maps,
                                                                          cursor,
                                                                          operands + first,
                                                                          p.is_compensated + first,
                                                                          shared,
                                                                          p.stages,
                                                                          schedule.waits.per_chunk};
            if (!kMaps && schedule.waits.operands && !schedule.waits.per_chunk) pdl_wait();
            load.run();
        } else if (maps.outputs) {
            if constexpr (!kMaps)
                StoreRole<T, kKey, kReadsState, kPerChannel>{a, maps.o, cursor, shared}.run();
        }
    } else {
        raise_registers<kStateRegisters<kScores>>();
        if (!kMaps && schedule.waits.states) pdl_wait();
        StateRole<T, kKey, kReadsState, kPerChannel, kMaps, Saver>{a, schedule, p, maps, shared}.run(cursor);
    }
    if (p.cluster > 1) sync_cluster();
    if (waits_last) pdl_trigger_and_wait();
}

}  // namespace cula::cuda::sm90
