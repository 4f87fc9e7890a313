// SPDX-License-Identifier: Apache-2.0
// schedule: first_chunk [N + 1], order [N] <- cu_seqlens      one CTA
//
// Packed sequences are cut into chunks on the device, so that no length is ever read by the host. The longest sequence goes
// first: the carry of a sequence is serial, and what starts late ends late.
#pragma once

#include <cub/block/block_scan.cuh>

#include "cuda/sm80/chunk.cuh"

namespace cula::cuda::sm80 {

inline constexpr int kScheduleThreads = 1024;
inline constexpr int kSortedSequences = 4096;  // beyond it comparing every pair costs more than order saves

static __global__ void __launch_bounds__(kScheduleThreads)
    schedule(const __grid_constant__ DeviceArgs a, int chunk_rows, std::int32_t* first_chunk, std::int32_t* order) {
    using Scan = cub::BlockScan<std::int32_t, kScheduleThreads>;
    __shared__ typename Scan::TempStorage scan;
    const int thread = static_cast<int>(threadIdx.x);
    std::int32_t base = 0;
    for (int start = 0; start < a.sequences; start += kScheduleThreads) {
        const int n = start + thread;
        const std::int64_t length = n < a.sequences ? tokens_of(a, n).length : 0;
        std::int32_t before = 0, total = 0;
        Scan(scan).ExclusiveSum(static_cast<std::int32_t>((length + chunk_rows - 1) / chunk_rows), before, total);
        if (n < a.sequences) first_chunk[n] = base + before;
        base += total;
        __syncthreads();
    }
    if (thread == 0) first_chunk[a.sequences] = base;
    for (int n = thread; n < a.sequences; n += kScheduleThreads) {
        int rank = n;
        if (a.sequences <= kSortedSequences) {
            const std::int64_t length = tokens_of(a, n).length;
            rank = 0;
            for (int other = 0; other < a.sequences; ++other) {
                const std::int64_t longer = tokens_of(a, other).length;
                rank += longer > length || (longer == length && other < n);
            }
        }
        order[rank] = n;
    }
}

}  // namespace cula::cuda::sm80
