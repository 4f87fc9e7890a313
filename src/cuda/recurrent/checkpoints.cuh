// SPDX-License-Identifier: Apache-2.0
// Intermediate states that a call asks for (checkpoint plan, chunk states), where tokens are processed one by
// one.
// All functions are called by whole warps: a plan or a list of packed sequences may have a hundred thousand
// rows, and a warp examines 32 of them at a time.
#pragma once

#include "cuda/device_args.h"

namespace cula::cuda::recurrent {

// The first row of the checkpoint plan, from `row` on, that asks for the state after `done` tokens of
// sequence n. Returns num_checkpoints if there is none.
__device__ __forceinline__ std::int64_t next_checkpoint(const DeviceArgs& a, std::int64_t row, std::int64_t n,
                                                        std::int64_t done) {
    for (; row < a.num_checkpoints; row += 32) {
        const std::int64_t own = row + threadIdx.x % 32;
        const bool wanted = own < a.num_checkpoints && a.checkpoint_plan.at(own, 0) == n &&
                            a.checkpoint_plan.at(own, 1) == done;
        if (const unsigned found = __ballot_sync(0xffffffffu, wanted))
            return row + __ffs(static_cast<int>(found)) - 1;
    }
    return a.num_checkpoints;
}

// The pool slot that a plan row names. Negative: nothing is stored.
__device__ __forceinline__ std::int64_t checkpoint_slot(const DeviceArgs& a, std::int64_t row) {
    const std::int64_t slot = a.checkpoint_plan.at(row, 2);
    return slot < a.checkpoints.slots ? slot : -1;
}

// The number of chunk states of the packed sequences before n; 0 without cu_seqlens.
__device__ __forceinline__ std::int32_t chunk_states_before(const DeviceArgs& a, std::int64_t n) {
    const int shift = a.chunk_tokens == 16 ? 4 : a.chunk_tokens == 32 ? 5 : 6;
    std::int32_t before = 0;
    for (std::int64_t i = threadIdx.x % 32; a.cu_seqlens && i < n; i += 32)
        before += static_cast<std::int32_t>((tokens_of(a, i).length + a.chunk_tokens - 1) >> shift);
    return __reduce_add_sync(0xffffffffu, before);
}

}  // namespace cula::cuda::recurrent
