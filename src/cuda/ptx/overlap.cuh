// SPDX-License-Identifier: Apache-2.0
// Kernels of one call that follow each other without a gap (LaunchShape::early): sm_90. Before it is nothing.
#pragma once

namespace cula::cuda {

// Before such a kernel touches global memory: lets the next one be put on multiprocessors as they become free, and
// waits until all kernels before have ended and what they wrote can be read. Every block waits, at the latest before it
// ends, so that who waits for this kernel waits for those before it, too.
__device__ __forceinline__ void follow_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
}

// The same in the other order: when the next kernel starts, those before this one have ended.
__device__ __forceinline__ void follow_kernels_and_lead() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace cula::cuda
