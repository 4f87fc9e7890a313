// SPDX-License-Identifier: Apache-2.0
// count_writes: cu_seqlens and the checkpoint plan, in rows of writes <- those of the call, in tokens
//   Grid: a thread for each number of the one and each row of the other; 256 threads. Launched before all
//   others, and only where there is one of the two.
#pragma once

#include <cstdint>

#include "cuda/chunked/timeline.h"
#include "cuda/device_args.h"
#include "cuda/ptx/pdl.cuh"

namespace cula::cuda::chunked {

inline constexpr int kCountThreads = 256;

__global__ void __launch_bounds__(kCountThreads)
    count_writes(const __grid_constant__ DeviceArgs a, const Timeline to) {
    pdl_trigger_and_wait();
    const std::int64_t i = std::int64_t{blockIdx.x} * kCountThreads + threadIdx.x;
    if (to.ends && i <= a.sequences) to.ends[i] = static_cast<std::int32_t>(Offsets(a).at(i) * a.writes);
    if (i >= to.checkpoints) return;
    const std::int32_t tokens = a.checkpoint_plan.low(i, 1);
    to.plan[3 * i] = a.checkpoint_plan.low(i, 0);
    to.plan[3 * i + 1] = tokens < 0 || tokens > a.tokens ? -1 : tokens * a.writes;
    to.plan[3 * i + 2] = a.checkpoint_plan.at(i, 2);
}

}  // namespace cula::cuda::chunked
