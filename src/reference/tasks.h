// SPDX-License-Identifier: Apache-2.0
// Sharing out the tasks of a call among the workers of its context.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/rows.h"
#include "cula/cula.h"

namespace cula::reference {

inline constexpr std::int64_t kAlignment = 64;

inline std::int64_t whole_lines(std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

inline std::int64_t longest_row(const Args& args) {
    if (!args.cu_seqlens) return args.q.size[1];
    std::int64_t longest = 0;
    for (std::int64_t n = 0; n < num_sequences(args); ++n)
        longest = std::max(longest, tokens_of(args, n).length);
    return longest;
}

inline std::int64_t num_workers(const Context& context, std::int64_t tasks) {
    return std::clamp<std::int64_t>(context.parallel_for.threads, 1, std::max<std::int64_t>(1, tasks));
}

// body(task, scratch) for every task; each worker has `bytes` of the workspace as its scratch.
template <class Body>
void for_each_task(const Context& context, std::int64_t tasks, std::int64_t bytes, const Body& body) {
    struct Shared {
        const Context& context;
        std::int64_t tasks, workers, bytes;
        const Body& body;
    } shared{context, tasks, num_workers(context, tasks), bytes, body};
    const auto work = [](void* arg, int index) {
        const auto& [place, count, workers, size, run] = *static_cast<Shared*>(arg);
        auto* scratch = static_cast<std::byte*>(place.workspace) + index * size;
        for (std::int64_t task = index; task < count; task += workers) run(task, scratch);
    };
    const auto count = static_cast<int>(shared.workers);
    if (context.parallel_for.run)
        context.parallel_for.run(context.parallel_for.context, count, work, &shared);
    else
        for (int index = 0; index < count; ++index) work(&shared, index);
}

}  // namespace cula::reference
