// SPDX-License-Identifier: Apache-2.0
// States of float8 for kernels that do not read them: before the call's kernels run they are made float32,
// one for each sequence, and afterwards they are stored.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cula/cula.h"

namespace cula::cuda::float8 {

// Whether a call has states of float8.
bool has_states(const Args& args);

// The states of a call in float32, [N, HV, V, K], and where each sequence starts and ends then: int32 [N]
// each, -1 for null rows.
struct DenseStates {
    float* states = nullptr;
    std::int32_t *starts = nullptr, *ends = nullptr;

    // The size of the memory that the constructor takes.
    static std::size_t bytes(const Args& args);
    DenseStates(const Args& args, void* memory);
    // The call on these states instead of its own of float8.
    Args apply(const Args& args) const;
};

// Reads the initial states, and makes the indices; stores the final states. Both enqueue on the context's
// stream.
void load(const Args& args, const DenseStates& dense, const Context& context);
void store(const Args& args, const DenseStates& dense, const Context& context);

}  // namespace cula::cuda::float8
