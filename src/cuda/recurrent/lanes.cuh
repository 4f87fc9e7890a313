// SPDX-License-Identifier: Apache-2.0
// How decode and step lay a state [V, K] over threads: eight lanes a row, four neighbouring channels a lane
// and access, so that one warp-wide load covers four whole 128-byte lines and a sum over channels ends in
// three shuffles.
#pragma once

namespace cula::cuda::recurrent {

inline constexpr int kStepThreads = 128;
inline constexpr int kStepWarps = kStepThreads / 32;
inline constexpr int kLanesPerRow = 8;
inline constexpr int kRowsPerPass = kStepThreads / kLanesPerRow;

// A lane's i-th channel. The same for every type and layout, so that sums run in the same order.
__device__ __forceinline__ int lane_channel(int i) {
    return (i / 4 * kLanesPerRow + static_cast<int>(threadIdx.x % kLanesPerRow)) * 4 + i % 4;
}

// Sum over the lanes of a row, in every one of them.
__device__ __forceinline__ float row_sum(float part) {
#pragma unroll
    for (int step = kLanesPerRow / 2; step > 0; step /= 2) part += __shfl_xor_sync(0xffffffffu, part, step);
    return part;
}

// Sum over all lanes, in every one of them.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// In order from the first.
template <int kCount>
__device__ __forceinline__ float sum(const float (&x)[kCount]) {
    float all = x[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) all += x[i];
    return all;
}

// What a token's sums over channels are multiplied by, instead of the channels. Both kernels form it, and
// what follows from it, by the same operations, so that neither a state's layout nor the shape of a draft
// changes a bit.
struct SumScales {
    float q, k, key_query;

    // q . q, k . k and k . q of raw q and k.
    __device__ __forceinline__ SumScales(float scale, bool l2norm, float qq, float kk, float kq)
        : q(scale), k(1.0f) {
        if (l2norm) q *= rsqrtf(qq + 1e-6f), k = rsqrtf(kk + 1e-6f);
        key_query = kq * q * k;
    }
    // What a delta rule writes for a value, where `read` is the row's sum with k.
    __device__ __forceinline__ float write(float beta, float value, float read) const {
        return beta * __fmaf_rn(-read, k, value);
    }
    // The output, where `out` is the row's sum with q.
    __device__ __forceinline__ float output(float out, float write) const {
        return __fmaf_rn(write, key_query, out * q);
    }
};

}  // namespace cula::cuda::recurrent
