// SPDX-License-Identifier: Apache-2.0
// The definition of every member of the family, one token of one value head at a time:
//
//     S' = diag(α_t) S_{t-1}          α_t = exp(a_t)
//     u_t = v_t                       or, for the delta rule, β_t (v_t − S'ᵀ k_t)
//                                     or, with erase strengths, β_t ∘ v_t − S'ᵀ e_t,  e_t = erase_t ∘ k_t
//     S_t = S' + k_t u_tᵀ
//     o_t = scale · S_tᵀ q_t
//
// A token that writes n times has n such u, one after another: each of the state that the write before it
// left, the first of S', and S_t is what the last leaves.
//
// With low-rank keys a_t and b_t, u_t = v_t, and what a_t reads of the state before its decay is written too:
//
//     r_t = S_{t-1}ᵀ a_t
//     S_t = S' + b_t r_tᵀ + k_t u_tᵀ
//
// The result of each equation is rounded to Scalar; sums inside an equation run in Sum.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "cula/problem.h"
#include "reference/access.h"

namespace cula::reference {

inline constexpr std::size_t kMaxDim = 256;

// S [K, V]: row k holds what key channel k remembers of every value channel.
template <class Scalar>
struct State {
    Scalar* data;
    std::int64_t key_dim, value_dim;

    Scalar* row(std::int64_t k) const { return data + k * value_dim; }
    std::int64_t size() const { return key_dim * value_dim; }
};

// A state [V, K] in memory; scales: [V], of states of float8 (core/float8.h).
template <class Sum, class Scalar>
void load_state(const TensorRef& matrix, State<Scalar> S, const TensorRef& scales = {}) {
    for (std::int64_t k = 0; k < S.key_dim; ++k)
        for (std::int64_t v = 0; v < S.value_dim; ++v) {
            const Sum scale = scales ? read<Sum>(scales, v) : Sum{1};
            S.row(k)[v] = static_cast<Scalar>(scale * read<Sum>(matrix, v, k));
        }
}

template <class Scalar>
void store_state(const TensorRef& matrix, State<Scalar> S) {
    for (std::int64_t k = 0; k < S.key_dim; ++k)
        for (std::int64_t v = 0; v < S.value_dim; ++v) write(matrix, S.row(k)[v], v, k);
}

template <class Sum, class Scalar>
void store_state(const TensorRef& matrix, State<Scalar> S, const TensorRef& scales) {
    if (!scales) return store_state(matrix, S);
    for (std::int64_t v = 0; v < S.value_dim; ++v) {
        float most = 0.0f;
        for (std::int64_t k = 0; k < S.key_dim; ++k) {
            const float magnitude = std::abs(static_cast<float>(S.row(k)[v]));
            if (!(magnitude <= most)) most = magnitude;
            if (std::isnan(most)) break;
        }
        const RowScale row = row_scale(most);
        write(scales, row.scale, v);
        for (std::int64_t k = 0; k < S.key_dim; ++k)
            write(matrix, static_cast<Sum>(S.row(k)[v]) * static_cast<Sum>(row.inverse), v, k);
    }
}

template <class Sum>
Sum sigmoid(Sum x) {
    return 1 / (1 + std::exp(-x));
}

template <class Sum>
Sum softplus(Sum x) {
    return (x > 0 ? x : Sum{0}) + std::log1p(std::exp(-std::abs(x)));
}

template <class T>
using Vector = std::array<T, kMaxDim>;

template <class T>
T& at(Vector<T>& vector, std::int64_t i) {
    return vector[static_cast<std::size_t>(i)];
}

// The query/key head that a value head reads.
inline std::int64_t key_head(const Args& args, std::int64_t hv) {
    return hv / (args.v.size[2] / args.q.size[2]);
}

// What one token brings to one value head besides its writes, after normalisation and gate.
template <class Scalar, class Sum>
struct Token {
    Vector<Scalar> q, alpha;

    Token(const Args& args, std::int64_t b, std::int64_t t, std::int64_t hv) {
        read_key(args, args.q, b, t, key_head(args, hv), q);
        if (varies_by_channel(args.algorithm.decay))
            for (std::int64_t i = 0; i < args.q.size[3]; ++i) at(alpha, i) = decay_factor(args, b, t, hv, i);
        else
            alpha.fill(decay_factor(args, b, t, hv, 0));
    }

    static void read_key(const Args& args, const TensorRef& ref, std::int64_t b, std::int64_t t,
                         std::int64_t h, Vector<Scalar>& x) {
        const std::int64_t key_dim = ref.size[3];
        Sum square = 0;
        for (std::int64_t i = 0; i < key_dim; ++i) {
            const Sum element = read<Sum>(ref, b, t, h, i);
            square += element * element;
            at(x, i) = static_cast<Scalar>(element);
        }
        if (!args.qk_l2norm) return;
        const Sum norm = std::sqrt(square + static_cast<Sum>(1e-6));
        for (std::int64_t i = 0; i < key_dim; ++i)
            at(x, i) = static_cast<Scalar>(static_cast<Sum>(at(x, i)) / norm);
    }

