// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/backward/launch_gradients.cuh"

namespace cula::cuda::backward {

template <class T, int kKey>
void launch_low_rank_gradients(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                               const Gradients& d, const Saved<T, kKey>& saved,
                               const GradientScratch& scratch, chunked::EarlyStarts& early) {
    launch_channel<T, kKey, kChunksOf<Update::kDplr>, Reader::kUndecayed>(call, a, schedule, d, saved,
                                                                          scratch, early);
}

}  // namespace cula::cuda::backward

#define CULA_INSTANTIATE(type, key)                                                                          \
    template void cula::cuda::backward::launch_low_rank_gradients<type, key>(                                \
        const Call&, const DeviceArgs&, const chunked::Schedule&, const Gradients&, const Saved<type, key>&, \
        const GradientScratch&, chunked::EarlyStarts&);
