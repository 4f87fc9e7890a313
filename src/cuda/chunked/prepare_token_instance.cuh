// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "cuda/chunked/prepare.h"
#include "cuda/chunked/prepare_token.cuh"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::chunked {

template <class T, int kKey>
void launch_prepare_token(const Call& call, const DeviceArgs& a, const Schedule& schedule,
                          const PrepareShare& share, const PreparedChunks<TokenChunk<T, kKey>>& to,
                          EarlyStarts& early, bool several) {
    const std::size_t chunks = static_cast<std::size_t>(schedule.slab_end - schedule.slab_begin) *
                               static_cast<std::size_t>(a.value_heads);
    const LaunchShape shape = early({.blocks = share.blocks(chunks),
                                     .threads = kPrepareThreads,
                                     .shared_bytes = TokenMemory<T, kKey>::bytes(share),
                                     .most_shared_bytes = TokenMemory<T, kKey>::kMost});
    if (several)
        launch<prepare_token<T, kKey, false, true>>(shape, call.stream, a, schedule, share, to.operands,
                                                    to.is_compensated, to.fading);
    else
        launch<prepare_token<T, kKey>>(shape, call.stream, a, schedule, share, to.operands, to.is_compensated,
                                       to.fading);
}

}  // namespace cula::cuda::chunked

#define CULA_INSTANTIATE(type, key)                                           \
    template void cula::cuda::chunked::launch_prepare_token<type, key>(       \
        const Call&, const DeviceArgs&, const Schedule&, const PrepareShare&, \
        const PreparedChunks<TokenChunk<type, key>>&, EarlyStarts&, bool);
