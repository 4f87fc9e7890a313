// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"

#include <string>
#include <vector>

#include "cuda/pipe/launch.h"

namespace cula::cuda {
namespace {

int attribute(cudaDeviceAttr which, int index) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, index), "device attribute");
    return value;
}

Device describe(int index) {
    const double memory_khz = attribute(cudaDevAttrMemoryClockRate, index),
                 bus_bytes = attribute(cudaDevAttrGlobalMemoryBusWidth, index) / 8.0;
    return {
        .kind = DeviceKind::kCuda,
        .index = index,
        .compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                              attribute(cudaDevAttrComputeCapabilityMinor, index),
        .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index),
        .shared_bytes = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index)),
        .clock_mhz = attribute(cudaDevAttrClockRate, index) / 1e3,
        .memory_gbps = 2.0 * memory_khz * bus_bytes / 1e6};  // two transfers a clock
}

std::vector<Device> all_devices() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "device count");
    std::vector<Device> devices;
    devices.reserve(static_cast<std::size_t>(count));
    for (int index = 0; index < count; ++index) devices.push_back(describe(index));
    return devices;
}

}  // namespace

// The attributes are queried once per process: every call of the library comes here, and four queries take as
// long as the rest of its dispatch.
Device device(int index) {
    static const std::vector<Device> devices = all_devices();
    if (index < 0 || index >= static_cast<int>(devices.size()))
        throw Error("there is no CUDA device " + std::to_string(index));
    return devices[static_cast<std::size_t>(index)];
}

}  // namespace cula::cuda
