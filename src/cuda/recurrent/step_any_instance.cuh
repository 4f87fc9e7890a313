// SPDX-License-Identifier: Apache-2.0
// An instance of launch_step_any (instances.h).
#pragma once

#include "cuda/recurrent/launch.cuh"

namespace cula::cuda::recurrent {

template <int kKey>
void launch_step_any(const Call& call) {
    if (call.args.erase.data)
        launch_step_of<kKey, Keys::kErase>(call);
    else
        launch_step_of<kKey, Keys::kOne>(call);
}

}  // namespace cula::cuda::recurrent

#define CULA_INSTANTIATE(type, key) template void cula::cuda::recurrent::launch_step_any<key>(const Call&);
