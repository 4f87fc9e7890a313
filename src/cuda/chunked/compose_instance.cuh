// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/chunked/compose.cuh"
#include "cuda/chunked/compose.h"
#include "cuda/chunked/compose_walks.cuh"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::chunked {

template <int kKey>
void launch_compose(const DeviceArgs& a, const Schedule& schedule, const CarryParams& p, int row_tiles,
                    bool matrices, bool total, EarlyStarts& early, void* stream) {
    const LaunchShape shape =
        early({.blocks = static_cast<std::size_t>(row_tiles) * a.value_heads * a.sequences,
               .threads = kComposeThreads<kKey>,
               .shared_bytes = sizeof(ComposeSmem<kKey>)});
    if (total)
        launch<compose<kKey, true>>(shape, stream, a, schedule, p, matrices);
    else
        launch<compose<kKey, false>>(shape, stream, a, schedule, p, matrices);
}

template <int kKey>
void launch_compose(const GivenMaps& given, std::int64_t sequences, void* stream) {
    const std::size_t tiles = static_cast<std::size_t>(ceil_div(given.value_dim, kComposeRows));
    launch<compose_given<kKey>>({.blocks = tiles * static_cast<std::size_t>(given.value_heads * sequences),
                                 .threads = kComposeThreads<kKey>,
                                 .shared_bytes = sizeof(ComposeSmem<kKey>)},
                                stream, given);
}

template <int kKey>
void launch_compose_walks(const DeviceArgs& a, const Schedule& schedule, const WalkMaps& maps,
                          EarlyStarts& early, void* stream) {
    const std::size_t tiles = static_cast<std::size_t>(ceil_div(a.value_dim, kComposeRows)),
                      columns = static_cast<std::size_t>(a.value_heads * a.sequences * maps.directions());
    launch<compose_walks<kKey>>(early({.blocks = tiles * columns,
                                       .threads = kComposeThreads<kKey>,
                                       .shared_bytes = sizeof(ComposeSmem<kKey>)}),
                                stream, a, schedule, maps);
}

}  // namespace cula::cuda::chunked

#define CULA_INSTANTIATE(type, key)                                                                    \
    template void cula::cuda::chunked::launch_compose<key>(                                            \
        const DeviceArgs&, const Schedule&, const CarryParams&, int, bool, bool, EarlyStarts&, void*); \
    template void cula::cuda::chunked::launch_compose<key>(const GivenMaps&, std::int64_t, void*);     \
    template void cula::cuda::chunked::launch_compose_walks<key>(const DeviceArgs&, const Schedule&,   \
                                                                 const WalkMaps&, EarlyStarts&, void*);
