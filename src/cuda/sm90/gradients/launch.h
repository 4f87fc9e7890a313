// SPDX-License-Identifier: Apache-2.0
// The interface between the launches of a backward call on Hopper and the instances of its gradient_token
// (instances.txt).
#pragma once

#include "cuda/backward/gradients.h"
#include "cuda/backward/saved.cuh"
#include "cuda/call.h"
#include "cuda/chunked/chunk.cuh"
#include "cuda/rule.h"

namespace cula::cuda::chunked {
class EarlyStarts;
}

namespace cula::cuda::sm90::gradients {

// Are the gradients of a chunk those of this update rule? A seam (cuda/rule.h).
template <Update kUpdate>
struct DifferentiatedRule {
    static_assert(kIsKnown<kUpdate>, "gradients of sm90: are they those of this update rule?");
};
template <>
struct DifferentiatedRule<Update::kAdditive> {
    static constexpr bool kHas = false;
};
template <>
struct DifferentiatedRule<Update::kDelta> {
    static constexpr bool kHas = true;
};

// Differentiates all chunks of a slab: by a rule that solves, with one decay per token or head, or none.
// several: tokens write several times.
template <class T>
void launch_token(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                  const backward::Gradients& d, const backward::Saved<T, 128>& saved,
                  const backward::GradientScratch& scratch, chunked::EarlyStarts& early, bool several);

}  // namespace cula::cuda::sm90::gradients
