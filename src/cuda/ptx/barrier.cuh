// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (mbarrier) that count arrivals and bytes, bulk copies that complete on them, and
// clusters: sm_90.
//
// The phases of a barrier alternate between parity 0 and 1, beginning with 0. Waiting for parity 1 on a fresh
// barrier, the phase before the first, returns at once.
#pragma once

#include <cstdint>

namespace cula::cuda {

// A phase ends after so many arrivals and after all bytes that were announced.
__device__ __forceinline__ void init_barrier(std::uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to the cluster. Call it after init_barrier(), and synchronise before the
// first use.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(std::uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier at the same offset in CTA `rank` of the cluster.
// Like everything here it orders shared memory. Ordering global memory across CTAs would need the cluster's
// scope, and cost a flush of the first-level cache.
__device__ __forceinline__ void arrive_at(std::uint32_t barrier, int rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
// Arrives once, and announces `bytes` that must also come before the phase ends.
__device__ __forceinline__ void arrive_expecting(std::uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void arrive_expecting_at(std::uint32_t barrier, int bytes, int rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %2; "
        "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [there], %1; }" ::"r"(barrier),
        "r"(bytes), "r"(rank)
        : "memory");
}
// Announces `bytes` without arriving.
__device__ __forceinline__ void expect(std::uint32_t barrier, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void expect_at(std::uint32_t barrier, int bytes, int rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %2; "
        "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [there], %1; }" ::"r"(barrier),
        "r"(bytes), "r"(rank)
        : "memory");
}
// Whether the phase of this parity has ended; does not wait.
__device__ __forceinline__ bool test_barrier(std::uint32_t barrier, int parity) {
    std::uint32_t done;
    asm volatile(
        "{ .reg .pred is; mbarrier.test_wait.parity.shared::cta.b64 is, [%1], %2; selp.u32 %0, 1, 0, is; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}
// Waits until the phase of this parity has ended.
__device__ __forceinline__ void wait_barrier(std::uint32_t barrier, int parity) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Makes ordinary stores and copies to shared memory visible to tensor cores and bulk copies that follow.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Makes ordinary stores to global memory visible to bulk copies that follow.
__device__ __forceinline__ void fence_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Copies `bytes` (a multiple of 16) of global memory to the same offset in every CTA of the cluster whose bit
// is set in `ranks`. The barrier at the same offset in each of them counts the bytes.
__device__ __forceinline__ void copy_bulk(std::uint32_t shared, const void* global, int bytes,
                                          std::uint32_t barrier, unsigned ranks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], "
        "%2, "
        "[%3], %4;" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier), "h"(static_cast<unsigned short>(ranks))
        : "memory");
}
// The same to this CTA alone.
__device__ __forceinline__ void copy_bulk(std::uint32_t shared, const void* global, int bytes,
                                          std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Prefetches what a bulk copy will read to the second-level cache.
__device__ __forceinline__ void prefetch_bulk(const void* global, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
}

// Copies from shared memory of this CTA to `shared` in CTA `rank`, whose barrier counts the bytes.
__device__ __forceinline__ void copy_bulk_to(std::uint32_t shared, std::uint32_t from, int bytes,
                                             std::uint32_t barrier, int rank) {
    asm volatile(
        "{ .reg .b32 to, there; mapa.shared::cluster.u32 to, %0, %4; mapa.shared::cluster.u32 there, %3, %4; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %2, [there]; }" ::
            "r"(shared),
        "r"(from), "r"(bytes), "r"(barrier), "r"(rank)
        : "memory");
}
// Stores two floats in the same way (8 bytes).
__device__ __forceinline__ void send_to(std::uint32_t shared, float2 x, std::uint32_t barrier, int rank) {
    asm volatile(
        "{ .reg .b32 to, there; mapa.shared::cluster.u32 to, %0, %4; mapa.shared::cluster.u32 there, %3, %4; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%1, %2}, [there]; }" ::"r"(
            shared),
        "f"(x.x), "f"(x.y), "r"(barrier), "r"(rank)
        : "memory");
}

__device__ __forceinline__ int cluster_rank() {
    std::uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}
// Synchronises all threads of the cluster.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// Sets the number of registers of each thread of the warpgroup (setmaxnreg): lower_registers() gives
// registers back, raise_registers() waits until the CTA has enough free ones.
template <int kCount>
__device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace cula::cuda
