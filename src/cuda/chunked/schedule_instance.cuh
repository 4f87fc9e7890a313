// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/check.h"
#include "cuda/chunked/count_writes.cuh"
#include "cuda/chunked/schedule.cuh"
#include "cuda/chunked/schedule.h"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::chunked {

template <int kKey>
void launch_schedule(const DeviceArgs& a, const Schedule& of, std::int32_t* first_chunk, PackedChunk* packed,
                     Segment* segments, bool reversed, EarlyStarts& early, void* stream) {
    const LaunchShape shape = early({.blocks = 1, .threads = kScheduleThreads});
    const auto launch_it = [&]<bool kReversed>(std::bool_constant<kReversed>) {
        launch<schedule<kReversed>>(shape, stream, a, of, first_chunk, packed, segments);
    };
    reversed ? launch_it(std::true_type{}) : launch_it(std::false_type{});
}

template <int kKey>
bool launch_count_writes(const DeviceArgs& a, const Timeline& to, void* stream) {
    if (to.checkpoints != a.num_checkpoints)
        throw Error("run: args must be those of the plan, got another checkpoint_plan");
    const std::int64_t threads = std::max(to.ends ? std::int64_t{a.sequences} + 1 : 0, to.checkpoints);
    if (threads == 0) return false;
    launch<count_writes>({.blocks = static_cast<std::size_t>((threads + kCountThreads - 1) / kCountThreads),
                          .threads = kCountThreads},
                         stream, a, to);
    return true;
}

}  // namespace cula::cuda::chunked

#define CULA_INSTANTIATE(type, key)                                                                      \
    template void cula::cuda::chunked::launch_schedule<key>(const DeviceArgs&, const Schedule&,          \
                                                            std::int32_t*, PackedChunk*, Segment*, bool, \
                                                            EarlyStarts&, void*);                        \
    template bool cula::cuda::chunked::launch_count_writes<key>(const DeviceArgs&, const Timeline&, void*);
