// SPDX-License-Identifier: Apache-2.0
// compose: the state before each segment <- the state before the first, maps      ALGORITHM.md: segments
//
// grid (tiles of 8 value rows * value heads * segments), only the first segment of a sequence works   512 threads
//
// S <- M S + B, segment after segment, all in float: rows of S^T in shared memory, a thread per channel and part of the
// sum.
#pragma once

#include "cuda/sm80/carry.cuh"

namespace cula::cuda::sm80 {

inline constexpr int kComposeThreads = 512, kComposeRows = 8;

template <int kKey>
__global__ void __launch_bounds__(kComposeThreads)
    compose(const __grid_constant__ DeviceArgs a, const Schedule schedule, const __grid_constant__ CarryParams p,
            bool delta) {
    constexpr int kParts = kComposeThreads / kKey, kSpan = kKey / kParts;
    __shared__ __align__(16) float state[kComposeRows][kKey];
    __shared__ float sums[kParts][kComposeRows][kKey];
    const int tiles = ceil_div(a.value_dim, kComposeRows);
    const int tile = static_cast<int>(blockIdx.x) % tiles,
              value_head = static_cast<int>(blockIdx.x) / tiles % a.value_heads;
    const int number = static_cast<int>(blockIdx.x) / tiles / a.value_heads;
    const Segment segment = segment_of(a, schedule, number);
    if (segment.sequence < 0 || segment.rank > 0 || segment.count <= 1) return;
    const StateSlots slots = states_of(a, segment.sequence);
    if (slots.skipped) return;

    const int channel = static_cast<int>(threadIdx.x) % kKey, part = static_cast<int>(threadIdx.x) / kKey,
              row0 = tile * kComposeRows;
    const States* from = segment.chunk > 0 ? &p.slab_start : slots.initial >= 0 ? &a.initial : nullptr;
    for (int row = part; row < kComposeRows; row += kParts) {
        float x = 0.0f;
        if (from && row0 + row < a.value_dim && channel < a.key_dim)
            x = load_float(from->data, from->dtype,
                           from->offset(segment.chunk > 0 ? 0 : slots.initial, value_head) + (row0 + row) * from->v +
                               channel * from->k);
        state[row][channel] = x;
    }
    for (int next = number + 1; next < number + segment.count; ++next) {
        __syncthreads();
        const auto* m = static_cast<const float*>(p.map_m.data) + p.map_m.offset(next - 1, value_head);
        const auto* b = static_cast<const float*>(p.map_b.data) + p.map_b.offset(next - 1, value_head);
        auto* start = static_cast<float*>(p.starts.data) + p.starts.offset(next, value_head);
        float sum[kComposeRows] = {};
        const int last = channel < a.key_dim ? min((part + 1) * kSpan, a.key_dim) : 0;
        if (delta) {
#pragma unroll 8
            for (int c = part * kSpan; c < last; ++c) {
                const float x = m[c * p.map_m.v + channel];
#pragma unroll
                for (int row = 0; row < kComposeRows; ++row) sum[row] += x * state[row][c];
            }
        } else if (part == 0 && channel < a.key_dim) {
#pragma unroll
            for (int row = 0; row < kComposeRows; ++row) sum[row] = m[channel] * state[row][channel];
        }
#pragma unroll
        for (int row = 0; row < kComposeRows; ++row) sums[part][row][channel] = sum[row];
        __syncthreads();
        for (int row = part; row < kComposeRows; row += kParts) {
            if (row0 + row >= a.value_dim || channel >= a.key_dim) continue;
            float x = b[(row0 + row) * p.map_b.v + channel];
#pragma unroll
            for (int i = 0; i < kParts; ++i) x += sums[i][row][channel];
            state[row][channel] = x;
            start[(row0 + row) * p.starts.v + channel] = x;
        }
    }
}

}  // namespace cula::cuda::sm80
