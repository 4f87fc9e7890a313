// SPDX-License-Identifier: Apache-2.0
// The arguments of decode and verify: a few lines of constant memory, in the order in which the kernel needs
// them, with all strides in bytes and 32 bits wide. One token of one sequence is so little work that looking
// up its arguments shows in the time: of DeviceArgs it would wait for a dozen lines of constant memory.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#include "cuda/device_args.h"
#include "cuda/rule.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/divisor.h"

namespace cula::cuda::recurrent {

// [N] or [N, columns]; strides in bytes.
struct DecodeIndices {
    const std::int32_t* data = nullptr;
    std::int32_t row = 0, column = 0, columns = 1;
    bool wide = false;  // int64
};

// [slots, HV, V, K], K contiguous; strides in bytes.
struct DecodeStates {
    char* data = nullptr;
    std::int32_t slot = 0, head = 0, v = 0, slots = 0;
};

// Of float8 states: [slots, HV, V]; strides in bytes.
struct DecodeScales {
    float* data = nullptr;
    std::int32_t slot = 0, head = 0, v = 0;
};

// [B, T, heads, channels]. last: stride between channels, 0 where a row has one number. Strides in bytes.
struct DecodeRows {
    char* data = nullptr;
    std::int32_t batch = 0, head = 0, last = 0, token = 0;
    Element type = Element::kNone;
};

struct DecodeParameter {
    const float* data = nullptr;
    std::int32_t head = 0, channel = 0;  // in floats
};

// What does a token write?
template <Update kUpdate>
struct DecodeRule {
    static_assert(kIsKnown<kUpdate>, "decode: what does a token write under this update rule?");
};
template <>
struct DecodeRule<Update::kAdditive> {
    static constexpr bool kCorrects = false;  // u = v
};
template <>
struct DecodeRule<Update::kDelta> {
    static constexpr bool kCorrects = true;  // u = beta (v - S' k)
};

struct DecodeArgs {
    Divisor blocks, value_heads, group;
    std::int32_t null_index = -1, value_dim = 0;
    DecodeIndices initial_indices, final_indices;
    const bool* has_initial = nullptr;
    DecodeStates initial, final;  // slots: of the pool that the indices refer to, even if data is null
    DecodeRows q, k, g, v, beta, o;
    DecodeParameter dt_bias, A_log, gamma;
    float scale = 1.0f, lower_bound = 0.0f, most_beta = 1.0f;
    Gate gate = Gate::kLogDecay;
    bool qk_l2norm = false, corrects = false, beta_is_logit = false;
    std::int32_t ahead = 0;  // prefetch distance in CTAs (prefetch_state)

    // Read only by verify and with kTokens = 4: calls that have other than one token per sequence, or that
    // name slots per token.
    bool cu_seqlens_64 = false;
    std::int32_t tokens = 1, sequences = 0;
    const void* cu_seqlens = nullptr;
    DecodeIndices state_indices, num_accepted, snapshot_indices;
    DecodeStates snapshots;
    std::int32_t snapshots_token = 0;

    // Read only with float8 states.
    DecodeScales initial_scales, final_scales;

    // Read only with erase keys. The write strength is then at most 1.
    DecodeRows erase;
    float most_erase = 1.0f;

    // Read only with low-rank keys.
    DecodeRows a_key, b_key;

