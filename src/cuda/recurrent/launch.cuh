// SPDX-License-Identifier: Apache-2.0
// Launches of step.
#pragma once

#include "cuda/pipe/launch.h"
#include "cuda/recurrent/instances.h"
#include "cuda/recurrent/step.cuh"

namespace cula::cuda::recurrent {

// more_rows: rows of M besides the value rows (kMaps).
template <auto kKernel>
void launch_rows(const Call& call, int more_rows = 0) {
    const DeviceArgs& a = call.args;
    const auto blocks = [](int rows) {
        return static_cast<std::size_t>((rows + kRowsPerPass - 1) / kRowsPerPass);
    };
    // Without sequences the CTAs of one are launched: they zero the outputs.
    const std::size_t sequences =
        a.cu_seqlens && a.sequences == 0 ? 1 : static_cast<std::size_t>(a.sequences);
    launch<kKernel>({.blocks = (blocks(a.value_dim) + blocks(more_rows)) * a.value_heads * sequences,
                     .threads = kStepThreads},
                    call.stream, a);
}

// Launches step on any states, along trees, or for maps.
template <int kKey, Keys kKeys>
void launch_step_of(const Call& call) {
    if (call.segment)
        launch_rows<step<kKey, false, true, kKeys>>(call, call.args.segment_m.data ? call.args.key_dim : 0);
    else if (call.args.parents.data)
        launch_rows<step<kKey, true, false, kKeys>>(call);
    else
        launch_rows<step<kKey, false, false, kKeys>>(call);
}

}  // namespace cula::cuda::recurrent
