// SPDX-License-Identifier: Apache-2.0
// The gradients of every member of the family, from the last token of a value head to the first. With Z =
// d loss / d S_t, and the letters of recurrence.h:
//
//     dq_t  = scale · S_t do_t              Z   ← Z + scale · q_t do_tᵀ
//     du_t  = Zᵀ k_t                        dk_t = Z u_t
//     delta rule, with w_t = v_t − S'ᵀ k_t:
//       dβ_t = w_t · du_t                   dw_t = β_t du_t,  dv_t = dw_t
//       dk_t ← dk_t − S' dw_t               Z   ← Z − k_t dw_tᵀ
//     with erase strengths, e_t = erase_t ∘ k_t:
//       dβ_t = v_t ∘ du_t                   dv_t = β_t ∘ du_t
//       de_t = −S' du_t                     derase_t = de_t ∘ k_t
//       dk_t ← dk_t + de_t ∘ erase_t        Z   ← Z − e_t du_tᵀ
//     otherwise dv_t = du_t
//     da_t  = rowsum(Z ∘ S')                Z   ← diag(α_t) Z
//     with low-rank keys, and the Z that du_t is made of:
//       dr_t = Zᵀ b_t                       db_t = Z r_t
//       (the low-rank) da_t = S_{t-1} dr_t  Z   ← Z + a_t dr_tᵀ, after its decay
//
// (of a token that writes n times, the middle part for the last write, then for those before it, each with
// the state that it found in the place of S') and then through gate, sigmoid and norm. The result of each
// equation is rounded to Scalar; sums inside an equation run in Sum, and so do the sums over value heads,
// tokens and sequences.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "reference/recurrence.h"
#include "reference/tasks.h"

namespace cula::reference {

// One call in one precision. A task is a query/key head of a sequence: its value heads follow each other.
template <class Scalar, class Sum>
class Backward {
public:
    Backward(const Args& args, const Context& context)
        : args_(args),
          context_(context),
          key_dim_(args.q.size[3]),
          value_dim_(args.v.size[3]),
          value_heads_(args.v.size[2]),
          group_(value_heads_ / args.q.size[2]),
          writes_(writes_per_token(args)),
          longest_(longest_row(args)),
          block_(std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(std::sqrt(longest_))))) {}

    std::size_t workspace_bytes() const {
        return static_cast<std::size_t>(bytes_of_workers() + whole_lines(partials() * sizeof_sum()));
    }

    void run() const {
        for_each_task(context_, tasks(), bytes_per_worker(), [this](std::int64_t task, std::byte* scratch) {
            const std::int64_t heads = args_.q.size[2], n = task / heads, head = task % heads;
            run_head(n, head, Scratch(*this, scratch));
        });
        sum_parameters();
        zero_tail();
    }

