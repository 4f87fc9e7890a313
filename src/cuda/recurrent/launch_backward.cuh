// SPDX-License-Identifier: Apache-2.0
// launch_backward (backward_plan.h): all windows forwards for the states at their ends, then
// from the last to the first for the gradients.
#pragma once

#include <algorithm>

#include "cuda/pipe/launch.h"
#include "cuda/recurrent/backward_finish.cuh"
#include "cuda/recurrent/backward_plan.h"
#include "cuda/recurrent/backward_prepare.cuh"
#include "cuda/recurrent/backward_walk.cuh"

namespace cula::cuda::recurrent {

template <int kKey, Keys kKeys>
void launch_backward(const Call& call, const backward::Gradients& d, const BackwardPlan& plan) {
    const DeviceArgs& a = call.args;
    const auto blocks = [](std::int64_t count, int each) {
        return static_cast<std::size_t>((count + each - 1) / each);
    };
    const std::size_t slices =
        static_cast<std::size_t>(a.value_heads) * static_cast<std::size_t>(plan.slices);
    // Packed sequences are one row.
    const std::int64_t batch = a.cu_seqlens ? 1 : a.sequences;
    const auto window_of = [&](std::int64_t group, std::int64_t i) {
        Window window{.index = i, .begin = i * plan.window_tokens, .first_row = group * plan.rows};
        window.end = std::min(window.begin + plan.window_tokens, rows_of_writes(a));
        window.rows = std::min<std::int64_t>(plan.rows, batch - window.first_row);
        return window;
    };
    const auto prepare = [&](const Window& window) {
        launch<backward_prepare<kKey, kKeys>>(
            {.blocks = blocks(window.tokens() * (a.heads + a.value_heads), kStepWarps),
             .threads = kStepThreads},
            call.stream, a, d, plan, window);
    };
    std::int64_t parameters = 0;
    const auto differentiate = [&](Window window) {
        window.first_parameters = parameters;
        parameters += static_cast<std::int64_t>(blocks(window.tokens(), kParameterTokens));
        prepare(window);
        // Of packed sequences at most so many have tokens in the window.
        const std::int64_t sequences =
            a.cu_seqlens ? std::min<std::int64_t>(a.sequences, window.tokens()) : window.rows;
        launch<backward_walk<kKey, kKeys>>({.blocks = static_cast<std::size_t>(sequences) * slices,
                                            .threads = kStepThreads,
                                            .shared_bytes = sizeof(WalkShared<kKey, kKeys>)},
                                           call.stream, a, d, plan, window);
        if (d.decay() || d.d_beta.data || plan.columns.erase >= 0 || d.d_a_key.data || d.d_b_key.data ||
            (a.cu_seqlens && d.d_v.data))
            launch<backward_heads<kKey, kKeys>>(
                {.blocks = blocks(window.tokens(), kParameterTokens) * a.value_heads,
                 .threads = kFinishThreads},
                call.stream, a, d, plan, window);
        if (d.keys())
            launch<backward_keys<kKey>>(
                {.blocks = blocks(window.tokens() * a.heads, kStepWarps), .threads = kStepThreads},
                call.stream, a, d, plan, window);
    };
    for (std::int64_t group = 0; group < plan.groups; ++group) {
        for (std::int64_t i = 0; i + 1 < plan.windows; ++i) {
            const Window window = window_of(group, i);
            prepare(window);
            launch<backward_advance<kKey, kKeys>>(
                {.blocks = static_cast<std::size_t>(window.rows) * slices, .threads = kStepThreads},
                call.stream, a, plan, window);
        }
        for (std::int64_t i = plan.windows - 1; i >= 0; --i) differentiate(window_of(group, i));
    }
    if (d.d_initial.data && (a.cu_seqlens || a.tokens == 0))
        launch<backward_untouched<kKey>>(
            {.blocks = static_cast<std::size_t>(a.sequences) * slices, .threads = kStepThreads}, call.stream,
            a, d, plan);
    if (d.parameters()) {
        const int columns = 1 + (varies_by_channel(a.algorithm.decay) ? a.key_dim : 1);
        launch<backward_parameters<kKey>>(
            {.blocks = blocks(columns, 32) * a.value_heads, .threads = kFinishThreads}, call.stream, a, d,
            plan, parameters);
    }
}

}  // namespace cula::cuda::recurrent
