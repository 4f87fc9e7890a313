// SPDX-License-Identifier: Apache-2.0
// The launchers that entry.cc calls; instances.txt lists their one instance.
#pragma once

#include <cstdint>

#include "cuda/device_args.h"

namespace cula::cuda::float8 {

// Launch load_states and store_states, for states of up to kKey channels. states: [N, HV, V, K].
template <int kKey>
void launch_load_states(const DeviceArgs& a, float* states, std::int32_t* starts, std::int32_t* ends,
                        void* stream);
template <int kKey>
void launch_store_states(const DeviceArgs& a, const float* states, void* stream);

}  // namespace cula::cuda::float8
