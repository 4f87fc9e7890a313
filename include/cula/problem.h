// SPDX-License-Identifier: Apache-2.0
// What is asked of a kernel: Args holds the tensors and options of one call, Problem what of them decides
// which kernel can take it. Shapes use B batch, T tokens, N sequences, H query/key heads, HV value heads (HV
// % H == 0; value head hv reads query/key head hv / (HV / H)), K and V the key and value dimensions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cula/algorithm.h"
#include "cula/tensor.h"

namespace cula {

enum class Pass : std::uint8_t {
    kPrefill,  // many tokens per sequence: o and the final state
    kDecode,   // token after token, made for one or a few per sequence
    kVerify,   // a few draft tokens per sequence, a chain or a tree, a state per token
    kSegment,  // the affine map S -> M S + B of each sequence
};

constexpr std::string_view name(Pass pass) {
    switch (pass) {
        case Pass::kPrefill: return "prefill";
        case Pass::kDecode: return "decode";
        case Pass::kVerify: return "verify";
        case Pass::kSegment: return "segment";
    }
    return "unknown";
}

// How g becomes the log decay.
enum class Gate : std::uint8_t {
    kLogDecay,  // g is the log decay (natural logarithm)
    kSoftplus,  // -exp(A_log) * softplus(g + dt_bias); without A_log, exp(A_log) = 1
    kBounded,   // lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); without A_log, exp(A_log) = 1
};

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

struct Device {
    DeviceKind kind = DeviceKind::kCpu;
    int index = 0;
    int compute_capability = 0;    // CUDA: 10 * major + minor
    int multiprocessors = 0;       // CUDA
    std::size_t shared_bytes = 0;  // CUDA: shared memory that one thread block may have
};

// Dense states at chunk starts are this many tokens apart, and checkpoints lie on multiples of it.
inline constexpr int kChunkTokens = 64;

// exp(A_log) counts as at most this, so that its products with gates stay numbers.
inline constexpr float kMostGateSlope = 1e30f;

struct Args {
    Algorithm algorithm;

    // Inputs. q, k, v, o share one dtype; the last dimension is contiguous, every other stride is free.
    TensorRef q, k;     // [B, T, H, K]
    TensorRef v;        // [B, T, HV, V]
    TensorRef g;        // kPerChannel [B, T, HV, K], kPerToken [B, T, HV]: any floating dtype
    TensorRef gamma;    // [HV] float32, log decay: kPerHead; kPerToken adds it to g
    TensorRef beta;     // kDelta [B, T, HV], or [B, T, HV, V] (one write strength per value channel): any
                        // floating dtype
    TensorRef A_log;    // [HV] float32
    TensorRef dt_bias;  // kPerChannel [HV, K], kPerToken [HV]: float32

    // Sequences: row b of the batch, or with cu_seqlens (B == 1) tokens cu_seqlens[n] to cu_seqlens[n + 1].
    // Tokens beyond the last sequence get o = 0.
    TensorRef cu_seqlens;  // [N + 1] int32 or int64

    // State, [N, HV, V, K], or a pool [slots, HV, V, K] with indices; any strides, float32, bfloat16 or
    // float16. final_state may be the same memory as initial_state. A row whose index is negative or equals
    // null_index is skipped: its o is zero and nothing is stored. final_state_indices default to
    // initial_state_indices. Slots that no index names are not touched.
    TensorRef initial_state;
    TensorRef final_state;
    TensorRef initial_state_indices;  // [N] int32 or int64: row n starts from this slot
    TensorRef final_state_indices;    // [N] int32 or int64: row n ends in this slot
    TensorRef has_initial_state;      // [N] bool: false starts from zero whatever the slot holds
    std::int32_t null_index = -1;

    // Output.
    TensorRef o;  // [B, T, HV, V]

    // Prefill: states written in the same pass. The plan has rows (sequence, tokens, slot): the state after
    // that many tokens of the sequence, a multiple of kChunkTokens or its length; rows with a negative slot
    // are skipped.
    TensorRef checkpoints;      // [slots, HV, V, K]
    TensorRef checkpoint_plan;  // [M, 3] int32 or int64

    // Prefill: the state at the start of every chunk. With cu_seqlens the chunks of all sequences in order,
    // NT >= their number.
    TensorRef chunk_states;           // [B, NT, HV, V, K]
    int chunk_tokens = kChunkTokens;  // their spacing: 16, 32 or 64

    // Verify. The state after token t goes to pool slot [n, t]; the row starts from slot [n, num_accepted[n]
    // - 1], or from initial_state_indices when given. S >= the tokens of every row.
    TensorRef state_indices;  // [N, S] int32 or int64
    TensorRef num_accepted;   // [N] int32 or int64 in 1..S; absent: 1
    // The state after token t goes to [snapshot_indices[n], t].
    TensorRef snapshots;         // [slots, S, HV, V, K]
    TensorRef snapshot_indices;  // [N] int32 or int64; absent: n
    // A tree: token t continues the state after token parents[n, t] < t; negative: the state the row starts
    // from.
    TensorRef parents;  // [N, S] int32 or int64

    // Segment. S_end = M S_start + B for each sequence. Without segment_m B alone is made; without either,
    // what the segment keeps.
    TensorRef segment_m;  // kDelta [N, HV, K, K] (row: channel written, column: read), kAdditive [N, HV, K]
                          // (the diagonal)
    TensorRef segment_b;  // [N, HV, V, K]
    // What does not depend on the state, made once for a segment and for the prefill of the same tokens: with
    // `keep` a segment leaves it in its workspace (Plan::kept_bytes), and `kept` hands it to the prefill.
    // Inputs and options must be the same in both calls; only the size is checked. Of a segment with
    // segment_b alone it is for a prefill without initial_state. A kernel that has no use for it makes its
    // own.
    bool keep = false;
    TensorRef kept;  // [bytes / 4] int32

    // Options.
    double scale = 1.0;  // on q alone
    Gate gate = Gate::kLogDecay;
    double lower_bound = 0.0;  // kBounded
    bool qk_l2norm = false;    // x * rsqrt(sum x^2 + 1e-6) on q and k
    bool beta_is_logit = false;
    bool allow_neg_eigval = false;  // beta_is_logit: beta = 2 sigmoid(beta)
    bool batch_invariant = false;   // a sequence gets the same bits whatever else is in the batch
};

// What decides which kernel can take a call; no pointers.
struct Problem {
    Pass pass = Pass::kPrefill;
    Algorithm algorithm;
    Device device;
    std::int64_t batch = 1, tokens = 0, sequences = 1;
    std::int64_t heads = 1, value_heads = 1, key_dim = 0, value_dim = 0;
    Dtype dtype = Dtype::kBFloat16;  // of q, k, v, o
    Dtype state_dtype = Dtype::kFloat32;
    Gate gate = Gate::kLogDecay;
    double lower_bound = 0.0;
    bool varlen = false;
    bool beta_per_value = false;
    bool checkpoints = false;
    bool chunk_states = false;
    bool tree = false;
    std::int64_t draft_tokens = 0;  // of a tree
    int chunk_tokens = kChunkTokens;
    bool batch_invariant = false;
};

}  // namespace cula
