// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/backward/launch_anchored.cuh"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"
#include "cuda/sm90/gradients/kernel.cuh"
#include "cuda/sm90/gradients/launch.h"
#include "cuda/sm90/gradients/rows.h"

namespace cula::cuda::sm90::gradients {

template <class T>
bool find_token_rows(backward::FromRows& rows, const DeviceArgs& a, const backward::Gradients& d) {
    return encode_rows<T>(rows, a, d, true);
}

template <class T>
void launch_token(const Call& call, const DeviceArgs& a, const Schedule& schedule, const Gradients& d,
                  const Saved<T, kKey>& saved, const GradientScratch& scratch, const backward::FromRows& rows,
                  chunked::EarlyStarts& early, bool several) {
    const auto launch = [&]<bool kShares, bool kSeveral, class From>(const From& from) {
        using Memory = Shared<T, kShares, From>;
        cuda::launch<gradient_token<T, kShares, kSeveral, From>>(
            early({.blocks = backward::persistent_ctas(call, a, schedule),
                   .threads = kThreads,
                   .shared_bytes = sizeof(Memory),
                   .most_shared_bytes = sizeof(Memory)}),
            call.stream, a, schedule, d, saved, scratch, from);
    };
    const auto launch_of = [&]<bool kShares>() {
        if (several)
            launch.template operator()<kShares, true>(backward::FromSlices());
        else if (saved.by_rows)
            launch.template operator()<kShares, false>(rows);
        else
            launch.template operator()<kShares, false>(backward::FromSlices());
    };
    if (a.group > 1)
        launch_of.template operator()<true>();
    else
        launch_of.template operator()<false>();
}

}  // namespace cula::cuda::sm90::gradients

#define CULA_INSTANTIATE(type, key)                                                                   \
    static_assert(key == cula::cuda::sm90::gradients::kKey);                                          \
    template bool cula::cuda::sm90::gradients::find_token_rows<type>(                                 \
        cula::cuda::backward::FromRows&, const cula::cuda::DeviceArgs&,                               \
        const cula::cuda::backward::Gradients&);                                                      \
    template void cula::cuda::sm90::gradients::launch_token<type>(                                    \
        const cula::cuda::Call&, const cula::cuda::DeviceArgs&, const cula::cuda::chunked::Schedule&, \
        const cula::cuda::backward::Gradients&, const cula::cuda::backward::Saved<type, key>&,        \
        const cula::cuda::backward::GradientScratch&, const cula::cuda::backward::FromRows&,          \
        cula::cuda::chunked::EarlyStarts&, bool);
