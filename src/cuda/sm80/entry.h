// SPDX-License-Identifier: Apache-2.0
// Entry points of the portable chunked backend, which the kernel registry lists: prefill, segment maps and
// backward on tensor cores by mma.sync, on any NVIDIA GPU from sm_80 on.
#pragma once

#include <cstddef>

#include "core/kernel.h"
#include "cuda/chunked/plan.h"

namespace cula::cuda::backward {
struct BackwardLimits;
}

namespace cula::cuda::sm80 {

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

// Backward, in chunks. kAny: the strategy that is predicted to take least.
template <chunked::StrategyKind kWanted>
Support backward_supports(const Problem& problem);
template <chunked::StrategyKind kWanted>
PreparedPtr backward_prepare(const Problem& problem, const Args& args, const Context& context);
// The same with other limits (backward/plan.h); also of a prefill that saves.
PreparedPtr backward_prepare_within(const Problem& problem, const Args& args,
                                    const backward::BackwardLimits& limits, chunked::StrategyKind wanted);

// Backward, as three walks of the carry (backward/three_walks.h).
Support three_walks_supports(const Problem& problem);
PreparedPtr three_walks_prepare(const Problem& problem, const Args& args, const Context& context);
Prediction three_walks_predict(const Problem& problem);

}  // namespace cula::cuda::sm80
