// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm80/prefill_launch.cuh"

#define CULA_INSTANTIATE(type, key)                                                    \
    template cula::cuda::PreparedCallPtr cula::cuda::sm80::prepare_several<type, key>( \
        const cula::Problem&, const cula::Args&, cula::cuda::chunked::StrategyKind);
