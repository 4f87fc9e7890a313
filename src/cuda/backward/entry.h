// SPDX-License-Identifier: Apache-2.0
// What the chunked backward takes on every architecture.
#pragma once

#include "core/kernel.h"
#include "cuda/chunked/plan.h"

namespace cula::cuda::backward {

// wanted: kAny, kWhole or kSegments.
Support supports(const Problem& problem, chunked::StrategyKind wanted);

}  // namespace cula::cuda::backward