private:
    struct Scratch {
        Scalar *starts, *states;  // at the starts of blocks, and inside of one
        Scalar *Z, *decayed;      // d loss / d state, and S'
        Sum *d_q, *d_k;           // [tokens, K] and [writes, K], summed over value heads

        Scratch(const Backward& call, std::byte* memory) {
            auto* sums = reinterpret_cast<Sum*>(memory);
            d_q = sums;
            d_k = d_q + call.longest_ * call.key_dim_;
            starts = reinterpret_cast<Scalar*>(d_k + call.longest_ * call.writes_ * call.key_dim_);
            states = starts + call.blocks() * call.state_size();
            Z = states + (call.block_ + 1) * call.state_size();
            decayed = Z + call.state_size();
        }
    };

    static constexpr std::int64_t sizeof_sum() { return static_cast<std::int64_t>(sizeof(Sum)); }
    std::int64_t state_size() const { return key_dim_ * value_dim_; }
    std::int64_t blocks() const { return (longest_ + block_ - 1) / block_; }
    std::int64_t tasks() const { return num_sequences(args_) * args_.q.size[2]; }
    std::int64_t bytes_per_worker() const {
        const std::int64_t states = blocks() + block_ + 1 + 2;
        return whole_lines((1 + writes_) * longest_ * key_dim_ * sizeof_sum() +
                           states * state_size() * static_cast<std::int64_t>(sizeof(Scalar)));
    }
    std::int64_t bytes_of_workers() const { return num_workers(context_, tasks()) * bytes_per_worker(); }

    bool wants_parameters() const { return args_.d_A_log || args_.d_dt_bias; }

    // The gradients of A_log and dt_bias of each sequence and value head: [N, HV, 1 + K].
    std::int64_t partials() const {
        return wants_parameters() ? num_sequences(args_) * value_heads_ * (1 + key_dim_) : 0;
    }
    Sum* partial(std::int64_t n, std::int64_t hv) const {
        auto* all = reinterpret_cast<Sum*>(static_cast<std::byte*>(context_.workspace) + bytes_of_workers());
        return all + (n * value_heads_ + hv) * (1 + key_dim_);
    }

    State<Scalar> state(Scalar* data) const { return {data, key_dim_, value_dim_}; }

    bool wants_keys() const { return args_.d_q || args_.d_k; }

    void run_head(std::int64_t n, std::int64_t head, const Scratch& scratch) const {
        const Tokens tokens = tokens_of(args_, n);
        if (wants_keys()) {
            std::fill_n(scratch.d_q, tokens.length * key_dim_, Sum{});
            std::fill_n(scratch.d_k, tokens.length * writes_ * key_dim_, Sum{});
        }
        for (std::int64_t hv = head * group_; hv < (head + 1) * group_; ++hv)
            run_value_head(n, tokens, hv, scratch);
        for (std::int64_t t = 0; t < tokens.length; ++t)
            write_key(args_.q, args_.d_q, tokens.batch, tokens.begin + t, head, scratch.d_q + t * key_dim_);
        for (std::int64_t row = 0; row < tokens.length * writes_; ++row)
            write_key(args_.k, args_.d_k, tokens.batch, tokens.begin * writes_ + row, head,
                      scratch.d_k + row * key_dim_);
    }

    void run_value_head(std::int64_t n, const Tokens& tokens, std::int64_t hv, const Scratch& scratch) const {
        const State<Scalar> Z = state(scratch.Z);
        if (wants_parameters()) std::fill_n(partial(n, hv), 1 + key_dim_, Sum{});
        walk_forward(n, tokens, hv, scratch);
        load({args_.d_final_state, args_.d_final_state ? n : -1}, hv, Z);
        for (std::int64_t begin = (blocks() - 1) * block_; begin >= 0; begin -= block_) {
            const std::int64_t end = std::min(begin + block_, tokens.length);
            if (begin >= end) continue;
            std::copy_n(scratch.starts + begin / block_ * state_size(), state_size(), scratch.states);
            for (std::int64_t t = begin; t < end; ++t) step(tokens, t, hv, scratch.states, t - begin);
            for (std::int64_t t = end; t-- > begin;)
                step_back(n, tokens, t, hv, scratch.states + (t - begin) * state_size(),
                          state(scratch.states + (t - begin + 1) * state_size()), Z, scratch);
        }
        if (!args_.d_initial_state) return;
        if (!starts_from_state(args_, n)) std::fill_n(Z.data, Z.size(), Scalar{});
        store_state(matrix_at(args_.d_initial_state, n, hv), Z);
    }

    // The states at the starts of all blocks.
    void walk_forward(std::int64_t n, const Tokens& tokens, std::int64_t hv, const Scratch& scratch) const {
        load(states_of(args_, n).initial, hv, state(scratch.states));
        for (std::int64_t t = 0; t < tokens.length; ++t) {
            if (t % block_ == 0)
                std::copy_n(scratch.states, state_size(), scratch.starts + t / block_ * state_size());
            advance(tokens, t, hv, state(scratch.states));
        }
    }

    // states[i + 1] of states[i].
    void step(const Tokens& tokens, std::int64_t t, std::int64_t hv, Scalar* states, std::int64_t i) const {
        const State<Scalar> S = state(states + (i + 1) * state_size());
        std::copy_n(states + i * state_size(), state_size(), S.data);
        advance(tokens, t, hv, S);
    }

    // S goes from before the token to after it.
    void advance(const Tokens& tokens, std::int64_t t, std::int64_t hv, State<Scalar> S) const {
        const Token<Scalar, Sum> token(args_, tokens.batch, tokens.begin + t, hv);
        pass_token(args_, token, tokens.batch, tokens.begin + t, hv, S);
    }

    // S x, a sum over value channels.
    static Vector<Sum> apply_to_values(State<Scalar> S, const Vector<Scalar>& x) {
        Vector<Sum> y{};
        for (std::int64_t k = 0; k < S.key_dim; ++k) {
            const Scalar* row = S.row(k);
            for (std::int64_t v = 0; v < S.value_dim; ++v)
                y[static_cast<std::size_t>(k)] +=
                    static_cast<Sum>(row[v]) * static_cast<Sum>(x[static_cast<std::size_t>(v)]);
        }
        return y;
    }

    // S ← S + factor · x yᵀ
    static void add_product(State<Scalar> S, Sum factor, const Vector<Scalar>& x, const Vector<Scalar>& y) {
        for (std::int64_t k = 0; k < S.key_dim; ++k) {
            const Sum weight = factor * static_cast<Sum>(x[static_cast<std::size_t>(k)]);
            Scalar* row = S.row(k);
            for (std::int64_t v = 0; v < S.value_dim; ++v)
                row[v] = static_cast<Scalar>(static_cast<Sum>(row[v]) +
                                             weight * static_cast<Sum>(y[static_cast<std::size_t>(v)]));
        }
    }

    static Vector<Scalar> rounded(const Vector<Sum>& x, std::int64_t count, Sum factor = 1) {
        Vector<Scalar> y{};
        for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
            y[i] = static_cast<Scalar>(factor * x[i]);
        return y;
    }

    // One token, from the states before and after it: Z goes from after the token to before it.
    void step_back(std::int64_t n, const Tokens& tokens, std::int64_t t, std::int64_t hv,
                   const Scalar* before, State<Scalar> after, State<Scalar> Z, const Scratch& scratch) const {
        const std::int64_t at = tokens.begin + t;
        const Token<Scalar, Sum> token(args_, tokens.batch, at, hv);
        const auto scale = static_cast<Sum>(args_.scale);
        Vector<Scalar> d_o{};
        if (args_.d_o)
            for (std::int64_t v = 0; v < value_dim_; ++v)
                d_o[static_cast<std::size_t>(v)] =
                    static_cast<Scalar>(read<Sum>(args_.d_o, tokens.batch, at, hv, v));
        const Vector<Scalar> d_q = rounded(apply_to_values(after, d_o), key_dim_, scale);
        add_product(Z, scale, token.q, d_o);
        for (std::int64_t k = 0; wants_keys() && k < key_dim_; ++k)
            scratch.d_q[t * key_dim_ + k] += static_cast<Sum>(d_q[static_cast<std::size_t>(k)]);
        const State<Scalar> found = state(scratch.decayed);  // S' with the token's first writes
        for (std::int64_t j = writes_; j-- > 0;) {
            std::copy_n(before, state_size(), found.data);
            decay(token, found);
            apply_writes<Scalar, Sum>(args_, tokens.batch, at, hv, j, found);
            write_back(tokens, t * writes_ + j, hv, found, Z, scratch.d_k);
        }
        write_gate(n, tokens.batch, at, hv, Z, found);
        if (!takes_low_rank(args_.algorithm.update)) return decay(token, Z);
        const Write<Scalar, Sum> write(args_, tokens.batch, at, hv);
        std::copy_n(before, state_size(), found.data);
        const Vector<Scalar> read = rounded(apply<Sum>(found, write.a), value_dim_),
                             d_read = rounded(apply<Sum>(Z, write.b), value_dim_);
        write_keys(args_.d_a_key, tokens.batch, at, hv, rounded(apply_to_values(found, d_read), key_dim_));
        write_keys(args_.d_b_key, tokens.batch, at, hv, rounded(apply_to_values(Z, read), key_dim_));
        decay(token, Z);
        add_product(Z, 1, write.a, d_read);
    }

    // One write, row `row` of the sequence's, into the state `found`: Z goes from after it to before it.
    void write_back(const Tokens& tokens, std::int64_t row, std::int64_t hv, State<Scalar> found,
                    State<Scalar> Z, Sum* d_keys) const {
        const std::int64_t at = tokens.begin * writes_ + row;
        const Write<Scalar, Sum> write(args_, tokens.batch, at, hv);
        const Vector<Scalar> u = written(args_.algorithm.update, write, write.v, found),
                             d_u = rounded(apply<Sum>(Z, write.k), value_dim_);
        Vector<Scalar> d_k = rounded(apply_to_values(Z, u), key_dim_), d_v = d_u, d_beta{}, d_erase{};
        switch (args_.algorithm.update) {
            case Update::kAdditive:
            case Update::kDplr: break;
            case Update::kDelta:
            case Update::kProduct: {
                const Vector<Sum> known = apply<Sum>(found, write.k);
                Vector<Sum> per_value{}, d_w{};
                Sum all = 0;
                for (std::size_t v = 0; v < static_cast<std::size_t>(value_dim_); ++v) {
                    per_value[v] = (static_cast<Sum>(write.v[v]) - known[v]) * static_cast<Sum>(d_u[v]);
                    all += per_value[v];
                    d_w[v] = static_cast<Sum>(write.beta[v]) * static_cast<Sum>(d_u[v]);
                }
                if (args_.beta.ndim != 4) per_value[0] = all;
                d_beta = rounded(per_value, value_dim_);
                d_v = rounded(d_w, value_dim_);
                const Vector<Sum> removed = apply_to_values(found, d_v);
                for (std::size_t k = 0; k < static_cast<std::size_t>(key_dim_); ++k)
                    d_k[k] = static_cast<Scalar>(static_cast<Sum>(d_k[k]) - removed[k]);
                add_product(Z, -1, write.k, d_v);
                break;
            }
            case Update::kErase: {
                Vector<Sum> per_value{}, d_value{};
                Sum all = 0;
                for (std::size_t v = 0; v < static_cast<std::size_t>(value_dim_); ++v) {
                    per_value[v] = static_cast<Sum>(write.v[v]) * static_cast<Sum>(d_u[v]);
                    all += per_value[v];
                    d_value[v] = static_cast<Sum>(write.beta[v]) * static_cast<Sum>(d_u[v]);
                }
                if (args_.beta.ndim != 4) per_value[0] = all;
                d_beta = rounded(per_value, value_dim_);
                d_v = rounded(d_value, value_dim_);
                const Vector<Scalar> d_e = rounded(apply_to_values(found, d_u), key_dim_, -1);
                for (std::size_t k = 0; k < static_cast<std::size_t>(key_dim_); ++k) {
                    d_erase[k] = static_cast<Scalar>(static_cast<Sum>(d_e[k]) * static_cast<Sum>(write.k[k]));
                    d_k[k] = static_cast<Scalar>(static_cast<Sum>(d_k[k]) +
                                                 static_cast<Sum>(d_e[k]) * static_cast<Sum>(write.erase[k]));
                }
                add_product(Z, -1, write.e, d_u);
                break;
            }
        }
        write_values(args_.d_v, tokens.batch, at, hv, d_v);
        write_beta(tokens.batch, at, hv, write, d_beta);
        write_erase(tokens.batch, at, hv, write, d_erase);
        for (std::int64_t k = 0; wants_keys() && k < key_dim_; ++k)
            d_keys[row * key_dim_ + k] += static_cast<Sum>(d_k[static_cast<std::size_t>(k)]);
    }

    void write_values(const TensorRef& ref, std::int64_t b, std::int64_t t, std::int64_t hv,
                      const Vector<Scalar>& x) const {
        for (std::int64_t v = 0; ref && v < value_dim_; ++v)
            write(ref, static_cast<Sum>(x[static_cast<std::size_t>(v)]), b, t, hv, v);
    }

    void write_keys(const TensorRef& ref, std::int64_t b, std::int64_t t, std::int64_t hv,
                    const Vector<Scalar>& x) const {
        for (std::int64_t k = 0; ref && k < key_dim_; ++k)
            write(ref, static_cast<Sum>(x[static_cast<std::size_t>(k)]), b, t, hv, k);
    }

    // A strength is factor · sigmoid(x): its derivative is strength · sigmoid(-x).
    Sum of_given(Sum gradient, Scalar strength, Sum given) const {
        return args_.beta_is_logit ? gradient * static_cast<Sum>(strength) * sigmoid(-given) : gradient;
    }

    void write_erase(std::int64_t b, std::int64_t t, std::int64_t hv, const Write<Scalar, Sum>& row,
                     const Vector<Scalar>& d_erase) const {
        for (std::int64_t k = 0; args_.d_erase && k < key_dim_; ++k) {
            const auto i = static_cast<std::size_t>(k);
            write(args_.d_erase,
                  of_given(static_cast<Sum>(d_erase[i]), row.erase[i], read<Sum>(args_.erase, b, t, hv, k)),
                  b, t, hv, k);
        }
    }

    void write_beta(std::int64_t b, std::int64_t t, std::int64_t hv, const Write<Scalar, Sum>& row,
                    const Vector<Scalar>& d_beta) const {
        if (!args_.d_beta) return;
        if (args_.beta.ndim != 4)
            return write(args_.d_beta,
                         of_given(static_cast<Sum>(d_beta[0]), row.beta[0], read<Sum>(args_.beta, b, t, hv)),
                         b, t, hv);
        for (std::int64_t v = 0; v < value_dim_; ++v) {
            const auto i = static_cast<std::size_t>(v);
            write(args_.d_beta,
                  of_given(static_cast<Sum>(d_beta[i]), row.beta[i], read<Sum>(args_.beta, b, t, hv, v)), b,
                  t, hv, v);
        }
    }

    // The gradient of the log decay, rowsum(Z ∘ S'), through the gate.
    void write_gate(std::int64_t n, std::int64_t b, std::int64_t t, std::int64_t hv, State<Scalar> Z,
                    State<Scalar> decayed) const {
        if (!args_.d_g && !wants_parameters()) return;
        const bool per_channel = varies_by_channel(args_.algorithm.decay);
        Sum all = 0;
        for (std::int64_t k = 0; k < key_dim_; ++k) {
            Sum d_a = 0;
            for (std::int64_t v = 0; v < value_dim_; ++v)
                d_a += static_cast<Sum>(Z.row(k)[v]) * static_cast<Sum>(decayed.row(k)[v]);
            all += d_a;
            if (!per_channel) continue;
            const Sum bias = args_.dt_bias ? read<Sum>(args_.dt_bias, hv, k) : 0;
            const Sum d_g = through_gate(n, hv, k, static_cast<Sum>(static_cast<Scalar>(d_a)),
                                         read<Sum>(args_.g, b, t, hv, k) + bias);
            if (args_.d_g) write(args_.d_g, d_g, b, t, hv, k);
        }
        if (per_channel) return;
        const Sum bias = args_.dt_bias ? read<Sum>(args_.dt_bias, hv) : 0;
        const Sum d_g = through_gate(n, hv, 0, static_cast<Sum>(static_cast<Scalar>(all)),
                                     read<Sum>(args_.g, b, t, hv) + bias);
        if (args_.d_g) write(args_.d_g, d_g, b, t, hv);
    }

    // The gradient of x = g + dt_bias of that of the log decay; adds what A_log and dt_bias get.
    Sum through_gate(std::int64_t n, std::int64_t hv, std::int64_t k, Sum d_a, Sum x) const {
        if (args_.gate == Gate::kLogDecay) return d_a;
        const Sum exponential = args_.A_log ? std::exp(read<Sum>(args_.A_log, hv)) : 1;
        const bool clamped = exponential > kMostGateSlope;
        const Sum rate = clamped ? kMostGateSlope : exponential;
        Sum slope = 0, of_log_rate = 0;  // of the log decay: by x, by A_log
        switch (args_.gate) {
            case Gate::kLogDecay: break;
            case Gate::kSoftplus:
                slope = -rate * sigmoid(x);
                of_log_rate = -rate * softplus(x);
                break;
            case Gate::kBounded:
                slope = static_cast<Sum>(args_.lower_bound) * rate * sigmoid(rate * x) * sigmoid(-rate * x);
                of_log_rate = slope * x;
                break;
        }
        if (wants_parameters()) {
            Sum* const sums = partial(n, hv);
            if (!clamped) sums[0] += d_a * of_log_rate;
            sums[1 + k] += d_a * slope;
        }
        return d_a * slope;
    }

    // dq or dk of the normalised vector y = x r, as the gradient of x: r (dy - (dy · y) y).
    void write_key(const TensorRef& x, const TensorRef& d_x, std::int64_t b, std::int64_t at,
                   std::int64_t head, Sum* d_y) const {
        if (!d_x) return;
        if (args_.qk_l2norm) {
            Vector<Scalar> y{};
            Token<Scalar, Sum>::read_key(args_, x, b, at, head, y);
            Sum square = 0, along = 0;
            for (std::int64_t k = 0; k < key_dim_; ++k) {
                const Sum element = read<Sum>(x, b, at, head, k);
                square += element * element;
                along += d_y[k] * static_cast<Sum>(y[static_cast<std::size_t>(k)]);
            }
            const Sum norm = std::sqrt(square + static_cast<Sum>(1e-6));
            for (std::int64_t k = 0; k < key_dim_; ++k)
                d_y[k] = (d_y[k] - along * static_cast<Sum>(y[static_cast<std::size_t>(k)])) / norm;
        }
        for (std::int64_t k = 0; k < key_dim_; ++k) write(d_x, d_y[k], b, at, head, k);
    }

    void sum_parameters() const {
        const bool per_channel = varies_by_channel(args_.algorithm.decay);
        for (std::int64_t hv = 0; wants_parameters() && hv < value_heads_; ++hv)
            for (std::int64_t i = 0; i < 1 + (per_channel ? key_dim_ : 1); ++i) {
                Sum all = 0;
                for (std::int64_t n = 0; n < num_sequences(args_); ++n) all += partial(n, hv)[i];
                if (i == 0 && args_.d_A_log) write(args_.d_A_log, all, hv);
                if (i == 0 || !args_.d_dt_bias) continue;
                if (per_channel)
                    write(args_.d_dt_bias, all, hv, i - 1);
                else
                    write(args_.d_dt_bias, all, hv);
            }
    }

    // Tokens that belong to no sequence.
    void zero_tail() const {
        if (!args_.cu_seqlens) return;
        const std::int64_t end = read_index(args_.cu_seqlens, num_sequences(args_));
        for (const TensorRef* ref : {&args_.d_q, &args_.d_k, &args_.d_v, &args_.d_g, &args_.d_beta,
                                     &args_.d_erase, &args_.d_a_key, &args_.d_b_key}) {
            if (!*ref) continue;
            const bool of_tokens = ref == &args_.d_q || ref == &args_.d_g;
            for (std::int64_t t = end * (of_tokens ? 1 : writes_); t < ref->size[1]; ++t)
                for (std::int64_t h = 0; h < ref->size[2]; ++h)
                    for (std::int64_t i = 0; i < (ref->ndim == 4 ? ref->size[3] : 1); ++i) {
                        if (ref->ndim == 4)
                            write(*ref, Sum{}, 0, t, h, i);
                        else
                            write(*ref, Sum{}, 0, t, h);
                    }
        }
    }

    static void load(const StateRow& row, std::int64_t hv, State<Scalar> S) {
        if (!row) return static_cast<void>(std::fill_n(S.data, S.size(), Scalar{}));
        load_state<Sum>(matrix_at(row.states, row.slot, hv), S);
    }

    const Args& args_;
    const Context& context_;
    const std::int64_t key_dim_, value_dim_, value_heads_, group_, writes_, longest_, block_;
};

}  // namespace cula::reference
