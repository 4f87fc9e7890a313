// SPDX-License-Identifier: Apache-2.0
// Args: the tensors and options of one call. Problem: the part of them that decides which kernel can take the
// call.
//
// Dimensions: B batch, T tokens, N sequences, H query/key heads, HV value heads (a multiple of H; value head
// hv reads query/key head hv / (HV / H)), K key channels (1 to 256), V value channels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "cula/algorithm.h"
#include "cula/tensor.h"

namespace cula {

enum class Pass : std::uint8_t {
    kPrefill,   // many tokens per sequence: o, and the final state
    kDecode,    // one token or a few per sequence, one after another
    kVerify,    // a few draft tokens per sequence, a chain or a tree; may store a state per token
    kSegment,   // the affine map S -> M S + B of each sequence
    kBackward,  // the gradients of a prefill or decode
};

constexpr std::string_view name(Pass pass) {
    switch (pass) {
        case Pass::kPrefill: return "prefill";
        case Pass::kDecode: return "decode";
        case Pass::kVerify: return "verify";
        case Pass::kSegment: return "segment";
        case Pass::kBackward: return "backward";
    }
    return "unknown";
}

// How g becomes the log decay (a natural logarithm), with the parameters of Args.
enum class Gate : std::uint8_t {
    kLogDecay,  // g is the log decay
    kSoftplus,  // -exp(A_log) * softplus(g + dt_bias); without A_log, exp(A_log) = 1
    kBounded,   // lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); without A_log, exp(A_log) = 1
};

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

struct Device {
    DeviceKind kind = DeviceKind::kCpu;
    int index = 0;
    int compute_capability = 0;    // CUDA: 10 * major + minor
    int multiprocessors = 0;       // CUDA
    std::size_t shared_bytes = 0;  // CUDA: most shared memory of one thread block
    // CUDA, from the device's attributes: the clock of its multiprocessors in MHz, and the peak rate of its
    // memory in GB/s. They scale the costs by which a prefill is planned; 0: unknown.
    double clock_mhz = 0.0, memory_gbps = 0.0;
};

// The spacing, in tokens, of checkpoints and, by default, of chunk states.
inline constexpr int kChunkTokens = 64;

// exp(A_log) is clamped to this, so that its product with a gate stays finite.
inline constexpr float kMostGateSlope = 1e30f;

struct Args {
    Algorithm algorithm;

    // Inputs. q, k and v share one dtype: float32, bfloat16 or float16 (the reference also takes float64).
    // Their last dimension is contiguous; every other stride is free. takes_several_writes: k, v and beta
    // have T n rows in the place of T, and write j of token t is row t n + j (writes_per_token).
    TensorRef q, k;     // [B, T, H, K]
    TensorRef v;        // [B, T, HV, V]
    TensorRef g;        // kPerChannel [B, T, HV, K], kPerToken [B, T, HV]; any floating dtype (Gate)
    TensorRef gamma;    // [HV] float32, a log decay: kPerHead; with kPerToken it is added to that of g
    TensorRef beta;     // takes_beta: [B, T, HV], or [B, T, HV, V] (one write strength per value channel);
                        // any floating dtype
    TensorRef erase;    // takes_erase: [B, T, HV, K], contiguous in its last dimension; any floating dtype
    TensorRef a_key;    // takes_low_rank: [B, T, HV, K], contiguous in its last dimension; any floating dtype
    TensorRef b_key;    // the same
    TensorRef A_log;    // [HV] float32
    TensorRef dt_bias;  // kPerChannel [HV, K], kPerToken [HV]: float32

    // Sequences: the B rows of the batch; or with cu_seqlens, where B = 1, N sequences packed along T, of
    // which sequence n has tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. Tokens after the last sequence get
    // o = 0.
    TensorRef cu_seqlens;  // [N + 1] int32 or int64, starts at 0 and does not decrease

