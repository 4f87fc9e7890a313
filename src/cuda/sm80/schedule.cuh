// SPDX-License-Identifier: Apache-2.0
// schedule: first_chunk [N + 1], segments <- cu_seqlens      one CTA: a warp for up to 32 sequences, or 1024 threads
//
// Packed sequences are cut into chunks and segments on the device, so that no length is ever read by the host. Where
// sequences stay whole the longest goes first: what starts late ends late. A thread has a sequence, and then a segment
// wherever its sequence may be, since one sequence may have all of them.
#pragma once

#include "cuda/ptx/overlap.cuh"
#include "cuda/sm80/chunk.cuh"

namespace cula::cuda::sm80 {

inline constexpr int kFewSequences = 32, kScheduleThreads = 1024;
inline constexpr int kSortedSequences = 4096;  // beyond it comparing every pair costs more than order saves

struct SumBefore {
    std::int32_t before, total;  // over the threads before this one, and over all
};

// The sum over a warp: `before` excludes the lane's own.
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

// The same over kThreads, of one warp or of 32. What was in shared memory before has been read by all when it returns.
template <int kThreads>
__device__ __forceinline__ SumBefore sum_before(std::int32_t x, std::int32_t (&of_warps)[32]) {
    static_assert(kThreads == 32 || kThreads == 1024);
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const SumBefore own = sum_before_in_warp(x);
    __syncthreads();
    if constexpr (kThreads == 32) return own;
    if (lane == 0) of_warps[warp] = own.total;
    __syncthreads();
    const SumBefore all = sum_before_in_warp(of_warps[lane]);
    return {__shfl_sync(0xffffffffu, all.before, warp) + own.before, all.total};
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    schedule(const __grid_constant__ DeviceArgs a, const Schedule s, std::int32_t* first_chunk, Segment* segments) {
    follow_kernels();
    constexpr int kSorted = kThreads > kFewSequences ? kSortedSequences : kFewSequences;
    __shared__ std::int32_t of_warps[32];
    __shared__ std::int32_t first[kThreads + 1], first_segment[kThreads];  // of the sequences at hand
    __shared__ std::int32_t lengths[kSorted];                              // in chunks, of all; -1: not in this slab
    const int thread = static_cast<int>(threadIdx.x);
    const bool whole = s.segment_chunks >= s.slab_end - s.slab_begin && a.sequences <= kSorted;
    std::int32_t chunks = 0, count = 0;  // of the sequences so far: chunks, segments
    Segment head;
    for (int start = 0; start < a.sequences; start += kThreads) {
        const int n = start + thread;
        const std::int64_t length = n < a.sequences ? tokens_of(a, n).length : 0;
        const std::int32_t own_chunks = ceil_div(length, s.chunk_tokens);
        const SumBefore of_chunks = sum_before<kThreads>(own_chunks, of_warps);
        const std::int32_t own_first = chunks + of_chunks.before;
        if (n < a.sequences) first_chunk[n] = own_first;
        chunks += of_chunks.total;

        head = segment_of_piece(s, n, own_first, own_first + own_chunks, 0);
        if (n >= a.sequences) head.sequence = -1;
        if (whole) {
            if (n < a.sequences) lengths[n] = head.sequence < 0 ? -1 : head.chunks;
            count += __syncthreads_count(head.sequence >= 0);
            continue;
        }
        const SumBefore of_segments = sum_before<kThreads>(head.sequence < 0 ? 0 : head.count, of_warps);
        first[thread] = own_first, first_segment[thread] = of_segments.before;
        if (thread == kThreads - 1) first[kThreads] = own_first + own_chunks;
        __syncthreads();
        for (int i = thread; i < of_segments.total; i += kThreads) {
            int which = 0;  // the last one that has no more than i before it, and so has segments itself
#pragma unroll
            for (int step = kThreads / 2; step > 0; step /= 2)
                if (first_segment[which + step] <= i) which += step;
            segments[count + i] =
                segment_of_piece(s, start + which, first[which], first[which + 1], i - first_segment[which]);
        }
        count += of_segments.total;
    }
    if (thread == 0) first_chunk[a.sequences] = chunks;

    if (whole) {
        if (a.sequences > kThreads) __syncthreads();
        for (int n = thread; n < a.sequences; n += kThreads) {
            if (a.sequences > kThreads) head = segment_of_piece(s, n, first_chunk[n], first_chunk[n + 1], 0);
            if (head.sequence < 0) continue;
            int longer = 0;
#pragma unroll 8
            for (int other = 0; other < a.sequences; ++other)
                longer += lengths[other] > head.chunks - (other < n ? 1 : 0);
            segments[longer] = head;
        }
    }
    for (int i = count + thread; i < s.max_segments; i += kThreads) segments[i] = Segment{};
}

}  // namespace cula::cuda::sm80