    static Scalar decay_factor(const Args& args, std::int64_t b, std::int64_t t, std::int64_t hv,
                               std::int64_t i) {
        return static_cast<Scalar>(std::exp(log_decay(args, b, t, hv, i)));
    }

    // a, the logarithm of the decay of key channel i.
    static Sum log_decay(const Args& args, std::int64_t b, std::int64_t t, std::int64_t hv, std::int64_t i) {
        switch (args.algorithm.decay) {
            case Decay::kNone: return 0;
            case Decay::kPerHead: return read<Sum>(args.gamma, hv);
            case Decay::kPerToken:
                return gated(args, read<Sum>(args.g, b, t, hv), hv,
                             args.dt_bias ? read<Sum>(args.dt_bias, hv) : 0) +
                       (args.gamma ? read<Sum>(args.gamma, hv) : 0);
            case Decay::kPerChannel:
                return gated(args, read<Sum>(args.g, b, t, hv, i), hv,
                             args.dt_bias ? read<Sum>(args.dt_bias, hv, i) : 0);
        }
        return 0;
    }

    static Sum gated(const Args& args, Sum g, std::int64_t hv, Sum bias) {
        if (args.gate == Gate::kLogDecay) return g;
        const Sum x = g + bias, exponential = args.A_log ? std::exp(read<Sum>(args.A_log, hv)) : 1;
        const Sum rate = exponential > kMostGateSlope ? kMostGateSlope : exponential;
        const Sum a = args.gate == Gate::kSoftplus ? -rate * softplus(x)
                                                   : static_cast<Sum>(args.lower_bound) * sigmoid(rate * x);
        return static_cast<Sum>(static_cast<Scalar>(a));
    }
};

// What row `row` of k, v and beta, one write of a token, brings to one value head, after normalisation and
// sigmoid.
template <class Scalar, class Sum>
struct Write {
    Vector<Scalar> k, v, erase, e;  // e: the erase key
    Vector<Scalar> a, b;            // the low-rank keys
    Vector<Scalar> beta{};          // zero beyond V: the map of a segment has K columns

    Write(const Args& args, std::int64_t batch, std::int64_t row, std::int64_t hv) {
        const std::int64_t key_dim = args.q.size[3], value_dim = args.v.size[3];
        Token<Scalar, Sum>::read_key(args, args.k, batch, row, key_head(args, hv), k);
        for (std::int64_t j = 0; j < value_dim; ++j)
            at(v, j) = static_cast<Scalar>(read<Sum>(args.v, batch, row, hv, j));
        if (args.beta.ndim == 4)
            for (std::int64_t j = 0; j < value_dim; ++j)
                at(beta, j) = write_strength(args, read<Sum>(args.beta, batch, row, hv, j));
        else if (args.beta)
            beta.fill(write_strength(args, read<Sum>(args.beta, batch, row, hv)));
        for (std::int64_t i = 0; args.erase && i < key_dim; ++i) {
            at(erase, i) = strength(args, read<Sum>(args.erase, batch, row, hv, i), args.allow_neg_eigval);
            at(e, i) = static_cast<Scalar>(static_cast<Sum>(at(erase, i)) * static_cast<Sum>(at(k, i)));
        }
        for (std::int64_t i = 0; args.a_key && i < key_dim; ++i) {
            at(a, i) = static_cast<Scalar>(read<Sum>(args.a_key, batch, row, hv, i));
            at(b, i) = static_cast<Scalar>(read<Sum>(args.b_key, batch, row, hv, i));
        }
    }

    static Scalar strength(const Args& args, Sum given, bool doubled) {
        if (!args.beta_is_logit) return static_cast<Scalar>(given);
        return static_cast<Scalar>((doubled ? 2 : 1) * sigmoid(given));
    }

