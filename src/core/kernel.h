// SPDX-License-Identifier: Apache-2.0
// A row of the registry: one pass on one target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "cula/cula.h"

namespace cula {

// A call as its kernel has planned it, once: for the size of the workspace and for the run.
class Prepared {
public:
    Prepared(std::size_t workspace_bytes, std::size_t kept_bytes)
        : workspace_bytes_(workspace_bytes), kept_bytes_(kept_bytes) {}
    virtual ~Prepared() = default;
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;

    // Runs the call. args: those that it was prepared from, though indices may lie elsewhere.
    virtual void run(const Args& args, const Context& context) const = 0;

    std::size_t workspace_bytes() const { return workspace_bytes_; }
    // Bytes at the start of the workspace that a segment keeps for a prefill (Args::keep).
    std::size_t kept_bytes() const { return kept_bytes_; }

private:
    std::size_t workspace_bytes_, kept_bytes_;
};

using PreparedPtr = std::shared_ptr<const Prepared>;

// Throws Error where a run needs a larger workspace than was planned.
void check_room(std::size_t needed, const Prepared& planned);

// The time that a kernel predicts for a problem, in microseconds of the device; none where it has no model.
using Prediction = std::optional<double>;

struct Kernel {
    std::string_view target;  // "cpu:avx2"; "cpu" names every target of that family
    Pass pass;
    DeviceKind device;
    Support (*supports)(const Problem&);
    PreparedPtr (*prepare)(const Problem&, const Args&, const Context&);
    Prediction (*predict)(const Problem&) = nullptr;  // of a problem that it supports; null: no model
    // What it saves for a backward, or a backward reads of a prefill: of a problem that it supports but for
    // its size; null: nothing.
    Saving (*saving)(const Problem&) = nullptr;
    // Whether it reads and stores states of float8; otherwise it gets them as float32 (cuda/float8/entry.h).
    bool takes_float8 = true;
};

// Kernel::prepare of a kernel whose plan is the size of its workspace: kWorkspaceBytes(args, context) or
// (pass, args, context). It depends on the number of threads, and on a CPU on lengths, so a run asks again.
template <auto kWorkspaceBytes, auto kRun>
PreparedPtr prepare(const Problem& problem, const Args& args, const Context& context) {
    struct Simple final : Prepared {
        Simple(Pass pass, std::size_t bytes) : Prepared(bytes, 0), pass(pass) {}
        void run(const Args& args, const Context& context) const override {
            check_room(bytes(pass, args, context), *this);
            kRun(args, context);
        }
        static std::size_t bytes(Pass pass, const Args& args, const Context& context) {
            if constexpr (std::is_invocable_v<decltype(kWorkspaceBytes), Pass, const Args&, const Context&>)
                return kWorkspaceBytes(pass, args, context);
            else
                return kWorkspaceBytes(args, context);
        }
        Pass pass;
    };
    return std::make_shared<const Simple>(problem.pass, Simple::bytes(problem.pass, args, context));
}

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
