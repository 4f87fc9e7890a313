// SPDX-License-Identifier: Apache-2.0
// A row of the registry: one pass on one target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "cula/cula.h"

namespace cula {

struct Kernel {
    std::string_view target;  // "cpu:avx2"; "cpu" names every target of that family
    Pass pass;
    DeviceKind device;
    Support (*supports)(const Problem&);
    std::size_t (*workspace_bytes)(const Args&, const Context&);
    void (*run)(const Args&, const Context&);
    std::size_t (*kept_bytes)(const Args&, const Context&) =
        nullptr;  // bytes that a segment keeps (Args::keep); null: it keeps nothing
};

// The registry, in order of preference (src/registry.cc).
std::span<const Kernel> kernels();

// Where the tensors lie whose values decide which memory a call accesses: cu_seqlens, checkpoint plan,
// parents, num_accepted, indices and has_initial_state.
enum class Indices : std::uint8_t { kOnHost, kOnDevice };

// Throws Error unless the arguments suit the pass and each other. Values of indices are checked if they are
// on the host. No other memory is read.
void validate(Pass pass, const Args& args, Indices indices);

// The Problem of a call whose arguments are valid.
Problem describe(Pass pass, const Args& args, const Device& device);

}  // namespace cula
