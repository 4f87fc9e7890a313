// SPDX-License-Identifier: Apache-2.0
// What the host sides of the CPU backend have in common (entry.cc, backward_entry.cc): running tasks on the
// caller's threads, and views of states.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/rows.h"
#include "cpu/task.h"
#include "cula/cula.h"

namespace cula::cpu {

inline int num_workers(const Context& context, std::int64_t tasks) {
    const std::int64_t threads = context.parallel_for.run ? context.parallel_for.threads : 1;
    return static_cast<int>(std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(tasks, 1)));
}

// Calls body(worker, task) for every task. even: each worker has a contiguous range, so that it works on the
// same states in every call. Otherwise a worker takes the next task whenever it is free.
template <class Body>
void for_each_task(const Context& context, int workers, std::int64_t tasks, bool even, Body body) {
    struct Job {
        Body& body;
        std::int64_t tasks;
        int workers;
        bool even;
        std::atomic<std::int64_t> next{0};
    } job{body, tasks, workers, even};
    const auto work = [](void* arg, int worker) {
        Job& mine = *static_cast<Job*>(arg);
        if (mine.even) {
            const std::int64_t end = mine.tasks * (worker + 1) / mine.workers;
            for (std::int64_t task = mine.tasks * worker / mine.workers; task < end; ++task)
                mine.body(worker, task);
        } else {
            for (std::int64_t task; (task = mine.next.fetch_add(1, std::memory_order_relaxed)) < mine.tasks;)
                mine.body(worker, task);
        }
    };
    if (workers == 1)
        work(&job, 0);
    else
        context.parallel_for.run(context.parallel_for.context, workers, work, &job);
}

inline StateView view(const StateRow& row, std::int64_t value_head) {
    if (!row) return {};
    StateView view{row.ptr(value_head), row.states.dtype, row.states.stride[2], row.states.stride[3]};
    if (row.scales) {
        view.scales = row.scales.at<float>(row.slot, value_head);
        view.scale_stride = row.scales.stride[2];
    }
    return view;
}

inline std::int64_t longest(const Args& args) {
    std::int64_t most = 0;
    for (std::int64_t n = 0; n < num_sequences(args); ++n) most = std::max(most, tokens_of(args, n).length);
    return most;
}

// Makes `order` the sequences, longest first.
inline void sort_by_length(const Args& args, std::int64_t* order, std::int64_t sequences) {
    for (std::int64_t n = 0; n < sequences; ++n) order[n] = n;
    if (!args.cu_seqlens) return;
    std::stable_sort(order, order + sequences, [&](std::int64_t a, std::int64_t b) {
        return tokens_of(args, a).length > tokens_of(args, b).length;
    });
}

// backward_entry.cc
std::size_t backward_workspace_bytes(const Isa& isa, const Args& args, const Context& context);
void run_backward(const Isa& isa, const Args& args, const Context& context);

}  // namespace cula::cpu
