// SPDX-License-Identifier: Apache-2.0
// The portable chunked backend: which problems it supports, and which template instance runs.
#include "cuda/sm80/entry.h"

#include "cuda/chunked/entry.h"
#include "cuda/pipe/launch.h"
#include "cuda/sm80/launch.h"
#include "cuda/with_instance.h"

namespace cula::cuda::sm80 {
namespace {

// Calls body.operator()<T, K, decay per channel>() of the smallest instance that holds the problem.
template <class Body>
auto with_instance(const Args& args, Body body) {
    return with_key(args.q.size[3], [&]<int kKey>(std::integral_constant<int, kKey>) {
        const bool per_channel = varies_by_channel(args.algorithm.decay);
        if (args.q.dtype == Dtype::kBFloat16)
            return per_channel ? body.template operator()<__nv_bfloat16, kKey, true>()
                               : body.template operator()<__nv_bfloat16, kKey, false>();
        return per_channel ? body.template operator()<__half, kKey, true>()
                           : body.template operator()<__half, kKey, false>();
    });
}

}  // namespace

Support supports(const Problem& problem) { return chunked::supports(problem); }

std::size_t workspace_bytes(const Args& args, const Context& context) {
    const Call call = make_call(args, context);
    return with_instance(args, [&]<class T, int kKey, bool kPerChannel>() {
        return prefill_workspace_bytes<T, kKey, kPerChannel>(call);
    });
}

std::size_t kept_bytes(const Args& args, const Context& context) {
    const Call call = make_call(args, context);
    return with_instance(args, [&]<class T, int kKey, bool kPerChannel>() {
        return prefill_kept_bytes<T, kKey, kPerChannel>(call);
    });
}

void prefill(const Args& args, const Context& context) {
    const DeviceGuard guard(context.device.index);
    const Call call = make_call(args, context);
    with_instance(args,
                  [&]<class T, int kKey, bool kPerChannel>() { launch_prefill<T, kKey, kPerChannel>(call); });
}

}  // namespace cula::cuda::sm80
