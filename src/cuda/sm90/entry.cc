// SPDX-License-Identifier: Apache-2.0
// The Hopper backend: which problems it supports, and which template instance runs.
#include "cuda/sm90/entry.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "cuda/backward/entry.h"
#include "cuda/backward/plan.h"
#include "cuda/chunked/entry.h"
#include "cuda/limits.h"
#include "cuda/sm90/fused/rule.h"
#include "cuda/sm90/launch.h"

namespace cula::cuda::sm90 {

using backward::Walk, chunked::StrategyKind;

namespace {

// Calls body.operator()<T, K, decay per channel>() of the smallest instance that holds the problem.
template <class Body>
auto with_instance(const Problem& problem, Body body) {
    const auto with_type = [&]<int kKey, bool kPerChannel>() {
        return problem.dtype == Dtype::kBFloat16
                   ? body.template operator()<__nv_bfloat16, kKey, kPerChannel>()
                   : body.template operator()<__half, kKey, kPerChannel>();
    };
    if (varies_by_channel(problem.algorithm.decay))
        return problem.key_dim <= 64 ? with_type.template operator()<64, true>()
                                     : with_type.template operator()<128, true>();
    return problem.key_dim <= 64 ? with_type.template operator()<64, false>()
                                 : with_type.template operator()<128, false>();
}

// Of the first of its parts, if there are more than kLargestDim value channels.
chunked::Candidates candidates(Problem problem) {
    problem.value_dim = std::min(problem.value_dim, kLargestDim);
    return with_instance(problem, [&]<class T, int kKey, bool kPerChannel>() {
        return prefill_candidates<T, kKey, kPerChannel>(problem);
    });
}

Support runs_on(const Device& device) {
    if (device.compute_capability == 90) return Support::yes();
    return Support::no("needs compute capability 9.0, this device has " +
                       std::to_string(device.compute_capability / 10) + "." +
                       std::to_string(device.compute_capability % 10));
}

Support takes(const Problem& problem) {
    if (Support any = runs_on(problem.device); !any) return any;
    if (problem.key_dim > 128)
        return Support::no("takes K up to 128, got " + std::to_string(problem.key_dim));
    if (Support any = chunked::supports(problem); !any) return any;
    if (kMostTileWrites % problem.writes != 0)
        return Support::no("takes writes of a token that divide " + std::to_string(kMostTileWrites) +
                           ", got " + std::to_string(problem.writes));
    return Support::yes();
}

// Whether the carry makes the scores itself (kMakesScores in carry/config.cuh).
bool makes_scores(Algorithm algorithm) {
    return has_diagonal_map(algorithm.update) && !varies_by_channel(algorithm.decay);
}

Support takes_fused(const Problem& problem) {
    if (!varies_by_channel(problem.algorithm.decay) || !fuses(problem.algorithm.update))
        return Support::no("fuses the delta rule with decays per channel");
    if (problem.dtype != Dtype::kBFloat16)
        return Support::no("takes bfloat16, whose range factors of whole halves of a chunk need");
    if (problem.key_dim <= 64) return Support::no("takes K above 64, got " + std::to_string(problem.key_dim));
    if (!fuses_gate(problem.gate, static_cast<float>(problem.lower_bound)))
        return Support::no(
            "takes softplus gates, and bounded ones whose lower_bound is -5 or nearer to zero");
    return Support::yes();
}

}  // namespace

template <StrategyKind kWanted>
Support supports(const Problem& problem) {
    Support any = takes(problem);
    if (any && problem.saves && makes_scores(problem.algorithm))
        return Support::no("makes the operands of these rules in its carry, and has none to save");
    if (!any || kWanted == StrategyKind::kAny) return any;
    if (kWanted == StrategyKind::kFused) return takes_fused(problem);
    if (kWanted == StrategyKind::kJoined) {
        if (Support fused = takes_fused(problem); !fused) return fused;
        if (problem.checkpoints || problem.chunk_states)
            return Support::no("stores no states on the way (checkpoints, chunk states)");
    }
    return candidates(problem).choose(kWanted) ? any : chunked::refuses(kWanted);
}

template <StrategyKind kWanted>
PreparedPtr prepare(const Problem& problem, const Args& args, const Context& context) {
    if (problem.saves) return backward_prepare<kWanted>(problem, args, context);
    return with_instance(problem, [&]<class T, int kKey, bool kPerChannel>() {
        return prepare_prefill<T, kKey, kPerChannel>(problem, args, kWanted);
    });
}

template <StrategyKind kWanted>
Prediction predict(const Problem& problem) {
    const chunked::Candidates all = candidates(problem);
    const chunked::Candidate* const chosen = all.choose(kWanted);
    return chosen ? Prediction(chosen->expected) : std::nullopt;
}

Saving saving(const Problem& problem) {
    return with_instance(problem, [&]<class T, int kKey, bool kPerChannel>() {
        return saving<T, kKey, kPerChannel>(problem);
    });
}

template <StrategyKind kWanted>
Support backward_supports(const Problem& problem) {
    if (Support any = takes(problem); !any) return any;
    return backward::supports(problem, kWanted);
}

template <StrategyKind kWanted>
PreparedPtr backward_prepare(const Problem& problem, const Args& args, const Context&) {
    return with_instance(problem, [&]<class T, int kKey, bool kPerChannel>() {
        return prepare_backward<T, kKey, kPerChannel>(problem, args, {}, kWanted);
    });
}

Support three_walks_supports(const Problem& problem) {
    if (Support any = runs_on(problem.device); !any) return any;
    return backward::three_walks_supports(problem);
}

PreparedPtr three_walks_prepare(const Problem& problem, const Args&, const Context&) {
    const auto prepared = [&](Walk walk) {
        const Problem of_walk = backward::walk_problem(problem, walk);
        return with_instance(of_walk, [&]<class T, int kKey, bool kPerChannel>() {
            return prepare_prefill<T, kKey, kPerChannel>(of_walk, Args{}, StrategyKind::kAny);
        });
    };
    // Its carry goes either way.
    const PreparedCallPtr transposed = prepared(Walk::kKey);
    return backward::join_walks({transposed, transposed, prepared(Walk::kValue)}, true);
}

Prediction three_walks_predict(const Problem& problem) {
    return backward::three_walks_predict(problem, candidates);
}

template Support backward_supports<StrategyKind::kAny>(const Problem&);
template PreparedPtr backward_prepare<StrategyKind::kAny>(const Problem&, const Args&, const Context&);
template Support backward_supports<StrategyKind::kWhole>(const Problem&);
template PreparedPtr backward_prepare<StrategyKind::kWhole>(const Problem&, const Args&, const Context&);
template Support backward_supports<StrategyKind::kSegments>(const Problem&);
template PreparedPtr backward_prepare<StrategyKind::kSegments>(const Problem&, const Args&, const Context&);
template Support supports<StrategyKind::kAny>(const Problem&);
template PreparedPtr prepare<StrategyKind::kAny>(const Problem&, const Args&, const Context&);
template Prediction predict<StrategyKind::kAny>(const Problem&);
template Support supports<StrategyKind::kFused>(const Problem&);
template PreparedPtr prepare<StrategyKind::kFused>(const Problem&, const Args&, const Context&);
template Prediction predict<StrategyKind::kFused>(const Problem&);
template Support supports<StrategyKind::kJoined>(const Problem&);
template PreparedPtr prepare<StrategyKind::kJoined>(const Problem&, const Args&, const Context&);
template Prediction predict<StrategyKind::kJoined>(const Problem&);
template Support supports<StrategyKind::kWhole>(const Problem&);
template PreparedPtr prepare<StrategyKind::kWhole>(const Problem&, const Args&, const Context&);
template Prediction predict<StrategyKind::kWhole>(const Problem&);
template Support supports<StrategyKind::kHalves>(const Problem&);
template PreparedPtr prepare<StrategyKind::kHalves>(const Problem&, const Args&, const Context&);
template Prediction predict<StrategyKind::kHalves>(const Problem&);
template Support supports<StrategyKind::kSegments>(const Problem&);
template PreparedPtr prepare<StrategyKind::kSegments>(const Problem&, const Args&, const Context&);
template Prediction predict<StrategyKind::kSegments>(const Problem&);

}  // namespace cula::cuda::sm90
