// SPDX-License-Identifier: Apache-2.0
// Which problems the token-by-token backward takes, and how it cuts them.
#include "cuda/recurrent/backward_entry.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/carve.h"
#include "core/check.h"
#include "cuda/limits.h"
#include "cuda/pipe/launch.h"
#include "cuda/recurrent/backward_plan.h"
#include "cuda/with_instance.h"

namespace cula::cuda::recurrent {
namespace {

// What one window may take of the workspace.
constexpr double kWindowBytes = 512.0 * (1 << 20);

// CTAs per multiprocessor that a group of rows should have: two waves.
constexpr int kCtasWanted = 6;

std::int64_t divide_up(std::int64_t x, std::int64_t by) { return (x + by - 1) / by; }
std::int64_t round_up(std::int64_t x, std::int64_t to) { return divide_up(x, to) * to; }

PartialColumns columns_of(const Args& args, int key) {
    PartialColumns columns;
    const auto take = [&](bool wanted, std::int32_t& at, int count) {
        if (wanted) at = columns.count, columns.count += count;
    };
    const bool of_decay = args.d_g || args.d_A_log || args.d_dt_bias,
               per_channel = varies_by_channel(args.algorithm.decay);
    take(static_cast<bool>(args.d_q), columns.q, key);
    take(static_cast<bool>(args.d_k), columns.k, key);
    take(args.erase && (args.d_k || args.d_erase), columns.erase, key);  // e has k as a factor
    take(static_cast<bool>(args.d_a_key), columns.a_key, key);
    take(static_cast<bool>(args.d_b_key), columns.b_key, key);
    take(of_decay && per_channel, columns.decay, key);
    take(of_decay && !per_channel, columns.token_decay, 1);
    take(args.d_beta && args.beta.ndim != 4, columns.beta, 1);
    columns.count = static_cast<std::int32_t>(round_up(columns.count, 4));
    return columns;
}

}  // namespace

// A group has rows enough to occupy the device. Windows are as large as kWindowBytes allow, or larger, if the
// states at their ends would take more than one of them.
BackwardPlan backward_plan(const Args& args, const Context& context, int key, void* workspace,
                           std::size_t& bytes) {
    const std::int64_t heads = args.q.size[2], value_heads = args.v.size[2], batch = args.q.size[0],
                       tokens = args.k.size[1];
    const Keys keys = keys_of(args.algorithm.update);
    const std::int64_t others = keys == Keys::kLowRank ? 2
                                : keys == Keys::kErase ? 1
                                                       : 0,
                       block = with_key(key, [&]<int kKey>(std::integral_constant<int, kKey>) {
                           return with_keys(keys, []<Keys kKeys>(KeysConstant<kKeys>) {
                               return kBlockTokens<kKey, kKeys>;
                           });
                       });
    BackwardPlan plan;
    plan.value_dim = static_cast<std::int32_t>(round_up(args.v.size[3], kWalkRows));
    plan.slices = plan.value_dim / kWalkRows;
    plan.columns = columns_of(args, key);

    const std::int64_t enough = divide_up(std::int64_t{kCtasWanted} * context.device.multiprocessors,
                                          value_heads * plan.slices),
                       rows = std::clamp<std::int64_t>(enough, 1, std::max<std::int64_t>(batch, 1));
    plan.groups = divide_up(batch, rows);
    plan.rows = static_cast<std::int32_t>(divide_up(batch, std::max<std::int64_t>(plan.groups, 1)));

    const std::int64_t state = key * plan.value_dim,  // of all slices, in floats
        of_keys = heads * 2 * key, of_channels = value_heads * key * (1 + others),
                       of_values = value_heads * 3 * plan.value_dim,
                       of_partials = value_heads * plan.slices * plan.columns.count;
    const double state_bytes = 4.0 * static_cast<double>(value_heads * state),
                 token_bytes = 4.0 * static_cast<double>(of_keys + of_channels + of_values + of_partials) +
                               state_bytes / static_cast<double>(block),
                 fitting = std::max(kWindowBytes / (token_bytes * std::max(plan.rows, 1)),
                                    std::sqrt(static_cast<double>(tokens) * state_bytes / token_bytes));
    plan.window_tokens = round_up(
        std::clamp<std::int64_t>(static_cast<std::int64_t>(fitting), 1, std::max<std::int64_t>(tokens, 1)),
        block);
    plan.windows = divide_up(tokens, plan.window_tokens);
    const std::int64_t window = plan.rows * std::min(plan.window_tokens, tokens);

    Carver carver(workspace);
    plan.keys = carver.take<float>(window * of_keys);
    plan.decays = carver.take<float>(window * value_heads * key);
    if (others > 0) plan.other_keys = carver.take<float>(window * value_heads * key * others);
    plan.values = carver.take<float>(window * of_values);
    plan.partials = carver.take<float>(window * of_partials);
    const std::int64_t states = value_heads * state / 4;
    plan.block_states = carver.take<float4>(divide_up(window, block) * states);
    if (plan.windows > 1) {
        plan.window_states = carver.take<float4>((plan.windows - 1) * plan.rows * states);
        plan.carried = carver.take<float4>(2 * plan.rows * states);
    }
    if (args.d_A_log || args.d_dt_bias) {
        const std::int64_t channels = varies_by_channel(args.algorithm.decay) ? args.q.size[3] : 1;
        plan.parameters = carver.take<float>(
            plan.groups * plan.windows * divide_up(window, kParameterTokens) * value_heads * (1 + channels));
    }
    bytes = carver.bytes();
    return plan;
}

Support backward_supports(const Problem& problem) {
    if (Support any = supports_any(problem); !any) return any;
    // The gradients of q and k are sums over all value channels: a call cannot be cut along them.
    if (problem.value_dim > kLargestDim)
        return Support::no("takes V up to " + std::to_string(kLargestDim) + ", got " +
                           std::to_string(problem.value_dim));
    return Support::yes();
}

std::size_t backward_workspace_bytes(const Args& args, const Context& context) {
    std::size_t bytes = 0;
    with_key(args.q.size[3], [&]<int kKey>(std::integral_constant<int, kKey>) {
        backward_plan(args, context, kKey, nullptr, bytes);
    });
    return bytes;
}

void backward_run(const Args& args, const Context& context) {
    const DeviceGuard guard(context.device.index);
    const Call call = make_call(args, context);
    with_key(args.q.size[3], [&]<int kKey>(std::integral_constant<int, kKey>) {
        std::size_t bytes = 0;
        const backward::Gradients d = backward::gradients(args);
        const BackwardPlan plan = backward_plan(args, context, kKey, context.workspace, bytes);
        with_keys(keys_of(args.algorithm.update),
                  [&]<Keys kKeys>(KeysConstant<kKeys>) { launch_backward<kKey, kKeys>(call, d, plan); });
    });
}

}  // namespace cula::cuda::recurrent
