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

// Clusters of `cluster` neighbouring blocks. Dynamic shared memory beyond 48 KiB has to be asked for once per kernel
// and device; asking again costs less than remembering.
template <class... Params, class... Args>
void launch_clusters(int cluster, void (*kernel)(Params...), std::size_t blocks, int threads, std::size_t shared_bytes,
                     void* stream, Args... args) {
    if (blocks == 0) return;
    if (shared_bytes > 48 * 1024)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
              "shared memory");
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = cluster > 1 ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "launch");
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), std::size_t blocks, int threads, std::size_t shared_bytes, void* stream,
            Args... args) {
    launch_clusters(1, kernel, blocks, threads, shared_bytes, stream, args...);
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
