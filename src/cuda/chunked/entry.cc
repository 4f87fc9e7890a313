// SPDX-License-Identifier: Apache-2.0
#include "cuda/chunked/entry.h"

#include <string>

#include "core/check.h"
#include "cuda/chunked/compose.h"
#include "cuda/chunked/plan.h"
#include "cuda/limits.h"
#include "cuda/pipe/launch.h"
#include "cuda/with_instance.h"

namespace cula::cuda::chunked {

namespace {

// Whether the rows of a call with low-rank keys can be made (low_rank_rows.cuh). Of others: yes.
Support takes_low_rank_keys(const Problem& problem) {
    if (!takes_low_rank(problem.algorithm.update)) return Support::yes();
    if (problem.key_dim > kMostLowRankChannels)
        return Support::no("takes K up to " + std::to_string(kMostLowRankChannels) +
                           " beside low-rank keys, got " + std::to_string(problem.key_dim));
    if (problem.saves) return Support::no("takes no saved beside low-rank keys");
    if (problem.tokens > kMostCounted / 2)
        return Support::no("takes up to " + std::to_string(kMostCounted / 2) +
                           " tokens a row beside low-rank keys, got " + std::to_string(problem.tokens));
    return Support::yes();
}

}  // namespace

Support supports(const Problem& problem) {
    if (Support any = supports_any(problem); !any) return any;
    if (problem.dtype == Dtype::kFloat32) return Support::no("multiplies bfloat16 and float16; q is float32");
    if (problem.beta_per_value && !takes_erase(problem.algorithm.update))
        return Support::no(
            "the chunked form takes one beta per token, not a write strength per value channel");
    if (problem.key_dim < kFewestChunkChannels)
        return Support::no("takes K from " + std::to_string(kFewestChunkChannels) +
                           " on: chunks of fewer channels cancel where tokens do not");
    if (problem.writes > 1 && varies_by_channel(problem.algorithm.decay))
        return Support::no("takes several writes of a token with one decay for all of its channels");
    if (problem.writes > kMostChunkWrites)
        return Support::no("takes up to " + std::to_string(kMostChunkWrites) + " writes a token, got " +
                           std::to_string(problem.writes));
    if (Support low_rank = takes_low_rank_keys(problem); !low_rank) return low_rank;
    const int rows = (problem.key_dim <= 128 ? 64 : 32) / (takes_low_rank(problem.algorithm.update) ? 2 : 1);
    if (problem.chunk_states && problem.chunk_tokens % rows != 0)
        return Support::no("stores chunk states every " + std::to_string(rows) + " tokens for this K");
    return Support::yes();
}

Support refuses(StrategyKind kind) {
    const std::string segments = std::to_string(kLeastSegments), chunks = std::to_string(kLeastSegment);
    switch (kind) {
        case StrategyKind::kSegments:
            return Support::no("cuts sequences into at least " + segments + " segments of " + chunks +
                               " chunks or more, which fit the device at once; none in batch-invariant mode");
        case StrategyKind::kHalves:
            return Support::no("cuts sequences of " + std::to_string(kLeastHalved) +
                               " chunks or more in two, where both halves fit the device at once; not in "
                               "batch-invariant mode, and only delta rules with one decay per token");
        case StrategyKind::kJoined:
            return Support::no("cuts sequences of at least " + std::to_string(2 * kLeastJoined) +
                               " chunks into segments that fit the device at once, with their maps; none in "
                               "batch-invariant mode");
        case StrategyKind::kAny:
        case StrategyKind::kFused:
        case StrategyKind::kWhole: break;
    }
    return Support::no("has no kernel for this call");
}

void compose(const Composition& c, const Context& context) {
    const DeviceGuard guard(context.device.index);
    const auto rows = [](const TensorRef& ref) {
        return GivenMaps::Rows{static_cast<const float*>(ref.data), ref.stride[0], ref.stride[1],
                               ref.stride[2], ref.stride[3]};
    };
    const auto dim = [](std::int64_t size) { return static_cast<std::int32_t>(size); };
    const TensorRef& state = c.state;
    const GivenMaps given{.m = rows(c.m),
                          .b = rows(c.b),
                          .joins = static_cast<const bool*>(c.joins.data),
                          .state = states(state),
                          .count = dim(c.m.size[0]),
                          .value_heads = dim(state.size[1]),
                          .value_dim = dim(state.size[2]),
                          .key_dim = dim(state.size[3]),
                          .matrices = c.m.size[3] == c.m.size[4]};
    with_key(state.size[3], [&]<int kKey>(std::integral_constant<int, kKey>) {
        launch_compose<kKey>(given, state.size[0], context.stream);
    });
}

}  // namespace cula::cuda::chunked
