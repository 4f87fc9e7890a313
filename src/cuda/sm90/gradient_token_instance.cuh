// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"
#include "cuda/sm90/gradients/kernel.cuh"
#include "cuda/sm90/gradients/launch.h"

namespace cula::cuda::sm90::gradients {

template <class T, bool kShares, bool kSeveral>
void launch_as(const Call& call, const DeviceArgs& a, const Schedule& schedule, const Gradients& d,
               const Saved<T, kKey>& saved, const GradientScratch& scratch, chunked::EarlyStarts& early) {
    const auto items =
        static_cast<std::size_t>(schedule.slab_end - schedule.slab_begin) * static_cast<std::size_t>(a.heads);
    cuda::launch<gradient_token<T, kShares, kSeveral>>(
        early({.blocks = std::min(items, static_cast<std::size_t>(call.multiprocessors)),
               .threads = kThreads,
               .shared_bytes = sizeof(Shared<T, kShares>),
               .most_shared_bytes = sizeof(Shared<T, kShares>)}),
        call.stream, a, schedule, d, saved, scratch);
}

template <class T>
void launch_token(const Call& call, const DeviceArgs& a, const Schedule& schedule, const Gradients& d,
                  const Saved<T, kKey>& saved, const GradientScratch& scratch, chunked::EarlyStarts& early,
                  bool several) {
    const auto launch = [&](auto shares, auto of_several) {
        launch_as<T, decltype(shares)::value, decltype(of_several)::value>(call, a, schedule, d, saved,
                                                                           scratch, early);
    };
    if (several)
        a.group > 1 ? launch(std::true_type(), std::true_type())
                    : launch(std::false_type(), std::true_type());
    else
        a.group > 1 ? launch(std::true_type(), std::false_type())
                    : launch(std::false_type(), std::false_type());
}

}  // namespace cula::cuda::sm90::gradients

#define CULA_INSTANTIATE(type, key)                                                                   \
    static_assert(key == cula::cuda::sm90::gradients::kKey);                                          \
    template void cula::cuda::sm90::gradients::launch_token<type>(                                    \
        const cula::cuda::Call&, const cula::cuda::DeviceArgs&, const cula::cuda::chunked::Schedule&, \
        const cula::cuda::backward::Gradients&, const cula::cuda::backward::Saved<type, key>&,        \
        const cula::cuda::backward::GradientScratch&, cula::cuda::chunked::EarlyStarts&, bool);
