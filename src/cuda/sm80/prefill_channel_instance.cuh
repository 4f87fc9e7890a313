// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm80/prefill_launch.cuh"

#define CULA_INSTANTIATE(type, key)                                                                 \
    template cula::cuda::chunked::Candidates cula::cuda::sm80::prefill_candidates<type, key, true>( \
        const cula::Problem&);                                                                      \
    template cula::cuda::PreparedCallPtr cula::cuda::sm80::prepare_prefill<type, key, true>(        \
        const cula::Problem&, const cula::Args&, cula::cuda::chunked::StrategyKind);
