// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/prefill_launch.cuh"

#define CULA_INSTANTIATE(type, key)                                                                \
    template std::size_t cula::cuda::sm90::prefill_workspace_bytes<type, key, false>(const Call&); \
    template std::size_t cula::cuda::sm90::prefill_kept_bytes<type, key, false>(const Call&);      \
    template void cula::cuda::sm90::launch_prefill<type, key, false>(const Call&);
