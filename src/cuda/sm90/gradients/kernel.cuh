// SPDX-License-Identifier: Apache-2.0
// gradient_token on Hopper, for rules that solve, 64 < K <= 128 and bfloat16: what
// backward/gradient_token.cuh says. Squares are rounded with norms as factors, for which float16 has not the
// range. docs/design/gradient-token-sm90.md says why it is built so.
//
// Persistent CTAs, each an item (a chunk of the slab and a head of q and k) after the other, and the value
// heads of that head one after another. A warpgroup has one product of the slices for all tokens and
// channels, so that shared memory gives every operand once:
//
//   role        threads  registers  has
//   reads       128      152        Y = dO S^T and dA = dO U^T; of all heads dq
//   removals    128      152        X = dV S^T and dL = dV U^T; norms of the next q and k, which they load
//                                   where value heads share them
//   writes      128      152        W = U Z^T; of all heads dk; q k^T and k k^T
//   gates       32       56         log decays; from paths d_g and d_beta
//   slices      32       56         finds items, asks for slices and tiles
//   through     64       56         sums S o Z; loads q and k where value heads do not share them
//
// Rings (mbarriers): items; slices; by rows (backward/saved.cuh) tiles of dV and dO; q and k, of the
// item after where value heads share nothing; log decays and paths of two value heads. Further mbarriers
// order the three warpgroups (config.cuh). After the last value head squares meet q and k: reads and removals
// multiply theirs from registers, and writes their transposes from shared memory, where they take the place
// of pairs. Norms are factors of the squares, so q and k are operands as they came.
//
// Shared memory, KiB: slices 7 x 14, or 6 x 14 where heads share q and k, by rows 6 x 10, or 5 x 10, and
// tiles 2 x 16; q and k 2 x 32, or 32; pairs and squares 20; dk 32; where heads share q and k, the sums of dq
// 32 and of squares 20; 6.
//
// PDL: waits, then triggers.
#pragma once

#include "cuda/ptx/pdl.cuh"
#include "cuda/sm90/gradients/other_roles.cuh"
#include "cuda/sm90/gradients/product_role.cuh"

namespace cula::cuda::sm90::gradients {

template <class T, bool kShares, bool kSeveral, class From>
__global__ void __launch_bounds__(kThreads, 1)
    gradient_token(const __grid_constant__ DeviceArgs a, const Schedule schedule,
                   const __grid_constant__ Gradients d, const Saved<T, kKey> saved,
                   const GradientScratch scratch, const __grid_constant__ From from) {
    extern __shared__ __align__(1024) unsigned char raw[];
    auto& s = *reinterpret_cast<Shared<T, kShares, From>*>(raw);
    const int warp = static_cast<int>(wgmma::uniform(threadIdx.x / 32)), warpgroup = warp / kWarpgroupWarps;
    if (threadIdx.x == 0) s.init_barriers();
    pdl_wait();
    pdl_trigger();
    __syncthreads();
    const OfCall<T, kShares, From> call{
        a, schedule, d, saved, scratch, from, s, (schedule.slab_end - schedule.slab_begin) * a.heads};
    if (warpgroup < kProductWarpgroups) {
        raise_registers<kProductRegisters>();
        return ProductRole<T, kShares, kSeveral, From>(call, warpgroup).run();
    }
    lower_registers<kOtherRegisters>();
    switch (const int number = warp % kWarpgroupWarps) {
        // Its scheduler has warp 0 of every warpgroup, with the fewest tiles of squares.
        case 0: return GateRole<T, kShares, kSeveral, From>(call).run();
        case 1: return SliceRole<T, kShares, From>(call).run();
        default: return ThroughRole<T, kShares, kSeveral, From>(call, number - 2).run();
    }
}

}  // namespace cula::cuda::sm90::gradients
