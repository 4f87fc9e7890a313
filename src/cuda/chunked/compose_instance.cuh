// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/chunked/compose.cuh"
#include "cuda/chunked/compose.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::chunked {

template <int kKey>
void launch_compose(const GivenMaps& given, std::int64_t sequences, void* stream) {
    const std::size_t tiles = static_cast<std::size_t>(ceil_div(given.value_dim, kComposeRows));
    launch<compose_given<kKey>>({.blocks = tiles * static_cast<std::size_t>(given.value_heads * sequences),
                                 .threads = kComposeThreads<kKey>,
                                 .shared_bytes = sizeof(ComposeSmem<kKey>)},
                                stream, given);
}

}  // namespace cula::cuda::chunked

#define CULA_INSTANTIATE(type, key) \
    template void cula::cuda::chunked::launch_compose<key>(const GivenMaps&, std::int64_t, void*);