    // The writes of a token. Read only with several keys.
    Divisor writes;
};

// Fills `to`, with a state cut into `blocks` row blocks. Returns false if decode does not take the call: a
// gate, beta, erase or low-rank key of float64, or a stride of 2 GiB or more.
template <class State>
bool decode_args(const DeviceArgs& a, int blocks, DecodeArgs& to) {
    bool fits = true;
    const auto narrow = [&](std::int64_t x) {
        fits = fits && x >= std::numeric_limits<std::int32_t>::min() &&
               x <= std::numeric_limits<std::int32_t>::max();
        return static_cast<std::int32_t>(x);
    };
    const auto rows = [&](const TokenRows& x, std::int64_t last) {
        if (!x.data) return DecodeRows{};
        fits = fits && x.dtype != Dtype::kFloat64;
        const std::int64_t size = x.dtype == Dtype::kFloat32 ? 4 : 2;
        return DecodeRows{static_cast<char*>(x.data), narrow(x.batch * size), narrow(x.head * size),
                          narrow(last * size),        narrow(x.token * size), element(x.dtype)};
    };
    const auto states = [&](const States& x, const States& pool) {
        const std::int64_t size = sizeof(State);
        return DecodeStates{static_cast<char*>(x.data), narrow(x.slot * size), narrow(x.head * size),
                            narrow(x.v * size), narrow(pool.slots)};
    };
    const auto scales = [&](const StateScales& x) {
        return DecodeScales{x.data, narrow(x.slot * 4), narrow(x.head * 4), narrow(x.v * 4)};
    };
    const auto indices = [&](const Indices& x) {
        return DecodeIndices{x.data, narrow(x.row * 4), narrow(x.column * 4), x.columns, x.wide};
    };
    const auto parameter = [&](const HeadParameter& x, std::int64_t channel) {
        return DecodeParameter{x.data, narrow(x.head), narrow(channel)};
    };
    const bool per_channel = varies_by_channel(a.algorithm.decay);

    to.blocks = Divisor(static_cast<std::uint32_t>(blocks));
    to.value_heads = a.by_value_heads;
    to.group = a.by_group;
    to.null_index = a.null_index;
    to.value_dim = a.value_dim;
    to.initial_indices = indices(a.initial_indices);
    // With state_indices the states of tokens are stored, and no final state.
    if (!a.state_indices.data)
        to.final_indices = indices(a.final_indices.data ? a.final_indices : a.initial_indices);
    to.has_initial = a.has_initial;
    to.initial = states(a.initial, a.initial.data ? a.initial : a.final);
    to.final = states(a.final, a.final.data ? a.final : a.initial);
    to.initial_scales = scales(a.initial_scales);
    to.final_scales = scales(a.final_scales);
    to.q = rows(a.q, 1);
    to.k = rows(a.k, 1);
    to.v = rows(a.v, 1);
    to.o = rows(a.o, 1);
    if (per_channel || varies_by_token(a.algorithm.decay)) {
        to.g = rows(a.g, per_channel ? 1 : 0);
        to.dt_bias = parameter(a.dt_bias, per_channel ? a.dt_bias.channel : 0);
        to.A_log = parameter(a.A_log, 0);
    }
    if (!per_channel) to.gamma = parameter(a.gamma, 0);
    to.scale = a.scale;
    to.lower_bound = a.lower_bound;
    to.gate = a.gate;
    to.qk_l2norm = a.qk_l2norm;
    to.corrects = answer_for(a.algorithm.update, []<Update kUpdate>(UpdateConstant<kUpdate>) {
        return DecodeRule<kUpdate>::kCorrects;
    });
    if (takes_beta(a.algorithm.update)) {
        to.beta = rows(a.beta, a.beta_per_value ? a.beta.last : 0);
        to.beta_is_logit = a.beta_is_logit;
        to.most_beta = a.allow_neg_eigval ? 2.0f : 1.0f;
    }
    if (a.erase.data) {
        to.erase = rows(a.erase, 1);
        to.most_erase = std::exchange(to.most_beta, 1.0f);  // what erases may be doubled
    }
    to.a_key = rows(a.a_key, 1);
    to.b_key = rows(a.b_key, 1);
    to.writes = Divisor(static_cast<std::uint32_t>(a.writes));
    narrow(a.tokens * a.writes);  // by which writes are counted
    to.cu_seqlens_64 = a.cu_seqlens_64;
    to.tokens = narrow(a.tokens);
    to.sequences = a.sequences;
    to.cu_seqlens = a.cu_seqlens;
    to.state_indices = indices(a.state_indices);
    to.num_accepted = indices(a.num_accepted);
    to.snapshot_indices = indices(a.snapshot_indices);
    to.snapshots = states(a.snapshots, a.snapshots);
    to.snapshots_token = narrow(a.snapshots_token * static_cast<std::int64_t>(sizeof(State)));
    return fits;
}

}  // namespace cula::cuda::recurrent
