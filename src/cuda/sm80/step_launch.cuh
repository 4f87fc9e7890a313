// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/pipe/launch.h"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/step.cuh"

namespace cula::cuda::sm80 {

template <class Kernel>
void launch_rows(const Call& call, Kernel* kernel, int rows) {
    const DeviceArgs& a = call.args;
    const int block_rows = rows * kRowsPerPass;
    const std::size_t blocks = static_cast<std::size_t>((a.value_dim + block_rows - 1) / block_rows);
    launch(kernel, blocks * a.value_heads * a.sequences, kStepThreads, 0, call.stream, a);
}

}  // namespace cula::cuda::sm80
