// SPDX-License-Identifier: Apache-2.0
// schedule: first_chunk [N + 1], segments <- cu_seqlens      one CTA
//
// Packed sequences are cut into chunks and segments on the device, so that no length is ever read by the host. Where
// sequences stay whole the longest goes first: what starts late ends late.
#pragma once

#include <cub/block/block_scan.cuh>

#include "cuda/sm80/chunk.cuh"

namespace cula::cuda::sm80 {

inline constexpr int kScheduleThreads = 1024;
inline constexpr int kSortedSequences = 4096;  // beyond it comparing every pair costs more than order saves

static __global__ void __launch_bounds__(kScheduleThreads)
    schedule(const __grid_constant__ DeviceArgs a, const Schedule s, std::int32_t* first_chunk, Segment* segments) {
    using Scan = cub::BlockScan<std::int32_t, kScheduleThreads>;
    __shared__ typename Scan::TempStorage scan;
    const int thread = static_cast<int>(threadIdx.x);
    std::int32_t base = 0;
    for (int start = 0; start < a.sequences; start += kScheduleThreads) {
        const int n = start + thread;
        const std::int64_t length = n < a.sequences ? tokens_of(a, n).length : 0;
        std::int32_t before = 0, total = 0;
        Scan(scan).ExclusiveSum(ceil_div(length, s.chunk_tokens), before, total);
        if (n < a.sequences) first_chunk[n] = base + before;
        base += total;
        __syncthreads();
    }
    if (thread == 0) first_chunk[a.sequences] = base;
    __syncthreads();

    const auto piece = [&](int n) { return segment_of_piece(s, n, first_chunk[n], first_chunk[n + 1], 0); };
    const bool whole = s.segment_chunks >= s.slab_end - s.slab_begin && a.sequences <= kSortedSequences;
    base = 0;
    for (int start = 0; start < a.sequences; start += kScheduleThreads) {
        const int n = start + thread;
        const Segment head = n < a.sequences ? piece(n) : Segment{};
        const std::int32_t count = head.sequence < 0 ? 0 : head.count;
        std::int32_t before = 0, total = 0;
        Scan(scan).ExclusiveSum(count, before, total);
        if (whole && count > 0) {
            before = -base;
            for (int other = 0; other < a.sequences; ++other) {
                const Segment rival = piece(other);
                before +=
                    rival.sequence >= 0 && (rival.chunks > head.chunks || (rival.chunks == head.chunks && other < n));
            }
        }
        for (std::int32_t rank = 0; rank < count; ++rank)
            segments[base + before + rank] = segment_of_piece(s, n, first_chunk[n], first_chunk[n + 1], rank);
        base += total;
        __syncthreads();
    }
    for (int i = base + thread; i < s.max_segments; i += kScheduleThreads) segments[i] = Segment{};
}

}  // namespace cula::cuda::sm80
