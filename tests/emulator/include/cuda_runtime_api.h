// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime of one emulated device. A launch runs at once; streams and attributes are ignored.
#pragma once

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "emulator/device.h"

using cudaError_t = int;
inline constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1;
using cudaStream_t = struct CUstream_st*;

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock,
    cudaDevAttrClockRate,
    cudaDevAttrMemoryClockRate,
    cudaDevAttrGlobalMemoryBusWidth,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension,
    cudaLaunchAttributeProgrammaticStreamSerialization,
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        uint3 clusterDim;
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    std::size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
    cudaLaunchAttribute* attrs = nullptr;
    unsigned numAttrs = 0;
};

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
inline constexpr unsigned long long cudaEnableDefault = 0;
// Knows cuTensorMapEncodeTiled.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);

inline const char* cudaGetErrorString(cudaError_t) { return "invalid value"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* p, int byte, std::size_t bytes, cudaStream_t) {
    return std::memset(p, byte, bytes), cudaSuccess;
}

namespace emulator {

// The emulated device and the order of its CTAs. Set it before the first call.
struct Settings {
    int compute_capability = 80, multiprocessors = 16;
    std::size_t shared_bytes = 163 * 1024;
    int host_threads = 2;
    // 0: CTAs and threads run in the order of their numbers. Otherwise in a random order that depends on it.
    std::uint64_t order = 0;
};
inline Settings settings;
// What the process is doing, for the message of a kernel that accesses what is not its memory.
inline std::string doing;

void raise_shared_limit(const void* kernel, std::size_t bytes);
// Runs body() in every thread of the grid. Throws std::runtime_error where a thread has failed.
void launch(const void* kernel, const cudaLaunchConfig_t& config, const std::function<void()>& body);

}  // namespace emulator

template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute, int bytes) {
    emulator::raise_shared_limit(reinterpret_cast<const void*>(kernel), static_cast<std::size_t>(bytes));
    return cudaSuccess;
}

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
    const std::tuple<Params...> parameters(args...);
    emulator::launch(reinterpret_cast<const void*>(kernel), *config,
                     [&] { std::apply([&](const Params&... each) { kernel(each...); }, parameters); });
    return cudaSuccess;
}
