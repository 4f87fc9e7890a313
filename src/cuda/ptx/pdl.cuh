// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PDL): the next kernel of a call may start before the one before it has ended
// (LaunchShape::early). Before sm_90 there is none, and the functions do nothing.
#pragma once

#include <cstdint>

namespace cula::cuda {

// PDL wait: returns when all kernels before this one have ended and their writes are visible.
// Every CTA calls it, at the latest before it ends. A kernel that has waited for this one has therefore also
// waited for those before it.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// PDL trigger: the CTAs of the next kernel may start, as multiprocessors become free, once every CTA of this
// kernel has triggered or ended.
// A trigger after pdl_wait() also tells the next kernel that the kernels before this one have ended. Their
// writes are then in memory; the next kernel needs a fence so as not to read stale lines of its first-level
// cache.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For kernels that do nothing before they touch global memory: triggers, then waits.
__device__ __forceinline__ void pdl_trigger_and_wait() {
    pdl_trigger();
    pdl_wait();
}

// Loads a number that an earlier kernel wrote, which may still have been running when this kernel started,
// and has ended since. Not ld.global.nc, which requires that the memory does not change while this kernel
// runs.
__device__ __forceinline__ std::int32_t written_before(const std::int32_t* at) {
    std::int32_t number;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(number) : "l"(at) : "memory");
    return number;
}

// A flag between kernels that run at the same time. publish() (release) makes visible what this thread wrote,
// and what it saw written before a barrier, to a thread that reads `number` by published() (acquire).
__device__ __forceinline__ void publish(std::int32_t* at, std::int32_t number) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(number) : "memory");
}
__device__ __forceinline__ std::int32_t published(const std::int32_t* at) {
    std::int32_t number;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(number) : "l"(at) : "memory");
    return number;
}

}  // namespace cula::cuda
