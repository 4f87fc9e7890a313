// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "cuda/backward/gradient_channel.cuh"
#include "cuda/backward/gradient_left.cuh"
#include "cuda/backward/gradient_token.cuh"
#include "cuda/backward/launch_anchored.cuh"
#include "cuda/backward/launch_gradients.h"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"
#include "cuda/rule.h"

namespace cula::cuda::backward {

// gradient_anchored and gradient_left, where the former takes the call. By rows a target has launched the
// former itself.
template <class T, int kKey, Update kUpdate, Reader kReader>
bool launch_anchored(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                     const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                     chunked::EarlyStarts& early) {
    using Left = GradientChannel<T, kKey>;
    if (!saved.by_rows) {
        if (!takes_anchored<T, kKey, FromSlices>(call, a, d, scratch, saved.count)) return false;
        launch_anchored_from<T, kKey, kUpdate, kReader>(call, a, schedule, d, saved, scratch, early,
                                                        FromSlices());
    }
    chunked::Schedule of_left = schedule;
    of_left.ahead = 0;  // a CTA's next chunk is another than gradient_channel's
    launch<gradient_left<T, kKey, kUpdate, kReader>>(
        early({persistent_ctas(call, a, schedule), Left::kThreads, Left::kSharedBytes}), call.stream, a,
        of_left, d, saved, scratch);
    return true;
}

template <class T, int kKey, Update kUpdate, Reader kReader>
void launch_channel(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                    const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                    chunked::EarlyStarts& early) {
    if constexpr (kHasAnchored<T, kKey> && kReader != Reader::kUndecayed)
        if (launch_anchored<T, kKey, kUpdate, kReader>(call, a, schedule, d, saved, scratch, early)) return;
    using Of = GradientChannel<T, kKey>;
    launch<gradient_channel<T, kKey, kUpdate, kReader>>(
        early({gradient_ctas(a, schedule), Of::kThreads, Of::kSharedBytes}), call.stream, a, schedule, d,
        saved, scratch);
}

template <class T, int kKey, Update kUpdate, bool kSeveral>
void launch_token(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                  const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                  chunked::EarlyStarts& early) {
    using Of = GradientToken<T, kKey>;
    const std::size_t ctas = gradient_ctas(a, schedule);
    // `follows` holds from sm_90 on, whose GPUs have bulk copies, too.
    if (call.follows && Of::kBulkBytes <= call.shared_bytes_limit) {
        launch<gradient_token<T, kKey, kUpdate, kSeveral, true>>(early({ctas, Of::kThreads, Of::kBulkBytes}),
                                                                 call.stream, a, schedule, d, saved, scratch,
                                                                 Of::kBulkPlaces);
        return;
    }
    const int places = Of::places(call.shared_bytes_limit);
    launch<gradient_token<T, kKey, kUpdate, kSeveral, false>>(
        early({ctas, Of::kThreads, Of::shared_bytes(places)}), call.stream, a, schedule, d, saved, scratch,
        places);
}

template <class T, int kKey, bool kPerChannel>
void launch_gradients(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                      const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                      chunked::EarlyStarts& early, Update update) {
    with_update(update, [&]<Update kUpdate>(UpdateConstant<kUpdate>) {
        if constexpr (kPerChannel)
            launch_channel<T, kKey, kUpdate, Reader::kKey>(call, a, schedule, d, saved, scratch, early);
        else
            launch_token<T, kKey, kUpdate, false>(call, a, schedule, d, saved, scratch, early);
    });
}

}  // namespace cula::cuda::backward

#define CULA_INSTANTIATE_GRADIENTS(type, key, per_channel)                                                   \
    template void cula::cuda::backward::launch_gradients<type, key, per_channel>(                            \
        const Call&, const DeviceArgs&, const chunked::Schedule&, const Gradients&, const Saved<type, key>&, \
        const GradientScratch&, chunked::EarlyStarts&, Update);
