// SPDX-License-Identifier: Apache-2.0
// Float8 states of a call to float32, and back (core/float8.h has the format and the scales of rows).
//
// load_states: states, starts, ends <- slots, codes, scales      grid: value heads * sequences, 128 threads
//     states[n] = scale * code of the slot that sequence n starts from, where it starts from a state
//     starts[n] = n, or where the initial state is not of float8 its slot       -1: null row
//     ends[n]   = n, or where the final state is not of float8 its slot         -1: null row
// store_states: codes, scales <- states                          grid: value heads * sequences, 128 threads
//     the slot that sequence n ends in gets states[n]
//
// A CTA converts one head's state. A warp takes one row after the other: lane l has channels l, l + 32, ...,
// so that the float32 side, and rows of the float8 side whose channels are contiguous, are read and written
// in whole lines.
//
// Budgets: at most 64 registers per thread, no shared memory. Design page: docs/design/float8.md.
#pragma once

#include "cuda/device_args.h"
#include "cuda/tile/float8.cuh"

namespace cula::cuda::float8 {

inline constexpr int kConvertThreads = 128;

// The float32 states of a sequence and head.
__device__ __forceinline__ std::int64_t dense_offset(const DeviceArgs& a, std::int64_t n, int value_head) {
    return (n * a.value_heads + value_head) * a.value_dim * a.key_dim;
}

__global__ void __launch_bounds__(kConvertThreads)
    load_states(const __grid_constant__ DeviceArgs a, float* states, std::int32_t* starts,
                std::int32_t* ends) {
    const std::int64_t n = blockIdx.x / static_cast<unsigned>(a.value_heads);
    const int value_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.value_heads));
    const StateSlots slots = states_of(a, n);
    const bool of_initial = a.initial_scales.data != nullptr;
    if (value_head == 0 && threadIdx.x == 0) {
        const bool own = of_initial || !a.initial.data || !a.initial_indices.data;
        const auto row = static_cast<std::int32_t>(n);
        starts[n] = slots.skipped ? -1 : own ? row : a.initial_indices.at(n);
        ends[n] = slots.skipped ? -1 : a.final_scales.data ? row : static_cast<std::int32_t>(slots.final);
    }
    if (!of_initial || slots.initial < 0) return;
    const auto* const codes =
        static_cast<const std::uint8_t*>(a.initial.data) + a.initial.offset(slots.initial, value_head);
    float* const to = states + dense_offset(a, n, value_head);
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int row = static_cast<int>(threadIdx.x / 32); row < a.value_dim; row += kConvertThreads / 32) {
        const float scale = *a.initial_scales.at(slots.initial, value_head, row);
        for (int c = lane; c < a.key_dim; c += 32)
            to[row * a.key_dim + c] = float8_numbers(codes[row * a.initial.v + c * a.initial.k]).x * scale;
    }
}

template <int kKey>
__global__ void __launch_bounds__(kConvertThreads)
    store_states(const __grid_constant__ DeviceArgs a, const float* states) {
    const std::int64_t n = blockIdx.x / static_cast<unsigned>(a.value_heads);
    const int value_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.value_heads));
    const std::int64_t slot = states_of(a, n).final;
    if (slot < 0) return;
    auto* const codes = static_cast<std::uint8_t*>(a.final.data) + a.final.offset(slot, value_head);
    const float* const from = states + dense_offset(a, n, value_head);
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int row = static_cast<int>(threadIdx.x / 32); row < a.value_dim; row += kConvertThreads / 32) {
        float x[kKey / 32];
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < kKey / 32; ++i) {
            const int c = lane + 32 * i;
            x[i] = c < a.key_dim ? from[row * a.key_dim + c] : 0.0f;
            most = larger_magnitude(most, x[i]);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            most = larger_magnitude(most, __shfl_xor_sync(0xffffffffu, most, step));
        const RowScale chosen = row_scale(most);
        if (lane == 0) *a.final_scales.at(slot, value_head, row) = chosen.scale;
#pragma unroll
        for (int i = 0; i < kKey / 32; ++i)
            if (const int c = lane + 32 * i; c < a.key_dim)
                codes[row * a.final.v + c * a.final.k] =
                    static_cast<std::uint8_t>(float8_codes(x[i] * chosen.inverse, 0.0f));
    }
}

}  // namespace cula::cuda::float8
