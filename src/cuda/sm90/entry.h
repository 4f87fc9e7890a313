// SPDX-License-Identifier: Apache-2.0
// Entry points of the Hopper backend, which the kernel registry lists: compute capability 9.0 only.
#pragma once

#include "core/kernel.h"
#include "cuda/chunked/plan.h"

namespace cula::cuda::sm90 {

// Prefill, and segment maps, in chunks, by the strategy that is wanted: with kAny by the one that is
// predicted to take least. predict() is for prefills; its call must be one that supports() takes.
template <chunked::StrategyKind kWanted>
Support supports(const Problem& problem);
template <chunked::StrategyKind kWanted>
PreparedPtr prepare(const Problem& problem, const Args& args, const Context& context);
template <chunked::StrategyKind kWanted>
Prediction predict(const Problem& problem);

// What a prefill by kAny saves for a backward.
Saving saving(const Problem& problem);

// Backward, in chunks, likewise.
template <chunked::StrategyKind kWanted>
Support backward_supports(const Problem& problem);
template <chunked::StrategyKind kWanted>
PreparedPtr backward_prepare(const Problem& problem, const Args& args, const Context& context);

// Backward, as three walks of the carry (backward/three_walks.h).
Support three_walks_supports(const Problem& problem);
PreparedPtr three_walks_prepare(const Problem& problem, const Args& args, const Context& context);
Prediction three_walks_predict(const Problem& problem);

}  // namespace cula::cuda::sm90
