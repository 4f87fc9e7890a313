// SPDX-License-Identifier: Apache-2.0
// The inputs of one head in the form of the equations: normalised and scaled q and k, decay factors exp(g),
// write strengths.
#pragma once

#include "core/carve.h"
#include "cpu/simd.h"
#include "cpu/task.h"

namespace cula::cpu::CULA_CPU_TARGET {

// Channels are padded to this many with zeros.
inline constexpr int kChannelMultiple = 64;
// Value columns are padded to this many with zeros.
inline constexpr int kColumnMultiple = 16;

CULA_INLINE int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

extern "C" float expf(float);

// Rows of one head lie kilobytes apart, mostly in different pages, where hardware prefetchers seldom follow.
// So with a token's row that of the fourth token after it is prefetched. Further ahead rows evict each other:
// at a stride of 4 KiB they share four sets of the L1 cache (docs/log/2026-11-28-rows-of-later-tokens.md).
inline constexpr int kTokensAhead = 4;
CULA_INLINE void prefetch_later_token(const TensorRef& x, std::int64_t batch, std::int64_t token,
                                      std::int64_t head, std::int64_t first, int count) {
    if (token + kTokensAhead >= x.size[1]) return;
    const auto* const row = static_cast<const char*>(x.ptr(batch, token + kTokensAhead, head, first));
    const int bytes = count * static_cast<int>(size_bytes(x.dtype));
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

// load_row() and store_row() of a token and a head of x [B, T, heads, channels], from channel `first` on.
inline void load_token_row(float* dst, const TensorRef& x, std::int64_t batch, std::int64_t token,
                           std::int64_t head, std::int64_t first, int count, int padded) {
    prefetch_later_token(x, batch, token, head, first, count);
    load_row(dst, x.ptr(batch, token, head, first), x.dtype, count, padded);
}
inline void store_token_row(const TensorRef& x, std::int64_t batch, std::int64_t token, std::int64_t head,
                            std::int64_t first, const float* src, int count) {
    prefetch_later_token(x, batch, token, head, first, count);
    store_row(x.ptr(batch, token, head, first), x.dtype, src, count);
}

struct HeadInputs {
    const Args& args;
    std::int64_t batch, head, value_head;
    int key_dim, padded_key_dim;
    float gate_slope;        // exp(A_log), at most kMostGateSlope
    float gate_bias_scalar;  // dt_bias, if there is one per head
    float head_log_decay;    // gamma
    const float* gate_bias;  // dt_bias [padded K], if there is one per channel

    // bias: memory for padded K floats; it becomes gate_bias.
    template <class Task>
    HeadInputs(const Args& a, const Task& task, float* bias)
        : args(a),
          batch(task.batch),
          head(task.head),
          value_head(task.value_head),
          key_dim(static_cast<int>(a.q.size[3])),
          padded_key_dim(round_up(key_dim, kChannelMultiple)),
          gate_slope(1.0f),
          gate_bias_scalar(0.0f),
          head_log_decay(0.0f),
          gate_bias(bias) {
        if (a.A_log) gate_slope = expf(load_scalar(a.A_log.ptr(value_head), a.A_log.dtype));
        if (gate_slope > kMostGateSlope) gate_slope = kMostGateSlope;
        if (a.gamma) head_log_decay = load_scalar(a.gamma.ptr(value_head), a.gamma.dtype);
        if (varies_by_channel(a.algorithm.decay)) {
            const int given = a.dt_bias ? key_dim : 0;
            for (int c = 0; c < given; ++c)
                bias[c] = load_scalar(a.dt_bias.ptr(value_head, c), a.dt_bias.dtype);
            for (int c = given; c < padded_key_dim; ++c) bias[c] = 0.0f;
        } else if (a.dt_bias) {
            gate_bias_scalar = load_scalar(a.dt_bias.ptr(value_head), a.dt_bias.dtype);
        }
    }

    CULA_INLINE Vec log_decay(Vec g, Vec bias) const {
        switch (args.gate) {
            case Gate::kSoftplus: return softplus(g + bias) * -gate_slope;
            case Gate::kBounded:
                return sigmoid((g + bias) * gate_slope) * static_cast<float>(args.lower_bound);
            case Gate::kLogDecay: break;
        }
        return g;
    }

    // Returns what x was multiplied by.
    float normalise(float* x, float scale) const {
        if (args.qk_l2norm) {
            Vec squares{};
            for (int c = 0; c < padded_key_dim; c += kLanes) squares += load(x + c) * load(x + c);
            scale /= __builtin_sqrtf(sum(squares) + 1e-6f);
        }
        if (scale != 1.0f)
            for (int c = 0; c < padded_key_dim; c += kLanes) store(x + c, load(x + c) * scale);
        return scale;
    }

    // Both return what the row was multiplied by.
    float query(float* q, std::int64_t token) const {
        load_token_row(q, args.q, batch, token, head, 0, key_dim, padded_key_dim);
        return normalise(q, static_cast<float>(args.scale));
    }
    float key(float* k, std::int64_t token) const {
        load_token_row(k, args.k, batch, token, head, 0, key_dim, padded_key_dim);
        return normalise(k, 1.0f);
    }

    // exp(g) of every channel of a token.
    void channel_decays(float* alpha, std::int64_t token) const {
        load_token_row(alpha, args.g, batch, token, value_head, 0, key_dim, padded_key_dim);
        for (int c = 0; c < padded_key_dim; c += kLanes)
            store(alpha + c, exp(log_decay(load(alpha + c), load(gate_bias + c))));
    }

    // exp(g) of `count` tokens, for one decay per token; alpha has room for whole vectors.
    void token_decays(float* alpha, std::int64_t token, int count) const {
        const bool per_token = varies_by_token(args.algorithm.decay);
        for (int i = 0; i < count; ++i)
            alpha[i] = per_token ? load_scalar(args.g.ptr(batch, token + i, value_head), args.g.dtype) : 0.0f;
        for (int i = count; i < round_up(count, kLanes); ++i) alpha[i] = 0.0f;
        for (int i = 0; i < count; i += kLanes) {
            const Vec g = per_token ? log_decay(load(alpha + i), broadcast(gate_bias_scalar)) : Vec{};
            store(alpha + i, exp(g + head_log_decay));
        }
    }

    CULA_INLINE Vec strength(Vec x, bool doubled) const {
        if (args.beta_is_logit) x = sigmoid(x) * (doubled ? 2.0f : 1.0f);
        return x;
    }
    // A beta that does not erase has no part in the eigenvalues.
    CULA_INLINE Vec beta(Vec x) const {
        return strength(x, args.allow_neg_eigval && !takes_erase(args.algorithm.update));
    }
    CULA_INLINE Vec erase(Vec x) const { return strength(x, args.allow_neg_eigval); }

    // The erase key of a token, of its key.
    void erase_key(float* e, const float* k, std::int64_t token) const {
        load_token_row(e, args.erase, batch, token, value_head, 0, key_dim, padded_key_dim);
        for (int c = 0; c < padded_key_dim; c += kLanes) store(e + c, erase(load(e + c)) * load(k + c));
    }

    // The low-rank keys of a token.
    void low_rank_keys(float* a, float* b, std::int64_t token) const {
        load_token_row(a, args.a_key, batch, token, value_head, 0, key_dim, padded_key_dim);
        load_token_row(b, args.b_key, batch, token, value_head, 0, key_dim, padded_key_dim);
    }

    // The write strengths of `count` tokens; strengths has room for whole vectors.
    void betas(float* strengths, std::int64_t token, int count) const {
        for (int i = 0; i < count; ++i)
            strengths[i] = load_scalar(args.beta.ptr(batch, token + i, value_head), args.beta.dtype);
        for (int i = count; i < round_up(count, kLanes); ++i) strengths[i] = 0.0f;
        for (int i = 0; i < count; i += kLanes) store(strengths + i, beta(load(strengths + i)));
    }

    // The write strengths of the value columns of a token, for one beta per value channel.
    void value_betas(float* strengths, std::int64_t token, int v_begin, int v_count, int padded) const {
        for (int j = 0; j < v_count; ++j)
            strengths[j] = load_scalar(args.beta.ptr(batch, token, value_head, v_begin + j), args.beta.dtype);
        for (int j = v_count; j < padded; ++j) strengths[j] = 0.0f;
        for (int j = 0; j < padded; j += kLanes) store(strengths + j, beta(load(strengths + j)));
    }
};

CULA_INLINE std::byte* state_at(const StateView& view, std::int64_t v, std::int64_t k) {
    return element(view.data, view.dtype, v * view.stride_v + k * view.stride_k);
}

CULA_INLINE StateView advance(StateView view, std::int64_t elements) {
    if (view.data) view.data = element(view.data, view.dtype, elements);
    return view;
}

}  // namespace cula::cpu::CULA_CPU_TARGET
