// SPDX-License-Identifier: Apache-2.0
// An instance of launch_step_any (instances.h).
#pragma once

#include "cuda/recurrent/launch.cuh"

namespace cula::cuda::recurrent {

template <int kKey, bool kErases>
void launch_step_of(const Call& call) {
    if (call.segment)
        launch_rows<step<kKey, false, true, kErases>>(call, call.args.segment_m.data ? call.args.key_dim : 0);
    else if (call.args.parents.data)
        launch_rows<step<kKey, true, false, kErases>>(call);
    else
        launch_rows<step<kKey, false, false, kErases>>(call);
}

template <int kKey>
void launch_step_any(const Call& call) {
    if (call.args.erase.data)
        launch_step_of<kKey, true>(call);
    else
        launch_step_of<kKey, false>(call);
}

}  // namespace cula::cuda::recurrent

#define CULA_INSTANTIATE(type, key) template void cula::cuda::recurrent::launch_step_any<key>(const Call&);
