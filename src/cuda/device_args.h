// SPDX-License-Identifier: Apache-2.0
// The tensors and options of a call as kernels read them: plain data, passed by value at launch.
//
// cu_seqlens and indices lie on the device, so their values are made safe here, whatever they are: token
// ranges are clamped to the tensors, and an index outside its pool counts as null. Malformed input never
// leads to an access out of bounds.
#pragma once

#include <cstdint>

#include "cuda/host_device.h"
#include "cuda/tile/divisor.h"
#include "cula/problem.h"

namespace cula::cuda {

// A tensor [B, T, heads, ...]; offset() is the start of the row of one token and head. Strides in elements.
struct TokenRows {
    void* data = nullptr;
    Dtype dtype = Dtype::kFloat32;
    std::int64_t batch = 0, token = 0, head = 0, last = 1;
    bool pieces = false;  // rows can be read in aligned pieces of 16 bytes, with 32-bit distances

    CULA_HOST_DEVICE std::int64_t offset(std::int64_t b, std::int64_t t, std::int64_t h) const {
        return b * batch + t * token + h * head;
    }
};

// States [slots, HV, V, K]; strides in elements.
struct States {
    void* data = nullptr;
    Dtype dtype = Dtype::kFloat32;
    std::int64_t slots = 0, slot = 0, head = 0, v = 0, k = 0;

    CULA_HOST_DEVICE std::int64_t offset(std::int64_t s, std::int64_t h) const { return s * slot + h * head; }
};

// The scales of float8 states, [slots, HV, V]; strides in floats.
struct StateScales {
    float* data = nullptr;
    std::int64_t slot = 0, head = 0, v = 0;

    CULA_HOST_DEVICE float* at(std::int64_t s, std::int64_t h, std::int64_t row) const {
        return data + (s * slot + h * head + row * v);
    }
};

// An int64 index from its two words; a number that int32 does not hold becomes -1, a null index.
CULA_HOST_DEVICE std::int32_t narrow_index(std::int32_t lower, std::int32_t upper) {
    return upper == (lower < 0 ? -1 : 0) ? lower : -1;
}

// A tensor of indices, [N] or [N, columns], int32 or int64. Strides in 32-bit words.
struct Indices {
    const std::int32_t* data = nullptr;
    std::int64_t row = 0, column = 0;
    std::int32_t columns = 1;
    bool wide = false;  // int64

    CULA_HOST_DEVICE std::int32_t at(std::int64_t n, std::int64_t s = 0) const {
        const std::int32_t* const words = data + n * row + s * column;
        return wide ? narrow_index(words[0], words[1]) : words[0];
    }
    // The lower word alone, for numbers that are no slots.
    CULA_HOST_DEVICE std::int32_t low(std::int64_t n, std::int64_t s = 0) const {
        return data[n * row + s * column];
    }
};

// Parameters [HV] or [HV, channels]; strides in floats.
struct HeadParameter {
    const float* data = nullptr;
    std::int64_t head = 0, channel = 0;
    bool pieces = false;  // four neighbouring channels can be read by one aligned load
};

struct DeviceArgs {
    Algorithm algorithm;  // its rule is the one whose kernels run the call (kernels_of)
    Gate gate = Gate::kLogDecay;
    bool qk_l2norm = false, beta_is_logit = false, allow_neg_eigval = false, beta_per_value = false;
    bool cu_seqlens_64 = false, batch_invariant = false;
    bool reversed = false;  // a walk of a backward call that runs from the last token to the first
    std::int32_t null_index = -1;
    std::int32_t heads = 1, value_heads = 1, group = 1, key_dim = 0, value_dim = 0,
                 chunk_tokens = kChunkTokens;
    std::int32_t sequences = 1;
    Divisor by_value_heads, by_group;
    float scale = 1.0f, lower_bound = 0.0f;
    float least_beta = 0.0f;  // chunks take it for every write strength nearer to zero
    std::int64_t tokens = 0;  // T

    TokenRows q, k, v, g, beta, o;
    HeadParameter gamma, A_log, dt_bias;
    const void* cu_seqlens = nullptr;

    States initial, final, checkpoints;
    Indices initial_indices, final_indices;
    const bool* has_initial = nullptr;

    Indices checkpoint_plan;  // [M, 3]: sequence, tokens, slot
    std::int64_t num_checkpoints = 0;
    States chunk_states;  // [B, NT, HV, V, K]; slot: chunk
    std::int64_t chunk_states_batch = 0;

    // The maps of a segment, if asked for. slot: sequence; of m, v is the channel read and k the one written.
    States segment_m, segment_b;

    Indices state_indices, num_accepted, snapshot_indices, parents;
    States snapshots;
    std::int64_t snapshots_token = 0;

    StateScales initial_scales, final_scales;  // of states of float8

