// SPDX-License-Identifier: Apache-2.0
// The Hopper backend's rows: what it takes, and which instance runs.
#include "cuda/sm90/entry.h"

#include "cuda/device_args.h"
#include "cuda/pipe/launch.h"
#include "cuda/sm80/entry.h"
#include "cuda/sm90/launch.h"

namespace cula::cuda::sm90 {
namespace {

// body.operator()<T, K, decay per channel>() of the instance that holds the problem.
template <class Body>
auto with_instance(const Args& args, Body body) {
    const auto with_type = [&]<int kKey, bool kPerChannel>() {
        return args.q.dtype == Dtype::kBFloat16 ? body.template operator()<__nv_bfloat16, kKey, kPerChannel>()
                                                : body.template operator()<__half, kKey, kPerChannel>();
    };
    if (args.algorithm.decay == Decay::kPerChannel)
        return args.q.size[3] <= 64 ? with_type.template operator()<64, true>()
                                    : with_type.template operator()<128, true>();
    return args.q.size[3] <= 64 ? with_type.template operator()<64, false>()
                                : with_type.template operator()<128, false>();
}

}  // namespace

Support supports(const Problem& problem) {
    if (problem.device.compute_capability != 90)
        return Support::no("needs compute capability 9.0, this device has " +
                           std::to_string(problem.device.compute_capability / 10) + "." +
                           std::to_string(problem.device.compute_capability % 10));
    if (problem.key_dim > 128) return Support::no("takes K up to 128, got " + std::to_string(problem.key_dim));
    return sm80::supports_prefill(problem);
}

std::size_t workspace_bytes(const Args& args, const Context& context) {
    const Call call = sm80::make_call(args, context);
    return with_instance(args, [&]<class T, int kKey, bool kPerChannel>() {
        return sm90::prefill_workspace_bytes<T, kKey, kPerChannel>(call);
    });
}

std::size_t kept_bytes(const Args& args, const Context& context) {
    const Call call = sm80::make_call(args, context);
    return with_instance(args, [&]<class T, int kKey, bool kPerChannel>() {
        return sm90::prefill_kept_bytes<T, kKey, kPerChannel>(call);
    });
}

void prefill(const Args& args, const Context& context) {
    const DeviceGuard guard(context.device.index);
    const Call call = sm80::make_call(args, context);
    with_instance(args,
                  [&]<class T, int kKey, bool kPerChannel>() { sm90::launch_prefill<T, kKey, kPerChannel>(call); });
}

}  // namespace cula::cuda::sm90
