// SPDX-License-Identifier: Apache-2.0
// schedule: first_chunk [N + 1], packed [chunks of the slab], segments <- cu_seqlens
//
// Grid: one CTA of 1024 threads. Launched before prepare, once
// per slab, with cu_seqlens unless Schedule::by_warp holds.
//
// Packed sequences are divided on the device, so that the
// host never reads a length. For 1024 sequences at a time:
//   1  a thread takes one sequence: its tokens, its chunks, and the sum of chunks over those before it
//   2  a thread takes one chunk of the slab after another, and finds its sequence by bisection
//   3  a thread takes one segment after another, and finds its sequence likewise
// Steps 2 and 3 assign chunks and segments, not sequences,
// to threads because one sequence may have all of them.
// Where sequences stay whole, step 3 follows at the end and sorts: the
// longest comes first, since a CTA that starts late should end early.
//
// Budgets: at most 64 registers; 44 KiB of static shared memory.
#pragma once

#include "cuda/chunked/chunk.cuh"
#include "cuda/ptx/pdl.cuh"

namespace cula::cuda::chunked {

inline constexpr int kScheduleThreads = 1024;
// Beyond it comparing all pairs costs more than the order saves
inline constexpr int kSortedSequences = 4096;

// Sum over all threads. When it returns, all threads have read what was in shared memory before.
__device__ __forceinline__ SumBefore sum_before(std::int32_t x, std::int32_t (&of_warps)[32]) {
    static_assert(kScheduleThreads == 32 * 32);
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const SumBefore own = sum_before_in_warp(x);
    __syncthreads();
    if (lane == 0) of_warps[warp] = own.total;
    __syncthreads();
    const SumBefore all = sum_before_in_warp(of_warps[lane]);
    return {__shfl_sync(0xffffffffu, all.before, warp) + own.before, all.total};
}

// Index of the last entry that is at most x. Entries ascend and
// the first is at most x. Its sequence has chunk (or segment) x.
__device__ __forceinline__ int last_up_to(const std::int32_t (&before)[kScheduleThreads], std::int32_t x) {
    int which = 0;
#pragma unroll
    for (int step = kScheduleThreads / 2; step > 0; step /= 2)
        if (before[which + step] <= x) which += step;
    return which;
}

// kReversed: as of place_of().
template <bool kReversed>
__global__ void __launch_bounds__(kScheduleThreads)
    schedule(const __grid_constant__ DeviceArgs a, const Schedule s, std::int32_t* first_chunk,
             PackedChunk* packed, Segment* segments) {
    pdl_trigger();
    pdl_wait();
    __shared__ std::int32_t of_warps[32];
    __shared__ std::int32_t first[kScheduleThreads], last[kScheduleThreads],
        first_segment[kScheduleThreads];                                     // of the 1024 sequences at hand
    __shared__ std::int64_t begin[kScheduleThreads], end[kScheduleThreads];  // their tokens
    __shared__ std::int32_t lengths[kSortedSequences];  // chunks of every sequence; -1: not in this slab
    const int thread = static_cast<int>(threadIdx.x);
    const bool whole = s.segment_chunks >= s.slab_end - s.slab_begin && a.sequences <= kSortedSequences;
    std::int32_t chunks = 0, count = 0;  // of the sequences so far: chunks, segments
    for (int start = 0; start < a.sequences; start += kScheduleThreads) {
        const int n = start + thread;
        const TokenRange tokens = n < a.sequences ? tokens_of(a, n) : TokenRange{};
        const std::int32_t own_chunks = ceil_div(tokens.length, s.chunk_tokens);
        const SumBefore of_chunks = sum_before(own_chunks, of_warps);
        const std::int32_t own_first = chunks + of_chunks.before;
        if (n < a.sequences) first_chunk[n] = own_first;
        first[thread] = own_first, last[thread] = own_first + own_chunks;
        begin[thread] = tokens.begin, end[thread] = tokens.begin + tokens.length;
        __syncthreads();
        const std::int32_t slab_chunk = chunks > s.slab_begin ? chunks : s.slab_begin;
        chunks += of_chunks.total;
        for (std::int32_t i = slab_chunk + thread; i < min(chunks, s.slab_end); i += kScheduleThreads) {
            const int which = last_up_to(first, i);
            const std::int64_t at =
                begin[which] +
                std::int64_t{kReversed ? last[which] - 1 - i : i - first[which]} * s.chunk_tokens;
            packed[i - s.slab_begin] = {
                at, static_cast<std::int32_t>(min(end[which] - at, std::int64_t{s.chunk_tokens})),
                start + which};
        }

        Segment head = segment_of_piece(s, n, own_first, own_first + own_chunks, 0);
        if (n >= a.sequences) head.sequence = -1;
        if (whole) {
            if (n < a.sequences) lengths[n] = head.sequence < 0 ? -1 : head.chunks;
            count += __syncthreads_count(head.sequence >= 0);
            continue;
        }
        const SumBefore of_segments = sum_before(head.sequence < 0 ? 0 : head.count, of_warps);
        first_segment[thread] = of_segments.before;
        __syncthreads();
        for (int i = thread; i < of_segments.total; i += kScheduleThreads) {
            const int which = last_up_to(first_segment, i);
            segments[count + i] =
                segment_of_piece(s, start + which, first[which], last[which], i - first_segment[which]);
        }
        count += of_segments.total;
    }
    if (thread == 0) first_chunk[a.sequences] = chunks;
    for (std::int32_t i = (chunks > s.slab_begin ? chunks : s.slab_begin) + thread; i < s.slab_end;
         i += kScheduleThreads)
        packed[i - s.slab_begin] = {};

    if (whole) {
        const bool at_hand = a.sequences <= kScheduleThreads;
        if (!at_hand) __syncthreads();
        for (int n = thread; n < a.sequences; n += kScheduleThreads) {
            const Segment head = at_hand ? segment_of_piece(s, n, first[n], last[n], 0)
                                         : segment_of_piece(s, n, first_chunk[n], first_chunk[n + 1], 0);
            if (head.sequence < 0) continue;
            int longer = 0;
#pragma unroll 8
            for (int other = 0; other < a.sequences; ++other)
                longer += lengths[other] > head.chunks - (other < n ? 1 : 0);
            segments[longer] = head;
        }
    }
    for (int i = count + thread; i < s.max_segments; i += kScheduleThreads) segments[i] = Segment{};
}

}  // namespace cula::cuda::chunked
