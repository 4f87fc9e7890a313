// SPDX-License-Identifier: Apache-2.0
#include "cuda/backward/three_walks.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/check.h"
#include "cuda/backward/three_walks_rule.h"

namespace cula::cuda::backward {

Support takes_three_walks(const Problem& problem) {
    if (!has_three_walks(problem.algorithm))
        return Support::no("takes rules that add values as they are, without a decay or with one per head");
    if (problem.qk_l2norm) return Support::no("takes q and k as they are, without qk_l2norm");
    if (problem.heads != problem.value_heads)
        return Support::no("takes as many value heads as heads, got " + std::to_string(problem.value_heads) +
                           " for " + std::to_string(problem.heads));
    if (problem.wide_d_o) return Support::no("takes a d_o of the inputs' dtype");
    if (std::max(problem.key_dim, problem.value_dim) > kMostWalkChannels)
        return Support::no("takes K and V up to " + std::to_string(kMostWalkChannels) + ", got " +
                           std::to_string(problem.key_dim) + " and " + std::to_string(problem.value_dim));
    if (problem.value_dim < kFewestChunkChannels)
        return Support::no("takes V from " + std::to_string(kFewestChunkChannels) +
                           " on: values are the keys of two of its walks");
    return Support::yes();
}

Problem walk_problem(const Problem& problem, Walk walk) {
    Problem of_walk = problem;
    of_walk.pass = Pass::kPrefill;
    if (is_transposed(walk)) std::swap(of_walk.key_dim, of_walk.value_dim);
    return of_walk;
}

DeviceArgs walk_args(const DeviceArgs& call, const Gradients& d, Walk walk) {
    DeviceArgs a = call;
    switch (walk) {
        case Walk::kQuery: a.q = d.d_o, a.k = call.v, a.v = call.k, a.o = d.d_q; break;
        case Walk::kKey: a.q = call.v, a.k = d.d_o, a.v = call.q, a.o = d.d_k; break;
        case Walk::kValue: a.q = call.k, a.k = call.q, a.v = d.d_o, a.o = d.d_v; break;
    }
    a.reversed = walk != Walk::kQuery;
    if (a.reversed) a.initial = d.d_final, a.has_initial = nullptr;
    if (walk == Walk::kValue) a.final = d.d_initial, a.has_final = call.has_initial;
    if (is_transposed(walk)) {
        std::swap(a.key_dim, a.value_dim);
        std::swap(a.initial.v, a.initial.k);
    }
    return a;
}

}  // namespace cula::cuda::backward
