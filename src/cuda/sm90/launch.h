// SPDX-License-Identifier: Apache-2.0
// The functions of the template instances that entry.cc calls. nvcc compiles one instance per file
// (instances.txt).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "core/kernel.h"
#include "cuda/call.h"
#include "cuda/chunked/plan.h"

namespace cula::cuda::backward {
struct BackwardLimits;
}

namespace cula::cuda::sm90 {

// Whether the fused prefill takes these gates. A bounded gate may decay by at most 2^-kMostLog2 over 16
// tokens, half a chunk of the fused prefill: the range of its operands has room for no more. Softplus gates
// have no bound: the kernel looks for out-of-range channels.
inline bool fuses_gate(Gate gate, float lower_bound) {
    constexpr float kMostLog2 = 116.0f;
    return gate == Gate::kSoftplus ||
           (gate == Gate::kBounded && std::fabs(lower_bound) * 1.442696f * 16 <= kMostLog2);
}

// The writes of a token divide this, so that TMA tiles of a chunk hold whole tokens. A store reads up to one
// row less behind its tile, which must be shared memory of the CTA (StoreRole).
inline constexpr int kMostTileWrites = 16;

// As in sm80/launch.h, for at most 128 key channels.
template <class T, int kKey, bool kPerChannel>
chunked::Candidates prefill_candidates(const Problem& problem);
template <class T, int kKey, bool kPerChannel>
PreparedCallPtr prepare_prefill(const Problem& problem, const Args& args, chunked::StrategyKind wanted);
template <class T, int kKey, bool kPerChannel>
PreparedPtr prepare_backward(const Problem& problem, const Args& args, const backward::BackwardLimits& limits,
                             chunked::StrategyKind wanted);
template <class T, int kKey, bool kPerChannel>
Saving saving(const Problem& problem);

}  // namespace cula::cuda::sm90
