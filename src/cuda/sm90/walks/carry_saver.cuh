// SPDX-License-Identifier: Apache-2.0
// The saver of a carry that makes outputs (carry/state_role.cuh), in a prefill that keeps S and U for the
// backward pass of the call. Warps store the operands of products (backward/saved.cuh) while the
// products run.
#pragma once

#include "cuda/sm90/walks/config.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey>
struct CarrySaver {
    using Params = WalkParams<T, kKey>;

    const Params& p;
    // Of the warp's next chunk: the number of its slice, in one register where a pointer takes two; negative:
    // the warp has no value rows.
    std::int32_t slice = -1;

    template <class W>
    __device__ __forceinline__ CarrySaver(const DeviceArgs& a, const Params& params, const W& cursor)
        : p(params) {
        if (cursor.rows.first < a.value_dim)
            slice = static_cast<std::int32_t>(
                p.saved.index(cursor.segment.slot, cursor.value_head, cursor.rows.first / kWarpRows));
    }

    __device__ __forceinline__ void save_state(const Packed (&packed)[kKey / 16]) const {
        if (slice < 0) return;
        T* const state = p.saved.carried[slice].state;
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step) backward::save_block(state, step, packed[step]);
    }
    // The last of a chunk.
    template <int kBlocks>
    __device__ __forceinline__ void save_writes(const Packed (&writes)[kBlocks]) {
        if (slice < 0) return;
        T* const rows = p.saved.carried[slice].writes;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) backward::save_block(rows, block, writes[block]);
        slice += p.saved.value_heads * p.saved.count;
    }
};

}  // namespace cula::cuda::sm90