    // A beta that does not erase has no part in the eigenvalues.
    static Scalar write_strength(const Args& args, Sum given) {
        return strength(args, given, args.allow_neg_eigval && !takes_erase(args.algorithm.update));
    }
};

// S ← diag(α) S
template <class Scalar, class Sum>
void decay(const Token<Scalar, Sum>& token, State<Scalar> S) {
    for (std::int64_t k = 0; k < S.key_dim; ++k) {
        const auto alpha = static_cast<Sum>(token.alpha[static_cast<std::size_t>(k)]);
        Scalar* row = S.row(k);
        for (std::int64_t v = 0; v < S.value_dim; ++v)
            row[v] = static_cast<Scalar>(alpha * static_cast<Sum>(row[v]));
    }
}

// Sᵀ x
template <class Sum, class Scalar>
std::array<Sum, kMaxDim> apply(State<Scalar> S, const std::array<Scalar, kMaxDim>& x) {
    std::array<Sum, kMaxDim> y{};
    for (std::int64_t k = 0; k < S.key_dim; ++k) {
        const auto weight = static_cast<Sum>(x[static_cast<std::size_t>(k)]);
        const Scalar* row = S.row(k);
        for (std::int64_t v = 0; v < S.value_dim; ++v)
            y[static_cast<std::size_t>(v)] += weight * static_cast<Sum>(row[v]);
    }
    return y;
}

// u, what a write puts into the decayed state S for `value`.
template <class Scalar, class Sum>
std::array<Scalar, kMaxDim> written(Update rule, const Write<Scalar, Sum>& write,
                                    const std::array<Scalar, kMaxDim>& value, State<Scalar> S) {
    std::array<Scalar, kMaxDim> u = value;
    switch (rule) {
        case Update::kAdditive:
        case Update::kDplr: break;
        case Update::kDelta:
        case Update::kProduct: {
            const std::array<Sum, kMaxDim> known = apply<Sum>(S, write.k);
            for (std::size_t v = 0; v < static_cast<std::size_t>(S.value_dim); ++v)
                u[v] = static_cast<Scalar>(static_cast<Sum>(write.beta[v]) *
                                           (static_cast<Sum>(value[v]) - known[v]));
            break;
        }
        case Update::kErase: {
            const std::array<Sum, kMaxDim> known = apply<Sum>(S, write.e);
            for (std::size_t v = 0; v < static_cast<std::size_t>(S.value_dim); ++v)
                u[v] = static_cast<Scalar>(static_cast<Sum>(write.beta[v]) * static_cast<Sum>(value[v]) -
                                           known[v]);
            break;
        }
    }
    return u;
}

// S ← S + k uᵀ
template <class Scalar, class Sum>
void update(Update rule, const Write<Scalar, Sum>& write, const std::array<Scalar, kMaxDim>& value,
            State<Scalar> S) {
    const std::array<Scalar, kMaxDim> u = written(rule, write, value, S);
    for (std::int64_t k = 0; k < S.key_dim; ++k) {
        const auto key = static_cast<Sum>(write.k[static_cast<std::size_t>(k)]);
        Scalar* row = S.row(k);
        for (std::int64_t v = 0; v < S.value_dim; ++v)
            row[v] = static_cast<Scalar>(static_cast<Sum>(row[v]) +
                                         key * static_cast<Sum>(u[static_cast<std::size_t>(v)]));
    }
}

// The first `count` writes of token t. With `values` false all of v is zero.
template <class Scalar, class Sum>
void apply_writes(const Args& args, std::int64_t b, std::int64_t t, std::int64_t hv, std::int64_t count,
                  State<Scalar> S, bool values = true) {
    const std::array<Scalar, kMaxDim> nothing{};
    const std::int64_t first = t * writes_per_token(args);
    for (std::int64_t row = first; row < first + count; ++row) {
        const Write<Scalar, Sum> write(args, b, row, hv);
        update(args.algorithm.update, write, values ? write.v : nothing, S);
    }
}

// S ← diag(α) S + b rᵀ + k vᵀ, with r = Sᵀ a
template <class Scalar, class Sum>
void apply_low_rank(const Token<Scalar, Sum>& token, const Write<Scalar, Sum>& write, State<Scalar> S,
                    bool values) {
    std::array<Scalar, kMaxDim> found{};
    const std::array<Sum, kMaxDim> sums = apply<Sum>(S, write.a);
    for (std::size_t v = 0; v < static_cast<std::size_t>(S.value_dim); ++v)
        found[v] = static_cast<Scalar>(sums[v]);
    decay(token, S);
    for (std::int64_t k = 0; k < S.key_dim; ++k) {
        const auto i = static_cast<std::size_t>(k);
        const auto key = static_cast<Sum>(write.k[i]), of_found = static_cast<Sum>(write.b[i]);
        Scalar* row = S.row(k);
        for (std::size_t v = 0; v < static_cast<std::size_t>(S.value_dim); ++v)
            row[v] = static_cast<Scalar>(static_cast<Sum>(row[v]) + of_found * static_cast<Sum>(found[v]) +
                                         (values ? key * static_cast<Sum>(write.v[v]) : Sum{}));
    }
}

// S goes from before token t to after it. With `values` false all of v is zero.
template <class Scalar, class Sum>
void pass_token(const Args& args, const Token<Scalar, Sum>& token, std::int64_t b, std::int64_t t,
                std::int64_t hv, State<Scalar> S, bool values = true) {
    if (takes_low_rank(args.algorithm.update))
        return apply_low_rank(token, Write<Scalar, Sum>(args, b, t, hv), S, values);
    decay(token, S);
    apply_writes<Scalar, Sum>(args, b, t, hv, writes_per_token(args), S, values);
}

// o ← scale · Sᵀ q
template <class Scalar, class Sum>
void output(const Args& args, const Token<Scalar, Sum>& token, State<Scalar> S, std::int64_t b,
            std::int64_t t, std::int64_t hv) {
    const std::array<Sum, kMaxDim> read_out = apply<Sum>(S, token.q);
    for (std::int64_t v = 0; v < S.value_dim; ++v)
        write(args.o,
              static_cast<Scalar>(static_cast<Sum>(args.scale) * read_out[static_cast<std::size_t>(v)]), b, t,
              hv, v);
}

}  // namespace cula::reference
