// SPDX-License-Identifier: Apache-2.0
// The only place that calls the CUDA runtime to launch kernels. Every call is checked.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/limits.h"
#include "cula/status.h"

namespace cula::cuda {

// Throws std::runtime_error with `what` and the message of CUDA if a call failed.
inline void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess)
        throw std::runtime_error(std::string("cula: ") + what + ": " + cudaGetErrorString(status));
}

struct LaunchShape {
    std::size_t blocks = 0;
    int threads = 0;
    // Dynamic shared memory per CTA: of this launch, and the most that any launch of this kernel has.
    std::size_t shared_bytes = 0, most_shared_bytes = 0;
    int cluster = 1;  // CTAs per cluster
    // PDL (ptx/pdl.cuh), sm_90: the kernel may start while the one launched before it is still running, and
    // waits for that one's end itself.
    bool early = false;
};

// Raises the limit of a kernel's dynamic shared memory, which is needed beyond 48 KiB, once per kernel and
// device. A call to the runtime takes a microsecond.
// The amount is always the same for a kernel, because two threads may launch it at the same time. A device
// that is reset loses the setting, and it is not made again.
template <auto kKernel>
void ask_for_shared(std::size_t bytes) {
    static std::atomic<std::uint64_t> asked = 0;  // one bit per device, for the first 64
    int device = 0;
    check(cudaGetDevice(&device), "current device");
    const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
    if (asked.load(std::memory_order_relaxed) & bit) return;
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "shared memory");
    asked.fetch_or(bit, std::memory_order_relaxed);
}

inline void fill_with_zeros(void* memory, std::size_t bytes, void* stream) {
    check(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), "zeros");
}

// Launches a kernel. Arguments are passed by reference, because they may take kilobytes: only the runtime
// copies them.
template <class... Params, class... Args>
void launch_as(void (*kernel)(Params...), const LaunchShape& shape, void* stream, const Args&... args) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    if (shape.cluster > 1) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    }
    if (shape.early) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    check(cudaLaunchKernelEx(&config, kernel, static_cast<const Params&>(args)...), "launch");
}

// Launches kKernel, or nothing if there are no blocks. Throws Error if there are more than a grid can have.
template <auto kKernel, class... Args>
void launch(const LaunchShape& shape, void* stream, const Args&... args) {
    if (shape.blocks == 0) return;
    if (shape.blocks > static_cast<std::size_t>(kMostBlocks))
        throw Error("launch: a call must have at most " + std::to_string(kMostBlocks) +
                    " thread blocks, got " + std::to_string(shape.blocks));
    const std::size_t most = std::max(shape.most_shared_bytes, shape.shared_bytes);
    if (most > 48 * 1024) ask_for_shared<kKernel>(most);
    launch_as(kKernel, shape, stream, args...);
}

// Makes `device` the current device of the calling thread, and restores the previous one at the end.
class DeviceGuard {
public:
    explicit DeviceGuard(int device) {
        check(cudaGetDevice(&previous_), "current device");
        if (previous_ != device) check(cudaSetDevice(device), "set device");
        changed_ = previous_ != device;
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(previous_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

private:
    int previous_ = 0;
    bool changed_ = false;
};

}  // namespace cula::cuda
