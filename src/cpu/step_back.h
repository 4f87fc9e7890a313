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
          rows_(round_up(value_dim_, kRows)),
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
    static constexpr int kRows = 4;  // value rows that are updated together
    static constexpr std::int64_t kBlockTokens = 16, kMostGroups = 256;

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
        float* q[kBlockTokens];                               // [K]
        float *d_q, *d_k, *d_a, *d_b, *d_g, *row;             // [K]
        float *d_o, *d_v, *d_read;                            // [V]
        float *gate_bias, *bias_sum;                          // [K]
        double* parameters;                                   // [1 + K]: the head's dA_log and ddt_bias
        float *Z, *transposed;                                // [V, K]
        float *starts_of_groups, *starts_of_blocks, *states;  // [.., V, K]
        float *sums_q, *sums_k;                               // [tokens, K]: over several value heads
        std::int64_t state_size;

        void carve(Carver& carver, const Args& args, const Blocks& blocks) {
            const int channels = round_up(static_cast<int>(args.q.size[3]), kChannelMultiple);
            const int columns = round_up(static_cast<int>(args.v.size[3]), kColumnMultiple);
            for (std::int64_t i = 0; i < kBlockTokens; ++i) {
                LowRankToken& token = tokens[i];
                token = {};
                for (float** p : {&token.decay, &token.k, &token.a, &token.b, &q[i]})
                    *p = carver.take<float>(channels);
                for (float** p : {&token.v, &token.read}) *p = carver.take<float>(columns);
            }
            for (float** p : {&d_q, &d_k, &d_a, &d_b, &d_g, &row, &gate_bias, &bias_sum})
                *p = carver.take<float>(channels);
            for (float** p : {&d_o, &d_v, &d_read}) *p = carver.take<float>(columns);
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
        load_row(token.v, args_.v.ptr(head_.batch, at, head_.value_head), args_.v.dtype, value_dim_,
                 columns_);
    }

    void pass(const LowRankToken& token, const float* before, float* after) const {
        for (int row = 0; row < rows_; row += kRows)
            pass_rows<kRows, false>(token, channels_, before + row * channels_, after + row * channels_,
                                    channels_, row);
    }

    // From the state before token `begin`, in `S`, to that before token `end`. keep(t) may keep the state
    // before token t.
    template <class Keep>
    void walk(float* S, std::int64_t begin, std::int64_t end, Keep keep) const {
        const LowRankToken& token = buffers_.tokens[0];
        for (std::int64_t t = begin; t < end; ++t) {
            keep(t);
            load_token(token, t);
            pass(token, S, S);
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
        const std::int64_t left = blocks_.tokens - begin, count = left < kBlockTokens ? left : kBlockTokens;
        for (std::int64_t i = 0; i < count; ++i) {
            load_token(b.tokens[i], begin + i);
            inputs_.query(b.q[i], whole_.begin + begin + i);
            pass(b.tokens[i], state(b.states, i), state(b.states, i + 1));
        }
        for (int c = 0; c < channels_; c += kLanes) store(b.bias_sum + c, Vec{});
        log_rate_ = Vec{};
        for (std::int64_t i = count; i-- > 0;) {
            step_back(b.tokens[i], b.q[i], begin + i, state(b.states, i), state(b.states, i + 1));
            write(begin + i);
        }
        const GateDerivative derivative{inputs_};
        b.parameters[0] += static_cast<double>(sum(log_rate_) * derivative.log_rate_factor());
        for (int c = 0; c < inputs_.key_dim; ++c) b.parameters[1 + c] += static_cast<double>(b.bias_sum[c]);
    }

    // One token, from the states before and after it: Z goes from after the token to before it.
    void step_back(const LowRankToken& token, const float* q, std::int64_t t, const float* before,
                   const float* after) const {
        const Buffers& b = buffers_;
        if (args_.d_o)
            load_row(b.d_o, args_.d_o.ptr(head_.batch, whole_.begin + t, head_.value_head), args_.d_o.dtype,
                     value_dim_, columns_);
        else
            for (int j = 0; j < columns_; j += kLanes) store(b.d_o + j, Vec{});
        for (int c = 0; c < channels_; c += kLanes)
            for (float* sums : {b.d_q, b.d_k, b.d_a, b.d_b, b.d_g}) store(sums + c, Vec{});
        for (int row = 0; row < rows_; row += kRows) read_back(token, q, after + row * channels_, row);
        for (int row = 0; row < rows_; row += kRows) return_state(token, before + row * channels_, row);
        for (int c = 0; c < channels_; c += kLanes) store(b.d_g + c, load(b.d_g + c) * load(token.decay + c));
    }

    // Rows of Z take the token's output; dq, dk, db, dv and dr.
    void read_back(const LowRankToken& token, const float* q, const float* after, int row) const {
        const Buffers& b = buffers_;
        float* Z = b.Z + row * channels_;
        Vec d_v[kRows] = {}, d_read[kRows] = {};
        for (int c = 0; c < channels_; c += kLanes) {
            const Vec query = load(q + c), key = load(token.k + c), of_read = load(token.b + c);
            Vec d_q = load(b.d_q + c), d_k = load(b.d_k + c), d_b = load(b.d_b + c);
            CULA_UNROLL
            for (int r = 0; r < kRows; ++r) {
                const float d_o = b.d_o[row + r];
                const Vec z = load(Z + r * channels_ + c) + query * d_o;
                store(Z + r * channels_ + c, z);
                d_q += load(after + r * channels_ + c) * d_o;
                d_k += z * token.v[row + r];
                d_b += z * token.read[row + r];
                d_v[r] += z * key;
                d_read[r] += z * of_read;
            }
            store(b.d_q + c, d_q);
            store(b.d_k + c, d_k);
            store(b.d_b + c, d_b);
        }
        CULA_UNROLL
        for (int r = 0; r < kRows; ++r) {
            b.d_v[row + r] = sum(d_v[r]);
            b.d_read[row + r] = sum(d_read[r]);
        }
    }

    // Rows of Z pass the decay and the token's reading; da, and dg without the decay.
    void return_state(const LowRankToken& token, const float* before, int row) const {
        const Buffers& b = buffers_;
        float* Z = b.Z + row * channels_;
        for (int c = 0; c < channels_; c += kLanes) {
            const Vec decay = load(token.decay + c), a = load(token.a + c);
            Vec d_a = load(b.d_a + c), d_g = load(b.d_g + c);
            CULA_UNROLL
            for (int r = 0; r < kRows; ++r) {
                const float d_read = b.d_read[row + r];
                const Vec s = load(before + r * channels_ + c), z = load(Z + r * channels_ + c);
                d_a += s * d_read;
                d_g += z * s;
                store(Z + r * channels_ + c, z * decay + a * d_read);
            }
            store(b.d_a + c, d_a);
            store(b.d_g + c, d_g);
        }
    }

    // --- results ---

    void write(std::int64_t t) {
        const Buffers& b = buffers_;
        const std::int64_t at = whole_.begin + t;
        const auto row_of = [&](const TensorRef& ref, const float* row, int count) {
            if (ref) store_row(ref.ptr(head_.batch, at, head_.value_head), ref.dtype, row, count);
        };
        row_of(args_.d_v, b.d_v, value_dim_);
        row_of(args_.d_a_key, b.d_a, inputs_.key_dim);
        row_of(args_.d_b_key, b.d_b, inputs_.key_dim);
        write_gate(at);
        row_of(args_.d_g, b.d_g, inputs_.key_dim);
        write_keys(t);
    }

    // d_g becomes that of the given gate.
    void write_gate(std::int64_t at) {
        const Buffers& b = buffers_;
        const GateDerivative derivative{inputs_};
        load_row(b.row, args_.g.ptr(head_.batch, at, head_.value_head), args_.g.dtype, inputs_.key_dim,
                 channels_);
        for (int c = 0; c < channels_; c += kLanes) {
            const GateGradient gradient =
                derivative(load(b.row + c), load(inputs_.gate_bias + c), load(b.d_g + c));
            store(b.d_g + c, gradient.of_x);
            store(b.bias_sum + c, load(b.bias_sum + c) + gradient.of_x);
            log_rate_ += gradient.of_log_rate;
        }
    }

    void write_keys(std::int64_t t) const {
        const Buffers& b = buffers_;
        const bool first = index_ == 0, last = index_ + 1 == whole_.group;
        const auto add = [&](float* row, float* sums) {
            float* all = sums + t * channels_;
            for (int c = 0; c < channels_ && !first; c += kLanes)
                store(row + c, load(row + c) + load(all + c));
            if (!last) copy(all, row, channels_);
        };
        if (whole_.group > 1) add(b.d_q, b.sums_q), add(b.d_k, b.sums_k);
        if (!last) return;
        const std::int64_t at = whole_.begin + t;
        write_key_gradient(inputs_, args_.q, args_.d_q, at, static_cast<float>(args_.scale), b.d_q, b.row);
        write_key_gradient(inputs_, args_.k, args_.d_k, at, 1.0f, b.d_k, b.row);
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
