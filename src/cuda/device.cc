// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"

#include "cuda/pipe/launch.h"

namespace cula::cuda {
namespace {

int attribute(cudaDeviceAttr which, int index) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, index), "device attribute");
    return value;
}

}  // namespace

Device device(int index) {
    return {.kind = DeviceKind::kCuda,
            .index = index,
            .compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                                  attribute(cudaDevAttrComputeCapabilityMinor, index),
            .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index),
            .shared_bytes = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index))};
}

}  // namespace cula::cuda
