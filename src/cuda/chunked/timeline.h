// SPDX-License-Identifier: Apache-2.0
// Calls whose tokens write several times, as the kernels of chunks read them: their tokens are rows of a
// timeline of writes (tile/tokens_of_rows.cuh).
#pragma once

#include <cstdint>

#include "core/carve.h"
#include "cuda/chunked/plan.h"
#include "cuda/device_args.h"

namespace cula::cuda::chunked {

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

}  // namespace cula::cuda::chunked
