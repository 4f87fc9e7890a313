// SPDX-License-Identifier: Apache-2.0
// step: tokens of one head, one after another. It serves decode, verify, prefills with one beta per value
// channel or few key channels, and all passes of rules that have no chunks here.
//
// Equation, per token (ALGORITHM.md, "The family"), with S [V, K]:
//     S' = S diag(exp(g))
//     u  = beta (v - S' k)           delta rules; additive rules: u = v; with an erase key e: beta v - S' e
//     S <- S' + u k^T
//     o  = S' q + u (k . q)          q has been multiplied by scale (inputs.h)
// Because o is formed from S', one pass over four rows reads, decays and contracts them with e and with q. A
// second pass, over rows that are still in cache, writes them. A token that writes n times does so n times
// with four rows, which it decays in the first pair of passes and contracts with q in the last.
//
// low_rank.h has the token of a rule with low-rank keys.
//
// The working state is [V, K] in float, K contiguous. It is the caller's own memory if that has this form and
// there is one token; otherwise it is a copy in scratch.
// Design page: docs/design/cpu.md.
#pragma once

#include "cpu/low_rank.h"
#include "cpu/states.h"

namespace cula::cpu::CULA_CPU_TARGET {

class Step {
public:
    static std::size_t scratch_bytes(const Args& args, int v_count, std::int64_t tree_tokens) {
        Carver carver(nullptr);
        Buffers{}.carve(carver, args, v_count, tree_tokens);
        return carver.bytes();
    }

    Step(const Args& args, const StepTask& task, std::byte* scratch)
        : args_(args),
          task_(task),
          corrects_(corrects(args.algorithm.update)),
          erases_(takes_erase(args.algorithm.update)),
          low_rank_(takes_low_rank(args.algorithm.update)),
          per_channel_(varies_by_channel(args.algorithm.decay)),
          rows_(round_up(task.v_count, kRows)),
          columns_(round_up(task.v_count, kColumnMultiple)),
          writes_(writes_per_token(args)),
          buffers_(carved(scratch, args, task)),
          inputs_(args, task, buffers_.gate_bias),
          channels_(inputs_.padded_key_dim),
          states_{buffers_.transposed, inputs_.key_dim, channels_, columns_, task.v_begin, task.v_count} {}

    void run() {
        const bool stores_within = stores_tokens() || task_.num_checkpoints || task_.chunk_states.data;
        if (task_.length == 1 && !stores_within && works_in_place()) return run_in_place();
        load_initial();
        const std::int64_t block = low_rank_ && !stores_tokens() ? kBlockTokens : 1;
        for (std::int64_t t = 0; t < task_.length; t += block) {
            if (task_.chunk_states.data && t % args_.chunk_tokens == 0)
                states_.write(advance(task_.chunk_states, t / args_.chunk_tokens * task_.chunk_states_stride),
                              buffers_.state);
            store_checkpoints(t);
            const float* before = buffers_.state;
            float* after = buffers_.state;
            if (task_.parents.data) {
                const std::int64_t parent = task_.parents[t];
                if (parent >= 0) before = node(parent);
                after = node(t);
            }
            if (low_rank_) {
                const std::int64_t left = task_.length - t;
                pass_tokens(t, static_cast<int>(left < block ? left : block), before, after);
            } else {
                load_token(t);
                for (int row = 0; row < rows_; row += kRows)
                    update<kRows>(before + row * channels_, after + row * channels_, channels_, row);
                store_output(t, buffers_.out);
            }
            store_token_states(t, after);
        }
        store_checkpoints(task_.length);
        if (task_.final.data) states_.write(task_.final, buffers_.state);
    }

private:
    static constexpr int kRows = 4;  // value rows that are updated together
    // With low-rank keys, tokens that a few rows pass before the next do. Chunk states and checkpoints lie at
    // multiples of it.
    static constexpr int kBlockTokens = 8;

    bool stores_tokens() const { return task_.slots.data || task_.snapshots.data || task_.parents.data; }

