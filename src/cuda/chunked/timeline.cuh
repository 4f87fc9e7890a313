// SPDX-License-Identifier: Apache-2.0
// Calls whose tokens write several times, as the kernels of chunks read them: their tokens are rows of a
// timeline of writes (tile/tokens_of_rows.cuh).
//
// count_writes: cu_seqlens and the checkpoint plan, in rows of writes <- those of the call, in tokens
//   Grid: a thread for each number of the one and each row of the other; 256 threads. Launched before all
//   others, and only where there is one of the two.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/carve.h"
#include "core/check.h"
#include "cuda/chunked/plan.h"
#include "cuda/device_args.h"
#include "cuda/pipe/launch.h"
#include "cuda/ptx/pdl.cuh"

namespace cula::cuda::chunked {

inline constexpr int kCountThreads = 256;

// What one call makes.
struct Timeline {
    std::int32_t* ends = nullptr;  // of sequences, [N + 1]; as safe as those of Offsets
    std::int32_t* plan = nullptr;  // [checkpoints, 3]
    std::int64_t checkpoints = 0;

    void carve_ends(Carver& carver, const PrefillShape& shape) {
        if (shape.packed) ends = carver.take<std::int32_t>(shape.sequences + 1);
    }
    void carve_plan(Carver& carver, const PrefillShape& shape) {
        checkpoints = shape.checkpoints;
        if (checkpoints > 0) plan = carver.take<std::int32_t>(3 * checkpoints);
    }

    // The arguments of the call, with rows of writes for tokens: those of k, v and beta as they are.
    void replace(DeviceArgs& a) const {
        a.tokens *= a.writes, a.chunk_tokens *= a.writes;
        if (a.cu_seqlens) a.cu_seqlens = ends, a.cu_seqlens_64 = false;
        if (plan) a.checkpoint_plan = {.data = plan, .row = 3, .column = 1, .columns = 3};
    }
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    count_writes(const __grid_constant__ DeviceArgs a, const Timeline to) {
    pdl_trigger_and_wait();
    const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (to.ends && i <= a.sequences) to.ends[i] = static_cast<std::int32_t>(Offsets(a).at(i) * a.writes);
    if (i >= to.checkpoints) return;
    const std::int32_t tokens = a.checkpoint_plan.low(i, 1);
    to.plan[3 * i] = a.checkpoint_plan.low(i, 0);
    to.plan[3 * i + 1] = tokens < 0 || tokens > a.tokens ? -1 : tokens * a.writes;
    to.plan[3 * i + 2] = a.checkpoint_plan.at(i, 2);
}

// Launches it, and says whether there was anything to count. a: as the call came.
template <int kThreads = kCountThreads>
bool launch_count_writes(const DeviceArgs& a, const Timeline& to, void* stream) {
    if (to.checkpoints != (to.plan ? a.num_checkpoints : 0))
        throw Error("run: args must be those of the plan, got another checkpoint_plan");
    const std::int64_t threads = std::max(to.ends ? std::int64_t{a.sequences} + 1 : 0, to.checkpoints);
    if (threads == 0) return false;
    launch<count_writes<kThreads>>(
        {.blocks = static_cast<std::size_t>((threads + kThreads - 1) / kThreads), .threads = kThreads},
        stream, a, to);
    return true;
}

}  // namespace cula::cuda::chunked
