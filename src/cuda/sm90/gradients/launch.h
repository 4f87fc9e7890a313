// SPDX-License-Identifier: Apache-2.0
// The interface between the launches of a backward call on Hopper and the instances of its gradient kernels
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

// Whether gradient_token can read dO and dV from the tensors of a call, for which this encodes maps.
template <class T>
bool find_token_rows(backward::FromRows& rows, const DeviceArgs& a, const backward::Gradients& d);

// Differentiates all chunks of a slab: by a rule that solves, with one decay per token or head, or none.
// several: tokens write several times. rows: if `saved` is by_rows.
template <class T>
void launch_token(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                  const backward::Gradients& d, const backward::Saved<T, 128>& saved,
                  const backward::GradientScratch& scratch, const backward::FromRows& rows,
                  chunked::EarlyStarts& early, bool several);

// Whether gradient_anchored takes a call by rows: it reads dO, and dV of rules that solve, from the tensors
// of the call, for which this encodes maps. count: slices of a value head.
template <class T>
bool find_anchored_rows(backward::FromRows& rows, const Call& call, const DeviceArgs& a,
                        const backward::Gradients& d, const backward::GradientScratch& scratch, int count,
                        bool solves);

// Differentiates the chunks of a slab that gradient_anchored takes, by rows.
template <class T>
void launch_anchored(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                     const backward::Gradients& d, const backward::Saved<T, 128>& saved,
                     const backward::GradientScratch& scratch, const backward::FromRows& rows,
                     chunked::EarlyStarts& early, Update update, bool erases);

}  // namespace cula::cuda::sm90::gradients