    // Whether a token writes u = beta (v - S' k), or v as it is.
    static constexpr bool corrects(Update update) {
        switch (update) {
            case Update::kAdditive:
            case Update::kDplr: return false;
            case Update::kDelta:
            case Update::kErase:
            case Update::kProduct: return true;
        }
        return false;
    }

    struct Buffers {
        float *q, *decay, *gate_bias;  // [K]
        float *k, *e;                  // [writes of a token, K]; e: what S' is read with
        float *v, *beta;               // [writes of a token, V]
        float* out;                    // [V]
        float* token_decay;
        LowRankToken low_rank[kBlockTokens];
        float* state;       // [V, K]
        float* transposed;  // [K, V]
        float* nodes;       // [tokens, V, K]: the state after each token of a tree

        void carve(Carver& carver, const Args& args, int v_count, std::int64_t tree_tokens) {
            const int channels = round_up(static_cast<int>(args.q.size[3]), kChannelMultiple);
            const int columns = round_up(v_count, kColumnMultiple);
            const std::int64_t writes = writes_per_token(args);
            for (float** p : {&q, &decay, &gate_bias}) *p = carver.take<float>(channels);
            k = carver.take<float>(writes * channels);
            e = takes_erase(args.algorithm.update) ? carver.take<float>(writes * channels) : k;
            for (float** p : {&v, &beta}) *p = carver.take<float>(writes * columns);
            out = carver.take<float>(columns);
            token_decay = carver.take<float>(kLanes);
            for (LowRankToken& token : low_rank) {
                token = {};
                if (!takes_low_rank(args.algorithm.update)) continue;
                for (float** p : {&token.decay, &token.k, &token.a, &token.b, &token.decayed_q})
                    *p = carver.take<float>(channels);
                for (float** p : {&token.v, &token.read, &token.out}) *p = carver.take<float>(columns);
            }
            state = carver.take<float>(columns * channels);
            transposed = carver.take<float>(channels * columns);
            nodes = carver.take<float>(tree_tokens * columns * channels);
        }
    };

    static Buffers carved(std::byte* scratch, const Args& args, const StepTask& task) {
        Carver carver(scratch);
        Buffers buffers;
        buffers.carve(carver, args, task.v_count, task.parents.data ? task.length : 0);
        return buffers;
    }

    float* node(std::int64_t t) const { return buffers_.nodes + t * columns_ * channels_; }

    bool whole_rows(const StateView& view) const {
        return view.dtype == Dtype::kFloat32 && view.stride_k == 1 && inputs_.key_dim == channels_ &&
               task_.v_count % kRows == 0;
    }
    bool works_in_place() const {
        return task_.initial.data && task_.final.data && whole_rows(task_.initial) && whole_rows(task_.final);
    }

    void run_in_place() {
        if (low_rank_) return pass_in_place();
        load_token(0);
        const StateView &from = task_.initial, &to = task_.final;
        for (int row = 0; row < rows_; row += kRows) {
            const auto* before = reinterpret_cast<const float*>(state_at(from, task_.v_begin + row, 0));
            auto* after = reinterpret_cast<float*>(state_at(to, task_.v_begin + row, 0));
            if (from.stride_v == to.stride_v)
                update<kRows>(before, after, from.stride_v, row);
            else
                for (int r = 0; r < kRows; ++r)
                    update<1>(before + r * from.stride_v, after + r * to.stride_v, 0, row + r);
        }
        store_output(0, buffers_.out);
    }

    void load_token(std::int64_t t) {
        Buffers& b = buffers_;
        const std::int64_t token = task_.begin + t;
        inputs_.query(b.q, token);
        if (per_channel_) {
            inputs_.channel_decays(b.decay, token);
        } else {
            inputs_.token_decays(b.token_decay, token, 1);
            for (int c = 0; c < channels_; c += kLanes) store(b.decay + c, broadcast(b.token_decay[0]));
        }
        for (std::int64_t write = 0; write < writes_; ++write) load_write(token * writes_ + write, write);
        const float* last = b.k + (writes_ - 1) * channels_;
        Vec dot{};
        for (int c = 0; c < channels_; c += kLanes) dot += load(last + c) * load(b.q + c);
        key_query_ = sum(dot);
    }

