// SPDX-License-Identifier: Apache-2.0
// Interface to the instance of the small kernels before prepare_*, schedule and count_writes (instances.txt).
#pragma once

#include <cstdint>

#include "cuda/chunked/chunk.cuh"
#include "cuda/chunked/timeline.h"
#include "cuda/device_args.h"

namespace cula::cuda::chunked {

class EarlyStarts;

// They are templates because everything that instances.txt lists is, of which kAnyKey is their one instance.
// reversed: as of place_of().
template <int kKey>
void launch_schedule(const DeviceArgs& a, const Schedule& of, std::int32_t* first_chunk, PackedChunk* packed,
                     Segment* segments, bool reversed, EarlyStarts& early, void* stream);

// Launches count_writes, and says whether there was anything to count. a: as the call came.
template <int kKey>
bool launch_count_writes(const DeviceArgs& a, const Timeline& to, void* stream);

}  // namespace cula::cuda::chunked
