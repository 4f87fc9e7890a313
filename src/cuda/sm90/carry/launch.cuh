// SPDX-License-Identifier: Apache-2.0
// The launch of the Hopper carry.
#pragma once

#include "cuda/call.h"
#include "cuda/pipe/launch.h"
#include "cuda/sm90/carry/kernel.cuh"

namespace cula::cuda::sm90 {

// Row blocks of a head: CTAs of `warpgroups` state warpgroups for its value rows and, with m, for the rows of
// M.
struct CarryRowBlocks {
    int warpgroups, of_values, of_m;

    CarryRowBlocks(const DeviceArgs& a, int state_warpgroups, bool m) : warpgroups(state_warpgroups) {
        const int rows = warpgroups * kWarpgroupRows;
        of_values = chunked::ceil_div(a.value_dim, rows), of_m = m ? chunked::ceil_div(a.key_dim, rows) : 0;
    }
    int blocks() const { return of_values + of_m; }
};

// columns: value heads times segments. shape: the LaunchShape with what it has of PDL.
template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kMaps, class Saver = NoSaver,
          class ShapeOf>
void launch_carry(const Call& call, const DeviceArgs& a, const Schedule& schedule,
                  const ChunkOperands<T, kKey, kPerChannel>* operands, typename Saver::Params p,
                  const CarryRowBlocks& rows, std::int64_t columns, const ShapeOf& shape) {
    p.value_blocks = rows.of_values, p.row_blocks = Divisor(static_cast<std::uint32_t>(rows.blocks()));
    const auto shared_bytes = [&] {
        return CarryShared<T, kKey, kReadsState, kPerChannel, kMaps>::bytes(rows.warpgroups, p.stages);
    };
    for (p.stages = kMaxStages; shared_bytes() > call.shared_bytes_limit;) --p.stages;
    constexpr bool kScores = kMakesScores<kReadsState, kPerChannel>;
    // Row blocks of one head read the same chunk operands: a cluster loads them once. Maps take clusters of
    // four only where these leave a fifth of the multiprocessors free: with fewer, the last clusters find no
    // four multiprocessors side by side.
    const bool in_fours =
        rows.blocks() % 4 == 0 && (!kMaps || 5 * columns * rows.blocks() < 4 * call.multiprocessors);
    p.cluster = kScores ? 1 : in_fours ? 4 : rows.blocks() % 2 == 0 ? 2 : 1;
    cuda::launch<carry<T, kKey, kReadsState, kPerChannel, kMaps, Saver>>(
        shape({.blocks = static_cast<std::size_t>(rows.blocks() * columns),
               .threads = (rows.warpgroups + kHelperWarpgroups<kScores>)*kWarpgroupThreads,
               .shared_bytes = shared_bytes(),
               .most_shared_bytes = call.shared_bytes_limit,
               .cluster = p.cluster}),
        call.stream, a, schedule, operands, p,
        carry_maps(a, kDtype<T>,
                   {.keys = !kPerChannel,
                    .outputs = !kMaps,
                    .rows = kTokens<kKey>,
                    .several = kSeveral<kReadsState, kPerChannel>}));
}

}  // namespace cula::cuda::sm90
