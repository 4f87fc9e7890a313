// SPDX-License-Identifier: Apache-2.0
// Level 1: one function per pass. Each checks its arguments, picks the first kernel of the registry that
// takes the problem on its device, and runs it on the caller's stream or threads.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "cula/problem.h"
#include "cula/status.h"

namespace cula {

// Calls worker(arg, i) once for each i in [0, count), at the same time where it can. The library hands out
// its work inside.
struct ParallelFor {
    void (*run)(void* context, int count, void (*worker)(void* arg, int index), void* arg) = nullptr;
    void* context = nullptr;
    int threads = 1;
};

// Plain std::thread, for callers without a thread pool of their own. threads <= 0: one per core.
ParallelFor std_threads(int threads = 0);

// An opaque device queue: a cudaStream_t on CUDA, unused on CPU.
using Stream = void*;

// Where a call runs. The workspace belongs to the caller and must outlive the call's work on the stream.
struct Context {
    Device device;
    Stream stream = nullptr;
    ParallelFor parallel_for;  // CPU; left empty, the calling thread does the work
    void* workspace = nullptr;
    std::size_t workspace_bytes = 0;
};

// The CUDA device of this number, as kernels are chosen for it. Throws Error where the library was built
// without CUDA.
Device cuda_device(int index);

struct Kernel;  // a row of the registry

// A checked and dispatched call: run it with the same Args and a workspace of at least workspace_bytes,
// 64-byte aligned.
struct Plan {
    const Kernel* kernel = nullptr;
    std::size_t workspace_bytes = 0;
    std::size_t kept_bytes =
        0;  // what a segment leaves at the start of the workspace for a prefill (Args::keep)
    std::string_view target() const;
};

// backend: empty for the best, else the name of a target ("cpu", "cpu:avx2", "reference"); throws Error with
// the target's own reason where it does not take the problem.
Plan plan(Pass pass, const Args& args, const Context& context, std::string_view backend = {});
void run(const Plan& plan, const Args& args, const Context& context);

// plan and run; a workspace left empty is allocated on the host heap (CPU only).
void prefill(const Args& args, const Context& context = {}, std::string_view backend = {});
void decode(const Args& args, const Context& context = {}, std::string_view backend = {});
void verify(const Args& args, const Context& context = {}, std::string_view backend = {});
void segment(const Args& args, const Context& context = {}, std::string_view backend = {});

// What consecutive segments make of a zero state: S <- M S + B for each of their maps in turn, the first of
// which gives its B alone.
struct Composition {
    TensorRef m;  // [P, N, HV, K, K], M transposed, or [P, N, HV, 1, K], the diagonal of an additive rule's
    TensorRef b;  // [P, N, HV, V, K], as a state is stored
    TensorRef joins;  // [P] bool; absent: all. Where it is false the map and those before it do not count
    TensorRef state;  // [N, HV, V, K]
};
// Of float32, or on a CPU float64. Products and sums are float32 on a GPU, which reads rows of maps in pieces
// of 16 bytes, and float64 on a CPU.
void compose(const Composition& composition, const Context& context = {});

struct Explanation {
    std::string_view target;
    Support support;
    bool chosen;
};

// Every row of the registry for the problem's pass, in order of preference.
std::vector<Explanation> explain(const Problem& problem);

// The targets of the registry, in order of preference, for tables.
std::vector<std::string_view> targets();

}  // namespace cula
