// SPDX-License-Identifier: Apache-2.0
// Entry points shared by all targets with chunked kernels: every NVIDIA GPU from sm_80 on.
#pragma once

#include "cula/cula.h"

namespace cula::cuda::chunked {

// Whether the chunked prefill and segment kernels take the problem.
Support supports(const Problem& problem);

// Applies maps that the caller gathered, one after the other.
void compose(const Composition& given, const Context& context);

}  // namespace cula::cuda::chunked
