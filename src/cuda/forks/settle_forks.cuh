// SPDX-License-Identifier: Apache-2.0
// Forks (core/forks.h) on the device, in two kernels that run before those of the call.
//
// A sequence n is a fork if another sequence of the call writes the slot initial(n) that n starts from. With
// first(n) the first slot that n writes:
//
// settle_forks: starts, ends <- indices                       grid: sequences, 128 threads
//     fork(n)    = some m != n writes initial(n)
//     chained(n) = some m != n starts from first(n)
//     starts[n]  = initial(n)   if not fork(n)
//                  first(n)     if fork(n), first(n) exists and not chained(n)
//                  -1           otherwise, and for null rows: the sequence is skipped
//   The threads of a CTA divide the other sequences among them, and combine what they find by
//   __syncthreads_or().
//   The work grows with N^2: some 0.1 ms for 10^4 sequences.
// copy_forks: state[starts[n]] <- state[initial(n)]           grid: value heads * sequences, 128 threads
//   The copies do not race. No copy reads first(n), because n is not chained. No copy writes initial(n): a
//   sequence m with first(m) = initial(n) is chained, and so is not copied.
//
// Budgets: at most 64 registers per thread, no shared memory. Design page: docs/design/forks.md.
#pragma once

#include "cuda/device_args.h"

namespace cula::cuda::forks {

inline constexpr int kSettleThreads = 128;

// Calls body(slot) for every slot that sequence n writes, in the order of its tokens.
template <class Body>
__device__ __forceinline__ void each_written(const DeviceArgs& a, std::int64_t n, const StateSlots& slots,
                                             Body body) {
    if (slots.skipped) return;
    if (!a.state_indices.data) return body(slots.final);
    const std::int64_t tokens = tokens_of(a, n).length;
    for (std::int64_t t = 0; t < tokens && t < a.state_indices.columns; ++t) {
        const std::int64_t slot = a.state_indices.at(n, t);
        if (!is_null(a, a.final, slot)) body(slot);
    }
}

__global__ void __launch_bounds__(kSettleThreads)
    settle_forks(const __grid_constant__ DeviceArgs a, std::int32_t* starts, std::int32_t* ends) {
    const std::int64_t n = blockIdx.x;
    const StateSlots own = states_of_drafts(a, n);
    std::int64_t first = -1;  // the slot that it writes first; -1: none
    each_written(a, n, own, [&](std::int64_t slot) {
        if (first < 0) first = slot;
    });
    bool forks = false, chained = false;
    for (std::int64_t m = threadIdx.x; own.initial >= 0 && m < a.sequences; m += kSettleThreads) {
        if (m == n) continue;
        const StateSlots other = states_of_drafts(a, m);
        each_written(a, m, other, [&](std::int64_t slot) { forks |= slot == own.initial; });
        chained |= first >= 0 && other.initial == first;
    }
    forks = __syncthreads_or(forks), chained = __syncthreads_or(chained);
    if (threadIdx.x != 0) return;
    const bool settled = forks && first >= 0 && !chained, skipped = own.skipped || (forks && !settled);
    const std::int64_t start = settled ? first : a.initial_indices.data ? a.initial_indices.at(n) : n;
    starts[n] = skipped ? -1 : static_cast<std::int32_t>(start);
    if (ends) ends[n] = skipped ? -1 : static_cast<std::int32_t>(own.final);
}

// Copies one head's state between slots; Word: an unsigned integer of the element's size.
template <class Word>
__device__ __forceinline__ void copy_state(const DeviceArgs& a, std::int64_t from, std::int64_t to,
                                           int value_head) {
    const auto* const source = static_cast<const Word*>(a.initial.data) + a.initial.offset(from, value_head);
    auto* const copy = static_cast<Word*>(a.final.data) + a.final.offset(to, value_head);
    const bool by_rows = a.final.k == 1;  // neighbouring threads access neighbouring elements
    const std::int64_t inner = by_rows ? a.key_dim : a.value_dim,
                       elements = std::int64_t{a.key_dim} * a.value_dim;
    for (std::int64_t i = threadIdx.x; i < elements; i += kSettleThreads) {
        const std::int64_t outer = i / inner, rest = i - outer * inner;
        const std::int64_t v = by_rows ? outer : rest, k = by_rows ? rest : outer;
        copy[v * a.final.v + k * a.final.k] = source[v * a.initial.v + k * a.initial.k];
    }
}

// 8 CTAs per multiprocessor allow 64 registers. Without that number ptxas aims at 32, and spills.
__global__ void __launch_bounds__(kSettleThreads, 8)
    copy_forks(const __grid_constant__ DeviceArgs a, const std::int32_t* starts) {
    const std::int64_t n = blockIdx.x / static_cast<unsigned>(a.value_heads);
    const int value_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.value_heads));
    const std::int64_t from = states_of_drafts(a, n).initial, to = starts[n];
    if (from < 0 || to < 0 || from == to) return;
    switch (a.final.dtype) {
        case Dtype::kFloat32: return copy_state<std::uint32_t>(a, from, to, value_head);
        case Dtype::kFloat8E4M3:
            for (int row = static_cast<int>(threadIdx.x); row < a.value_dim; row += kSettleThreads)
                *a.final_scales.at(to, value_head, row) = *a.initial_scales.at(from, value_head, row);
            return copy_state<std::uint8_t>(a, from, to, value_head);
        default: return copy_state<std::uint16_t>(a, from, to, value_head);
    }
}

}  // namespace cula::cuda::forks
