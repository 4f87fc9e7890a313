// SPDX-License-Identifier: Apache-2.0
// An instance of launch_step_several (instances.h).
#pragma once

#include "cuda/recurrent/launch.cuh"

namespace cula::cuda::recurrent {

template <int kKey>
void launch_step_several(const Call& call) {
    launch_step_of<kKey, Keys::kSeveral>(call);
}

}  // namespace cula::cuda::recurrent

#define CULA_INSTANTIATE(type, key) \
    template void cula::cuda::recurrent::launch_step_several<key>(const Call&);
