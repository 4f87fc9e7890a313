// SPDX-License-Identifier: Apache-2.0
// The host side of the CPU backend, built for any CPU: it detects instruction sets, divides a call into
// tasks, and runs the tasks on the caller's threads.
// A task is one sequence and one value head; if these are fewer than the threads, also one block of value
// columns. How a call is divided never changes a bit of its result.
#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "core/carve.h"
#include "core/check.h"
#include "core/rows.h"
#include "cpu/host.h"
#include "cpu/layers.h"
#include "cpu/task.h"
#include "cula/kernels.h"

namespace cula::cpu {
namespace {

// --- availability ---

Support available_portable() { return Support::yes(); }

#if defined(__x86_64__)
Support available_avx2() {
    const bool has =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has ? Support::yes() : Support::no("this CPU has no AVX2");
}

Support available_avx512() {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                     available_avx2();
    return has ? Support::yes() : Support::no("this CPU has no AVX-512 (F, BW, DQ, VL)");
}

Support available_avx512bf16() {
    const bool has = __builtin_cpu_supports("avx512bf16") && available_avx512();
    return has ? Support::yes() : Support::no("this CPU has no AVX-512 bf16 dot products");
}

// Requests the AMX tile registers from the operating system; called once per process.
bool request_tiles() {
#if defined(__linux__)
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

Support available_amx() {
    static const bool has = request_tiles();
    if (!has || !available_avx512bf16())
        return Support::no("this CPU, or its operating system, offers no AMX bf16 tiles");
    return Support::yes();
}
#endif

// Whether scan and step have this algorithm. A rule that they do not have yet is declined here.
Support takes(Algorithm algorithm) {
    switch (algorithm.decay) {
        case Decay::kNone:
        case Decay::kPerHead:
        case Decay::kPerToken:
        case Decay::kPerChannel: break;
    }
    switch (algorithm.update) {
        case Update::kAdditive:
        case Update::kDelta:
        case Update::kErase:
        case Update::kProduct:
        case Update::kDplr: return Support::yes();
    }
    return Support::no("has no kernel for " + std::string(name(algorithm)));
}

Support supports(const Problem& problem, Support available, bool bf16_only) {
    if (!available) return available;
    if (Support takes_it = takes(problem.algorithm); !takes_it) return takes_it;
    if (problem.dtype == Dtype::kFloat64)
        return Support::no("takes float32, bfloat16 and float16; q is float64");
    if (bf16_only && problem.dtype != Dtype::kBFloat16)
        return Support::no("multiplies bfloat16; q is " + std::string(name(problem.dtype)));
    // A beta that does not erase is of the values alone.
    const bool own_maps = problem.beta_per_value && !takes_erase(problem.algorithm.update);
    if (own_maps && problem.pass == Pass::kSegment)
        return Support::no("a segment's map needs one beta per token, not one per value channel");
    if (problem.pass == Pass::kBackward) {
        if (own_maps)
            return Support::no("a backward in chunks needs one beta per token, not one per value channel");
        if (problem.key_dim < kFewestChunkChannels && in_chunks(problem.algorithm.update))
            return Support::no("a backward in chunks takes K from " + std::to_string(kFewestChunkChannels) +
                               ", got " + std::to_string(problem.key_dim));
        if (problem.value_dim > kLargestDim)
            return Support::no("takes V up to " + std::to_string(kLargestDim) + ", got " +
                               std::to_string(problem.value_dim));
    }
    return Support::yes();
}

// --- dividing a call into tasks ---

struct Cut {
    std::int64_t sequences, value_heads, group;  // group: value heads per q/k head
    int value_dim, block;                        // value columns of a task
    int blocks;

    std::int64_t tasks() const { return sequences * value_heads * blocks; }
};

// Divides `columns` value columns into blocks, multiples of 32, if sequences times heads are fewer than the
// threads.
Cut cut(const Args& args, const Context& context, int columns) {
    constexpr int kSmallestBlock = 32;
    Cut cut{};
    cut.sequences = num_sequences(args);
    cut.value_heads = args.v.size[2];
    cut.group = cut.value_heads / args.q.size[2];
    cut.value_dim = columns;
    const std::int64_t threads = context.parallel_for.run ? context.parallel_for.threads : 1;
    const std::int64_t rows = std::max<std::int64_t>(cut.sequences * cut.value_heads, 1);
    const auto wanted =
        static_cast<int>(std::min<std::int64_t>((threads + rows - 1) / rows, columns / kSmallestBlock));
    const int even = (columns + std::max(wanted, 1) - 1) / std::max(wanted, 1);
    cut.block = std::min(columns, (even + kSmallestBlock - 1) / kSmallestBlock * kSmallestBlock);
    cut.blocks = (columns + cut.block - 1) / cut.block;
    return cut;
}

struct Place {
    std::int64_t sequence, value_head, head;
    int v_begin, v_count;
};

Place place_of(const Cut& cut, std::int64_t task) {
    const auto block = static_cast<int>(task % cut.blocks);
    const std::int64_t row = task / cut.blocks;
    Place place{row / cut.value_heads, row % cut.value_heads, 0, block * cut.block, 0};
    place.head = place.value_head / cut.group;
    place.v_count = std::min(cut.block, cut.value_dim - place.v_begin);
    return place;
}

void zero_output(const Args& args, std::int64_t batch, std::int64_t begin, std::int64_t end,
                 std::int64_t value_head, int v_begin, int v_count) {
    for (std::int64_t t = begin; t < end; ++t)
        std::memset(args.o.ptr(batch, t, value_head, v_begin), 0,
                    static_cast<std::size_t>(v_count) * size_bytes(args.o.dtype));
}

// Tokens after the last sequence belong to none: their outputs are zero.
void zero_slack(const Args& args) {
    if (!args.cu_seqlens) return;
    const std::int64_t end = read_index(args.cu_seqlens, num_sequences(args));
    for (std::int64_t hv = 0; hv < args.o.size[2]; ++hv)
        zero_output(args, 0, end, args.o.size[1], hv, 0, static_cast<int>(args.o.size[3]));
}

// --- prefill ---

struct PrefillPlan {
    std::int64_t* order;             // sequences, longest first
    std::int64_t* first_chunk;       // of each sequence, among the chunk states of all packed sequences
    Checkpoint* checkpoints;         // by sequence, then by tokens
    std::int64_t* first_checkpoint;  // of each sequence, followed by the total
    std::byte* scratch;
    std::size_t scratch_bytes;  // of one worker
};

// Whether a prefill is computed token by token: by rules without chunks, where one beta per value channel
// erases, or with few key channels.
bool steps(const Args& args) {
    return !in_chunks(args.algorithm.update) ||
           (args.beta.ndim == 4 && !takes_erase(args.algorithm.update)) ||
           args.q.size[3] < kFewestChunkChannels;
}

PrefillPlan carve_prefill(Carver& carver, const Isa& isa, const Args& args, const Context& context,
                          const Cut& cut) {
    PrefillPlan plan{};
    plan.order = carver.take<std::int64_t>(cut.sequences);
    plan.first_chunk = carver.take<std::int64_t>(cut.sequences);
    plan.checkpoints = carver.take<Checkpoint>(args.checkpoint_plan ? args.checkpoint_plan.size[0] : 0);
    plan.first_checkpoint = carver.take<std::int64_t>(cut.sequences + 1);
    plan.scratch_bytes = steps(args) ? isa.step_scratch_bytes(args, cut.block, 0)
                                     : isa.scan_scratch_bytes(args, cut.block, kMaxScanHeads);
    plan.scratch = carver.take<std::byte>(static_cast<std::int64_t>(plan.scratch_bytes) *
                                          num_workers(context, cut.tasks()));
    return plan;
}

void sort_checkpoints(const Args& args, const Cut& cut, PrefillPlan& plan) {
    const TensorRef& rows = args.checkpoint_plan;
    const auto field = [&](std::int64_t m, int column) { return read_index(rows, m, column); };
    std::fill_n(plan.first_checkpoint, cut.sequences + 1, 0);
    if (!rows) return;
    // A counting sort by sequence; the few checkpoints of one sequence are then sorted by tokens.
    for (std::int64_t m = 0; m < rows.size[0]; ++m)
        if (field(m, 2) >= 0) ++plan.first_checkpoint[field(m, 0) + 1];
    for (std::int64_t n = 0; n < cut.sequences; ++n) plan.first_checkpoint[n + 1] += plan.first_checkpoint[n];
    for (std::int64_t m = rows.size[0] - 1; m >= 0; --m)
        if (field(m, 2) >= 0)
            plan.checkpoints[--plan.first_checkpoint[field(m, 0) + 1]] = {field(m, 1), field(m, 2)};
    // The start of sequence n now stands at index n + 1: move it to n.
    for (std::int64_t n = 0; n < cut.sequences; ++n) plan.first_checkpoint[n] = plan.first_checkpoint[n + 1];
    std::int64_t total = 0;
    for (std::int64_t m = 0; m < rows.size[0]; ++m) total += field(m, 2) >= 0;
    plan.first_checkpoint[cut.sequences] = total;
    for (std::int64_t n = 0; n < cut.sequences; ++n)
        std::sort(plan.checkpoints + plan.first_checkpoint[n],
                  plan.checkpoints + plan.first_checkpoint[n + 1],
                  [](const Checkpoint& a, const Checkpoint& b) { return a.tokens < b.tokens; });
}

void make_prefill_plan(const Args& args, const Cut& cut, PrefillPlan& plan) {
    std::int64_t chunks = 0;
    for (std::int64_t n = 0; n < cut.sequences; ++n) {
        plan.first_chunk[n] = chunks;
        if (args.cu_seqlens)
            chunks += (tokens_of(args, n).length + args.chunk_tokens - 1) / args.chunk_tokens;
    }
    sort_by_length(args, plan.order, cut.sequences);
    sort_checkpoints(args, cut, plan);
}

IndexRow index_row(const TensorRef& ref, std::int64_t n) {
    return {ref.ptr(n), ref.dtype == Dtype::kInt64, ref.stride[1]};
}

// The fields that scan and step tasks have in common.
template <class Task>
Task make_task(const Place& place, const Tokens& tokens, const StateRows& states) {
    Task task{};
    task.batch = tokens.batch, task.begin = tokens.begin, task.length = tokens.length;
    task.head = place.head, task.value_head = place.value_head;
    task.v_begin = place.v_begin, task.v_count = place.v_count;
    task.initial = view(states.initial, place.value_head);
    task.final = view(states.final, place.value_head);
    return task;
}

template <class Task>
Task make_prefill_task(const Args& args, const PrefillPlan& plan, const Place& place, const Tokens& tokens,
                       const StateRows& states) {
    Task task = make_task<Task>(place, tokens, states);
    task.checkpoints = plan.checkpoints + plan.first_checkpoint[place.sequence];
    task.num_checkpoints = plan.first_checkpoint[place.sequence + 1] - plan.first_checkpoint[place.sequence];
    if (const TensorRef& dense = args.chunk_states) {
        task.chunk_states = {dense.ptr(tokens.batch, plan.first_chunk[place.sequence], place.value_head),
                             dense.dtype, dense.stride[3], dense.stride[4]};
        task.chunk_states_stride = dense.stride[1];
    }
    return task;
}

void zero_output(const Args& args, const Place& place, const Tokens& tokens) {
    zero_output(args, tokens.batch, tokens.begin, tokens.begin + tokens.length, place.value_head,
                place.v_begin, place.v_count);
}

// The number of neighbouring heads that one worker processes together, chunk by chunk: up to kMaxScanHeads,
// as long as every worker still has two tasks.
int heads_together(const Args& args, const Cut& cut, int workers) {
    constexpr int kTasksPerWorker = 2;
    int heads = steps(args) || cut.blocks > 1 ? 1 : kMaxScanHeads;
    while (heads > 1 && (cut.value_heads % heads != 0 || cut.tasks() / heads < kTasksPerWorker * workers))
        heads /= 2;
    return heads;
}

void prefill(const Isa& isa, const Args& args, const Context& context) {
    const Cut cut = cpu::cut(args, context, static_cast<int>(args.v.size[3]));
    Carver carver(context.workspace);
    PrefillPlan plan = carve_prefill(carver, isa, args, context, cut);
    make_prefill_plan(args, cut, plan);
    zero_slack(args);
    const int workers = num_workers(context, cut.tasks()), heads = heads_together(args, cut, workers);
    for_each_task(context, workers, cut.tasks() / heads, false, [&](int worker, std::int64_t index) {
        std::byte* scratch = plan.scratch + static_cast<std::size_t>(worker) * plan.scratch_bytes;
        ScanTask scans[kMaxScanHeads];
        for (int i = 0; i < heads; ++i) {
            Place place = place_of(cut, index * heads + i);
            place.sequence = plan.order[place.sequence];
            const Tokens tokens = tokens_of(args, place.sequence);
            const StateRows states = states_of(args, place.sequence);
            if (states.skipped) {
                zero_output(args, place, tokens);
                if (i + 1 == heads) return;
            } else if (steps(args)) {
                return isa.step(args, make_prefill_task<StepTask>(args, plan, place, tokens, states),
                                scratch);
            } else {
                scans[i] = make_prefill_task<ScanTask>(args, plan, place, tokens, states);
            }
        }
        isa.scan(args, scans, heads, scratch);
    });
}

std::size_t prefill_workspace_bytes(const Isa& isa, const Args& args, const Context& context) {
    Carver carver(nullptr);
    carve_prefill(carver, isa, args, context, cut(args, context, static_cast<int>(args.v.size[3])));
    return carver.bytes();
}

// --- segment: B from a zero state; M from the identity with zero values, or as the product of the decays ---

std::size_t segment_scratch_bytes(const Isa& isa, const Args& args, const Cut& values, const Cut& channels) {
    const int columns = std::max(values.block, channels.block);
    return in_chunks(args.algorithm.update) ? isa.scan_scratch_bytes(args, columns, 1)
                                            : isa.step_scratch_bytes(args, columns, 0);
}

void segment(const Isa& isa, const Args& args, const Context& context) {
    const bool diagonal = has_diagonal_map(args.algorithm.update);
    const int key_dim = static_cast<int>(args.q.size[3]), value_dim = static_cast<int>(args.v.size[3]);
    const Cut values = cut(args, context, value_dim), channels = cut(args, context, key_dim);
    const std::int64_t maps = args.segment_m && !diagonal ? channels.tasks() : 0,
                       tasks = values.tasks() + maps;
    const int workers = num_workers(context, values.tasks());
    const std::size_t scratch_bytes = segment_scratch_bytes(isa, args, values, channels);
    for_each_task(context, workers, tasks, false, [&](int worker, std::int64_t index) {
        const bool is_map = index < maps;
        const Place place = is_map ? place_of(channels, index) : place_of(values, index - maps);
        const Tokens tokens = tokens_of(args, place.sequence);
        std::byte* scratch =
            static_cast<std::byte*>(context.workspace) + static_cast<std::size_t>(worker) * scratch_bytes;
        const TensorRef &m = args.segment_m, &b = args.segment_b;
        const auto make = [&](auto& task) {
            task.identity = is_map;
            if (is_map)
                task.final = {m.ptr(place.sequence, place.value_head), m.dtype, m.stride[3], m.stride[2]};
            else
                task.final = {b.ptr(place.sequence, place.value_head), b.dtype, b.stride[2], b.stride[3]};
        };
        if (!in_chunks(args.algorithm.update)) {
            auto task = make_task<StepTask>(place, tokens, {});
            make(task);
            return isa.step(args, task, scratch);
        }
        auto task = make_task<ScanTask>(place, tokens, {});
        make(task);
        if (diagonal && m && place.v_begin == 0) {
            task.total_decay = m.at<float>(place.sequence, place.value_head);
            task.total_decay_stride = m.stride[2];
        }
        isa.scan(args, &task, 1, scratch);
    });
}

std::size_t segment_workspace_bytes(const Isa& isa, const Args& args, const Context& context) {
    const Cut values = cut(args, context, static_cast<int>(args.v.size[3]));
    const Cut channels = cut(args, context, static_cast<int>(args.q.size[3]));
    return segment_scratch_bytes(isa, args, values, channels) *
           static_cast<std::size_t>(num_workers(context, values.tasks()));
}

// --- decode, verify ---

std::size_t step_scratch_bytes(const Isa& isa, const Args& args, const Cut& cut) {
    return isa.step_scratch_bytes(args, cut.block, args.parents ? longest(args) : 0);
}

std::size_t step_workspace_bytes(const Isa& isa, const Args& args, const Context& context) {
    const Cut cut = cpu::cut(args, context, static_cast<int>(args.v.size[3]));
    return step_scratch_bytes(isa, args, cut) * static_cast<std::size_t>(num_workers(context, cut.tasks()));
}

void step_through(const Isa& isa, const Args& args, const Context& context) {
    const Cut cut = cpu::cut(args, context, static_cast<int>(args.v.size[3]));
    const std::int64_t most = longest(args);
    // With fewer state elements to update, waking other threads costs more than they save.
    constexpr std::int64_t kWorthSharing = 4 * 128 * 128;
    const std::int64_t elements = cut.sequences * cut.value_heads * most * args.q.size[3] * args.v.size[3];
    const int workers = elements < kWorthSharing ? 1 : num_workers(context, cut.tasks());
    const std::size_t scratch_bytes = step_scratch_bytes(isa, args, cut);
    zero_slack(args);
    for_each_task(context, workers, cut.tasks(), most <= 1, [&](int worker, std::int64_t index) {
        const Place place = place_of(cut, index);
        const Tokens tokens = tokens_of(args, place.sequence);
        const StateRows states = states_of(args, place.sequence);
        if (states.skipped) return zero_output(args, place, tokens);
        StepTask task = make_task<StepTask>(place, tokens, states);
        if (args.state_indices) {
            task.slots = index_row(args.state_indices, place.sequence);
            if (args.final_state) {
                task.pool = view({args.final_state, 0, args.final_scales}, place.value_head);
                task.pool_stride = args.final_state.stride[0];
                task.pool_scales_stride = args.final_scales.stride[0];
            }
        }
        if (const TensorRef& shots = args.snapshots) {
            const std::int64_t slot =
                args.snapshot_indices ? read_index(args.snapshot_indices, place.sequence) : place.sequence;
            if (!args.snapshot_indices || !is_null(args, slot)) {
                task.snapshots = {shots.ptr(slot, 0, place.value_head), shots.dtype, shots.stride[3],
                                  shots.stride[4]};
                task.snapshots_stride = shots.stride[1];
            }
        }
        if (args.parents) {
            task.parents = index_row(args.parents, place.sequence);
        }
        isa.step(
            args, task,
            static_cast<std::byte*>(context.workspace) + static_cast<std::size_t>(worker) * scratch_bytes);
    });
}

std::size_t workspace_bytes(const Isa& isa, Pass pass, const Args& args, const Context& context) {
    switch (pass) {
        case Pass::kPrefill: return prefill_workspace_bytes(isa, args, context);
        case Pass::kSegment: return segment_workspace_bytes(isa, args, context);
        case Pass::kDecode:
        case Pass::kVerify: return step_workspace_bytes(isa, args, context);
        case Pass::kBackward: return backward_workspace_bytes(isa, args, context);
    }
    return 0;
}

}  // namespace

const LayerIsa& layer_isa(std::string_view op, std::string_view backend) {
    struct Row {
        std::string_view target;
        Support (*available)();
        const LayerIsa& isa;
    };
    // None of them multiplies matrices, so AMX has nothing to add.
    static constexpr Row kRows[] = {
#if defined(__x86_64__)
        {"cpu:avx512bf16", available_avx512bf16, avx512bf16::kLayerIsa},
        {"cpu:avx512", available_avx512, avx512::kLayerIsa},
        {"cpu:avx2", available_avx2, avx2::kLayerIsa},
#endif
        {"cpu:portable", available_portable, portable::kLayerIsa},
    };
    std::string targets;
    for (const Row& row : kRows) {
        targets += (targets.empty() ? "" : ", ") + std::string(row.target);
        if (backend.empty() || backend == "cpu" ? !row.available() : row.target != backend) continue;
        if (const Support support = row.available(); !support)
            throw Error(std::string(op) + ": backend \"" + std::string(backend) +
                        "\" declines: " + support.reason());
        return row.isa;
    }
    throw Error(std::string(op) + ": backend must be one of " + targets + ", got \"" + std::string(backend) +
                "\"");
}

#define CULA_DEFINE_TARGET(target, bf16_only)                                                      \
    namespace target {                                                                             \
    Support supports(const Problem& problem) {                                                     \
        return cpu::supports(problem, available_##target(), bf16_only);                            \
    }                                                                                              \
    std::size_t workspace_bytes(Pass pass, const Args& args, const Context& context) {             \
        return cpu::workspace_bytes(kIsa, pass, args, context);                                    \
    }                                                                                              \
    void prefill(const Args& args, const Context& context) { cpu::prefill(kIsa, args, context); }  \
    void decode(const Args& args, const Context& context) { step_through(kIsa, args, context); }   \
    void verify(const Args& args, const Context& context) { step_through(kIsa, args, context); }   \
    void segment(const Args& args, const Context& context) { cpu::segment(kIsa, args, context); }  \
    void backward(const Args& args, const Context& context) { run_backward(kIsa, args, context); } \
    }

CULA_DEFINE_TARGET(portable, false)
#if defined(__x86_64__)
CULA_DEFINE_TARGET(avx2, false)
CULA_DEFINE_TARGET(avx512, false)
CULA_DEFINE_TARGET(avx512bf16, true)
CULA_DEFINE_TARGET(amx, true)
#endif

}  // namespace cula::cpu
