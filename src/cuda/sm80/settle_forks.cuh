// SPDX-License-Identifier: Apache-2.0
// settle_forks: starts, ends, slots of the pool <- indices, slots of the pool      core/forks.h
//
// grid (value heads * sequences)   128 threads
//
// A CTA has one head of one sequence. It looks through all others for one that writes the slot which its own starts
// from, and for one that starts from the slot which its own writes first. A fork is copied to that slot, which nobody
// reads meanwhile, and starts there; where somebody does, the sequence is skipped.
#pragma once

#include "cuda/device_args.h"

namespace cula::cuda::sm80 {

inline constexpr int kSettleThreads = 128;

// Where a sequence starts, its initial slot or -1 for zero, and whether it writes a slot.
struct ForkRow {
    const DeviceArgs& a;
    std::int64_t n;
    StateSlots slots;

    __device__ __forceinline__ ForkRow(const DeviceArgs& args, std::int64_t sequence) : a(args), n(sequence) {
        if (!a.state_indices.data) {
            slots = states_of(a, n);
            return;
        }
        const std::int64_t from = a.initial_indices.at(n);
        slots.skipped = is_null(a, a.initial, from);
        if (!slots.skipped && (!a.has_initial || a.has_initial[n])) slots.initial = from;
    }
    __device__ __forceinline__ bool reads(std::int64_t slot) const { return slots.initial == slot; }
    __device__ __forceinline__ bool writes(std::int64_t slot) const {
        bool found = false;
        each_written([&](std::int64_t written) { found |= written == slot; });
        return found;
    }
    // -1: it writes none.
    __device__ __forceinline__ std::int64_t first_written() const {
        std::int64_t first = -1;
        each_written([&](std::int64_t written) {
            if (first < 0) first = written;
        });
        return first;
    }

private:
    template <class Body>
    __device__ __forceinline__ void each_written(Body body) const {
        if (slots.skipped) return;
        if (!a.state_indices.data) return body(slots.final);
        const std::int64_t tokens = tokens_of(a, n).length;
        for (std::int64_t t = 0; t < tokens && t < a.state_indices.columns; ++t) {
            const std::int64_t slot = a.state_indices.at(n, t);
            if (!is_null(a, a.final, slot)) body(slot);
        }
    }
};

template <class Word>
__device__ __forceinline__ void copy_state(const DeviceArgs& a, std::int64_t from, std::int64_t to, int value_head) {
    const States& pool = a.initial;
    Word* const data = static_cast<Word*>(pool.data);
    const bool by_rows = pool.k == 1;  // neighbouring threads have neighbouring elements
    const int inner = by_rows ? a.key_dim : a.value_dim, elements = a.key_dim * a.value_dim;
    for (int i = static_cast<int>(threadIdx.x); i < elements; i += kSettleThreads) {
        const int outer = i / inner, rest = i - outer * inner;
        const std::int64_t at = by_rows ? outer * pool.v + rest * pool.k : rest * pool.v + outer * pool.k;
        data[pool.offset(to, value_head) + at] = data[pool.offset(from, value_head) + at];
    }
}

__global__ void __launch_bounds__(kSettleThreads)
    settle_forks(const __grid_constant__ DeviceArgs a, std::int32_t* starts, std::int32_t* ends) {
    const std::int64_t n = blockIdx.x / static_cast<unsigned>(a.value_heads);
    const int value_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.value_heads));
    const ForkRow own(a, n);
    const std::int64_t first = own.first_written(), from = own.slots.initial;
    bool forks = false, chained = false;
    for (std::int64_t m = threadIdx.x; from >= 0 && m < a.sequences; m += kSettleThreads) {
        if (m == n) continue;
        const ForkRow other(a, m);
        forks |= other.writes(from);
        chained |= first >= 0 && other.reads(first);
    }
    forks = __syncthreads_or(forks), chained = __syncthreads_or(chained);
    const bool settled = forks && first >= 0 && !chained;
    if (settled) {
        if (a.initial.dtype == Dtype::kFloat32)
            copy_state<std::uint32_t>(a, from, first, value_head);
        else
            copy_state<std::uint16_t>(a, from, first, value_head);
    }
    if (value_head != 0 || threadIdx.x != 0) return;
    const std::int64_t start = settled ? first : a.initial_indices.data ? a.initial_indices.at(n) : n;
    const bool skipped = own.slots.skipped || (forks && !settled);
    starts[n] = skipped ? -1 : static_cast<std::int32_t>(start);
    if (ends) ends[n] = skipped ? -1 : static_cast<std::int32_t>(own.slots.final);
}

}  // namespace cula::cuda::sm80
