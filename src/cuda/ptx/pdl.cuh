// SPDX-License-Identifier: Apache-2.0
// Kernels of one call that follow each other without a gap (LaunchShape::early), which before sm_90 they
// never do: what waits or leads is nothing there.
#pragma once

#include <cstdint>

namespace cula::cuda {

// Until all kernels before have ended and what they wrote can be read. Every block waits, at the latest
// before it ends, so that who waits for this kernel waits for those before it, too.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel be put on multiprocessors as they become free, once every block has come here or
// ended. After pdl_wait() it tells the next one that those before this one have ended: what they wrote lies
// in memory, and a fence there keeps it from reading what its first-level cache held before.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Before such a kernel touches global memory.
__device__ __forceinline__ void pdl_trigger_and_wait() {
    pdl_trigger();
    pdl_wait();
}

// A number of a kernel that may still have been running when this one started, and has ended since:
// ld.global.nc promises that what it reads does not change while this kernel runs.
__device__ __forceinline__ std::int32_t written_before(const std::int32_t* at) {
    std::int32_t number;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(number) : "l"(at) : "memory");
    return number;
}

// A number by which a kernel tells one that runs beside it that what this thread wrote, or saw written before
// a barrier, can be read; and its other end.
__device__ __forceinline__ void publish(std::int32_t* at, std::int32_t number) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(number) : "memory");
}
__device__ __forceinline__ std::int32_t published(const std::int32_t* at) {
    std::int32_t number;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(number) : "l"(at) : "memory");
    return number;
}

}  // namespace cula::cuda
