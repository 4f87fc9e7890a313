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
    std::size_t (*kept_bytes)(const Args&, const Context&) = nullptr;  // a segment's (Args::keep)
};

// In order of preference (src/registry.cc).
std::span<const Kernel> kernels();

// Where the tensors lie whose values decide which memory a call touches: cu_seqlens, plans, parents, counts,
// indices and has_initial_state.
enum class Indices : std::uint8_t { kOnHost, kOnDevice };

// Throws Error unless the arguments fit the pass and each other, with the values of the indices where they
// are on the host. No other memory is read.
void validate(Pass pass, const Args& args, Indices indices);

// The problem that valid arguments pose.
Problem describe(Pass pass, const Args& args, const Device& device);

}  // namespace cula
