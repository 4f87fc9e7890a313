// SPDX-License-Identifier: Apache-2.0
// Planning and running of calls: chooses a kernel of the registry, divides wide values, sizes the workspace,
// settles forks.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>

#include "core/check.h"
#include "core/forks.h"
#include "core/kernel.h"
#include "core/rows.h"
#if defined(CULA_WITH_CUDA)
#include "cuda/float8/entry.h"
#include "cuda/forks/entry.h"
#endif

namespace cula {
namespace {

// Whether `backend` names `target`: "cpu" also names "cpu:avx2".
bool names_target(std::string_view backend, std::string_view target) {
    return target == backend || (target.starts_with(backend) && target[backend.size()] == ':');
}

std::string_view name(DeviceKind kind) { return kind == DeviceKind::kCpu ? "CPU" : "CUDA"; }

// How many chunks a call with `saved` has, at most.
std::int64_t saved_chunks(const Problem& problem, const Saving& of) {
    if (problem.tokens == 0) return 0;
    const std::int64_t rows = problem.tokens * problem.writes;
    if (problem.varlen) return rows / of.chunk_tokens + problem.sequences;
    return (rows + of.chunk_tokens - 1) / of.chunk_tokens * problem.sequences;
}

// Checks what holds for every kernel, then asks the kernel itself.
Support supports(const Kernel& kernel, const Problem& problem) {
    if (kernel.device != problem.device.kind)
        return Support::no("runs on " + std::string(name(kernel.device)) + " tensors, these are on " +
                           std::string(name(problem.device.kind)));
    if (problem.key_dim > kLargestDim)
        return Support::no("takes K up to 256, got " + std::to_string(problem.key_dim));
    if (problem.state_dtype == Dtype::kFloat8E4M3 && problem.pass == Pass::kBackward)
        return Support::no("a state of float8_e4m3fn has no gradients");
    if (problem.saves && !kernel.saving)
        return Support::no(problem.pass == Pass::kBackward ? "computes all itself, and takes no saved"
                                                           : "saves nothing that a backward would compute");
    if (problem.saves && problem.value_dim > kLargestDim)
        return Support::no("saves V up to 256, got " + std::to_string(problem.value_dim));
    Support any = kernel.supports(problem);
    if (!any || !problem.saves) return any;
    const std::int64_t chunks = saved_chunks(problem, kernel.saving(problem)),
                       most = kernel.saving(problem).most_chunks;
    if (chunks < 1 || chunks > most)
        return Support::no("saves from 1 to " + std::to_string(most) + " chunks, got " +
                           std::to_string(chunks));
    return any;
}

bool named(const Kernel& kernel, std::string_view backend) {
    return backend.empty() || names_target(backend, kernel.target);
}

[[noreturn]] void refuse(const Problem& problem, std::string_view backend) {
    std::string reasons;
    bool known = backend.empty();
    for (const Kernel& kernel : kernels()) {
        if (!named(kernel, backend)) continue;
        known = true;
        if (kernel.pass == problem.pass)
            reasons += "\n  " + std::string(kernel.target) + ": " + supports(kernel, problem).reason();
    }
    const std::string pass(name(problem.pass));
    if (!known) {
        std::string names;
        for (std::string_view target : targets()) names += (names.empty() ? "" : ", ") + std::string(target);
        throw Error(pass + ": backend must be one of " + names + ", got \"" + std::string(backend) + "\"");
    }
    if (reasons.empty()) reasons = " it has no " + pass + " kernel";
    const std::string who =
        backend.empty() ? "no backend takes" : "backend \"" + std::string(backend) + "\" does not take";
    throw Error(pass + ": " + who + " this call:" + reasons);
}

const Kernel& choose(const Problem& problem, std::string_view backend) {
    for (const Kernel& kernel : kernels()) {
        if (kernel.pass != problem.pass || kernel.device != problem.device.kind) continue;
        if (named(kernel, backend) && supports(kernel, problem)) return kernel;
    }
    refuse(problem, backend);
}

// The call restricted to `count` value channels from `first` on. M of a segment does not depend on them, so
// the first such call computes it.
Args value_channels(const Args& args, std::int64_t first, std::int64_t count) {
    Args part = args;
    const auto take = [&](TensorRef& ref, std::size_t dim) {
        if (!ref) return;
        ref.size[dim] = count;
        if (ref.data)
            ref.data = static_cast<std::byte*>(ref.data) +
                       first * ref.stride[dim] * static_cast<std::int64_t>(size_bytes(ref.dtype));
    };
    for (TensorRef* ref : {&part.v, &part.o, &part.chunk_states, &part.snapshots}) take(*ref, 3);
    for (TensorRef* ref : {&part.initial_state, &part.final_state, &part.initial_scales, &part.final_scales,
                           &part.checkpoints, &part.segment_b})
        take(*ref, 2);
    if (part.beta.ndim == 4) take(part.beta, 3);
    if (first > 0) part.segment_m = {};
    return part;
}

// Calls body(args), for at most kLargestDim value channels at a time. Value channels do not interact, so a
// call with more of them is several calls, one after another.
template <class Body>
void each_call(const Args& args, Body body) {
    const std::int64_t value_dim = args.v.size[3];
    if (value_dim <= kLargestDim) return body(args);
    for (std::int64_t first = 0; first < value_dim; first += kLargestDim)
        body(value_channels(args, first, std::min(kLargestDim, value_dim - first)));
}

// The alignment of a workspace, in bytes.
constexpr std::size_t kLineBytes = 64;
constexpr std::size_t whole_lines(std::size_t bytes) {
    return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

struct Free {
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{kLineBytes}); }
};

// Whether a call writes nothing, so that no kernel is launched; its arguments are checked all the same. This
// is a call without tokens that stores no states (a prefill's kernel would still read `kept`), or a segment
// without m and b on a kernel that keeps nothing.
bool writes_nothing(const Plan& plan, const Args& args) {
    switch (plan.kernel->pass) {
        case Pass::kPrefill:
            return args.q.size[1] == 0 && !args.final_state && !args.checkpoints && !args.chunk_states &&
                   !args.kept;
        case Pass::kSegment: return !args.segment_b && plan.kept_bytes == 0;
        case Pass::kDecode: return args.q.size[1] == 0 && !args.final_state;
        case Pass::kVerify: return args.q.size[1] == 0 && (!args.final_state || args.state_indices);
        case Pass::kBackward: return false;  // without tokens it still writes parameters and states
    }
    return false;
}

// The bytes at the end of a workspace where states of float8 become float32 for a kernel that does not take
// them; 0: none do.
std::size_t dense_states_bytes([[maybe_unused]] const Kernel& kernel, [[maybe_unused]] const Args& args) {
#if defined(CULA_WITH_CUDA)
    if (!kernel.takes_float8 && cuda::float8::has_states(args)) return cuda::float8::DenseStates::bytes(args);
#endif
    return 0;
}

// Calls body(args) with the arguments that the kernel gets, between the conversions of the states. memory:
// null where nothing runs.
template <class Body>
void with_dense_states([[maybe_unused]] const Kernel& kernel, const Args& args, [[maybe_unused]] void* memory,
                       [[maybe_unused]] const Context& context, Body body) {
#if defined(CULA_WITH_CUDA)
    if (dense_states_bytes(kernel, args) > 0) {
        const cuda::float8::DenseStates dense(args, memory);
        if (memory) cuda::float8::load(args, dense, context);
        body(dense.apply(args));
        if (memory) cuda::float8::store(args, dense, context);
        return;
    }
#endif
    body(args);
}

void plan_and_run(Pass pass, const Args& args, const Context& context, std::string_view backend) {
    const Plan planned = plan(pass, args, context, backend);
    if (context.workspace || planned.workspace_bytes == 0 || context.device.kind != DeviceKind::kCpu)
        return run(planned, args, context);
    const std::unique_ptr<void, Free> memory(
        ::operator new(planned.workspace_bytes, std::align_val_t{kLineBytes}));
    Context own = context;
    own.workspace = memory.get();
    own.workspace_bytes = planned.workspace_bytes;
    run(planned, args, own);
}

}  // namespace

