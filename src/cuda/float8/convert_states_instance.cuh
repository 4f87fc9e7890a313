// SPDX-License-Identifier: Apache-2.0
// The instance of launch_load_states and launch_store_states (launch.h).
#pragma once

#include "cuda/float8/convert_states.cuh"
#include "cuda/float8/launch.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::float8 {

inline LaunchShape convert_shape(const DeviceArgs& a) {
    return {.blocks = static_cast<std::size_t>(a.value_heads) * static_cast<std::size_t>(a.sequences),
            .threads = kConvertThreads};
}

template <int kKey>
void launch_load_states(const DeviceArgs& a, float* states, std::int32_t* starts, std::int32_t* ends,
                        void* stream) {
    launch<load_states>(convert_shape(a), stream, a, states, starts, ends);
}

template <int kKey>
void launch_store_states(const DeviceArgs& a, const float* states, void* stream) {
    launch<store_states<kKey>>(convert_shape(a), stream, a, states);
}

}  // namespace cula::cuda::float8

#define CULA_INSTANTIATE(type, key)                                                                     \
    template void cula::cuda::float8::launch_load_states<key>(const DeviceArgs&, float*, std::int32_t*, \
                                                              std::int32_t*, void*);                    \
    template void cula::cuda::float8::launch_store_states<key>(const DeviceArgs&, const float*, void*);
