// SPDX-License-Identifier: Apache-2.0
// The one place that talks to the CUDA runtime: launches, always checked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "cula/status.h"

namespace cula::cuda {

inline void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess)
        throw std::runtime_error(std::string("cula: ") + what + ": " + cudaGetErrorString(status));
}

struct LaunchShape {
    std::size_t blocks = 0;
    int threads = 0;
    std::size_t shared_bytes = 0, most_shared_bytes = 0;  // of this launch; of any of the kernel, where that is more
    int cluster = 1;                                      // neighbouring blocks
    // The kernel may start while the one launched before is running, for whose end it waits itself (ptx/overlap.cuh);
    // sm_90.
    bool early = false;
};

// Dynamic shared memory beyond 48 KiB has to be asked for once per kernel and device; asking again costs less than
// remembering, and always for the same amount, as two threads may launch one kernel. Arguments pass by reference, since
// a kernel's may be kilobytes: only the runtime copies them.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchShape& shape, void* stream, const Args&... args) {
    if (shape.blocks == 0) return;
    const std::size_t most = shape.most_shared_bytes ? shape.most_shared_bytes : shape.shared_bytes;
    if (most > 48 * 1024)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)),
              "shared memory");
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

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), std::size_t blocks, int threads, std::size_t shared_bytes, void* stream,
            const Args&... args) {
    launch(kernel, LaunchShape{.blocks = blocks, .threads = threads, .shared_bytes = shared_bytes}, stream, args...);
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
