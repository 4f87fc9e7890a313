// SPDX-License-Identifier: Apache-2.0
#include "cuda/backward/entry.h"

#include <string>

#include "core/check.h"
#include "cuda/chunked/entry.h"

namespace cula::cuda::backward {

using chunked::StrategyKind;

Support supports(const Problem& problem, StrategyKind wanted) {
    if (Support any = chunked::supports(problem); !any) return any;
    if (problem.value_dim > kLargestDim)
        return Support::no("takes V up to " + std::to_string(kLargestDim) + ", got " +
                           std::to_string(problem.value_dim) +
                           ": more are several calls, whose gradients of q, k, gate and beta add up");
    const std::int64_t chunk = problem.key_dim <= 128 ? 64 : 32;
    if (wanted == StrategyKind::kSegments && (problem.batch_invariant || problem.tokens <= chunk))
        return Support::no("cuts sequences of more than one chunk, and no batch-invariant call");
    return Support::yes();
}

}  // namespace cula::cuda::backward
