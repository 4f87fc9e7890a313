// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/backward/gradient_channel.cuh"
#include "cuda/backward/launch_gradients.h"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"
#include "cuda/rule.h"

namespace cula::cuda::backward {

template <class T, int kKey, bool kPerChannel>
void launch_gradients(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                      const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                      chunked::EarlyStarts& early, Update update) {
    const auto blocks =
        static_cast<std::size_t>(schedule.slab_end - schedule.slab_begin) * static_cast<std::size_t>(a.heads);
    using Of = GradientChannel<T, kKey>;
    with_update(update, [&]<Update kUpdate>(UpdateConstant<kUpdate>) {
        launch<gradient_channel<T, kKey, kUpdate>>(early({blocks, Of::kThreads, Of::kSharedBytes}),
                                                   call.stream, a, schedule, d, saved, scratch);
    });
}

}  // namespace cula::cuda::backward

#define CULA_INSTANTIATE(type, key)                                                                          \
    template void cula::cuda::backward::launch_gradients<type, key, true>(                                   \
        const Call&, const DeviceArgs&, const chunked::Schedule&, const Gradients&, const Saved<type, key>&, \
        const GradientScratch&, chunked::EarlyStarts&, Update);
