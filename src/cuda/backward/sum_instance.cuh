// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "cuda/backward/sum.cuh"
#include "cuda/backward/sum.h"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::backward {

template <int kKey>
void launch_sum_parameters(const DeviceArgs& a, const Gradients& d, const float* parameters,
                           std::int64_t chunks, chunked::EarlyStarts& early, void* stream) {
    launch<sum_parameters>(
        early({.blocks = static_cast<std::size_t>(sum_parameters_ctas(a)), .threads = kSumThreads}), stream,
        a, d, parameters, chunks);
}

template <int kKey>
void launch_zero_tail(const DeviceArgs& a, const Gradients& d, chunked::EarlyStarts& early, void* stream) {
    launch<zero_tail>(early({.blocks = static_cast<std::size_t>(zero_tail_ctas(a)), .threads = kZeroThreads}),
                      stream, a, d);
}

}  // namespace cula::cuda::backward

#define CULA_INSTANTIATE(type, key)                                                                     \
    template void cula::cuda::backward::launch_sum_parameters<key>(                                     \
        const DeviceArgs&, const Gradients&, const float*, std::int64_t, chunked::EarlyStarts&, void*); \
    template void cula::cuda::backward::launch_zero_tail<key>(const DeviceArgs&, const Gradients&,      \
                                                              chunked::EarlyStarts&, void*);
