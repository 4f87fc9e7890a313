// SPDX-License-Identifier: Apache-2.0
// Sums and prefix sums over a warp.
#pragma once

namespace cula::cuda {

// Inclusive prefix sums over the 32 * kEach numbers of a warp; each lane holds kEach neighbouring ones, in
// the order of lanes.
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

// Of 2 kHalf numbers per lane: x[0] becomes the sum of x[i] over the lanes that differ from this one in the
// bits of (2 kHalf - 1) kStep, with i = lane / kStep % (2 kHalf).
template <int kHalf, int kStep, int kCount>
__device__ __forceinline__ void scatter_sums(float (&x)[kCount]) {
    static_assert(2 * kHalf <= kCount);
    const bool upper = threadIdx.x & (kHalf * kStep);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const float sent = upper ? x[i] : x[i + kHalf], kept = upper ? x[i + kHalf] : x[i];
        x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kHalf * kStep);
    }
    if constexpr (kHalf > 1) scatter_sums<kHalf / 2, kStep>(x);
}

struct SumBefore {
    std::int32_t before, total;  // over the lanes before this one, and over all
};

// The exclusive prefix sum of the lanes, and the total.
__device__ __forceinline__ SumBefore sum_before_in_warp(std::int32_t x) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    std::int32_t sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const std::int32_t other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    return {sum - x, __shfl_sync(0xffffffffu, sum, 31)};
}

}  // namespace cula::cuda
