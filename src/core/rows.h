// SPDX-License-Identifier: Apache-2.0
// Reads indices on the host: which tokens a sequence has, and which states it starts from and ends in.
#pragma once

#include <cstdint>

#include "cula/problem.h"

namespace cula {

// An element of a tensor of indices, int32 or int64.
template <class... Index>
std::int64_t read_index(const TensorRef& ref, Index... i) {
    return ref.dtype == Dtype::kInt64 ? *ref.at<const std::int64_t>(i...) : *ref.at<const std::int32_t>(i...);
}

inline std::int64_t num_sequences(const Args& args) {
    return args.cu_seqlens ? args.cu_seqlens.size[0] - 1 : args.q.size[0];
}

struct Tokens {
    std::int64_t batch;   // row of the batch dimension
    std::int64_t begin;   // first token in that row
    std::int64_t length;  // may be 0
};

inline Tokens tokens_of(const Args& args, std::int64_t n) {
    if (!args.cu_seqlens) return {n, 0, args.q.size[1]};
    const std::int64_t begin = read_index(args.cu_seqlens, n);
    return {0, begin, read_index(args.cu_seqlens, n + 1) - begin};
}

inline bool is_null(const Args& args, std::int64_t index) { return index < 0 || index == args.null_index; }

// Whether sequence n starts from the state of its slot (otherwise from zero). A byte may hold more than a
// bool does.
inline bool starts_from_state(const Args& args, std::int64_t n) {
    return !args.has_initial_state || *args.has_initial_state.at<const unsigned char>(n) != 0;
}

// A state [HV, V, K]: slot `slot` of `states`. slot = -1: absent.
struct StateRow {
    TensorRef states;
    std::int64_t slot = -1;
    TensorRef scales = {};  // of states of float8

    explicit operator bool() const { return slot >= 0; }
    void* ptr(std::int64_t hv, std::int64_t v = 0, std::int64_t k = 0) const {
        return states.ptr(slot, hv, v, k);
    }
};

struct StateRows {
    bool skipped = false;  // a null row: o is zero, nothing is read or stored
    StateRow initial;      // absent: zero
    StateRow final;        // absent: not stored; always with state_indices, which name a slot per token
};

inline StateRows states_of(const Args& args, std::int64_t n) {
    StateRows rows;
    const TensorRef &read = args.initial_state_indices, &drafts = args.state_indices;
    const TensorRef& write = args.final_state_indices ? args.final_state_indices : read;
    std::int64_t from = read ? read_index(read, n) : n;
    if (drafts && !read)
        from = read_index(drafts, n, args.num_accepted ? read_index(args.num_accepted, n) - 1 : 0);
    const std::int64_t to = write ? read_index(write, n) : n;
    // Without index tensors slot n is meant literally, even where n equals null_index.
    if (((read || drafts) && is_null(args, from)) || (write && is_null(args, to)))
        return {.skipped = true, .initial = {}, .final = {}};
    if (args.initial_state && starts_from_state(args, n))
        rows.initial = {args.initial_state, from, args.initial_scales};
    if (args.final_state && !drafts) rows.final = {args.final_state, to, args.final_scales};
    return rows;
}

// The number of chunks of the packed sequences before n: where the chunk states of n begin.
inline std::int64_t chunks_before(const Args& args, std::int64_t n) {
    std::int64_t chunks = 0;
    if (args.cu_seqlens)
        for (std::int64_t i = 0; i < n; ++i)
            chunks += (tokens_of(args, i).length + args.chunk_tokens - 1) / args.chunk_tokens;
    return chunks;
}

}  // namespace cula