    // --- low-rank keys ---

    void load_low_rank(LowRankToken& own, std::int64_t t) const {
        const std::int64_t token = task_.begin + t;
        const float* q = buffers_.q;
        inputs_.query(buffers_.q, token);
        inputs_.channel_decays(own.decay, token);
        inputs_.key(own.k, token);
        inputs_.low_rank_keys(own.a, own.b, token);
        load_values(own.v, token);
        Vec of_key{}, of_b{};
        for (int c = 0; c < channels_; c += kLanes) {
            store(own.decayed_q + c, load(own.decay + c) * load(q + c));
            of_key += load(own.k + c) * load(q + c);
            of_b += load(own.b + c) * load(q + c);
        }
        own.key_query = sum(of_key);
        own.b_query = sum(of_b);
    }

    void pass_in_place() {
        LowRankToken& token = buffers_.low_rank[0];
        load_low_rank(token, 0);
        const StateView &from = task_.initial, &to = task_.final;
        each_rows<kOutputRows>(rows_, [&](auto rows, int row) {
            const auto* before = reinterpret_cast<const float*>(state_at(from, task_.v_begin + row, 0));
            auto* after = reinterpret_cast<float*>(state_at(to, task_.v_begin + row, 0));
            if (from.stride_v == to.stride_v)
                return pass_rows<rows(), true>(token, channels_, before, after, from.stride_v, row);
            for (int r = 0; r < rows(); ++r)
                pass_rows<1, true>(token, channels_, before + r * from.stride_v, after + r * to.stride_v, 0,
                                   row + r);
        });
        store_output(0, token.out);
    }

    // `count` tokens, the first of which finds `before`; they leave `after`.
    void pass_tokens(std::int64_t t, int count, const float* before, float* after) {
        LowRankToken* tokens = buffers_.low_rank;
        for (int i = 0; i < count; ++i) load_low_rank(tokens[i], t + i);
        each_rows<kOutputRows>(rows_, [&](auto rows, int row) {
            for (int i = 0; i < count; ++i)
                pass_rows<rows(), true>(tokens[i], channels_, (i ? after : before) + row * channels_,
                                        after + row * channels_, channels_, row);
        });
        for (int i = 0; i < count; ++i) store_output(t + i, tokens[i].out);
    }

    void load_values(float* v, std::int64_t row) const {
        if (task_.identity)
            for (int j = 0; j < columns_; j += kLanes) store(v + j, Vec{});
        else
            load_token_row(v, args_.v, task_.batch, row, task_.value_head, task_.v_begin, task_.v_count,
                           columns_);
    }

    // Row `row` of k, v and beta, a write of the token.
    void load_write(std::int64_t row, std::int64_t write) {
        const Buffers& b = buffers_;
        float *k = b.k + write * channels_, *v = b.v + write * columns_, *beta = b.beta + write * columns_;
        inputs_.key(k, row);
        if (erases_) inputs_.erase_key(b.e + write * channels_, k, row);
        load_values(v, row);
        if (corrects_) {
            if (args_.beta.ndim == 4) {
                inputs_.value_betas(beta, row, task_.v_begin, task_.v_count, columns_);
            } else {
                inputs_.betas(b.token_decay, row, 1);
                for (int j = 0; j < columns_; j += kLanes) store(beta + j, broadcast(b.token_decay[0]));
            }
        }
        // beta v - S' e is beta (v - S' e) of a beta of 1 and a v that has its strength.
        for (int j = 0; erases_ && j < columns_; j += kLanes) {
            store(v + j, load(v + j) * load(beta + j));
            store(beta + j, broadcast(1.0f));
        }
    }

