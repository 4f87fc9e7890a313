// SPDX-License-Identifier: Apache-2.0
// The launcher that entry.cc calls; instances.txt lists its one instance.
#pragma once

#include <cstdint>

#include "cuda/device_args.h"

namespace cula::cuda::forks {

// Launches settle_forks, for states of any K. It is a template because everything that instances.txt lists
// is.
template <int kKey>
void launch_settle_forks(const DeviceArgs& a, std::int32_t* starts, std::int32_t* ends, int multiprocessors,
                         void* stream);

}  // namespace cula::cuda::forks
