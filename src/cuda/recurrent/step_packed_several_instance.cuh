// SPDX-License-Identifier: Apache-2.0
// An instance of launch_step_packed (instances.h) for rules whose tokens write several times.
#pragma once

#include "cuda/recurrent/launch_packed.cuh"

#define CULA_INSTANTIATE(type, key)                                           \
    namespace cula::cuda::recurrent {                                         \
    template bool launch_step_packed<type, key, Keys::kSeveral>(const Call&); \
    }
