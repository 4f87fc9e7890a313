// SPDX-License-Identifier: Apache-2.0
// An instance of launch_backward (backward_plan.h) for rules that read with the key that they write with.
#pragma once

#include "cuda/recurrent/launch_backward.cuh"

#define CULA_INSTANTIATE(type, key)                                                               \
    template void cula::cuda::recurrent::launch_backward<key, cula::cuda::recurrent::Keys::kOne>( \
        const Call&, const cula::cuda::backward::Gradients&, const BackwardPlan&);
