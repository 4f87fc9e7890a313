// SPDX-License-Identifier: Apache-2.0
// Forks: sequences that start from a slot which another sequence of the same call writes, for example copies
// of a shared prefix.
//
// Sequences run at the same time, so the state of a fork is copied before the call's kernels run: to the slot
// that the fork writes first itself. The fork then starts from there. This is called settling.
// No other sequence may start from that slot. Such a chain of forks is refused (Error) if its indices can be
// read on the host; otherwise its sequence is skipped like a null row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cula/problem.h"

namespace cula {

// Whether a call may contain forks, whatever its indices hold: it has several sequences, and initial_state
// and final_state are one pool, which is read by some indices and written by others.
bool may_fork(const Args& args);

// The slots where each sequence starts and ends after settling, int32 [N] each; -1: null row. `ends` is null
// with state_indices, which name a slot for each token.
struct SettledIndices {
    std::int32_t *starts = nullptr, *ends = nullptr;

    // The size of the memory that the constructor takes.
    static std::size_t bytes(const Args& args);
    SettledIndices(const Args& args, void* memory);
    // The call with these indices instead of its own.
    Args apply(const Args& args) const;
};

// A fork that cannot be settled. slot: where its state would be copied; other: the other sequence that starts
// from there. If the fork writes no slot, both are negative.
struct Chain {
    std::int64_t sequence, slot, other;
};
// The first such fork of a call whose indices lie on the host.
std::optional<Chain> find_chain(const Args& args);

// Copies the states of forks and writes `to`. Indices and states lie on the host; cuda::forks::settle does
// the same on a device.
void settle_forks(const Args& args, const SettledIndices& to);

}  // namespace cula
