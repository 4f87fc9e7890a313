// SPDX-License-Identifier: Apache-2.0
// What entry.cc asks of the instance (instances.txt).
#pragma once

#include <cstdint>

#include "cuda/device_args.h"

namespace cula::cuda::forks {

// core/forks.h, on states of any K. (A template, as whatever instances.txt lists is.)
template <int kKey>
void launch_settle_forks(const DeviceArgs& a, std::int32_t* starts, std::int32_t* ends, void* stream);

}  // namespace cula::cuda::forks
