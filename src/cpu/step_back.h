// SPDX-License-Identifier: Apache-2.0
// step_back: the gradients of one sequence and one query/key head, token by token, of a rule with low-rank
// keys. With S [V, K] before a token and S+ after it, r = S a, Z = d loss / d S+ [V, K], and the letters of
// low_rank.h (ALGORITHM.md, "Backward"):
//
//     Z  <- Z + do q^T                 dq = do S+
//     dv = Z k,  dr = Z b              dk = v Z,  db = r Z
//     da = dr S                        dg = exp(g) o colsum(Z o S)
//     Z  <- Z diag(exp(g)) + dr a^T    at last dh0 = Z
//
// then, in float32, through gate and norm (derivatives.h). Everything is computed, whatever is wanted.
//
// States. The walk backwards needs the state before and after each token. A sequence is divided into blocks
// of kBlockTokens tokens, and blocks into at most kMostGroups groups of equally many. One walk forwards keeps
// the first states of groups; another, before a group is walked backwards, those of its blocks; a third those
// of a block's tokens.
//
// Value heads of a group of heads follow each other; the gradients of q and k are summed in their order. A
// task shares nothing with others, so that bits do not depend on threads.
// Design page: docs/design/backward-cpu.md.
#pragma once

#include "cpu/derivatives.h"
#include "cpu/low_rank.h"
#include "cpu/states.h"

namespace cula::cpu::CULA_CPU_TARGET {

class StepBack {
public:
    static std::size_t scratch_bytes(const Args& args, std::int64_t tokens) {
        Carver carver(nullptr);
        Buffers().carve(carver, args, Blocks(tokens));
        return carver.bytes();
    }

    // The value head `index` of the task's. scratch is the same for all of them.
    StepBack(const Args& args, const BackwardTask& task, int index, std::byte* scratch)
        : args_(args),
          whole_(task),
          index_(index),
          head_{task.batch, task.head, task.value_head + index},
          value_dim_(static_cast<int>(args.v.size[3])),
          rows_(round_up(value_dim_, 4)),
          columns_(round_up(value_dim_, kColumnMultiple)),
          blocks_(task.length),
          buffers_(carved(scratch, args, Blocks(task.length))),
          inputs_(args, head_, buffers_.gate_bias),
          channels_(inputs_.padded_key_dim),
          states_{buffers_.transposed, inputs_.key_dim, channels_, columns_, 0, value_dim_} {}

    void run() {
        const Buffers& b = buffers_;
        for (int i = 0; i < 1 + channels_; ++i) b.parameters[i] = 0.0;
        states_.read(b.Z, advance(whole_.d_final, index_ * whole_.d_final_step));
        if (whole_.length > 0) {
            walk_forwards();
            for (std::int64_t group = blocks_.groups; group-- > 0;) step_back_group(group);
        }
        finish();
    }

private:
    static constexpr int kBlockTokens = 16;
    static constexpr std::int64_t kMostGroups = 256;

    struct Head {
        std::int64_t batch, head, value_head;
    };

    struct Blocks {
        std::int64_t tokens, count, of_group, groups;

        CULA_INLINE explicit Blocks(std::int64_t all)
            : tokens(all),
              count((all + kBlockTokens - 1) / kBlockTokens),
              of_group((count + kMostGroups - 1) / kMostGroups),
              groups(of_group ? (count + of_group - 1) / of_group : 0) {}
    };

    struct Buffers {
        LowRankToken tokens[kBlockTokens];
        float *q, *d_q, *d_k, *d_a, *d_b, *d_g;               // [tokens of a block, K]
        float *d_o, *d_v, *d_read;                            // [tokens of a block, V]
        float* row;                                           // [K]
        float *gate_bias, *bias_sum;                          // [K]
        double* parameters;                                   // [1 + K]: the head's dA_log and ddt_bias
        float *Z, *transposed;                                // [V, K]
        float *starts_of_groups, *starts_of_blocks, *states;  // [.., V, K]
        float *sums_q, *sums_k;                               // [tokens, K]: over several value heads
        std::int64_t state_size;

