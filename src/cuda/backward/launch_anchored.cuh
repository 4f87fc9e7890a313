// SPDX-License-Identifier: Apache-2.0
// The launch of gradient_anchored.
#pragma once

#include <algorithm>

#include "cuda/backward/gradient_anchored.cuh"
#include "cuda/call.h"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::backward {

inline std::size_t gradient_ctas(const DeviceArgs& a, const chunked::Schedule& schedule) {
    return static_cast<std::size_t>(schedule.slab_end - schedule.slab_begin) *
           static_cast<std::size_t>(a.heads);
}
// Of kernels whose CTAs go through chunks and heads.
inline std::size_t persistent_ctas(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule) {
    return std::min(gradient_ctas(a, schedule), static_cast<std::size_t>(call.multiprocessors));
}

// Whether gradient_anchored takes a call, whose value heads have `count` slices.
template <class T, int kKey, class From>
bool takes_anchored(const Call& call, const DeviceArgs& a, const Gradients& d, const GradientScratch& scratch,
                    int count) {
    const AnchoredSlices<T, kKey, From> slices{count};
    return scratch.left && a.heads == a.value_heads && (d.keys() || d.decay() || d.others()) &&
           count <= slices.room() && slices.shared_bytes() <= call.shared_bytes_limit;
}

template <class T, int kKey, Update kUpdate, Reader kReader, class From>
void launch_anchored_from(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                          const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                          chunked::EarlyStarts& early, const From& from) {
    launch<gradient_anchored<T, kKey, kUpdate, kReader, From>>(
        early({persistent_ctas(call, a, schedule), Patches<kKey>::kThreads,
               AnchoredSlices<T, kKey, From>{saved.count}.shared_bytes(), call.shared_bytes_limit}),
        call.stream, a, schedule, d, saved, scratch, from);
}

}  // namespace cula::cuda::backward
