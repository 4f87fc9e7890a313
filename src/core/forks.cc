// SPDX-License-Identifier: Apache-2.0
// Forks on the host (forks.h).
#include "core/forks.h"

#include <algorithm>
#include <unordered_map>

#include "core/carve.h"
#include "core/rows.h"

namespace cula {
namespace {

struct Fork {
    std::int64_t sequence, from, to;  // to: the slot that the sequence writes first; negative: it writes none
};

// Maps each slot of a pool to the sequences that start from it and the one that writes it.
class Slots {
public:
    explicit Slots(const Args& args) : args_(args) {
        for (std::int64_t n = 0; n < num_sequences(args); ++n) {
            const StateRows rows = states_of(args, n);
            if (rows.initial) readers_.emplace(rows.initial.slot, n);
            each_written(n, rows, [&](std::int64_t slot) { writers_.emplace(slot, n); });
        }
    }

    // Calls body(fork) for every fork, in the order of sequences.
    template <class Body>
    void each_fork(Body body) const {
        for (std::int64_t n = 0; n < num_sequences(args_); ++n) {
            const StateRows rows = states_of(args_, n);
            if (!rows.initial) continue;
            const auto writer = writers_.find(rows.initial.slot);
            if (writer == writers_.end() || writer->second == n) continue;
            Fork fork{n, rows.initial.slot, -1};
            each_written(n, rows, [&](std::int64_t slot) {
                if (fork.to < 0) fork.to = slot;
            });
            body(fork);
        }
    }

    // Another sequence that starts from the slot fork.to, so that the fork cannot be settled; -1 if there is
    // none.
    std::int64_t other_reader(const Fork& fork) const {
        const auto [first, last] = readers_.equal_range(fork.to);
        const auto other =
            std::find_if(first, last, [&](const auto& reader) { return reader.second != fork.sequence; });
        return other == last ? -1 : other->second;
    }

private:
    template <class Body>
    void each_written(std::int64_t n, const StateRows& rows, Body body) const {
        if (rows.final) body(rows.final.slot);
        if (!args_.state_indices || rows.skipped) return;
        for (std::int64_t t = 0; t < tokens_of(args_, n).length; ++t) {
            const std::int64_t slot = read_index(args_.state_indices, n, t);
            if (!is_null(args_, slot)) body(slot);
        }
    }

    const Args& args_;
    std::unordered_multimap<std::int64_t, std::int64_t> readers_;
    std::unordered_map<std::int64_t, std::int64_t> writers_;
};

// Copies a state of initial_state to a slot of final_state; both are the same memory.
void copy_state(const Args& args, std::int64_t from, std::int64_t to) {
    const TensorRef &initial = args.initial_state, &final = args.final_state;
    for (std::int64_t hv = 0; hv < final.size[1]; ++hv)
        for (std::int64_t v = 0; v < final.size[2]; ++v)
            for (std::int64_t k = 0; k < final.size[3]; ++k)
                std::copy_n(static_cast<const std::byte*>(initial.ptr(from, hv, v, k)),
                            size_bytes(final.dtype), static_cast<std::byte*>(final.ptr(to, hv, v, k)));
    if (const TensorRef& scales = args.final_scales)
        for (std::int64_t hv = 0; hv < scales.size[1]; ++hv)
            for (std::int64_t v = 0; v < scales.size[2]; ++v)
                *scales.at<float>(to, hv, v) = *args.initial_scales.at<const float>(from, hv, v);
}

// Whether some sequence starts from another slot than it ends in. With state_indices: always true, because
// any sequence may.
bool some_start_elsewhere(const Args& args) {
    if (args.state_indices) return true;
    for (std::int64_t n = 0; n < num_sequences(args); ++n) {
        const StateRows rows = states_of(args, n);
        if (rows.initial && rows.initial.slot != rows.final.slot) return true;
    }
    return false;
}

}  // namespace

bool may_fork(const Args& args) {
    if (num_sequences(args) < 2) return false;
    const TensorRef &read = args.initial_state_indices, &write = args.final_state_indices;
    if (!args.initial_state || !args.final_state || args.initial_state.data != args.final_state.data)
        return false;
    if (args.state_indices) return static_cast<bool>(read);
    const bool same =
        read && read.data == write.data && read.dtype == write.dtype && read.stride[0] == write.stride[0];
    return write && !same;
}

std::size_t SettledIndices::bytes(const Args& args) {
    Carver carver(nullptr);
    carver.take<std::int32_t>(num_sequences(args) * (args.state_indices ? 1 : 2));
    return carver.bytes();
}

SettledIndices::SettledIndices(const Args& args, void* memory) : starts(static_cast<std::int32_t*>(memory)) {
    if (!args.state_indices) ends = starts + num_sequences(args);
}

Args SettledIndices::apply(const Args& args) const {
    Args settled = args;
    const auto indices = [&](std::int32_t* data) {
        return TensorRef::contiguous(data, Dtype::kInt32, {num_sequences(args)});
    };
    // A settled fork starts from a slot of final_state, which may have more slots than initial_state.
    if (args.final_state.size[0] > args.initial_state.size[0])
        settled.initial_state = args.final_state, settled.initial_scales = args.final_scales;
    settled.initial_state_indices = indices(starts);
    if (!ends) return settled;
    settled.final_state_indices = indices(ends);
    // Without initial_state_indices a sequence starts from the slot of its own number, even if that equals
    // null_index; so no settled index may count as null_index.
    if (!args.initial_state_indices) settled.null_index = -1;
    return settled;
}

std::optional<Chain> find_chain(const Args& args) {
    if (!some_start_elsewhere(args)) return std::nullopt;
    const Slots slots(args);
    std::optional<Chain> found;
    slots.each_fork([&](const Fork& fork) {
        const std::int64_t other = fork.to < 0 ? -1 : slots.other_reader(fork);
        const bool settles = fork.to < 0 ? tokens_of(args, fork.sequence).length == 0 : other < 0;
        if (!found && !settles) found = Chain{fork.sequence, fork.to, other};
    });
    return found;
}

void settle_forks(const Args& args, const SettledIndices& to) {
    for (std::int64_t n = 0; n < num_sequences(args); ++n) {
        const StateRows rows = states_of(args, n);
        const std::int64_t from = args.initial_state_indices ? read_index(args.initial_state_indices, n) : n;
        to.starts[n] = rows.skipped ? -1 : static_cast<std::int32_t>(from);
        if (to.ends) to.ends[n] = rows.skipped ? -1 : static_cast<std::int32_t>(rows.final.slot);
    }
    if (!some_start_elsewhere(args)) return;
    Slots(args).each_fork([&](const Fork& fork) {
        if (fork.to < 0) return;
        copy_state(args, fork.from, fork.to);
        to.starts[fork.sequence] = static_cast<std::int32_t>(fork.to);
    });
}

}  // namespace cula