        void carve(Carver& carver, const Args& args, const Blocks& blocks) {
            const int channels = round_up(static_cast<int>(args.q.size[3]), kChannelMultiple);
            const int columns = round_up(static_cast<int>(args.v.size[3]), kColumnMultiple);
            for (LowRankToken& token : tokens) {
                token = {};
                for (float** p : {&token.decay, &token.k, &token.a, &token.b})
                    *p = carver.take<float>(channels);
                for (float** p : {&token.v, &token.read}) *p = carver.take<float>(columns);
            }
            for (float** p : {&q, &d_q, &d_k, &d_a, &d_b, &d_g})
                *p = carver.take<float>(kBlockTokens * channels);
            for (float** p : {&d_o, &d_v, &d_read}) *p = carver.take<float>(kBlockTokens * columns);
            for (float** p : {&row, &gate_bias, &bias_sum}) *p = carver.take<float>(channels);
            parameters = carver.take<double>(1 + channels);
            state_size = std::int64_t{channels} * columns;
            for (float** p : {&Z, &transposed}) *p = carver.take<float>(state_size);
            starts_of_groups = carver.take<float>(blocks.groups * state_size);
            starts_of_blocks = carver.take<float>(blocks.of_group * state_size);
            states = carver.take<float>((kBlockTokens + 1) * state_size);
            const std::int64_t sums = args.v.size[2] > args.q.size[2] ? blocks.tokens * channels : 0;
            sums_q = carver.take<float>(sums);
            sums_k = carver.take<float>(sums);
        }
    };

    static Buffers carved(std::byte* scratch, const Args& args, const Blocks& blocks) {
        Carver carver(scratch);
        Buffers buffers;
        buffers.carve(carver, args, blocks);
        return buffers;
    }

    float* state(float* states, std::int64_t i) const { return states + i * buffers_.state_size; }

    static void copy(float* dst, const float* src, std::int64_t count) {
        for (std::int64_t x = 0; x < count; x += kLanes) store(dst + x, load(src + x));
    }

    // --- forwards ---

    // What a token brings to its state.
    void load_token(const LowRankToken& token, std::int64_t t) const {
        const std::int64_t at = whole_.begin + t;
        inputs_.channel_decays(token.decay, at);
        inputs_.key(token.k, at);
        inputs_.low_rank_keys(token.a, token.b, at);
        load_token_row(token.v, args_.v, head_.batch, at, head_.value_head, 0, value_dim_, columns_);
    }

    // From the state before token `begin`, in `S`, to that before token `end`, both multiples of
    // kBlockTokens. keep(t) may keep the state before token t, a multiple as well.
    template <class Keep>
    void walk(float* S, std::int64_t begin, std::int64_t end, Keep keep) const {
        const LowRankToken* tokens = buffers_.tokens;
        for (std::int64_t t = begin; t < end; t += kBlockTokens) {
            keep(t);
            for (int i = 0; i < kBlockTokens; ++i) load_token(tokens[i], t + i);
            each_rows<kStateRows>(rows_, [&](auto rows, int row) {
                float* at = S + row * channels_;
                for (int i = 0; i < kBlockTokens; ++i)
                    pass_rows<rows(), false>(tokens[i], channels_, at, at, channels_, row);
            });
        }
        keep(end);
    }

    // Keeps the first states of all groups.
    void walk_forwards() const {
        const Buffers& b = buffers_;
        const std::int64_t tokens = blocks_.of_group * kBlockTokens;  // of a group
        states_.read(b.states, advance(whole_.initial, index_ * whole_.initial_step));
        walk(b.states, 0, (blocks_.groups - 1) * tokens, [&](std::int64_t t) {
            if (t % tokens == 0) copy(state(b.starts_of_groups, t / tokens), b.states, b.state_size);
        });
    }

    // --- backwards ---

    void step_back_group(std::int64_t group) {
        const Buffers& b = buffers_;
        const std::int64_t first = group * blocks_.of_group, end = first + blocks_.of_group < blocks_.count
                                                                       ? first + blocks_.of_group
                                                                       : blocks_.count;
        copy(b.states, state(b.starts_of_groups, group), b.state_size);
        walk(b.states, first * kBlockTokens, (end - 1) * kBlockTokens, [&](std::int64_t t) {
            if (t % kBlockTokens == 0)
                copy(state(b.starts_of_blocks, t / kBlockTokens - first), b.states, b.state_size);
        });
        for (std::int64_t block = end; block-- > first;) {
            copy(b.states, state(b.starts_of_blocks, block - first), b.state_size);
            step_back_block(block * kBlockTokens);
        }
    }