Problem describe(Pass pass, const Args& args, const Device& device) {
    Problem problem;
    problem.pass = pass;
    problem.algorithm = args.algorithm;
    problem.device = device;
    problem.batch = args.q.size[0];
    problem.tokens = args.q.size[1];
    problem.sequences = num_sequences(args);
    problem.heads = args.q.size[2];
    problem.value_heads = args.v.size[2];
    problem.key_dim = args.q.size[3];
    problem.value_dim = args.v.size[3];
    problem.writes = writes_per_token(args);
    problem.dtype = args.q.dtype;
    const TensorRef& state = args.initial_state ? args.initial_state : args.final_state;
    problem.state_dtype = state ? state.dtype : Dtype::kFloat32;
    problem.gate = args.gate;
    problem.lower_bound = args.lower_bound;
    problem.varlen = static_cast<bool>(args.cu_seqlens);
    problem.beta_per_value = args.beta.ndim == 4;
    problem.checkpoints = static_cast<bool>(args.checkpoints);
    problem.chunk_states = static_cast<bool>(args.chunk_states);
    problem.tree = static_cast<bool>(args.parents);
    problem.draft_tokens = args.parents ? args.parents.size[1] : 0;
    problem.chunk_tokens = args.chunk_tokens;
    problem.batch_invariant = args.batch_invariant;
    problem.qk_l2norm = args.qk_l2norm;
    problem.wide_d_o = args.d_o && args.d_o.dtype != args.q.dtype;
    problem.saves = static_cast<bool>(args.saved);
    return problem;
}