    // States: [N, HV, V, K], or a pool [slots, HV, V, K] with indices. float32, bfloat16 or float16, or
    // float8_e4m3fn with scales; K or V is contiguous, other strides are free. final_state may be the same
    // memory as initial_state.
    // A sequence whose index is negative or equals null_index is a null row: its o is zero, and nothing is
    // stored. Without final_state_indices a sequence ends in the slot that it starts from. Slots that no
    // index names are not touched.
    TensorRef initial_state;
    TensorRef final_state;
    // With a state of float8_e4m3fn: a row of K numbers of the state is its scale times what is stored
    // (core/float8.h has the rule by which it is stored). Scales are stored where the states are.
    TensorRef initial_scales;         // [slots of initial_state, HV, V] float32
    TensorRef final_scales;           // [slots of final_state, HV, V] float32
    TensorRef initial_state_indices;  // [N] int32 or int64: sequence n starts from this slot
    TensorRef final_state_indices;    // [N] int32 or int64: sequence n ends in this slot
    TensorRef has_initial_state;      // [N] bool: false: starts from zero, whatever the slot holds
    std::int32_t null_index = -1;

    // Output, in the dtype of q or float32, V contiguous. What a prefill, decode or verify writes may share
    // memory with nothing else of the call, states in place apart; that is not checked.
    TensorRef o;  // [B, T, HV, V]

    // Prefill: checkpoints. Row (sequence, tokens, slot) of the plan asks for the state after that many
    // tokens of the sequence, which is a multiple of kChunkTokens or the length of the sequence. Rows with a
    // negative slot are skipped. These, chunk states and snapshots are float32, bfloat16 or float16; K or V
    // is contiguous.
    TensorRef checkpoints;      // [slots, HV, V, K]
    TensorRef checkpoint_plan;  // [M, 3] int32 or int64: sequence, tokens, slot

    // Prefill: the state at the start of every chunk. With cu_seqlens the chunks of all sequences follow each
    // other. NT is at least their number.
    TensorRef chunk_states;           // [B, NT, HV, V, K]
    int chunk_tokens = kChunkTokens;  // their spacing in tokens: 16, 32 or 64

    // Verify: the state after token t of sequence n is stored in slot state_indices[n, t] of the pool. The
    // sequence starts from slot state_indices[n, num_accepted[n] - 1], or from initial_state_indices[n] if
    // given. S is at least the number of tokens of every sequence.
    TensorRef state_indices;  // [N, S] int32 or int64
    TensorRef num_accepted;   // [N] int32 or int64, in 1..S; absent: 1
    // Verify: the state after token t of sequence n is also stored in snapshots[snapshot_indices[n], t].
    TensorRef snapshots;         // [slots, S, HV, V, K]
    TensorRef snapshot_indices;  // [N] int32 or int64; absent: n
    // Verify, trees: token t continues from the state after token parents[n, t] < t; negative: from the state
    // that the sequence starts from. A GPU takes up to 256 draft tokens per sequence.
    TensorRef parents;  // [N, S] int32 or int64

    // Segment: S_end = M S_start + B for each sequence (ALGORITHM.md, "Segments"). Without segment_m only B
    // is computed; without both, only what the segment keeps. float32, apart from each other, one of the last
    // two dimensions contiguous (of a diagonal M the last).
    TensorRef segment_m;  // [N, HV, K, K] (row: channel written, column: read); has_diagonal_map: [N, HV, K]
    TensorRef segment_b;  // [N, HV, V, K]
    // What does not depend on the state can be computed once for a segment and for the prefill of the same
    // tokens. With `keep` a segment leaves it in its workspace (Plan::kept_bytes); `kept` passes it to the
    // prefill. Inputs and options must be the same in both calls; only the size is checked.
    // What a segment with segment_b alone keeps is for a prefill without initial_state. A kernel that cannot
    // use `kept` computes everything itself.
    bool keep = false;
    TensorRef kept;  // [bytes / 4] int32