    // A reversed walk: [N], false: zeros are stored in place of the sequence's final state.
    const bool* has_final = nullptr;

    // Of rules with erase strengths: the strengths, and, for the gradient kernel, the erase keys that follow
    // from them (chunked/erase_operands.cuh), [B, T, HV, K].
    TokenRows erase, erase_keys;

    std::int32_t writes = 1;  // of a token

    TokenRows a_key, b_key;  // low-rank keys, [B, T, HV, K]
};

DeviceArgs device_args(const Args& args);
TokenRows token_rows(const TensorRef& ref);
States states(const TensorRef& ref);

// The tokens [begin, begin + length) of batch row `batch`.
struct TokenRange {
    std::int64_t batch, begin, length;
};

// cu_seqlens, clamped to the T tokens of the tensors.
struct Offsets {
    const void* data;
    std::int64_t tokens;
    std::int32_t sequences;
    bool wide;  // int64

    CULA_HOST_DEVICE explicit Offsets(const DeviceArgs& a)
        : data(a.cu_seqlens), tokens(a.tokens), sequences(a.sequences), wide(a.cu_seqlens_64) {}

    CULA_HOST_DEVICE std::int64_t at(std::int64_t i) const {
        const std::int64_t token =
            wide ? static_cast<const std::int64_t*>(data)[i] : static_cast<const std::int32_t*>(data)[i];
        return token < 0 ? 0 : token > tokens ? tokens : token;
    }
    CULA_HOST_DEVICE TokenRange tokens_of(std::int64_t n) const {
        const std::int64_t begin = at(n), end = at(n + 1);
        return {0, begin, end > begin ? end - begin : 0};
    }
};

CULA_HOST_DEVICE TokenRange tokens_of(const DeviceArgs& a, std::int64_t n) {
    if (!a.cu_seqlens) return {n, 0, a.tokens};
    return Offsets(a).tokens_of(n);
}

// Null indices: negative, null_index, or outside the pool.
CULA_HOST_DEVICE bool is_null(const DeviceArgs& a, const States& states, std::int64_t index) {
    return index < 0 || index == a.null_index || index >= states.slots;
}

// The slots that a sequence starts from and ends in. skipped: a null row, whose o is zero and which stores
// nothing.
struct StateSlots {
    bool skipped = false;
    std::int64_t initial = -1, final = -1;  // -1: starts from zero; is not stored
};

CULA_HOST_DEVICE StateSlots states_of(const DeviceArgs& a, std::int64_t n) {
    StateSlots slots;
    const Indices& write = a.final_indices.data ? a.final_indices : a.initial_indices;
    const std::int64_t from = a.initial_indices.data ? a.initial_indices.at(n) : n;
    const std::int64_t to = write.data ? write.at(n) : n;
    const States& read_pool = a.initial.data ? a.initial : a.final;
    const States& write_pool = a.final.data ? a.final : a.initial;
    slots.skipped =
        (a.initial_indices.data && is_null(a, read_pool, from)) || (write.data && is_null(a, write_pool, to));
    if (slots.skipped) return slots;
    if (a.initial.data && (!a.has_initial || a.has_initial[n])) slots.initial = from;
    if (a.final.data) slots.final = to;
    return slots;
}

// The same for calls that may have state_indices (verify). With them a sequence starts from the slot of its
// last accepted token, unless initial_state_indices are given, and has no final slot: each token has its own.
CULA_HOST_DEVICE StateSlots states_of_drafts(const DeviceArgs& a, std::int64_t n) {
    if (!a.state_indices.data) return states_of(a, n);
    const std::int32_t accepted = a.num_accepted.data ? a.num_accepted.at(n) : 1,
                       most = a.state_indices.columns;
    const std::int64_t from = a.initial_indices.data ? a.initial_indices.at(n)
                                                     : a.state_indices.at(n, (accepted < 1      ? 1
                                                                              : accepted > most ? most
                                                                                                : accepted) -
                                                                                 1);
    StateSlots slots;
    slots.skipped = is_null(a, a.initial.data ? a.initial : a.final, from);
    if (!slots.skipped && a.initial.data && (!a.has_initial || a.has_initial[n])) slots.initial = from;
    return slots;
}

// The place of the chunk states of sequence n and one value head: the offset of the first, in elements, and
// how many fit from there. before: chunk states of the packed sequences before n.
struct ChunkStates {
    std::int64_t offset = 0, room = 0;
};

CULA_HOST_DEVICE ChunkStates chunk_states_of(const DeviceArgs& a, std::int64_t n, std::int64_t value_head,
                                             std::int64_t before) {
    const std::int64_t batch = a.cu_seqlens ? 0 : n, first = a.cu_seqlens ? before : 0;
    return {batch * a.chunk_states_batch + a.chunk_states.offset(first, value_head),
            a.chunk_states.slots - first};
}

}  // namespace cula::cuda
