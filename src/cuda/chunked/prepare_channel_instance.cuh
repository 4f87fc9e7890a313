// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "cuda/chunked/prepare.h"
#include "cuda/chunked/prepare_channel.cuh"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"
#include "cuda/rule.h"

namespace cula::cuda::chunked {

template <class T, int kKey>
void launch_prepare_channel(const Call& call, const DeviceArgs& a, const Schedule& schedule,
                            const PreparedChunks<ChannelChunk<T, kKey>>& to, EarlyStarts& early,
                            Update update) {
    const std::size_t chunks = static_cast<std::size_t>(schedule.slab_end - schedule.slab_begin) *
                               static_cast<std::size_t>(a.value_heads);
    with_update(update, [&]<Update kUpdate>(UpdateConstant<kUpdate>) {
        launch<prepare_channel<T, kKey, kUpdate, NoGateTiles>>(
            early({.blocks = chunks, .threads = kPrepareThreads, .shared_bytes = sizeof(ChannelSmem<kKey>)}),
            call.stream, a, NoGateTiles{}, schedule, to.operands, to.is_compensated, to.fading);
    });
}

}  // namespace cula::cuda::chunked

#define CULA_INSTANTIATE(type, key)                                                                      \
    template void cula::cuda::chunked::launch_prepare_channel<type, key>(                                \
        const Call&, const DeviceArgs&, const Schedule&, const PreparedChunks<ChannelChunk<type, key>>&, \
        EarlyStarts&, Update);
