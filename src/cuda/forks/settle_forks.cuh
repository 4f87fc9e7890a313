// SPDX-License-Identifier: Apache-2.0
// Forks (core/forks.h) on the device, in a kernel that runs before those of the call.
//
// A sequence n is a fork if another sequence of the call writes the slot initial(n) that n starts from. With
// first(n) the first slot that n writes:
//
//     fork(n)    = some m != n writes initial(n)
//     chained(n) = some m != n starts from first(n)
//     starts[n]  = initial(n)   if not fork(n)
//                  first(n)     if fork(n), first(n) exists and not chained(n); then also
//                               state[first(n)] <- state[initial(n)]
//                  -1           otherwise, and for null rows: the sequence is skipped
//
// Grid: sequences * parts, 256 threads. A CTA's threads divide the other sequences among them, combine what
// they find by __syncthreads_or(), and copy the state of a fork: the heads of one part. Few sequences have
// several parts, which all look for themselves. The work grows with N^2: some 0.1 ms for 10^4 sequences.
// The copies do not race. No copy reads first(n), because n is not chained. No copy writes initial(n): a
// sequence m with first(m) = initial(n) is chained, and so is not copied.
//
// PDL: triggers at once; what follows waits for all of it.
// Budgets: at most 64 registers per thread, no shared memory. Design page: docs/design/forks.md.
#pragma once

#include <cstdint>

#include "cuda/device_args.h"
#include "cuda/ptx/pdl.cuh"

namespace cula::cuda::forks {

inline constexpr int kSettleThreads = 256;

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

// Copies one head's state from slot `from` to slot `to`, a Word at a time: an element, or several that lie
// side by side. Consecutive threads take neighbours along K if by_rows, otherwise along V.
template <class Word>
__device__ __forceinline__ void copy_words(const DeviceArgs& a, std::int64_t from, std::int64_t to,
                                           int value_head, bool by_rows, int element_bytes) {
    const auto* const source =
        static_cast<const char*>(a.initial.data) + a.initial.offset(from, value_head) * element_bytes;
    auto* const copy = static_cast<char*>(a.final.data) + a.final.offset(to, value_head) * element_bytes;
    const int each = static_cast<int>(sizeof(Word)) / element_bytes,
              inner = (by_rows ? a.key_dim : a.value_dim) / each,
              words = inner * (by_rows ? a.value_dim : a.key_dim);
    for (int i = static_cast<int>(threadIdx.x); i < words; i += kSettleThreads) {
        const int outer = i / inner, rest = (i - outer * inner) * each;
        const std::int64_t v = by_rows ? outer : rest, k = by_rows ? rest : outer;
        *reinterpret_cast<Word*>(copy + (v * a.final.v + k * a.final.k) * element_bytes) =
            *reinterpret_cast<const Word*>(source + (v * a.initial.v + k * a.initial.k) * element_bytes);
    }
}

// Whether rows along K lie in aligned pieces of 16 bytes.
__device__ __forceinline__ bool in_pieces(const States& states, int element_bytes) {
    return states.k == 1 && (states.slot | states.head | states.v) * element_bytes % 16 == 0 &&
           reinterpret_cast<std::uintptr_t>(states.data) % 16 == 0;
}

__device__ __forceinline__ void copy_state(const DeviceArgs& a, std::int64_t from, std::int64_t to,
                                           int value_head) {
    const bool by_rows = a.final.k == 1;  // neighbouring threads access neighbouring elements
    const int bytes = static_cast<int>(size_bytes(a.final.dtype));
    if (by_rows && in_pieces(a.initial, bytes) && in_pieces(a.final, bytes) && a.key_dim * bytes % 16 == 0)
        return copy_words<uint4>(a, from, to, value_head, by_rows, bytes);
    switch (bytes) {
        case 4: return copy_words<std::uint32_t>(a, from, to, value_head, by_rows, bytes);
        case 2: return copy_words<std::uint16_t>(a, from, to, value_head, by_rows, bytes);
        default: return copy_words<std::uint8_t>(a, from, to, value_head, by_rows, bytes);
    }
}

// 4 CTAs per multiprocessor allow 64 registers. Without that number ptxas aims at 32, and spills.
__global__ void __launch_bounds__(kSettleThreads, 4)
    settle_forks(const __grid_constant__ DeviceArgs a, std::int32_t* starts, std::int32_t* ends, int parts) {
    pdl_trigger();
    const std::int64_t n = blockIdx.x / static_cast<unsigned>(parts);
    const int part = static_cast<int>(blockIdx.x % static_cast<unsigned>(parts));
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
    const bool settled = forks && first >= 0 && !chained, skipped = own.skipped || (forks && !settled);
    if (part == 0 && threadIdx.x == 0) {
        const std::int64_t start = settled ? first : a.initial_indices.data ? a.initial_indices.at(n) : n;
        starts[n] = skipped ? -1 : static_cast<std::int32_t>(start);
        if (ends) ends[n] = skipped ? -1 : static_cast<std::int32_t>(own.final);
    }
    if (!settled || own.initial == first) return;
    for (int value_head = part; value_head < a.value_heads; value_head += parts) {
        copy_state(a, own.initial, first, value_head);
        if (a.final.dtype != Dtype::kFloat8E4M3) continue;
        for (int row = static_cast<int>(threadIdx.x); row < a.value_dim; row += kSettleThreads)
            *a.final_scales.at(first, value_head, row) = *a.initial_scales.at(own.initial, value_head, row);
    }
}

}  // namespace cula::cuda::forks
