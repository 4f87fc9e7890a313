// SPDX-License-Identifier: Apache-2.0
// The two kernels at the end of a backward call.
//
// sum_parameters: d_A_log, d_dt_bias <- summands of chunks (GradientScratch::parameters)
//   Grid: a CTA per value head and sum_columns() parameters; 512 threads. A thread sums chunks at a constant
//   distance in double precision; a tree over the threads of a parameter follows. The order depends on shapes
//   alone.
//   Budgets: 32 registers; 4 KiB of static shared memory.
//
// zero_tail: zeros <- the gradients of the tokens behind the last packed sequence
//   Grid: zero_tail_ctas(), which take one token after another; 256 threads.
#pragma once

#include <algorithm>

#include "cuda/backward/gradients.h"
#include "cuda/backward/sum.h"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/store_gradient.cuh"

namespace cula::cuda::backward {

inline constexpr int kSumThreads = 512, kZeroThreads = 256;

// Parameters that a CTA sums, a power of two.
CULA_HOST_DEVICE std::int32_t sum_columns(const DeviceArgs& a) { return parameter_count(a) > 2 ? 32 : 2; }

inline std::int64_t sum_parameters_ctas(const DeviceArgs& a) {
    const std::int32_t columns = sum_columns(a);
    return std::int64_t{a.value_heads} * ((parameter_count(a) + columns - 1) / columns);
}
inline std::int64_t zero_tail_ctas(const DeviceArgs& a) {
    constexpr std::int64_t kMost = 256;
    return std::clamp<std::int64_t>(a.tokens, 1, kMost);
}

// parameters: [chunks, HV, parameter_count].
__global__ void __launch_bounds__(kSumThreads)
    sum_parameters(const __grid_constant__ DeviceArgs a, const __grid_constant__ Gradients d,
                   const float* parameters, std::int64_t chunks) {
    __shared__ double sums[kSumThreads];
    pdl_trigger_and_wait();
    const int count = parameter_count(a), columns = sum_columns(a), parts = (count + columns - 1) / columns,
              rows = kSumThreads / columns;
    const int value_head = static_cast<int>(blockIdx.x) / parts, thread = static_cast<int>(threadIdx.x),
              row = thread / columns,
              column = static_cast<int>(blockIdx.x) % parts * columns + thread % columns;
    double sum = 0.0;
    if (column < count) {
        const std::int64_t pitch = std::int64_t{a.value_heads} * count;
        const float* const from = parameters + std::int64_t{value_head} * count + column;
#pragma unroll 4
        for (std::int64_t chunk = row; chunk < chunks; chunk += rows)
            sum += static_cast<double>(from[chunk * pitch]);
    }
    sums[thread] = sum;
#pragma unroll 1
    for (int half = rows / 2; half > 0; half /= 2) {
        __syncthreads();
        if (row < half) sums[thread] += sums[thread + half * columns];
    }
    if (row > 0 || column >= count) return;
    const float total = static_cast<float>(sums[thread]);
    if (column == 0) {
        if (d.d_A_log.data) d.d_A_log.data[value_head * d.d_A_log.head] = total;
    } else if (d.d_dt_bias.data) {
        d.d_dt_bias.data[value_head * d.d_dt_bias.head + (column - 1) * d.d_dt_bias.channel] = total;
    }
}

// Writes zeros to the rows of one token, which a CTA shares.
__device__ __forceinline__ void zero_rows(const TokenRows& rows, std::int64_t token, int heads, int width) {
    if (!rows.data) return;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < heads * width; i += kZeroThreads)
        store_gradient(rows.data, rows.dtype, rows.offset(0, token, i / width) + i % width * rows.last, 0.0f);
}

__global__ void __launch_bounds__(kZeroThreads)
    zero_tail(const __grid_constant__ DeviceArgs a, const __grid_constant__ Gradients d) {
    pdl_trigger_and_wait();
    const int gates = varies_by_channel(a.algorithm.decay) ? a.key_dim : 1;
    std::int64_t token = a.sequences > 0 ? Offsets(a).at(a.sequences) : 0;
#pragma unroll 1
    for (token += blockIdx.x; token < a.tokens; token += gridDim.x) {
        zero_rows(d.d_q, token, a.heads, a.key_dim);
        zero_rows(d.d_k, token, a.heads, a.key_dim);
        zero_rows(d.d_v, token, a.value_heads, a.value_dim);
        zero_rows(d.d_g, token, a.value_heads, gates);
        zero_rows(d.d_beta, token, a.value_heads, a.beta_per_value ? a.value_dim : 1);
        zero_rows(d.d_erase, token, a.value_heads, a.key_dim);
        zero_rows(d.d_a_key, token, a.value_heads, a.key_dim);
        zero_rows(d.d_b_key, token, a.value_heads, a.key_dim);
    }
}

}  // namespace cula::cuda::backward
