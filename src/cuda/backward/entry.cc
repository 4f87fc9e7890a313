// SPDX-License-Identifier: Apache-2.0
#include "cuda/backward/entry.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "core/check.h"
#include "cuda/backward/gradients.h"
#include "cuda/chunked/entry.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::backward {

using chunked::StrategyKind;

namespace {

class ThreeWalks final : public Prepared {
public:
    ThreeWalks(PlannedWalks walks, bool reads_any_d_o)
        : Prepared(largest(walks) + (reads_any_d_o ? 0 : kRowOfZeros), 0),
          walks_(std::move(walks)),
          reads_any_d_o_(reads_any_d_o) {}

    void run(const Args& args, const Context& context) const override {
        const DeviceGuard guard(context.device.index);
        Call call = make_call(args, context);
        const DeviceArgs whole = call.args;
        Gradients d = gradients(args);
        if (!d.d_o.data && !reads_any_d_o_) {
            std::byte* const zeros =
                static_cast<std::byte*>(call.workspace) + workspace_bytes() - kRowOfZeros;
            fill_with_zeros(zeros, kRowOfZeros, call.stream);
            d.d_o = {.data = zeros, .dtype = args.q.dtype, .pieces = true};
        }
        for (std::size_t i = 0; i < kWalks.size(); ++i) {
            call.args = walk_args(whole, d, kWalks[i]);
            if (!call.args.o.data && !call.args.final.data) continue;  // not wanted
            walks_[i]->launch(call);
            call.goes_on = true;
        }
    }

private:
    static constexpr std::size_t kRowOfZeros =
        2 * kMostWalkChannels;  // bytes: one row for all tokens and heads

    // One walk follows the other, in the same workspace; up to a multiple of the bytes of a row.
    static std::size_t largest(const PlannedWalks& walks) {
        std::size_t bytes = 0;
        for (const PreparedCallPtr& walk : walks) bytes = std::max(bytes, walk->workspace_bytes());
        return (bytes + kRowOfZeros - 1) / kRowOfZeros * kRowOfZeros;
    }

    PlannedWalks walks_;
    bool reads_any_d_o_;
};

}  // namespace

Support supports(const Problem& problem, StrategyKind wanted) {
    if (Support any = chunked::supports(problem); !any) return any;
    if (problem.value_dim > kLargestDim)
        return Support::no("takes V up to " + std::to_string(kLargestDim) + ", got " +
                           std::to_string(problem.value_dim) +
                           ": more are several calls, whose gradients of q, k, gate and beta add up");
    const std::int64_t chunk = problem.key_dim <= 128 ? 64 : 32;
    if (wanted == StrategyKind::kSegments &&
        (problem.batch_invariant || problem.tokens * chunked::rows_of_token(problem) <= chunk))
        return Support::no("cuts sequences of more than one chunk, and no batch-invariant call");
    return Support::yes();
}

Support three_walks_supports(const Problem& problem) {
    if (Support any = takes_three_walks(problem); !any) return any;
    for (const Walk walk : kWalks)
        if (Support any = chunked::supports(walk_problem(problem, walk)); !any) return any;
    return Support::yes();
}

PreparedPtr join_walks(PlannedWalks walks, bool reads_any_d_o) {
    return std::make_shared<const ThreeWalks>(std::move(walks), reads_any_d_o);
}

Prediction three_walks_predict(const Problem& problem, chunked::Candidates (*prefill)(Problem)) {
    double microseconds = 0.0;
    for (const Walk walk : kWalks)
        microseconds += prefill(walk_problem(problem, walk)).choose(StrategyKind::kAny)->expected;
    return microseconds;
}

}  // namespace cula::cuda::backward
