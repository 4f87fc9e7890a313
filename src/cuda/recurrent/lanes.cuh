// SPDX-License-Identifier: Apache-2.0
// How decode and step distribute a state [V, K] over threads: eight lanes per row, four neighbouring channels
// per lane and access.
// A warp-wide access of float32 then covers four whole 128-byte lines, and a sum over channels ends in three
// shuffles.
#pragma once

#include "cuda/tile/float8.cuh"

namespace cula::cuda::recurrent {

inline constexpr int kStepThreads = 128;
inline constexpr int kStepWarps = kStepThreads / 32;
inline constexpr int kLanesPerRow = 8;
inline constexpr int kRowsPerPass = kStepThreads / kLanesPerRow;

// The channel of a lane's i-th element: the same for every dtype and layout, so that sums are formed in the
// same order.
__device__ __forceinline__ int lane_channel(int i) {
    return (i / 4 * kLanesPerRow + static_cast<int>(threadIdx.x % kLanesPerRow)) * 4 + i % 4;
}

// The sum over the lanes of a row, in every one of them.
__device__ __forceinline__ float row_sum(float part) {
#pragma unroll
    for (int step = kLanesPerRow / 2; step > 0; step /= 2) part += __shfl_xor_sync(0xffffffffu, part, step);
    return part;
}

// The largest magnitude over the lanes of a row, in every one of them.
__device__ __forceinline__ float row_largest(float own) {
#pragma unroll
    for (int step = kLanesPerRow / 2; step > 0; step /= 2)
        own = larger_magnitude(own, __shfl_xor_sync(0xffffffffu, own, step));
    return own;
}

// The sum over a warp, in all lanes.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The sum of an array, in order from the first element.
template <int kCount>
__device__ __forceinline__ float sum(const float (&x)[kCount]) {
    float all = x[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) all += x[i];
    return all;
}

// 1 / sqrt(squares + 1e-6), the factor of a row's l2norm. One Newton step brings the instruction's result,
// which may be two units in the last place off, to about one half. A delta rule of few channels and strengths
// near 2 multiplies the state by nearly -1 for each token, and would show the difference after some hundreds.
__device__ __forceinline__ float inverse_norm(float squares) {
    const float x = squares + 1e-6f, r = rsqrtf(x);
    const float refined = fmaf(0.5f * r, fmaf(-x * r, r, 1.0f), r);
    return r > 0.0f ? refined : r;  // 0 of infinite sums
}

// The factors of a token's sums over channels: l2norm and `scale` are applied to the sums instead of to the
// channels.
// decode and step compute them, and what follows from them, by the same operations, so that neither a state's
// layout nor the shape of a draft changes a bit of the result.
struct SumScales {
    float q, k, key_query;

    // qq, kk, kq: q . q, k . k and k . q of q and k as they were loaded.
    __device__ __forceinline__ SumScales(float scale, bool l2norm, float qq, float kk, float kq)
        : q(scale), k(1.0f) {
        if (l2norm) q *= inverse_norm(qq), k = inverse_norm(kk);
        key_query = kq * q * k;
    }
    // u of a delta rule for one row; read: the decayed row times k.
    __device__ __forceinline__ float write(float beta, float value, float read) const {
        return beta * __fmaf_rn(-read, k, value);
    }
    // o of one row; out: the decayed row times q; write: u.
    __device__ __forceinline__ float output(float out, float write) const {
        return __fmaf_rn(write, key_query, out * q);
    }
};

}  // namespace cula::cuda::recurrent
