// SPDX-License-Identifier: Apache-2.0
// An instance of launch_step_low_rank (instances.h).
#pragma once

#include "cuda/recurrent/launch.cuh"

namespace cula::cuda::recurrent {

template <int kKey>
void launch_step_low_rank(const Call& call) {
    launch_step_of<kKey, Keys::kLowRank>(call);
}

}  // namespace cula::cuda::recurrent

#define CULA_INSTANTIATE(type, key) \
    template void cula::cuda::recurrent::launch_step_low_rank<key>(const Call&);
