// SPDX-License-Identifier: Apache-2.0
// Entry points of the portable chunked backend, which the kernel registry lists: prefill, segment maps and
// backward on tensor cores by mma.sync, on any NVIDIA GPU from sm_80 on.
#pragma once

#include <cstddef>

#include "core/kernel.h"
#include "cuda/chunked/plan.h"

namespace cula::cuda::sm80 {

// Prefill, and segment maps, in chunks, by the strategy that is wanted: with kAny by the one that is
// predicted to take least. predict() is for prefills; its call must be one that supports() takes.
template <chunked::StrategyKind kWanted>
Support supports(const Problem& problem);
template <chunked::StrategyKind kWanted>
PreparedPtr prepare(const Problem& problem, const Args& args, const Context& context);
template <chunked::StrategyKind kWanted>
Prediction predict(const Problem& problem);

// Backward, in chunks.
Support backward_supports(const Problem& problem);
PreparedPtr backward_prepare(const Problem& problem, const Args& args, const Context& context);
// The same with another limit on what the chunks of a slab take of the workspace.
PreparedPtr backward_prepare_in_slabs(const Problem& problem, const Args& args, std::size_t slab_bytes);

}  // namespace cula::cuda::sm80
