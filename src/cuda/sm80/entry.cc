// SPDX-License-Identifier: Apache-2.0
// The portable chunked backend: which problems it supports, and which template instance runs.
#include "cuda/sm80/entry.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "cuda/backward/entry.h"
#include "cuda/backward/plan.h"
#include "cuda/chunked/entry.h"
#include "cuda/sm80/launch.h"
#include "cuda/with_instance.h"

namespace cula::cuda::sm80 {

using backward::Walk, chunked::StrategyKind;

namespace {

// Calls body.operator()<T, K, decay per channel>() of the smallest instance that holds the problem.
template <class Body>
auto with_instance(const Problem& problem, Body body) {
    return with_key(problem.key_dim, [&]<int kKey>(std::integral_constant<int, kKey>) {
        const bool per_channel = varies_by_channel(problem.algorithm.decay);
        if (problem.dtype == Dtype::kBFloat16)
            return per_channel ? body.template operator()<__nv_bfloat16, kKey, true>()
                               : body.template operator()<__nv_bfloat16, kKey, false>();
        return per_channel ? body.template operator()<__half, kKey, true>()
                           : body.template operator()<__half, kKey, false>();
    });
}

// Of the first of its parts, if there are more than kLargestDim value channels.
chunked::Candidates candidates(Problem problem) {
    problem.value_dim = std::min(problem.value_dim, kLargestDim);
    return with_instance(problem, [&]<class T, int kKey, bool kPerChannel>() {
        return prefill_candidates<T, kKey, kPerChannel>(problem);
    });
}

}  // namespace

template <StrategyKind kWanted>
Support supports(const Problem& problem) {
    Support any = chunked::supports(problem);
    if (!any || kWanted == StrategyKind::kAny || candidates(problem).choose(kWanted)) return any;
    return chunked::refuses(kWanted);
}

template <StrategyKind kWanted>
PreparedPtr prepare(const Problem& problem, const Args& args, const Context&) {
    if (problem.saves) return backward_prepare_within(problem, args, {}, kWanted);
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
    return backward::supports(problem, kWanted);
}

template <StrategyKind kWanted>
PreparedPtr backward_prepare(const Problem& problem, const Args& args, const Context&) {
    return backward_prepare_within(problem, args, {}, kWanted);
}

PreparedPtr backward_prepare_within(const Problem& problem, const Args& args, const BackwardLimits& limits,
                                    StrategyKind wanted) {
    return with_instance(problem, [&]<class T, int kKey, bool kPerChannel>() {
        return prepare_backward<T, kKey, kPerChannel>(problem, args, limits, wanted);
    });
}

Support three_walks_supports(const Problem& problem) { return backward::three_walks_supports(problem); }

PreparedPtr three_walks_prepare(const Problem& problem, const Args&, const Context&) {
    const auto prepared = [&](Walk walk) {
        const Problem of_walk = backward::walk_problem(problem, walk);
        return with_instance(of_walk, [&]<class T, int kKey, bool kPerChannel>() {
            return walk == Walk::kQuery
                       ? prepare_prefill<T, kKey, kPerChannel>(of_walk, Args{}, StrategyKind::kAny)
                       : prepare_reversed_walk<T, std::min(kKey, backward::kMostWalkChannels)>(of_walk);
        });
    };
    return backward::join_walks({prepared(Walk::kQuery), prepared(Walk::kKey), prepared(Walk::kValue)},
                                false);
}

Prediction three_walks_predict(const Problem& problem) {
    return backward::three_walks_predict(problem, candidates);
}

template Support supports<StrategyKind::kAny>(const Problem&);
template PreparedPtr prepare<StrategyKind::kAny>(const Problem&, const Args&, const Context&);
template Prediction predict<StrategyKind::kAny>(const Problem&);
template Support supports<StrategyKind::kWhole>(const Problem&);
template PreparedPtr prepare<StrategyKind::kWhole>(const Problem&, const Args&, const Context&);
template Prediction predict<StrategyKind::kWhole>(const Problem&);
template Support supports<StrategyKind::kSegments>(const Problem&);
template PreparedPtr prepare<StrategyKind::kSegments>(const Problem&, const Args&, const Context&);
template Prediction predict<StrategyKind::kSegments>(const Problem&);

template Support backward_supports<StrategyKind::kAny>(const Problem&);
template PreparedPtr backward_prepare<StrategyKind::kAny>(const Problem&, const Args&, const Context&);
template Support backward_supports<StrategyKind::kWhole>(const Problem&);
template PreparedPtr backward_prepare<StrategyKind::kWhole>(const Problem&, const Args&, const Context&);
template Support backward_supports<StrategyKind::kSegments>(const Problem&);
template PreparedPtr backward_prepare<StrategyKind::kSegments>(const Problem&, const Args&, const Context&);

}  // namespace cula::cuda::sm80