    // The block that begins with token `begin`, from the state before it, which is the first of b.states.
    void step_back_block(std::int64_t begin) {
        const Buffers& b = buffers_;
        const std::int64_t left = blocks_.tokens - begin;
        const int count = static_cast<int>(left < kBlockTokens ? left : kBlockTokens);
        load_block(begin, count);
        each_rows<kStateRows>(rows_, [&](auto rows, int row) {
            for (int i = 0; i < count; ++i)
                pass_rows<rows(), false>(b.tokens[i], channels_, state(b.states, i) + row * channels_,
                                         state(b.states, i + 1) + row * channels_, channels_, row);
        });
        for (float* sums : {b.d_q, b.d_k, b.d_a, b.d_b, b.d_g})
            for (int x = 0; x < count * channels_; x += kLanes) store(sums + x, Vec{});
        each_rows<kOutputRows>(rows_, [&](auto rows, int row) {
            for (int i = count; i-- > 0;) {
                read_back<rows()>(i, row);
                return_rows<rows()>(i, row);
            }
        });
        for (int c = 0; c < channels_; c += kLanes) store(b.bias_sum + c, Vec{});
        log_rate_ = Vec{};
        for (int i = count; i-- > 0;) write(i, begin + i);
        const GateDerivative derivative{inputs_};
        b.parameters[0] += static_cast<double>(sum(log_rate_) * derivative.log_rate_factor());
        for (int c = 0; c < inputs_.key_dim; ++c) b.parameters[1 + c] += static_cast<double>(b.bias_sum[c]);
    }

    void load_block(std::int64_t begin, int count) const {
        const Buffers& b = buffers_;
        for (int i = 0; i < count; ++i) {
            load_token(b.tokens[i], begin + i);
            inputs_.query(b.q + i * channels_, whole_.begin + begin + i);
            float* d_o = b.d_o + i * columns_;
            if (args_.d_o)
                load_token_row(d_o, args_.d_o, head_.batch, whole_.begin + begin + i, head_.value_head, 0,
                               value_dim_, columns_);
            else
                for (int j = 0; j < columns_; j += kLanes) store(d_o + j, Vec{});
        }
    }

    // Rows of Z take the output of token i of the block; dq, dk, db, dv and dr.
    template <int kCount>
    void read_back(int i, int row) const {
        const Buffers& b = buffers_;
        const LowRankToken& token = b.tokens[i];
        const float *after = state(b.states, i + 1) + row * channels_, *d_o = b.d_o + i * columns_ + row,
                    *v = token.v + row, *read = token.read + row;
        float* Z = b.Z + row * channels_;
        Vec partial[2 * kCount] = {};  // of dv, then of dr
        for (int c = 0; c < channels_; c += kLanes) {
            const int at = i * channels_ + c;
            const Vec q = load(b.q + at), key = load(token.k + c), of_read = load(token.b + c);
            Vec d_q = load(b.d_q + at), d_k = load(b.d_k + at), d_b = load(b.d_b + at);
            CULA_UNROLL
            for (int r = 0; r < kCount; ++r) {
                const Vec z = load(Z + r * channels_ + c) + q * d_o[r];
                store(Z + r * channels_ + c, z);
                d_q += load(after + r * channels_ + c) * d_o[r];
                d_k += z * v[r];
                d_b += z * read[r];
                partial[r] += z * key;
                partial[kCount + r] += z * of_read;
            }
            store(b.d_q + at, d_q);
            store(b.d_k + at, d_k);
            store(b.d_b + at, d_b);
        }
        float found[2 * kCount + kLanes];
        store_sums(found, partial);
        for (int r = 0; r < kCount; ++r) {
            b.d_v[i * columns_ + row + r] = found[r];
            b.d_read[i * columns_ + row + r] = found[kCount + r];
        }
    }

