// SPDX-License-Identifier: Apache-2.0
// What no CUDA target takes: algorithms without kernels, and calls too large for kernels
// that count in 32 bits and launch one-dimensional grids.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/check.h"
#include "cula/problem.h"
#include "cula/status.h"

namespace cula::cuda {

inline constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;
// Bound on everything that is counted: 2^16 below 2^31,
// so that rounding a count up does not overflow 32 bits.
inline constexpr std::int64_t kMostCounted = (std::int64_t{1} << 31) - (1 << 16);

// The K of instances that take calls of any K (instances.txt).
inline constexpr int kAnyKey = static_cast<int>(kLargestDim);

// The writes of a token in chunks (TokensOfWrites divides by them).
inline constexpr std::int64_t kMostChunkWrites = 1 << 15;

inline Support counts_fit(const Problem& problem) {
    // Smallest row tile of a CTA; smallest chunk.
    constexpr std::int64_t kLeastRows = 16, kLeastChunk = 32;
    const auto refuse = [](const std::string& what, std::int64_t count) {
        return Support::no("takes up to " + std::to_string(kMostCounted) + " " + what + ", got " +
                           std::to_string(count));
    };
    // More than kLargestDim value channels are several calls.
    const auto blocks = [](std::int64_t rows) {
        return (std::min(rows, kLargestDim) + kLeastRows - 1) / kLeastRows;
    };
    if (problem.sequences > kMostCounted) return refuse("sequences", problem.sequences);
    if (problem.tokens > kMostCounted) return refuse("tokens a row", problem.tokens);
    if (problem.writes > kMostCounted / std::max<std::int64_t>(problem.tokens, 1))
        return Support::no("takes up to " + std::to_string(kMostCounted) + " writes a row, got " +
                           std::to_string(problem.writes) + " for each of " + std::to_string(problem.tokens) +
                           " tokens");
    if (problem.value_heads > kMostCounted) return refuse("value heads", problem.value_heads);
    const std::int64_t heads = std::max<std::int64_t>(problem.sequences, 1) * problem.value_heads;
    if (heads > kMostCounted) return refuse("value heads of all sequences", heads);
    const std::int64_t of_map = problem.pass == Pass::kSegment ? blocks(problem.key_dim) : 0;
    const std::int64_t walks = problem.pass == Pass::kBackward ? 2 : 1;  // forwards and backwards
    const std::int64_t all = walks * heads * (blocks(problem.value_dim) + of_map);
    if (all > kMostCounted) return refuse("thread blocks of 16 rows of a state", all);
    const std::int64_t writes = problem.tokens * problem.writes,
                       rows = problem.varlen ? 1 : problem.sequences,
                       chunks = (writes + kLeastChunk - 1) / kLeastChunk * rows + problem.sequences;
    if (chunks > kMostCounted) return refuse("chunks of 32 tokens", chunks);
    return Support::yes();
}

// Whether CUDA kernels have this algorithm. A rule that none has yet is declined here.
inline Support takes(Algorithm algorithm) {
    switch (algorithm.decay) {
        case Decay::kNone:
        case Decay::kPerHead:
        case Decay::kPerToken:
        case Decay::kPerChannel: break;
    }
    switch (algorithm.update) {
        case Update::kAdditive:
        case Update::kDelta:
        case Update::kErase:
        case Update::kProduct:
        case Update::kDplr: return Support::yes();
    }
    return Support::no("has no kernel for " + std::string(name(algorithm)));
}

inline Support supports_any(const Problem& problem) {
    if (problem.device.compute_capability < 80)
        return Support::no("needs compute capability 8.0, this device has " +
                           std::to_string(problem.device.compute_capability / 10) + "." +
                           std::to_string(problem.device.compute_capability % 10));
    if (problem.dtype == Dtype::kFloat64)
        return Support::no("takes float32, bfloat16 and float16; q is float64");
    if (Support takes_it = takes(problem.algorithm); !takes_it) return takes_it;
    return counts_fit(problem);
}

}  // namespace cula::cuda
