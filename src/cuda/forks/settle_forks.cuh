// SPDX-License-Identifier: Apache-2.0
// Forks (core/forks.h), settled on the device in two kernels.
//
// settle_forks: starts, ends <- indices                     grid (sequences)                  128 threads
//   A CTA looks through all other sequences for one that writes the slot which its own starts from, and for
//   one that starts from the slot which its own writes first. With the former alone its own is a fork, and
//   starts from there.
// copy_forks: slots that forks start from <- the pool       grid (value heads * sequences)    128 threads
//   Nobody reads the slot meanwhile, nor writes the one that it is copied from.
#pragma once

#include "cuda/device_args.h"

namespace cula::cuda::forks {

inline constexpr int kSettleThreads = 128;

// body(slot) for every slot that sequence n writes, in the order of its tokens.
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
    std::int64_t first = -1;  // that it writes
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

template <class Word>
__device__ __forceinline__ void copy_state(const DeviceArgs& a, std::int64_t from, std::int64_t to,
                                           int value_head) {
    const auto* const source = static_cast<const Word*>(a.initial.data) + a.initial.offset(from, value_head);
    auto* const copy = static_cast<Word*>(a.final.data) + a.final.offset(to, value_head);
    const bool by_rows = a.final.k == 1;  // neighbouring threads have neighbouring elements
    const std::int64_t inner = by_rows ? a.key_dim : a.value_dim,
                       elements = std::int64_t{a.key_dim} * a.value_dim;
    for (std::int64_t i = threadIdx.x; i < elements; i += kSettleThreads) {
        const std::int64_t outer = i / inner, rest = i - outer * inner;
        const std::int64_t v = by_rows ? outer : rest, k = by_rows ? rest : outer;
        copy[v * a.final.v + k * a.final.k] = source[v * a.initial.v + k * a.initial.k];
    }
}

__global__ void __launch_bounds__(kSettleThreads)
    copy_forks(const __grid_constant__ DeviceArgs a, const std::int32_t* starts) {
    const std::int64_t n = blockIdx.x / static_cast<unsigned>(a.value_heads);
    const int value_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.value_heads));
    const std::int64_t from = states_of_drafts(a, n).initial, to = starts[n];
    if (from < 0 || to < 0 || from == to) return;
    if (a.final.dtype == Dtype::kFloat32)
        copy_state<std::uint32_t>(a, from, to, value_head);
    else
        copy_state<std::uint16_t>(a, from, to, value_head);
}

}  // namespace cula::cuda::forks
