// SPDX-License-Identifier: Apache-2.0
// Boxes of tensors that a map on the host describes, to and from shared memory: sm_90.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace cula::cuda {

struct TileCoordinates {
    int channel, head, token, batch;
};

// The box at `at`, with zeros where it reaches beyond the tensor; `barrier` counts its bytes, those too.
__device__ __forceinline__ void tma_load(std::uint32_t shared, const CUtensorMap& map,
                                         const TileCoordinates& at, std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
        "l"(&map), "r"(at.channel), "r"(at.head), "r"(at.token), "r"(at.batch), "r"(barrier)
        : "memory");
}
// To the second-level cache alone.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, const TileCoordinates& at) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map),
                 "r"(at.channel), "r"(at.head), "r"(at.token), "r"(at.batch)
                 : "memory");
}
// The way back, of what lies in the tensor.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const TileCoordinates& at,
                                          std::uint32_t shared) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
            &map),
        "r"(at.channel), "r"(at.head), "r"(at.token), "r"(at.batch), "r"(shared)
        : "memory");
}
// Returns when all that the thread has stored so far has been read.
__device__ __forceinline__ void tma_wait_stores_read() {
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// A map, to where tensor copies look for it.
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace cula::cuda
