// SPDX-License-Identifier: Apache-2.0
// What all targets that go by chunks share of their entries: any NVIDIA GPU from sm_80 on.
#pragma once

#include "cula/cula.h"

namespace cula::cuda::chunked {

// Prefill and segment maps.
Support supports(const Problem& problem);

// Maps that were gathered, applied one after the other.
void compose(const Composition& given, const Context& context);

}  // namespace cula::cuda::chunked
