// SPDX-License-Identifier: Apache-2.0
// forgets: whether the sequences of a slab are cut into segments <- what every chunk forgets
//
// grid (1)      a warp for the end of a segment and a value head, in turn
//
// Segments take maps, which are cheap where the last quarter of each forgets by itself all that was before (chunk.cuh):
// they walk no more. If a single one does not, all sequences stay whole.
#pragma once

#include "cuda/ptx/overlap.cuh"
#include "cuda/sm80/chunk.cuh"
#include "cuda/tile/scan.cuh"

namespace cula::cuda::sm80 {

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    forgets(const __grid_constant__ DeviceArgs a, Schedule schedule, const float* fading, std::int32_t* whole) {
    follow_kernels();
    schedule.whole = nullptr;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    bool keeps = false;
    for (int i = warp; i < schedule.max_segments * a.value_heads; i += kThreads / 32) {
        const Segment segment = segment_of(a, schedule, i / a.value_heads);
        if (segment.sequence < 0 || segment.rank + 1 >= segment.count) continue;
        float sum = 0.0f;
        for (int chunk = segment.chunks - segment.chunks / 4 + lane; chunk < segment.chunks; chunk += 32)
            sum += fading[(std::int64_t{segment.image} + chunk) * a.value_heads + i % a.value_heads];
        keeps |= !(sum_over_warp(sum) <= kForgotten);
    }
    const bool any = __syncthreads_or(keeps);
    if (threadIdx.x == 0) *whole = any;
}

}  // namespace cula::cuda::sm80
