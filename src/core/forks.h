// SPDX-License-Identifier: Apache-2.0
// Forks: sequences that start from a slot which another sequence of the call writes, as copies of a shared
// prefix do.
//
// Sequences run at the same time, so a fork's state is copied first, to the slot that the sequence writes
// first itself, and the sequence then starts from there. Nobody else may start from that slot: a chain of
// forks is refused where its indices can be read on the host, and elsewhere a sequence inside of one is
// skipped like a null row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cula/problem.h"

namespace cula {

// Whether the arguments allow forks, whatever the indices hold: one pool is read by some indices and written
// by others.
bool may_fork(const Args& args);

// Where each sequence starts and ends once forks are settled, [N] each, -1 for null rows; ends: not with
// state_indices, which say where each token ends.
struct SettledIndices {
    std::int32_t *starts = nullptr, *ends = nullptr;

    static std::size_t bytes(const Args& args);
    SettledIndices(const Args& args, void* memory);
    // The call with these indices.
    Args apply(const Args& args) const;
};

// A fork that cannot be settled, with indices that are read on the host: the slot that it would be copied to,
// and the other sequence that starts from there; negative where it writes no slot.
struct Chain {
    std::int64_t sequence, slot, other;
};
std::optional<Chain> find_chain(const Args& args);

// Copies forks' states and writes `to`. Indices and states are read on the host; cuda::forks does it on a
// device.
void settle_forks(const Args& args, const SettledIndices& to);

}  // namespace cula
