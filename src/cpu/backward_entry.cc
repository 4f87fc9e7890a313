// SPDX-License-Identifier: Apache-2.0
// The host side of the CPU backward pass, built for any CPU. A task is one sequence and one query/key head
// with the value heads of its group, so that no two tasks write the same gradient. What they add to dA_log
// and ddt_bias lies in the workspace, and is summed in the order of the sequences at the end.
#include <algorithm>
#include <cstring>

#include "core/carve.h"
#include "core/rows.h"
#include "cpu/host.h"
#include "cpu/task.h"

namespace cula::cpu {
namespace {

struct BackwardPlan {
    std::int64_t sequences, heads, value_heads, parameters;  // parameters: 1 + K, or 0 if none is wanted
    std::int64_t* order;                                     // sequences, longest first
    double* sums;                                            // [sequences, value heads, parameters]
    std::byte* scratch;
    std::size_t scratch_bytes;  // of one worker

    std::int64_t tasks() const { return sequences * heads; }
};

BackwardPlan carve_plan(Carver& carver, const Isa& isa, const Args& args, const Context& context) {
    BackwardPlan plan{};
    plan.sequences = num_sequences(args);
    plan.heads = args.q.size[2];
    plan.value_heads = args.v.size[2];
    plan.parameters = args.d_A_log || args.d_dt_bias ? 1 + args.q.size[3] : 0;
    plan.order = carver.take<std::int64_t>(plan.sequences);
    plan.sums = carver.take<double>(plan.sequences * plan.value_heads * plan.parameters);
    plan.scratch_bytes = isa.backward_scratch_bytes(args, longest(args));
    plan.scratch = carver.take<std::byte>(static_cast<std::int64_t>(plan.scratch_bytes) *
                                          num_workers(context, plan.tasks()));
    return plan;
}

BackwardTask make_task(const Args& args, const BackwardPlan& plan, std::int64_t n, std::int64_t head) {
    const Tokens tokens = tokens_of(args, n);
    BackwardTask task{};
    task.batch = tokens.batch, task.begin = tokens.begin, task.length = tokens.length;
    task.group = static_cast<int>(plan.value_heads / plan.heads);
    task.head = head, task.value_head = head * task.group;
    task.starts_from_state = starts_from_state(args, n);
    const auto first = [&](const TensorRef& states, StateView& of_head, std::int64_t& step) {
        if (states) of_head = view({states, n}, task.value_head), step = states.stride[1];
    };
    if (task.starts_from_state) first(args.initial_state, task.initial, task.initial_step);
    first(args.d_final_state, task.d_final, task.d_final_step);
    first(args.d_initial_state, task.d_initial, task.d_initial_step);
    if (plan.parameters)
        task.parameters = plan.sums + (n * plan.value_heads + task.value_head) * plan.parameters;
    return task;
}

void sum_parameters(const Args& args, const BackwardPlan& plan) {
    const auto sum = [&](std::int64_t value_head, std::int64_t i) {
        double all = 0.0;
        for (std::int64_t n = 0; n < plan.sequences; ++n)
            all += plan.sums[(n * plan.value_heads + value_head) * plan.parameters + i];
        return static_cast<float>(all);
    };
    const std::int64_t biases = args.d_dt_bias.ndim == 2 ? args.d_dt_bias.size[1] : 1;
    for (std::int64_t hv = 0; hv < plan.value_heads; ++hv) {
        if (args.d_A_log) *args.d_A_log.at<float>(hv) = sum(hv, 0);
        for (std::int64_t i = 0; args.d_dt_bias && i < biases; ++i)
            *args.d_dt_bias.at<float>(hv, i) = sum(hv, 1 + i);
    }
}

// Tokens after the last sequence belong to none: their gradients are zero.
void zero_slack(const Args& args) {
    if (!args.cu_seqlens) return;
    const std::int64_t end = read_index(args.cu_seqlens, num_sequences(args));
    for (const TensorRef* ref : {&args.d_q, &args.d_k, &args.d_v, &args.d_g, &args.d_beta, &args.d_erase,
                                 &args.d_a_key, &args.d_b_key}) {
        const bool of_tokens = ref == &args.d_q || ref == &args.d_g;
        const std::int64_t first = end * (of_tokens ? 1 : writes_per_token(args));
        const std::size_t bytes =
            size_bytes(ref->dtype) * static_cast<std::size_t>(ref->ndim == 4 ? ref->size[3] : 1);
        for (std::int64_t row = first; *ref && row < ref->size[1]; ++row)
            for (std::int64_t h = 0; h < ref->size[2]; ++h) std::memset(ref->ptr(0, row, h), 0, bytes);
    }
}

}  // namespace

std::size_t backward_workspace_bytes(const Isa& isa, const Args& args, const Context& context) {
    Carver carver(nullptr);
    carve_plan(carver, isa, args, context);
    return carver.bytes();
}

void run_backward(const Isa& isa, const Args& args, const Context& context) {
    Carver carver(context.workspace);
    const BackwardPlan plan = carve_plan(carver, isa, args, context);
    sort_by_length(args, plan.order, plan.sequences);
    zero_slack(args);
    const int workers = num_workers(context, plan.tasks());
    for_each_task(context, workers, plan.tasks(), false, [&](int worker, std::int64_t index) {
        const std::int64_t n = plan.order[index / plan.heads];
        isa.backward(args, make_task(args, plan, n, index % plan.heads),
                     plan.scratch + static_cast<std::size_t>(worker) * plan.scratch_bytes);
    });
    if (plan.parameters) sum_parameters(args, plan);
}

}  // namespace cula::cpu
