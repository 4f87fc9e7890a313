// SPDX-License-Identifier: Apache-2.0
// The public interface: one function per pass. Each checks its arguments, picks the first kernel of the
// registry that takes the problem on its device, and runs it on the caller's stream or threads.
//
// Errors: a bad argument, or a call that no kernel takes, throws Error (status.h) before anything is written.
// A failed call to CUDA throws std::runtime_error. Work on a CUDA stream is asynchronous.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cula/problem.h"
#include "cula/status.h"

namespace cula {

// A parallel loop: run(context, count, worker, arg) calls worker(arg, i) once for each i in [0, count),
// concurrently where it can, and returns when all calls have returned. The library divides a call's work
// among `threads` workers.
struct ParallelFor {
    void (*run)(void* context, int count, void (*worker)(void* arg, int index), void* arg) = nullptr;
    void* context = nullptr;
    int threads = 1;
};

// A ParallelFor that starts std::threads for each call, for callers without a thread pool. threads <= 0: one
// per core.
ParallelFor std_threads(int threads = 0);

// The queue that a call is enqueued on: a cudaStream_t on CUDA, unused on a CPU.
using Stream = void*;

// Where a call runs. The workspace is memory of the device, aligned to 64 bytes, that belongs to the caller.
// It must outlive the call's work on the stream, and may hold anything.
struct Context {
    Device device;
    Stream stream = nullptr;
    ParallelFor parallel_for;  // CPU only; if empty, the calling thread does the work
    void* workspace = nullptr;
    std::size_t workspace_bytes = 0;
};

// The CUDA device of this number, with what the choice of kernels depends on. Throws Error if there is no
// such device, or if the library was built without CUDA.
Device cuda_device(int index);

struct Kernel;   // a row of the registry
class Prepared;  // what it has decided about a call

// A checked call, its kernel, and how that will run it. Pass it to run() with the same Args, on a CPU also
// with the same values of cu_seqlens and parents, with no more threads, and with a workspace of at least
// workspace_bytes, aligned to 64 bytes.
struct Plan {
    const Kernel* kernel = nullptr;
    // One after another, for at most 256 value channels each.
    std::vector<std::shared_ptr<const Prepared>> parts;
    std::size_t workspace_bytes = 0;
    // Bytes at the start of the workspace that a segment keeps for a prefill (Args::keep).
    std::size_t kept_bytes = 0;
    std::string_view target() const;  // name of the kernel's target, such as "cpu:avx2"
};

// plan() checks the arguments and picks a kernel. backend: empty for the first that takes the call, or the
// name of a target or a family of targets ("cpu", "cpu:avx2", "reference"). Throws Error, with each target's
// own reason, if none takes the problem.
// run() runs a plan. Throws Error if the workspace is too small, null or misaligned.
Plan plan(Pass pass, const Args& args, const Context& context, std::string_view backend = {});
void run(const Plan& plan, const Args& args, const Context& context);

// plan() and run() in one. On a CPU a workspace that is left empty is allocated on the heap; on CUDA the
// caller must bring it.
void prefill(const Args& args, const Context& context = {}, std::string_view backend = {});
void decode(const Args& args, const Context& context = {}, std::string_view backend = {});
void verify(const Args& args, const Context& context = {}, std::string_view backend = {});
void segment(const Args& args, const Context& context = {}, std::string_view backend = {});
void backward(const Args& args, const Context& context = {}, std::string_view backend = {});

// Composition of the maps of P consecutive segments (ALGORITHM.md, "Segments"): S <- M S + B for each map in
// turn, from S = 0, so that of the first map only B counts. All tensors have one dtype: float32, or on a CPU
// also float64.
struct Composition {
    TensorRef m;  // [P, N, HV, K, K], M transposed; or [P, N, HV, 1, K], the diagonal M of an additive rule
    TensorRef b;  // [P, N, HV, V, K], stored as a state is
    TensorRef joins;  // [P] bool: false drops this map and all before it; absent: all true
    TensorRef state;  // [N, HV, V, K], output
};
// Computes composition.state. Products and sums are float32 on a GPU and float64 on a CPU. A GPU reads maps
// in pieces of 16 bytes: their last dimension is contiguous, and every row starts at a multiple of 16 bytes.
// Throws Error for arguments that are not as described.
void compose(const Composition& composition, const Context& context = {});

// What a prefill saves for the backward of the same call (Args::saved): `words` int32 of every chunk of
// chunk_tokens tokens and every value head, of at most most_chunks chunks. Without cu_seqlens each row of the
// batch has T / chunk_tokens chunks, rounded up; with them there are T / chunk_tokens, rounded down, and one
// more for each sequence. Of tokens that write n times T n stands for T.
struct Saving {
    int chunk_tokens = kChunkTokens;
    std::int64_t words = 0, most_chunks = 0;
};

// Whether one target takes a problem, and if not, why.
struct Explanation {
    std::string_view target;
    Support support;
    bool chosen;
    // What the target would take, if it takes the problem and has a model of its time.
    std::optional<double> microseconds;
    std::optional<Saving> saving;  // of a problem with `saves` that the target takes
};

// An Explanation for each row of the registry for the problem's pass, in order of preference. At most one is
// chosen.
std::vector<Explanation> explain(const Problem& problem);

// The names of all targets, in order of preference.
std::vector<std::string_view> targets();

}  // namespace cula
