// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory that count arrivals and bytes, bulk copies that complete on them, and clusters:
// sm_90.
//
// A barrier's phases alternate between parity 0 and 1. Waiting for the phase before the first, parity 1,
// returns at once.
#pragma once

#include <cstdint>

namespace cula::cuda {

__device__ __forceinline__ void init_barrier(std::uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// After init_barrier, before anyone of the cluster uses the barriers.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(std::uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier of the same place in CTA `rank` of the cluster. It orders shared memory, as all here does;
// global memory across CTAs would take the cluster's scope, and cost a flush of the first-level cache.
__device__ __forceinline__ void arrive_at(std::uint32_t barrier, int rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
// One arrival, and `bytes` more to come before the phase ends.
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
// No arrival, but so many bytes more.
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
// Whether the phase is over.
__device__ __forceinline__ bool test_barrier(std::uint32_t barrier, int parity) {
    std::uint32_t done;
    asm volatile(
        "{ .reg .pred is; mbarrier.test_wait.parity.shared::cta.b64 is, [%1], %2; selp.u32 %0, 1, 0, is; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}
__device__ __forceinline__ void wait_barrier(std::uint32_t barrier, int parity) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// What ordinary stores and copies wrote to shared memory, before tensor cores and bulk copies read it.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// What ordinary stores wrote to global memory, before bulk copies read it.
__device__ __forceinline__ void fence_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Whole 16-byte pieces of global memory to the same place in every CTA of the cluster that `ranks` names by a
// bit; each one's barrier, at the same place too, counts the bytes.
__device__ __forceinline__ void copy_bulk(std::uint32_t shared, const void* global, int bytes,
                                          std::uint32_t barrier, unsigned ranks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], "
        "%2, "
        "[%3], %4;" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier), "h"(static_cast<unsigned short>(ranks))
        : "memory");
}
// To this CTA alone.
__device__ __forceinline__ void copy_bulk(std::uint32_t shared, const void* global, int bytes,
                                          std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// From this CTA's shared memory to `shared` in CTA `rank`, whose barrier counts the bytes.
__device__ __forceinline__ void copy_bulk_to(std::uint32_t shared, std::uint32_t from, int bytes,
                                             std::uint32_t barrier, int rank) {
    asm volatile(
        "{ .reg .b32 to, there; mapa.shared::cluster.u32 to, %0, %4; mapa.shared::cluster.u32 there, %3, %4; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %2, [there]; }" ::
            "r"(shared),
        "r"(from), "r"(bytes), "r"(barrier), "r"(rank)
        : "memory");
}
// Two floats, the same way.
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
// All threads of the cluster.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// How many registers each thread of the warpgroup has from here on: given back, or asked for and waited for.
template <int kCount>
__device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace cula::cuda