std::string_view Plan::target() const { return kernel ? kernel->target : std::string_view(); }

Plan plan(Pass pass, const Args& args, const Context& context, std::string_view backend) {
    validate(pass, args, context.device.kind == DeviceKind::kCpu ? Indices::kOnHost : Indices::kOnDevice);
    Problem problem = describe(pass, args, context.device);
    const Kernel& kernel = choose(problem, backend);
    Plan planned;
    planned.kernel = &kernel;
    const std::size_t dense_bytes = dense_states_bytes(kernel, args);
    if (dense_bytes > 0) problem.state_dtype = Dtype::kFloat32;
    const auto prepare = [&](const Args& part) {
        Problem of_part = problem;
        of_part.value_dim = part.v.size[3];
        planned.parts.push_back(kernel.prepare(of_part, part, context));
        const Prepared& prepared = *planned.parts.back();
        planned.workspace_bytes = std::max(planned.workspace_bytes, prepared.workspace_bytes());
        if (args.keep) planned.kept_bytes = prepared.kept_bytes();
    };
    with_dense_states(kernel, args, nullptr, context, [&](const Args& of) { each_call(of, prepare); });
    if (dense_bytes > 0) planned.workspace_bytes = whole_lines(planned.workspace_bytes) + dense_bytes;
    if (may_fork(args))
        planned.workspace_bytes = whole_lines(planned.workspace_bytes) + SettledIndices::bytes(args);
    return planned;
}

void check_room(std::size_t needed, const Prepared& planned) {
    if (needed > planned.workspace_bytes())
        throw Error("run: args and context must be those of the plan, whose workspace has " +
                    std::to_string(planned.workspace_bytes()) + " bytes, got lengths or threads that need " +
                    std::to_string(needed));
}