    // Rows of Z pass the decay and the reading of token i of the block; da, and dg without the decay.
    template <int kCount>
    void return_rows(int i, int row) const {
        const Buffers& b = buffers_;
        const LowRankToken& token = b.tokens[i];
        const float *before = state(b.states, i) + row * channels_, *d_read = b.d_read + i * columns_ + row;
        float* Z = b.Z + row * channels_;
        for (int c = 0; c < channels_; c += kLanes) {
            const int at = i * channels_ + c;
            const Vec decay = load(token.decay + c), a = load(token.a + c);
            Vec d_a = load(b.d_a + at), d_g = load(b.d_g + at);
            CULA_UNROLL
            for (int r = 0; r < kCount; ++r) {
                const Vec s = load(before + r * channels_ + c), z = load(Z + r * channels_ + c);
                d_a += s * d_read[r];
                d_g += z * s;
                store(Z + r * channels_ + c, z * decay + a * d_read[r]);
            }
            store(b.d_a + at, d_a);
            store(b.d_g + at, d_g);
        }
    }

    // --- results ---

    // Token i of the block, which is token t.
    void write(int i, std::int64_t t) {
        const Buffers& b = buffers_;
        const std::int64_t at = whole_.begin + t;
        const auto row_of = [&](const TensorRef& ref, const float* row, int count) {
            if (ref) store_token_row(ref, head_.batch, at, head_.value_head, 0, row, count);
        };
        float* d_g = b.d_g + i * channels_;
        row_of(args_.d_v, b.d_v + i * columns_, value_dim_);
        row_of(args_.d_a_key, b.d_a + i * channels_, inputs_.key_dim);
        row_of(args_.d_b_key, b.d_b + i * channels_, inputs_.key_dim);
        write_gate(b.tokens[i], d_g, at);
        row_of(args_.d_g, d_g, inputs_.key_dim);
        write_keys(b.d_q + i * channels_, b.d_k + i * channels_, t);
    }

    // d_g, which lacks the decay, becomes that of the given gate.
    void write_gate(const LowRankToken& token, float* d_g, std::int64_t at) {
        const Buffers& b = buffers_;
        const GateDerivative derivative{inputs_};
        load_token_row(b.row, args_.g, head_.batch, at, head_.value_head, 0, inputs_.key_dim, channels_);
        for (int c = 0; c < channels_; c += kLanes) {
            const GateGradient gradient = derivative(load(b.row + c), load(inputs_.gate_bias + c),
                                                     load(d_g + c) * load(token.decay + c));
            store(d_g + c, gradient.of_x);
            store(b.bias_sum + c, load(b.bias_sum + c) + gradient.of_x);
            log_rate_ += gradient.of_log_rate;
        }
    }

    void write_keys(float* d_q, float* d_k, std::int64_t t) const {
        const Buffers& b = buffers_;
        const bool first = index_ == 0, last = index_ + 1 == whole_.group;
        const auto add = [&](float* row, float* sums) {
            float* all = sums + t * channels_;
            for (int c = 0; c < channels_ && !first; c += kLanes)
                store(row + c, load(row + c) + load(all + c));
            if (!last) copy(all, row, channels_);
        };
        if (whole_.group > 1) add(d_q, b.sums_q), add(d_k, b.sums_k);
        if (!last) return;
        const std::int64_t at = whole_.begin + t;
        write_key_gradient(inputs_, args_.q, args_.d_q, at, static_cast<float>(args_.scale), d_q, b.row);
        write_key_gradient(inputs_, args_.k, args_.d_k, at, 1.0f, d_k, b.row);
    }

    void finish() const {
        const Buffers& b = buffers_;
        if (StateView d_initial = advance(whole_.d_initial, index_ * whole_.d_initial_step); d_initial.data) {
            if (!whole_.starts_from_state)
                for (std::int64_t x = 0; x < b.state_size; x += kLanes) store(b.Z + x, Vec{});
            states_.write(d_initial, b.Z);
        }
        if (double* sums = whole_.parameters)
            for (int i = 0; i < 1 + inputs_.key_dim; ++i)
                sums[index_ * (1 + inputs_.key_dim) + i] = b.parameters[i];
    }

    const Args& args_;
    const BackwardTask& whole_;
    const int index_;  // of the value head in its group
    const Head head_;
    const int value_dim_, rows_, columns_;
    const Blocks blocks_;
    const Buffers buffers_;
    const HeadInputs inputs_;
    const int channels_;
    const StateRowMemory states_;
    Vec log_rate_{};  // of a block's tokens: dA_log without its factor
};

inline void step_back_heads(const Args& args, const BackwardTask& task, std::byte* scratch) {
    for (int i = 0; i < task.group; ++i) StepBack(args, task, i, scratch).run();
}

}  // namespace cula::cpu::CULA_CPU_TARGET
