// SPDX-License-Identifier: Apache-2.0
// Which problems the token-by-token kernels take, and which instance runs: decode where it takes the call,
// otherwise step.
#include "cuda/recurrent/entry.h"

#include <string>

#include "cuda/limits.h"
#include "cuda/pipe/launch.h"
#include "cuda/recurrent/instances.h"
#include "cuda/with_instance.h"

namespace cula::cuda::recurrent {

Support supports(const Problem& problem) {
    if (Support any = supports_any(problem); !any) return any;
    if (problem.pass == Pass::kSegment && problem.beta_per_value && !takes_erase(problem.algorithm.update))
        return Support::no("one map a head takes one beta per token, not a write strength per value channel");
    if (problem.tree && problem.draft_tokens > kMaxTreeTokens)
        return Support::no("takes trees of up to " + std::to_string(kMaxTreeTokens) + " tokens, got " +
                           std::to_string(problem.draft_tokens));
    return Support::yes();
}

std::size_t workspace_bytes(const Args&, const Context&) { return 0; }

namespace {

template <class Body>
auto with_state(Dtype dtype, Body body) {
    if (dtype == Dtype::kFloat8E4M3) return body(Type<Float8E4M3>{});
    return with_dtype(dtype, body);
}

}  // namespace

void run(const Args& args, const Context& context) {
    const DeviceGuard guard(context.device.index);
    const Call call = make_call(args, context);
    const TensorRef& state = args.initial_state ? args.initial_state
                             : args.final_state ? args.final_state
                                                : args.snapshots;
    with_state(state ? state.dtype : Dtype::kFloat32, [&]<class State>(Type<State>) {
        with_key(args.q.size[3], [&]<int kKey>(std::integral_constant<int, kKey>) {
            const Keys keys = keys_of(args.algorithm.update);
            const bool several = call.args.writes > 1;
            const auto launch_packed = [&]<Keys kKeys>(KeysConstant<kKeys>) {
                if constexpr (kIsPacked<State, kKey, kKeys>)
                    return launch_step_packed<State, kKey, kKeys>(call);
                else
                    return false;
            };
            if (!call.segment &&
                (several ? launch_packed(KeysConstant<Keys::kSeveral>{}) : with_keys(keys, launch_packed)))
                return;
            if (several)
                launch_step_several<kKey>(call);
            else if (keys == Keys::kLowRank)
                launch_step_low_rank<kKey>(call);
            else
                launch_step_any<kKey>(call);
        });
    });
}

}  // namespace cula::cuda::recurrent
