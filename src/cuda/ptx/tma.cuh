// SPDX-License-Identifier: Apache-2.0
// TMA tiles: copies between a tensor in global memory, which the host describes by a tensor map, and shared
// memory; and bulk stores: sm_90.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace cula::cuda {

// The first element of a TMA tile.
struct TileCoordinates {
    int channel, head, token, batch;
};
// The same in a tensor of one more dimension, between heads and tokens.
struct WriteCoordinates {
    int channel, head, write, token, batch;
};

// Loads the TMA tile at `at`. Elements beyond the tensor become zeros. `barrier` counts the bytes of the
// whole tile, zeros included.
__device__ __forceinline__ void tma_load(std::uint32_t shared, const CUtensorMap& map,
                                         const TileCoordinates& at, std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
        "l"(&map), "r"(at.channel), "r"(at.head), "r"(at.token), "r"(at.batch), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void tma_load(std::uint32_t shared, const CUtensorMap& map,
                                         const WriteCoordinates& at, std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared),
        "l"(&map), "r"(at.channel), "r"(at.head), "r"(at.write), "r"(at.token), "r"(at.batch), "r"(barrier)
        : "memory");
}
// Prefetches the tile to the second-level cache.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, const TileCoordinates& at) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map),
                 "r"(at.channel), "r"(at.head), "r"(at.token), "r"(at.batch)
                 : "memory");
}
// Stores the tile at `at` from shared memory; elements beyond the tensor are not written.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const TileCoordinates& at,
                                          std::uint32_t shared) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
            &map),
        "r"(at.channel), "r"(at.head), "r"(at.token), "r"(at.batch), "r"(shared)
        : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const WriteCoordinates& at,
                                          std::uint32_t shared) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(
            &map),
        "r"(at.channel), "r"(at.head), "r"(at.write), "r"(at.token), "r"(at.batch), "r"(shared)
        : "memory");
}
// Stores `bytes` (a multiple of 16) of shared memory, in the thread's open batch.
__device__ __forceinline__ void store_bulk(void* global, std::uint32_t shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared),
                 "r"(bytes)
                 : "memory");
}
// Waits until the sources of all tile stores of this thread have been read, so that their shared memory may
// be reused.
__device__ __forceinline__ void tma_wait_stores_read() {
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Closes the thread's batch of tile and bulk stores, and waits until the sources of all but the latest
// kPending batches have been read.
__device__ __forceinline__ void tma_commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void tma_wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all tile stores of this thread are done: their bytes are in memory.
__device__ __forceinline__ void tma_wait_stores() {
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}

// Prefetches a tensor map to the descriptor cache.
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace cula::cuda