    template <int kCount>
    void update(const float* before, float* after, std::int64_t stride, int row) {
        if (writes_ == 1) return update_rows<kCount, true, true>(before, after, stride, row, 0);
        update_rows<kCount, true, false>(before, after, stride, row, 0);
        for (std::int64_t write = 1; write + 1 < writes_; ++write)
            update_rows<kCount, false, false>(after, after, stride, row, write);
        update_rows<kCount, false, true>(after, after, stride, row, writes_ - 1);
    }

    // One write, which is the token's first (kDecays), its last (kReads), both or neither.
    template <int kCount, bool kDecays, bool kReads>
    void update_rows(const float* before, float* after, std::int64_t stride, int row, std::int64_t write) {
        const Buffers& b = buffers_;
        const float *keys = b.k + write * channels_, *readers = b.e + write * channels_,
                    *v = b.v + write * columns_ + row, *beta = b.beta + write * columns_ + row;
        Vec reads[kCount] = {}, outs[kCount] = {};
        for (int c = 0; c < channels_; c += kLanes) {
            const Vec decay = load(b.decay + c), e = load(readers + c), q = load(b.q + c);
            CULA_UNROLL
            for (int r = 0; r < kCount; ++r) {
                Vec s = load(before + r * stride + c);
                if constexpr (kDecays) s *= decay;
                reads[r] += s * e;
                if constexpr (kReads) outs[r] += s * q;
            }
        }
        float u[kCount];
        CULA_UNROLL
        for (int r = 0; r < kCount; ++r) {
            u[r] = corrects_ ? beta[r] * (v[r] - sum(reads[r])) : v[r];
            if constexpr (kReads) b.out[row + r] = sum(outs[r]) + u[r] * key_query_;
        }
        for (int c = 0; c < channels_; c += kLanes) {
            const Vec decay = load(b.decay + c), k = load(keys + c);
            CULA_UNROLL
            for (int r = 0; r < kCount; ++r) {
                Vec s = load(before + r * stride + c);
                if constexpr (kDecays) s *= decay;
                store(after + r * stride + c, s + k * u[r]);
            }
        }
    }

    void store_output(std::int64_t t, const float* out) const {
        if (!args_.o.data) return;
        store_token_row(args_.o, task_.batch, task_.begin + t, task_.value_head, task_.v_begin, out,
                        task_.v_count);
    }

    void store_token_states(std::int64_t t, const float* state) {
        if (task_.slots.data && task_.pool.data) {
            const std::int64_t slot = task_.slots[t];
            if (slot >= 0 && slot != args_.null_index) {
                StateView view = advance(task_.pool, slot * task_.pool_stride);
                if (view.scales) view.scales += slot * task_.pool_scales_stride;
                states_.write(view, state);
            }
        }
        if (task_.snapshots.data) states_.write(advance(task_.snapshots, t * task_.snapshots_stride), state);
    }

    void store_checkpoints(std::int64_t done) {
        for (; next_checkpoint_ < task_.num_checkpoints && task_.checkpoints[next_checkpoint_].tokens == done;
             ++next_checkpoint_) {
            const TensorRef& states = args_.checkpoints;
            const std::int64_t slot = task_.checkpoints[next_checkpoint_].slot;
            states_.write(
                {states.ptr(slot, task_.value_head), states.dtype, states.stride[2], states.stride[3]},
                buffers_.state);
        }
    }

    void load_initial() {
        states_.read(buffers_.state, task_.initial);
        for (int j = 0; task_.identity && j < task_.v_count; ++j)
            buffers_.state[j * channels_ + task_.v_begin + j] = 1.0f;
    }

    const Args& args_;
    const StepTask& task_;
    const bool corrects_, erases_, low_rank_, per_channel_;
    const int rows_, columns_;
    const std::int64_t writes_;  // of a token; its rows in scratch may be more numbers than an int counts
    Buffers buffers_;
    const HeadInputs inputs_;
    const int channels_;
    const StateRowMemory states_;
    float key_query_ = 0.0f;
    std::int64_t next_checkpoint_ = 0;
};

}  // namespace cula::cpu::CULA_CPU_TARGET
