// SPDX-License-Identifier: Apache-2.0
// Entry points shared by all targets with chunked kernels: every NVIDIA GPU from sm_80 on.
#pragma once

#include "cuda/chunked/plan.h"
#include "cula/cula.h"

namespace cula::cuda::chunked {

// Whether the chunked prefill and segment kernels take the problem.
Support supports(const Problem& problem);

// Why a strategy is no candidate for a problem that the target takes otherwise.
Support refuses(StrategyKind kind);

// Applies maps that the caller gathered, one after the other.
void compose(const Composition& given, const Context& context);

}  // namespace cula::cuda::chunked
