// SPDX-License-Identifier: Apache-2.0
// Where update rules differ in the carry: a seam (cuda/rule.h).
#pragma once

#include "cuda/rule.h"

namespace cula::cuda::sm90 {

// What does a chunk write?
template <Update kUpdate>
struct CarryRule {
    static_assert(kIsKnown<kUpdate>, "carry of sm90: what does a chunk write under this update rule?");
};
template <>
struct CarryRule<Update::kAdditive> {
    static constexpr bool kReadsState = false;  // U = V
};
template <>
struct CarryRule<Update::kDelta> {
    static constexpr bool kReadsState = true;  // U = T (V - R)
};

}  // namespace cula::cuda::sm90
