// SPDX-License-Identifier: Apache-2.0
// The functions of the template instances that entry.cc calls. nvcc compiles one instance per file
// (instances.txt).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "core/kernel.h"
#include "cuda/call.h"
#include "cuda/chunked/plan.h"

namespace cula::cuda::backward {
struct BackwardLimits;
}

namespace cula::cuda::sm80 {

using backward::BackwardLimits;

// The chunked prefill of inputs of type T with at most kKey key channels: outputs and final states, or, where
// the arguments ask for them, the affine maps of whole sequences.
template <class T, int kKey, bool kPerChannel>
chunked::Candidates prefill_candidates(const Problem& problem);
template <class T, int kKey, bool kPerChannel>
PreparedCallPtr prepare_prefill(const Problem& problem, const Args& args, chunked::StrategyKind wanted);

// A walk of a backward call from the last token to the first, of additive rules with a constant decay
// (backward/three_walks.h), for at most 128 key channels. problem: of the walk as a prefill.
template <class T, int kKey>
PreparedCallPtr prepare_reversed_walk(const Problem& problem);

// The chunked backward of such inputs, or a prefill that saves for it.
template <class T, int kKey, bool kPerChannel>
PreparedPtr prepare_backward(const Problem& problem, const Args& args, const BackwardLimits& limits,
                             chunked::StrategyKind wanted);
template <class T, int kKey, bool kPerChannel>
Saving saving(const Problem& problem);

}  // namespace cula::cuda::sm80