    // What a backward would otherwise compute again: a prefill writes it, and the backward of a call with the
    // same inputs and options reads it. Which targets do, and its shape, explain() says
    // (Explanation::saving). Such a prefill takes a write strength nearer to zero than 2^-40 (float16: 2^-12)
    // for that, as every backward in chunks does.
    TensorRef saved;  // [chunks, HV, words] int32, contiguous, at a multiple of 128 bytes

    // Backward: the gradients of a prefill with the inputs above, from those of its outputs (ALGORITHM.md,
    // "Backward"). States are dense: there are no indices and no pool.
    // Inputs: the gradient of o, in the dtype of q or float32, contiguous in its last dimension, other
    // strides free (also 0); and that of the final state, of any dtype that a state may have. Absent: zero.
    TensorRef d_o;            // [B, T, HV, V]
    TensorRef d_final_state;  // [N, HV, V, K]
    // Outputs, written and not added to; one that is absent is not computed. Each has the dtype of its input
    // or float32, and the last dimension of d_q, d_k, d_v, d_erase, d_a_key, d_b_key and a d_g per channel is
    // contiguous.
    // Tokens after the last sequence get zeros, as do states that has_initial_state says are not read.
    TensorRef d_q, d_k;         // [B, T, H, K]
    TensorRef d_v;              // [B, T, HV, V]
    TensorRef d_g;              // the shape of g, which may be a raw gate
    TensorRef d_beta, d_erase;  // the shape of beta or erase, which may be logits
    TensorRef d_a_key, d_b_key;
    TensorRef d_A_log;          // [HV] float32
    TensorRef d_dt_bias;        // the shape of dt_bias, float32
    TensorRef d_initial_state;  // [N, HV, V, K], the layout of any state

    // Options.
    double scale = 1.0;  // factor on q
    Gate gate = Gate::kLogDecay;
    double lower_bound = 0.0;       // kBounded
    bool qk_l2norm = false;         // q and k <- x * rsqrt(sum x^2 + 1e-6) over K
    bool beta_is_logit = false;     // beta = sigmoid(beta), and erase = sigmoid(erase)
    bool allow_neg_eigval = false;  // with beta_is_logit: what erases, beta or erase, is 2 sigmoid(..)
    bool batch_invariant = false;   // the bits of a sequence do not depend on what else is in the batch
};

// n, the writes of a token: the rows of k for each row of q. Without tokens 1.
[[gnu::always_inline]] inline std::int64_t writes_per_token(const Args& args) {
    return args.q.size[1] > 0 ? args.k.size[1] / args.q.size[1] : 1;
}

// What decides which kernel can take a call. It owns no memory: `costs` points to the caller's numbers.
struct Problem {
    Pass pass = Pass::kPrefill;
    Algorithm algorithm;
    Device device;
    std::int64_t batch = 1, tokens = 0, sequences = 1;
    std::int64_t heads = 1, value_heads = 1, key_dim = 0, value_dim = 0;
    std::int64_t writes = 1;         // of a token
    Dtype dtype = Dtype::kBFloat16;  // of q, k, v
    Dtype state_dtype = Dtype::kFloat32;
    Gate gate = Gate::kLogDecay;
    double lower_bound = 0.0;
    bool varlen = false;
    bool beta_per_value = false;
    bool checkpoints = false;
    bool chunk_states = false;
    bool tree = false;
    std::int64_t draft_tokens = 0;  // S of a tree (Args::parents)
    int chunk_tokens = kChunkTokens;
    bool batch_invariant = false;
    bool qk_l2norm = false;
    bool wide_d_o = false;  // backward: d_o is not of `dtype`
    bool saves = false;     // Args::saved is given
    // Costs to predict times with instead of the device's own (src/cuda/machines.h), in the order of Costs,
    // of the family of the problem; empty: its own. For fitting them.
    std::span<const double> costs = {};
};

}  // namespace cula
