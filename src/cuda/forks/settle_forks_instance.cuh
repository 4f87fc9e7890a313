// SPDX-License-Identifier: Apache-2.0
// The instance of launch_settle_forks (launch.h).
#pragma once

#include <algorithm>

#include "cuda/forks/launch.h"
#include "cuda/forks/settle_forks.cuh"
#include "cuda/pipe/launch.h"

namespace cula::cuda::forks {

template <int kKey>
void launch_settle_forks(const DeviceArgs& a, std::int32_t* starts, std::int32_t* ends, int multiprocessors,
                         void* stream) {
    // Two CTAs a multiprocessor, as long as each has a head of its own.
    const int parts = std::clamp(2 * multiprocessors / std::max(a.sequences, 1), 1, a.value_heads);
    launch<settle_forks>({.blocks = static_cast<std::size_t>(a.sequences) * parts, .threads = kSettleThreads},
                         stream, a, starts, ends, parts);
}

}  // namespace cula::cuda::forks

#define CULA_INSTANTIATE(type, key)                                                             \
    template void cula::cuda::forks::launch_settle_forks<key>(const DeviceArgs&, std::int32_t*, \
                                                              std::int32_t*, int, void*);
