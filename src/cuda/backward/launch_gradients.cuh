// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/backward/gradient_channel.cuh"
#include "cuda/backward/gradient_token.cuh"
#include "cuda/backward/launch_gradients.h"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"
#include "cuda/rule.h"

namespace cula::cuda::backward {

inline std::size_t gradient_ctas(const DeviceArgs& a, const chunked::Schedule& schedule) {
    return static_cast<std::size_t>(schedule.slab_end - schedule.slab_begin) *
           static_cast<std::size_t>(a.heads);
}

template <class T, int kKey, Update kUpdate, bool kErases>
void launch_channel(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                    const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                    chunked::EarlyStarts& early) {
    using Of = GradientChannel<T, kKey>;
    launch<gradient_channel<T, kKey, kUpdate, kErases>>(
        early({gradient_ctas(a, schedule), Of::kThreads, Of::kSharedBytes}), call.stream, a, schedule, d,
        saved, scratch);
}

template <class T, int kKey, Update kUpdate, bool kSeveral>
void launch_token(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                  const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                  chunked::EarlyStarts& early) {
    using Of = GradientToken<T, kKey>;
    const std::int32_t stages = Of::stages(call.shared_bytes_limit);
    launch<gradient_token<T, kKey, kUpdate, kSeveral>>(
        early({gradient_ctas(a, schedule), Of::kThreads, Of::shared_bytes(stages)}), call.stream, a, schedule,
        d, saved, scratch, stages);
}

template <class T, int kKey, bool kPerChannel>
void launch_gradients(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                      const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                      chunked::EarlyStarts& early, Update update) {
    with_update(update, [&]<Update kUpdate>(UpdateConstant<kUpdate>) {
        if constexpr (kPerChannel)
            launch_channel<T, kKey, kUpdate, false>(call, a, schedule, d, saved, scratch, early);
        else
            launch_token<T, kKey, kUpdate, false>(call, a, schedule, d, saved, scratch, early);
    });
}

}  // namespace cula::cuda::backward

#define CULA_INSTANTIATE_GRADIENTS(type, key, per_channel)                                                   \
    template void cula::cuda::backward::launch_gradients<type, key, per_channel>(                            \
        const Call&, const DeviceArgs&, const chunked::Schedule&, const Gradients&, const Saved<type, key>&, \
        const GradientScratch&, chunked::EarlyStarts&, Update);
