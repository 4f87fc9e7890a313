// SPDX-License-Identifier: Apache-2.0
// Running sums over a warp.
#pragma once

namespace cula::cuda {

// Neighbouring numbers a lane, in the order of lanes: each becomes the sum of all up to itself.
template <int kEach>
__device__ __forceinline__ void running_sums(float (&x)[kEach]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 1; i < kEach; ++i) x[i] += x[i - 1];
    float before = x[kEach - 1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (lane == 0) before = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = before + x[i];
}

// The sum over a warp, in all lanes.
__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

}  // namespace cula::cuda
