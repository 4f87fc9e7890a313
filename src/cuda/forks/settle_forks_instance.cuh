// SPDX-License-Identifier: Apache-2.0
// The instance of launch_settle_forks (launch.h).
#pragma once

#include "cuda/forks/launch.h"
#include "cuda/forks/settle_forks.cuh"
#include "cuda/pipe/launch.h"

namespace cula::cuda::forks {

template <int kKey>
void launch_settle_forks(const DeviceArgs& a, std::int32_t* starts, std::int32_t* ends, void* stream) {
    const auto sequences = static_cast<std::size_t>(a.sequences);
    launch<settle_forks>({.blocks = sequences, .threads = kSettleThreads}, stream, a, starts, ends);
    launch<copy_forks>(
        {.blocks = static_cast<std::size_t>(a.value_heads) * sequences, .threads = kSettleThreads}, stream, a,
        starts);
}

}  // namespace cula::cuda::forks

#define CULA_INSTANTIATE(type, key)                                                             \
    template void cula::cuda::forks::launch_settle_forks<key>(const DeviceArgs&, std::int32_t*, \
                                                              std::int32_t*, void*);
