// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/backward_launch.cuh"

#define CULA_INSTANTIATE(type, key)                                                           \
    template cula::PreparedPtr cula::cuda::sm90::prepare_backward<type, key, false>(          \
        const cula::Problem&, const cula::Args&, const cula::cuda::backward::BackwardLimits&, \
        cula::cuda::chunked::StrategyKind);                                                   \
    template cula::Saving cula::cuda::sm90::saving<type, key, false>(const cula::Problem&);
