// SPDX-License-Identifier: Apache-2.0
// Interface to the instance of the kernels at the end of a backward call, sum_parameters and zero_tail
// (instances.txt), which takes calls of any K (kAnyKey).
#pragma once

#include <cstdint>

#include "cuda/backward/gradients.h"
#include "cuda/device_args.h"

namespace cula::cuda::chunked {
class EarlyStarts;
}  // namespace cula::cuda::chunked

namespace cula::cuda::backward {

// Parameters of one value head: A_log, then dt_bias.
CULA_HOST_DEVICE std::int32_t parameter_count(const DeviceArgs& a) {
    return 1 + (varies_by_channel(a.algorithm.decay) ? a.key_dim : 1);
}

// parameters: of `chunks` chunks.
template <int kKey>
void launch_sum_parameters(const DeviceArgs& a, const Gradients& d, const float* parameters,
                           std::int64_t chunks, chunked::EarlyStarts& early, void* stream);
template <int kKey>
void launch_zero_tail(const DeviceArgs& a, const Gradients& d, chunked::EarlyStarts& early, void* stream);

}  // namespace cula::cuda::backward
