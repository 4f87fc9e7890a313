// SPDX-License-Identifier: Apache-2.0
// The interface between the host side (entry.cc, built for any CPU) and the code that is compiled once per
// instruction set. Plain data: simd.h says why that code may use no inline functions of the library beyond
// this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cula/problem.h"

namespace cula::cpu {

// The state of one sequence and value head, [V, K]; data == nullptr: absent.
struct StateView {
    void* data = nullptr;
    Dtype dtype = Dtype::kFloat32;
    std::int64_t stride_v = 0, stride_k = 0;
    // Of states of float8: the scale of each row (core/float8.h); otherwise nullptr.
    float* scales = nullptr;
    std::int64_t scale_stride = 0;
};

// A row of a tensor of indices; data == nullptr: absent.
struct IndexRow {
    const void* data = nullptr;
    bool wide = false;  // int64, else int32
    std::int64_t stride = 0;

    [[gnu::always_inline]] std::int64_t operator[](std::int64_t i) const {
        return wide ? static_cast<const std::int64_t*>(data)[i * stride]
                    : static_cast<const std::int32_t*>(data)[i * stride];
    }
};

struct Checkpoint {
    std::int64_t tokens;  // after this many tokens of the sequence
    std::int64_t slot;
};

// scan.h: one sequence, one value head, some of its value columns.
struct ScanTask {
    std::int64_t batch, begin, length;  // tokens [begin, begin + length) of row `batch`
    std::int64_t head, value_head;
    int v_begin, v_count;
    StateView initial, final;

    // Prefill.
    const Checkpoint* checkpoints = nullptr;  // sorted by tokens
    std::int64_t num_checkpoints = 0;
    StateView chunk_states;  // of the first chunk of the sequence
    std::int64_t chunk_states_stride = 0;

    // Segment.
    // Computes M: values are 0, the initial state is the identity, and the final state is M.
    bool identity = false;
    float* total_decay = nullptr;  // [K], additive rules: the diagonal of M
    std::int64_t total_decay_stride = 0;
};

// step.h: one sequence, one value head, some of its value rows; tokens one after another.
struct StepTask {
    std::int64_t batch, begin, length;
    std::int64_t head, value_head;
    int v_begin, v_count;
    StateView initial, final;

    // Prefill.
    const Checkpoint* checkpoints = nullptr;  // sorted by tokens
    std::int64_t num_checkpoints = 0;
    StateView chunk_states;  // of the first chunk of the sequence
    std::int64_t chunk_states_stride = 0;

    // Verify.
    IndexRow slots;  // per token: the slot of `pool` for the state after it, or a null index
    StateView pool;  // slot 0
    std::int64_t pool_stride = 0, pool_scales_stride = 0;
    StateView snapshots;  // of token 0
    std::int64_t snapshots_stride = 0;
    IndexRow parents;

    // Segment: computes M, as ScanTask::identity.
    bool identity = false;
};

// backward.h: one sequence, one query/key head and its value heads.
struct BackwardTask {
    std::int64_t batch, begin, length;
    std::int64_t head, value_head;  // value_head: the first of `group`
    int group;
    StateView initial, d_final, d_initial;                    // of the first value head
    std::int64_t initial_step, d_final_step, d_initial_step;  // elements from one value head to the next
    bool starts_from_state;
    double* parameters;  // [group, 1 + K]: what the task adds to dA_log and ddt_bias; nullptr: unwanted
};

// Whether prefill, segment and backward go in chunks (scan.h, backward.h); otherwise token by token (step.h,
// step_back.h).
[[gnu::always_inline]] constexpr bool in_chunks(Update update) {
    switch (update) {
        case Update::kAdditive:
        case Update::kDelta:
        case Update::kErase:
        case Update::kProduct: return true;
        case Update::kDplr: return false;
    }
    return true;
}

inline constexpr int kMaxScanHeads = 4;

// The functions of one instruction set. The scratch of a task is aligned to 64 bytes and may hold anything.
struct Isa {
    // scan: tasks that differ in their head alone, at most kMaxScanHeads.
    std::size_t (*scan_scratch_bytes)(const Args&, int v_count, int heads);
    void (*scan)(const Args&, const ScanTask* tasks, int heads, std::byte* scratch);
    std::size_t (*step_scratch_bytes)(const Args&, int v_count, std::int64_t tree_tokens);
    void (*step)(const Args&, const StepTask&, std::byte* scratch);
    // tokens: of the longest task.
    std::size_t (*backward_scratch_bytes)(const Args&, std::int64_t tokens);
    void (*backward)(const Args&, const BackwardTask&, std::byte* scratch);
};

#define CULA_FOR_EACH_X86_TARGET(X) X(amx) X(avx512bf16) X(avx512) X(avx2)
#define CULA_DECLARE_ISA(target) \
    namespace target {           \
    extern const Isa kIsa;       \
    }
#if defined(__x86_64__)
CULA_FOR_EACH_X86_TARGET(CULA_DECLARE_ISA)
#endif
CULA_DECLARE_ISA(portable)
#undef CULA_DECLARE_ISA

}  // namespace cula::cpu
