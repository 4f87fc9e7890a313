// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/backward/launch_gradients.cuh"
#include "cuda/backward/value_gradients.cuh"
#include "cuda/chunked/prepare_erase.h"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::backward {

template <class T, int kKey>
void launch_erase_gradients(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                            const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                            chunked::EarlyStarts& early) {
    launch_channel<T, kKey, kKernelsOf<Update::kErase>, Reader::kErase>(call, a, schedule, d, saved, scratch,
                                                                        early);
}

template <class T, int kKey>
void launch_value_gradients(const Call& call, const TokenRows& d_values, const Gradients& d,
                            chunked::EarlyStarts& early) {
    const std::int64_t runs = chunked::EraseOperands<T>::runs(call.args);
    launch<value_gradients<T, kKey>>(early({.blocks = chunked::EraseOperands<T>::template blocks<kKey>(runs),
                                            .threads = chunked::kEraseThreads}),
                                     call.stream, call.args, d_values, d, runs);
}

}  // namespace cula::cuda::backward

#define CULA_INSTANTIATE(type, key)                                                                          \
    template void cula::cuda::backward::launch_erase_gradients<type, key>(                                   \
        const Call&, const DeviceArgs&, const chunked::Schedule&, const Gradients&, const Saved<type, key>&, \
        const GradientScratch&, chunked::EarlyStarts&);                                                      \
    template void cula::cuda::backward::launch_value_gradients<type, key>(                                   \
        const Call&, const TokenRows&, const Gradients&, chunked::EarlyStarts&);
