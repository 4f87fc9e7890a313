// SPDX-License-Identifier: Apache-2.0
// The portable CUDA backend's rows: what it takes, and which instance runs.
#include "cuda/sm80/entry.h"

#include <string>
#include <type_traits>

#include "core/check.h"
#include "cuda/device_args.h"
#include "cuda/limits.h"
#include "cuda/pipe/launch.h"
#include "cuda/sm80/launch.h"

namespace cula::cuda::sm80 {
namespace {

template <class T>
struct Type {
    using type = T;
};

// Calls body(Type<T>{}, constant K) for the smallest key dimension instantiated that holds the problem's.
template <class Body>
auto with_key(std::int64_t key_dim, Body body) {
    if (key_dim <= 64) return body(std::integral_constant<int, 64>{});
    if (key_dim <= 128) return body(std::integral_constant<int, 128>{});
    return body(std::integral_constant<int, 256>{});
}

template <class Body>
auto with_dtype(Dtype dtype, Body body) {
    if (dtype == Dtype::kBFloat16) return body(Type<__nv_bfloat16>{});
    if (dtype == Dtype::kFloat16) return body(Type<__half>{});
    return body(Type<float>{});
}

// body.operator()<T, K, decay per channel>() of the prefill instance that holds the problem.
template <class Body>
auto with_instance(const Args& args, Body body) {
    return with_key(args.q.size[3], [&]<int kKey>(std::integral_constant<int, kKey>) {
        const bool per_channel = args.algorithm.decay == Decay::kPerChannel;
        if (args.q.dtype == Dtype::kBFloat16)
            return per_channel ? body.template operator()<__nv_bfloat16, kKey, true>()
                               : body.template operator()<__nv_bfloat16, kKey, false>();
        return per_channel ? body.template operator()<__half, kKey, true>()
                           : body.template operator()<__half, kKey, false>();
    });
}

Support supports_any(const Problem& problem) {
    if (problem.device.compute_capability < 80)
        return Support::no("needs compute capability 8.0, this device has " +
                           std::to_string(problem.device.compute_capability / 10) + "." +
                           std::to_string(problem.device.compute_capability % 10));
    if (problem.dtype == Dtype::kFloat64) return Support::no("takes float32, bfloat16 and float16; q is float64");
    return counts_fit(problem);
}

}  // namespace

Call make_call(const Args& args, const Context& context) {
    Call call;
    call.args = device_args(args);
    call.stream = context.stream;
    call.workspace = context.workspace;
    call.multiprocessors = context.device.multiprocessors;
    call.shared_bytes_limit = context.device.shared_bytes;
    call.follows = context.device.compute_capability >= 90;
    call.segment = args.segment_b || args.keep;
    call.keeps = args.keep;
    call.kept = args.kept.data;
    if (call.kept) call.kept_bytes = static_cast<std::size_t>(args.kept.size[0]) * sizeof(std::int32_t);
    return call;
}

Support supports_prefill(const Problem& problem) {
    if (Support any = supports_any(problem); !any) return any;
    if (problem.dtype == Dtype::kFloat32) return Support::no("multiplies bfloat16 and float16; q is float32");
    if (problem.beta_per_value)
        return Support::no("the chunked form takes one beta per token, not a write strength per value channel");
    if (problem.key_dim < kFewestChunkChannels)
        return Support::no("takes K from " + std::to_string(kFewestChunkChannels) +
                           " on: chunks of fewer channels cancel where tokens do not");
    const int rows = problem.key_dim <= 128 ? 64 : 32;
    if (problem.chunk_states && problem.chunk_tokens % rows != 0)
        return Support::no("stores chunk states every " + std::to_string(rows) + " tokens for this K");
    return Support::yes();
}

std::size_t prefill_workspace_bytes(const Args& args, const Context& context) {
    const Call call = make_call(args, context);
    return with_instance(args, [&]<class T, int kKey, bool kPerChannel>() {
        return prefill_workspace_bytes<T, kKey, kPerChannel>(call);
    });
}

std::size_t prefill_kept_bytes(const Args& args, const Context& context) {
    const Call call = make_call(args, context);
    return with_instance(
        args, [&]<class T, int kKey, bool kPerChannel>() { return prefill_kept_bytes<T, kKey, kPerChannel>(call); });
}

void prefill(const Args& args, const Context& context) {
    const DeviceGuard guard(context.device.index);
    const Call call = make_call(args, context);
    with_instance(args, [&]<class T, int kKey, bool kPerChannel>() { launch_prefill<T, kKey, kPerChannel>(call); });
}

void compose(const Composition& c, const Context& context) {
    const DeviceGuard guard(context.device.index);
    const auto rows = [](const TensorRef& ref) {
        return GivenMaps::Rows{static_cast<const float*>(ref.data), ref.stride[0], ref.stride[1], ref.stride[2],
                               ref.stride[3]};
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

void settle_forks(const Args& args, const SettledIndices& to, const Context& context) {
    const DeviceGuard guard(context.device.index);
    launch_settle_forks<static_cast<int>(kLargestDim)>(device_args(args), to.starts, to.ends, context.stream);
}

Support supports_step(const Problem& problem) {
    if (Support any = supports_any(problem); !any) return any;
    if (problem.pass == Pass::kSegment && problem.beta_per_value)
        return Support::no("one map a head takes one beta per token, not a write strength per value channel");
    if (problem.tree && problem.draft_tokens > kMaxTreeTokens)
        return Support::no("walks trees of up to " + std::to_string(kMaxTreeTokens) + " tokens, got " +
                           std::to_string(problem.draft_tokens));
    return Support::yes();
}

std::size_t step_workspace_bytes(const Args&, const Context&) { return 0; }

void step(const Args& args, const Context& context) {
    const DeviceGuard guard(context.device.index);
    const Call call = make_call(args, context);
    const TensorRef& state = args.initial_state ? args.initial_state
                             : args.final_state ? args.final_state
                                                : args.snapshots;
    with_dtype(state ? state.dtype : Dtype::kFloat32, [&]<class State>(Type<State>) {
        with_key(args.q.size[3], [&]<int kKey>(std::integral_constant<int, kKey>) {
            if (call.segment || !launch_step_packed<State, kKey>(call)) launch_step_any<kKey>(call);
        });
    });
}

}  // namespace cula::cuda::sm80
