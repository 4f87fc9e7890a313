// SPDX-License-Identifier: Apache-2.0
// The Hopper backend: which problems it supports, and which template instance runs.
#include "cuda/sm90/entry.h"

#include "cuda/chunked/entry.h"
#include "cuda/pipe/launch.h"
#include "cuda/sm90/fused/rule.h"
#include "cuda/sm90/launch.h"

namespace cula::cuda::sm90 {
namespace {

// Calls body.operator()<T, K, decay per channel>() of the smallest instance that holds the problem.
template <class Body>
auto with_instance(const Args& args, Body body) {
    const auto with_type = [&]<int kKey, bool kPerChannel>() {
        return args.q.dtype == Dtype::kBFloat16 ? body.template operator()<__nv_bfloat16, kKey, kPerChannel>()
                                                : body.template operator()<__half, kKey, kPerChannel>();
    };
    if (varies_by_channel(args.algorithm.decay))
        return args.q.size[3] <= 64 ? with_type.template operator()<64, true>()
                                    : with_type.template operator()<128, true>();
    return args.q.size[3] <= 64 ? with_type.template operator()<64, false>()
                                : with_type.template operator()<128, false>();
}

Call fused_call(const Args& args, const Context& context) {
    Call call = make_call(args, context);
    call.fused = true;
    return call;
}

}  // namespace

Support supports(const Problem& problem) {
    if (problem.device.compute_capability != 90)
        return Support::no("needs compute capability 9.0, this device has " +
                           std::to_string(problem.device.compute_capability / 10) + "." +
                           std::to_string(problem.device.compute_capability % 10));
    if (problem.key_dim > 128)
        return Support::no("takes K up to 128, got " + std::to_string(problem.key_dim));
    return chunked::supports(problem);
}

std::size_t workspace_bytes(const Args& args, const Context& context) {
    const Call call = make_call(args, context);
    return with_instance(args, [&]<class T, int kKey, bool kPerChannel>() {
        return sm90::prefill_workspace_bytes<T, kKey, kPerChannel>(call);
    });
}

std::size_t kept_bytes(const Args& args, const Context& context) {
    const Call call = make_call(args, context);
    return with_instance(args, [&]<class T, int kKey, bool kPerChannel>() {
        return sm90::prefill_kept_bytes<T, kKey, kPerChannel>(call);
    });
}

void prefill(const Args& args, const Context& context) {
    const DeviceGuard guard(context.device.index);
    const Call call = make_call(args, context);
    with_instance(args, [&]<class T, int kKey, bool kPerChannel>() {
        sm90::launch_prefill<T, kKey, kPerChannel>(call);
    });
}

Support supports_fused(const Problem& problem) {
    if (Support any = supports(problem); !any) return any;
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

std::size_t fused_workspace_bytes(const Args& args, const Context& context) {
    return sm90::prefill_workspace_bytes<__nv_bfloat16, 128, true>(fused_call(args, context));
}

void prefill_fused(const Args& args, const Context& context) {
    const DeviceGuard guard(context.device.index);
    sm90::launch_prefill<__nv_bfloat16, 128, true>(fused_call(args, context));
}

}  // namespace cula::cuda::sm90
