// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm80/backward_launch.cuh"

#define CULA_INSTANTIATE(type, key)                                                           \
    template cula::PreparedPtr cula::cuda::sm80::prepare_backward_several<type, key>(         \
        const cula::Problem&, const cula::Args&, const cula::cuda::backward::BackwardLimits&, \
        cula::cuda::chunked::StrategyKind);
