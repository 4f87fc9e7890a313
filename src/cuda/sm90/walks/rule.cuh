// SPDX-License-Identifier: Apache-2.0
// Where update rules differ in the return: a seam (cuda/rule.h).
#pragma once

#include "cuda/rule.h"

namespace cula::cuda::sm90 {

// What does a chunk hand back?
template <Update kUpdate>
struct ReturnRule {
    static_assert(kIsKnown<kUpdate>, "walks of sm90: what does a chunk hand back under this update rule?");
};
template <>
struct ReturnRule<Update::kAdditive> {
    static constexpr bool kSolves = false;  // dV = dU
};
template <>
struct ReturnRule<Update::kDelta> {
    static constexpr bool kSolves = true;  // dV = T^T dU
};

}  // namespace cula::cuda::sm90