void run(const Plan& plan, const Args& args, const Context& context) {
    const auto fail = [&](std::string_view argument, std::string_view expected, const std::string& given) {
        throw Error(std::string(name(plan.kernel->pass)) + ": " + std::string(argument) + " must " +
                    std::string(expected) + ", got " + given);
    };
    if (!plan.kernel) throw Error("run: plan must be one that plan() has made, got an empty one");
    if (plan.workspace_bytes > 0) {
        CULA_REQUIRE(context.workspace_bytes >= plan.workspace_bytes, "workspace",
                     "hold " + std::to_string(plan.workspace_bytes) + " bytes",
                     std::to_string(context.workspace_bytes));
        CULA_REQUIRE(context.workspace != nullptr, "workspace", "point to memory", "a null pointer");
        CULA_REQUIRE(reinterpret_cast<std::uintptr_t>(context.workspace) % kLineBytes == 0, "workspace",
                     "start at a multiple of 64 bytes",
                     std::to_string(reinterpret_cast<std::uintptr_t>(context.workspace) % kLineBytes) +
                         " bytes beyond one");
    }
    CULA_REQUIRE(
        plan.parts.size() == static_cast<std::size_t>((args.v.size[3] + kLargestDim - 1) / kLargestDim),
        "args", "be those of the plan", "v with " + std::to_string(args.v.size[3]) + " channels");
    if (writes_nothing(plan, args)) return;
    // What lies at the end of the workspace: float32 states, then settled indices.
    const std::size_t settled_bytes = may_fork(args) ? SettledIndices::bytes(args) : 0,
                      dense_bytes = dense_states_bytes(*plan.kernel, args);
    CULA_REQUIRE(plan.workspace_bytes >= settled_bytes + dense_bytes, "args", "be those of the plan",
                 "indices or states that it has no room for");
    std::byte* const settled =
        static_cast<std::byte*>(context.workspace) + (plan.workspace_bytes - settled_bytes);
    const auto run_all = [&](const Args& whole) {
        auto prepared = plan.parts.begin();
        const auto run_part = [&](const Args& part) { (*prepared++)->run(part, context); };
        with_dense_states(*plan.kernel, whole, settled - dense_bytes, context,
                          [&](const Args& of) { each_call(of, run_part); });
    };
    if (!may_fork(args)) return run_all(args);
    const SettledIndices indices(args, settled);
#if defined(CULA_WITH_CUDA)
    if (context.device.kind == DeviceKind::kCuda)
        cuda::forks::settle(args, indices, context);
    else
#endif
        settle_forks(args, indices);
    run_all(indices.apply(args));
}

void prefill(const Args& args, const Context& context, std::string_view backend) {
    plan_and_run(Pass::kPrefill, args, context, backend);
}

void decode(const Args& args, const Context& context, std::string_view backend) {
    plan_and_run(Pass::kDecode, args, context, backend);
}

void verify(const Args& args, const Context& context, std::string_view backend) {
    plan_and_run(Pass::kVerify, args, context, backend);
}

void segment(const Args& args, const Context& context, std::string_view backend) {
    plan_and_run(Pass::kSegment, args, context, backend);
}

void backward(const Args& args, const Context& context, std::string_view backend) {
    plan_and_run(Pass::kBackward, args, context, backend);
}

std::vector<Explanation> explain(const Problem& problem) {
    if (problem.writes < 1)
        throw Error("explain: writes must be at least 1, got " + std::to_string(problem.writes));
    std::vector<Explanation> rows;
    bool found = false;
    for (const Kernel& kernel : kernels()) {
        if (kernel.pass != problem.pass) continue;
        Support support = supports(kernel, problem);
        const bool chosen = !found && support;
        found = found || chosen;
        const bool models = support && kernel.predict && !problem.saves;
        const Prediction prediction = models ? kernel.predict(problem) : std::nullopt;
        std::optional<Saving> saving;
        if (support && problem.saves) saving = kernel.saving(problem);
        rows.push_back({kernel.target, std::move(support), chosen, prediction, saving});
    }
    return rows;
}

std::vector<std::string_view> targets() {
    std::vector<std::string_view> names;
    for (const Kernel& kernel : kernels()) {
        bool seen = false;
        for (std::string_view name : names) seen = seen || name == kernel.target;
        if (!seen) names.push_back(kernel.target);
    }
    return names;
}

}  // namespace cula
