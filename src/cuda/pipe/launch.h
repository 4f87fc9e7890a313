// SPDX-License-Identifier: Apache-2.0
// The one place that talks to the CUDA runtime: launches, always checked.
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

inline void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess)
        throw std::runtime_error(std::string("cula: ") + what + ": " + cudaGetErrorString(status));
}

struct LaunchShape {
    std::size_t blocks = 0;
    int threads = 0;
    std::size_t shared_bytes = 0,
                most_shared_bytes = 0;  // of this launch; of any of the kernel, where that is more
    int cluster = 1;                    // neighbouring blocks
    // The kernel may start while the one launched before is running, for whose end it waits itself
    // (ptx/overlap.cuh); sm_90.
    bool early = false;
};

// Dynamic shared memory beyond 48 KiB has to be asked for once per kernel and device: always for the same
// amount, as two threads may launch one kernel. Asking takes a microsecond. A device that is reset forgets,
// and is not asked again.
template <auto kKernel>
void ask_for_shared(std::size_t bytes) {
    static std::atomic<std::uint64_t> asked = 0;  // a bit for each of the first devices
    int device = 0;
    check(cudaGetDevice(&device), "current device");
    const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
    if (asked.load(std::memory_order_relaxed) & bit) return;
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "shared memory");
    asked.fetch_or(bit, std::memory_order_relaxed);
}

// Arguments pass by reference, since a kernel's may be kilobytes: only the runtime copies them.
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

// The calling thread's current device, put back at the end.
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
