// SPDX-License-Identifier: Apache-2.0
// How the roles of a specialised kernel wait for each other: mbarriers as members of its shared memory, the
// position of a role in a ring of places, and named barriers. sm_90; the instructions are in ptx/barrier.cuh.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/memory.cuh"

namespace cula::cuda {

// An mbarrier. One thread calls init() on each, then publish_barriers(), and the CTA synchronises before the
// first use. A function that ends in _at acts on the barrier at the same place in CTA `rank` of the cluster.
struct Mbarrier {
    std::uint64_t state;

    __device__ __forceinline__ std::uint32_t address() const { return shared_address(&state); }
    // Each phase ends after `arrivals` arrivals, and after all bytes that were announced.
    __device__ __forceinline__ void init(int arrivals) { init_barrier(address(), arrivals); }
    __device__ __forceinline__ void arrive() { cuda::arrive(address()); }
    __device__ __forceinline__ void arrive_at(int rank) { cuda::arrive_at(address(), rank); }
    // Announces `bytes` that a copy will bring, and arrives, or only announces them.
    __device__ __forceinline__ void arrive_expecting(int bytes) { cuda::arrive_expecting(address(), bytes); }
    __device__ __forceinline__ void arrive_expecting_at(int bytes, int rank) {
        cuda::arrive_expecting_at(address(), bytes, rank);
    }
    __device__ __forceinline__ void expect(int bytes) { cuda::expect(address(), bytes); }
    __device__ __forceinline__ void expect_at(int bytes, int rank) {
        cuda::expect_at(address(), bytes, rank);
    }
    // Waits until the phase of this parity has ended. has_ended() only looks.
    __device__ __forceinline__ void wait(int parity) const { wait_barrier(address(), parity); }
    __device__ __forceinline__ bool has_ended(int parity) const { return test_barrier(address(), parity); }
};
static_assert(sizeof(Mbarrier) == 8);

// The barriers of a ring of places, which one side fills and the other empties. ready[i]: place i may be
// read; free[i]: it may be overwritten.
template <int kPlaces>
struct Ring {
    Mbarrier ready[kPlaces], free[kPlaces];
};

// The position of a role that takes the places of a ring in turn, and the parity of the phase that it waits
// for there. A reader begins with the first phase of `ready`. A writer begins with the phase before the first
// one of `free`: waiting for that returns at once, since all places are free.
struct RingPosition {
    int at = 0, parity = 0;

    static __device__ __forceinline__ RingPosition of_reader() { return {0, 0}; }
    static __device__ __forceinline__ RingPosition of_writer() { return {0, 1}; }
    __device__ __forceinline__ void next(int places) {
        if (++at == places) at = 0, parity ^= 1;
    }
};

// Named barriers of a CTA. `Name` is a kernel's enum of their numbers; 0 is that of __syncthreads(). kThreads
// is how many threads take part, those that only arrive included.
template <int kThreads, class Name>
__device__ __forceinline__ void named_barrier_sync(Name name) {
    asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(name)), "n"(kThreads) : "memory");
}
template <int kThreads, class Name>
__device__ __forceinline__ void named_barrier_arrive(Name name) {
    asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(name)), "n"(kThreads) : "memory");
}
template <auto kName, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(static_cast<int>(kName)), "n"(kThreads) : "memory");
}
// Synchronises, and returns whether `is` holds in any of the threads.
template <int kThreads, class Name>
__device__ __forceinline__ bool named_barrier_any(Name name, bool is) {
    std::uint32_t any;
    asm volatile(
        "{ .reg .pred in, out; setp.ne.u32 in, %1, 0; barrier.cta.red.or.pred out, %2, %3, in; "
        "selp.u32 %0, 1, 0, out; }"
        : "=r"(any)
        : "r"(static_cast<std::uint32_t>(is)), "r"(static_cast<int>(name)), "n"(kThreads)
        : "memory");
    return any != 0;
}
// The i-th of several named barriers that have consecutive numbers.
template <class Name>
__device__ __forceinline__ Name nth(Name first, int i) {
    return static_cast<Name>(static_cast<int>(first) + i);
}

}  // namespace cula::cuda
