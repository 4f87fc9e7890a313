// SPDX-License-Identifier: Apache-2.0
// The walks of a backward pass on Hopper: the carry, which stores S before every chunk and U, and the return,
// which stores Z after every chunk, dV and dO; or, with kMaps, the maps of segments of both. Equations:
// save_role.cuh, return_role.cuh. Design page: docs/design/backward-cuda.md.
//
// Grid: row blocks x value heads x segments, row blocks fastest; of neighbouring CTAs one walks forwards and
// one backwards. A row block is 64 or 128 value rows; for maps of delta rules further row blocks are rows of
// M, which the return does not have.
//
// Roles: w = 1 or 2 state warpgroups.
//   role    threads  registers  waits for                           signals
//   state   128 w    216        operands.ready, out.free (return)   operands.free, out.ready (return)
//   load    96       72         operands.free                       operands.ready
//   store   32       72         out.ready (return)                  out.free (return)
//
// Barriers: as in the carry (carry/kernel.cuh); there are no clusters. `out` of the return has a phase for
// every chunk and one more (return_role.cuh).
//
// Shared memory, K = 128: as many stages as fit 227 KiB, at most four; of a carry beside a return, two. KiB a
// stage, stages, for w = 1; 2:
//                                   carry                   return
//   delta, decay per channel        48, four; 56, three     72, two;   80, two
//   delta, decay per token          32, four; 40, four      56, three; 64, two
//   additive                        24, four; 32, four      48, four;  56, three
// Besides, of every state warp 4 KiB, where it puts together the S or Z that it stores, and of a return that
// solves 2 KiB more for dV; 8 KiB of dV by tokens per state warpgroup of the return; and the carry's factors
// and barriers.
//
// PDL: wait, then trigger.
#pragma once

#include "cuda/ptx/pdl.cuh"
#include "cuda/sm90/walks/return_role.cuh"
#include "cuda/sm90/walks/save_role.cuh"

namespace cula::cuda::sm90 {

// One walk of a CTA, whose number among those of its direction is `block`.
template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kMaps, bool kReturns>
__device__ __forceinline__ void walk(const DeviceArgs& a, const Schedule& schedule,
                                     const ChunkOperands<T, kKey, kPerChannel>* operands,
                                     const WalkParams<T, kKey>& p, const CarryMaps& maps, int stages,
                                     int block, unsigned char* memory) {
    constexpr bool kMapCursor = kMaps && !kReturns;
    const int thread = static_cast<int>(threadIdx.x),
              warp = static_cast<int>(wgmma::uniform(threadIdx.x / 32));
    const int warpgroups = static_cast<int>(blockDim.x) / kWarpgroupThreads - 1;
    const bool is_state = warp < warpgroups * kWarpgroupWarps;
    using Shared = CarryShared<T, kKey, kReadsState, kPerChannel, !kReturns>;
    const Shared shared(memory, stages, warpgroups);
    CarryControl& control = shared.control;
    const std::uint32_t buffers =
        shared_address(memory) + static_cast<std::uint32_t>(Shared::bytes(warpgroups, stages));
    for (int stage = 0; stage < stages; ++stage) shared.stage(stage).clear_squares();
    fence_async_proxy();
    if (thread == 0) {
        if (maps.inputs) tma_prefetch_map(maps.v);
        for (int stage = 0; stage < stages; ++stage) {
            control.operands.ready[stage].init(1 + kLoadThreads);
            control.operands.free[stage].init(warpgroups * kWarpgroupThreads);
        }
        for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
            control.out.ready[warpgroup].init(kWarpgroupThreads);
            control.out.free[warpgroup].init(kStoreThreads);
        }
        publish_barriers();
    }
    pdl_wait();
    pdl_trigger();
    if (warp == 0) {
        const Segment segment = own_segment<kKey, kMapCursor>(a, schedule, p, block);
        if (thread == 0) control.segment = segment;
    }
    __syncthreads();
    const CarryCursor<kKey, kReadsState, kPerChannel, kMapCursor> cursor(
        a, schedule, p, control.segment, is_state ? warp : 0, warpgroups * kWarpgroupWarps, block);
    const Segment& segment = cursor.segment;
    if (segment.sequence < 0) return;
    if constexpr (kReturns) {
        if (kMaps && (segment.rank == 0 || !p.walks_backwards ||
                      cursor.rows.first >= p.value_blocks * warpgroups * kWarpgroupRows))
            return;
    } else {
        if (cursor.nothing()) return;
        if (kMaps && kReadsState && !cursor.of_m && !p.walks_forwards) return;
    }
    if (is_state) {
        raise_registers<kWalkStateRegisters>();
        if constexpr (kReturns)
            ReturnRole<T, kKey, kReadsState, kPerChannel, kMaps>{
                a,      p,      cursor,
                shared, stages, buffers + warp * int{sizeof(ReturnBuffer<T, kKey, kReadsState>)}}
                .run();
        else
            SaveRole<T, kKey, kReadsState, kPerChannel, kMaps>{
                a, p, cursor, shared, stages, {buffers + warp * StateBuffer<T, kKey>::kBytes}}
                .run();
        return;
    }
    lower_registers<kWalkLoadRegisters>();
    if (warp % kWarpgroupWarps >= kLoadThreads / 32) {
        if constexpr (kReturns && !kMaps)
            ReturnStoreRole<T, kKey, kReadsState, kPerChannel>{a, p, maps, cursor, shared, buffers}.run();
        return;
    }
    // The load role of a carry without A and Q~ is that of maps.
    const CarryCursor<kKey, kReadsState, kPerChannel, !kReturns> of_loads(
        a, schedule, p, control.segment, 0, warpgroups * kWarpgroupWarps, block);
    const std::int64_t first = std::int64_t{segment.slot} * a.value_heads + cursor.value_head;
    WalkLoadRole<T, kKey, kReadsState, kPerChannel, kReturns>{
        {a, maps, of_loads, operands + first, p.is_compensated + first, shared, stages, false}}
        .run();
}

// `back` are the arguments of the return, whose values are dO and whose outputs are dV.
template <class T, int kKey, Update kUpdate, bool kPerChannel, bool kMaps>
__global__ void __launch_bounds__(kMaxWalkThreads, 1)
    walks(const __grid_constant__ DeviceArgs a, const __grid_constant__ DeviceArgs back,
          const Schedule schedule, const ChunkOperands<T, kKey, kPerChannel>* operands,
          const __grid_constant__ WalkParams<T, kKey> p, const __grid_constant__ WalkTiles tiles) {
    constexpr bool kReadsState = CarryRule<kUpdate>::kReadsState, kSolves = ReturnRule<kUpdate>::kSolves;
    extern __shared__ __align__(1024) unsigned char memory[];
    const int block = static_cast<int>(blockIdx.x), own = p.template own_block<kMaps>(block);
    if (p.template returns<kMaps>(block))
        walk<T, kKey, kSolves, kPerChannel, kMaps, true>(back, schedule, operands, p, tiles.backwards,
                                                         tiles.stages_backwards, own, memory);
    else
        walk<T, kKey, kReadsState, kPerChannel, kMaps, false>(a, schedule, operands, p, tiles.forwards,
                                                              tiles.stages_forwards, own, memory);
}

}  // namespace cula::cuda::sm90
