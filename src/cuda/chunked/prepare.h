// SPDX-License-Identifier: Apache-2.0
// Interface to the instances of prepare_channel and prepare_token (instances.txt), which the prefills and
// backward passes of all targets launch. What one target alone launches, with gates by TMA or for reversed
// walks, is instantiated with that target's launches (launch.cuh).
#pragma once

#include <cstdint>

#include "cuda/call.h"
#include "cuda/chunked/chunk.cuh"
#include "cula/algorithm.h"

namespace cula::cuda::chunked {

class EarlyStarts;
struct PrepareShare;

// What they write, for every chunk of a slab and value head.
template <class Operands>
struct PreparedChunks {
    Operands* operands = nullptr;
    std::int32_t* is_compensated = nullptr;
    float* fading = nullptr;  // null: maps skip no chunks
};

// One decay per channel.
template <class T, int kKey>
void launch_prepare_channel(const Call& call, const DeviceArgs& a, const Schedule& schedule,
                            const PreparedChunks<ChannelChunk<T, kKey>>& to, EarlyStarts& early,
                            Update update);

// One decay per token or none. several: tokens write several times.
template <class T, int kKey>
void launch_prepare_token(const Call& call, const DeviceArgs& a, const Schedule& schedule,
                          const PrepareShare& share, const PreparedChunks<TokenChunk<T, kKey>>& to,
                          EarlyStarts& early, bool several);

}  // namespace cula::cuda::chunked
