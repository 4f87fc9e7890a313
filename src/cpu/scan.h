// SPDX-License-Identifier: Apache-2.0
// scan: one head of a sequence in chunks of 64 tokens, in the phases score, solve, read, output, carry.
//
// Equation, per chunk that starts from the state S (ALGORITHM.md, "Chunks", which also has the letters):
//     score    A = tril(Q~ K-^T),  L = tril(K^ K-^T, -1)
//     solve    T = (I + diag(beta) L)^-1 diag(beta)       additive rules: T = I
//     read     U = T (V - K^ S)                           additive rules: U = V
//     output   O = Q~ S + A U
//     carry    S <- diag(Gamma_C) S + K+^T U
//
// Decay. Every factor is a running product of exp(g), between a token and an anchor on the same side of it in
// time. So all factors of a contraction are at most 1: nothing overflows at any decay, underflow is the true
// limit, and no digits are lost in a cumulative sum of logarithms.
// A pair of tokens (i, j) is anchored at the border of the largest aligned block that separates them. Blocks
// of 32 and 16 tokens are matrix products; the 16 x 16 squares on the diagonal multiply the factors out,
// token by token. With one decay per token the factors multiply the scores instead.
//
// Compensated operands (bf16, delta rules). If keys are nearly collinear, the writes U of a chunk nearly
// cancel, and later tokens of the chunk do not correct what rounding takes from U, the inverse and the
// scores, as they do in the recurrence. All three are therefore kept as two words: a high word and a low word
// with what rounding to the high word lost.
// Without low words the error is 6 to 13 times that of the naive recurrence; without those of the scores it
// is up to 3.8 times, on outputs of a few numbers.
//
// S is kept as [K, columns] in float. Operands of products are Words (gemm.h): pairs of bf16 if the inputs
// are bf16 and the CPU multiplies bf16, floats otherwise.
// Design page: docs/design/cpu.md.
#pragma once

#include <new>

#include "cpu/gemm.h"
#include "cpu/inputs.h"

namespace cula::cpu::CULA_CPU_TARGET {

inline constexpr int kChunk = kChunkTokens;
inline constexpr int kLeaf = 16;  // tokens of a diagonal square

// What one head keeps from one chunk to the next.
struct ScanState {
    float* state;  // [channels, columns]
    float *gate_bias, *decay_so_far;

    static ScanState carve(Carver& carver, int channels, int columns) {
        return {carver.take<float>(channels * columns), carver.take<float>(channels),
                carver.take<float>(channels)};
    }
};

// Scratch for the current chunk; heads that are processed together use it in turn. *_lost_w: low words.
template <class Word>
struct ScanBuffers {
    // [tokens, channels]
    float *q, *k, *decay;
    Word *q_decayed, *k_decayed;  // Q~, K^: decayed to the chunk's start; row-major
    Word* k_remaining;            // K+: decayed to the chunk's end; packed as a B operand
    Word* k_remaining_t;          // its transpose, [channels, token words]
    Word *q_anchored, *k_anchored, *k_toward, *k_toward_t;
    float* chunk_decay;
    // [tokens, tokens]
    float *scores, *overlaps, *inverse;
    Word *scores_w, *scores_lost_w, *inverse_w, *inverse_lost_w;
    float *beta, *token_decay, *row_decay;
    // [tokens, columns]
    float *values, *read, *out;
    Word *values_w, *writes_w, *writes_lost_w;
    Word* state_w;      // [channels, columns]
    float* transposed;  // [columns, channels]
    float* leaf;        // [kLeaf, kLeaf]

    static ScanBuffers carve(Carver& carver, int channels, int columns) {
        ScanBuffers b;
        const auto matrix = [&](float*& p, int rows, int width) { p = carver.take<float>(rows * width); };
        const auto operand = [&](Word*& p, int rows, int width) {
            p = carver.take<Word>(rows * width / kPerWord<Word>);
        };
        matrix(b.q, kChunk, channels);
        matrix(b.k, kChunk, channels);
        matrix(b.decay, kChunk, channels);
        for (Word** p : {&b.q_decayed, &b.k_decayed, &b.k_remaining, &b.k_remaining_t, &b.q_anchored,
                         &b.k_anchored, &b.k_toward, &b.k_toward_t})
            operand(*p, kChunk, channels);
        matrix(b.chunk_decay, 1, channels);
        for (float** p : {&b.scores, &b.overlaps, &b.inverse}) matrix(*p, kChunk, kChunk);
        for (Word** p : {&b.scores_w, &b.scores_lost_w, &b.inverse_w, &b.inverse_lost_w})
            operand(*p, kChunk, kChunk);
        for (float** p : {&b.beta, &b.token_decay, &b.row_decay}) matrix(*p, 1, kChunk);
        for (float** p : {&b.values, &b.read, &b.out}) matrix(*p, kChunk, columns);
        for (Word** p : {&b.values_w, &b.writes_w, &b.writes_lost_w}) operand(*p, kChunk, columns);
        operand(b.state_w, channels, columns);
        matrix(b.transposed, columns, channels);
        matrix(b.leaf, kLeaf, kLeaf);
        return b;
    }
};

template <class Word>
class Scan {
public:
    Scan(const Args& args, const ScanTask& task, const ScanBuffers<Word>& buffers, const ScanState& own)
        : args_(args),
          task_(task),
          solves_(solves(args.algorithm.update)),
          per_channel_(varies_by_channel(args.algorithm.decay)),
          with_output_(args.o.ndim != 0),
          chunk_(chunk_tokens(args, task)),
          columns_(round_up(task.v_count, kColumnMultiple)),
          buffers_(buffers),
          own_(own),
          inputs_(args, task, own.gate_bias),
          key_dim_(inputs_.key_dim),
          channels_(inputs_.padded_key_dim),
          words_(channels_ / kPerWord<Word>) {
        load_initial();
        if (task_.total_decay) fill(own_.decay_so_far, channels_, 1.0f);
    }

    static int chunk_tokens(const Args& args, const ScanTask& task) {
        return task.chunk_states.data ? args.chunk_tokens : kChunkTokens;
    }

    // Processes the chunk that starts `done` tokens into the sequence.
    void step(std::int64_t done) {
        store_checkpoints(done);
        if (task_.chunk_states.data)
            store_state(advance(task_.chunk_states, done / chunk_ * task_.chunk_states_stride));
        count_ = static_cast<int>(task_.length - done < chunk_ ? task_.length - done : chunk_);
        padded_ = round_up(count_, kTokenMultiple);
        chunk(task_.begin + done);
    }

    void finish() {
        store_checkpoints(task_.length);
        if (task_.final.data) store_state(task_.final);
        for (int c = 0; task_.total_decay && c < key_dim_; ++c)
            task_.total_decay[c * task_.total_decay_stride] = own_.decay_so_far[c];
    }

private:
    // Whether the writes U of a chunk solve a triangular system (solve, read), or are its values.
    static constexpr bool solves(Update update) {
        switch (update) {
            case Update::kAdditive: return false;
            case Update::kDelta: return true;
        }
        return false;
    }

    // Whether operands of rules that solve are compensated.
    static constexpr bool kSplit = kPerWord<Word> > 1;

    static void fill(float* x, int count, float value) {
        for (int i = 0; i < count; ++i) x[i] = value;
    }
    static void zero(float* x, int count) { fill(x, count, 0.0f); }

    void chunk(std::int64_t token) {
        load_inputs(token);
        scale_operands();
        score();
        if (solves_) solve();
        load_values(token);
        pack_rows(buffers_.state_w, columns_, own_.state, columns_, channels_, columns_);
        if (solves_)
            read();
        else
            pack_rows(buffers_.writes_w, columns_, buffers_.values, columns_, padded_, columns_);
        if (with_output_) output(token);
        carry();
    }

    // --- inputs ---

    void load_inputs(std::int64_t token) {
        const ScanBuffers<Word>& b = buffers_;
        for (int i = 0; i < count_; ++i) {
            if (with_output_) inputs_.query(b.q + i * channels_, token + i);
            inputs_.key(b.k + i * channels_, token + i);
            if (per_channel_) inputs_.channel_decays(b.decay + i * channels_, token + i);
        }
        // Padding tokens write nothing and do not decay.
        const int padding = (padded_ - count_) * channels_;
        if (with_output_) zero(b.q + count_ * channels_, padding);
        zero(b.k + count_ * channels_, padding);
        if (per_channel_)
            fill(b.decay + count_ * channels_, padding, 1.0f);
        else
            inputs_.token_decays(b.token_decay, token, count_);
        for (int i = count_; i < padded_; ++i) b.token_decay[i] = 1.0f;
        if (!solves_) return;
        inputs_.betas(b.beta, token, count_);
        for (int i = count_; i < padded_; ++i) b.beta[i] = 0.0f;
    }

    void load_values(std::int64_t token) {
        float* values = buffers_.values;
        const int loaded = task_.identity ? 0 : count_;
        for (int i = 0; i < loaded; ++i)
            load_row(values + i * columns_,
                     args_.v.ptr(task_.batch, token + i, task_.value_head, task_.v_begin), args_.v.dtype,
                     task_.v_count, columns_);
        zero(values + loaded * columns_, (padded_ - loaded) * columns_);
    }

    // --- decay ---

    // The decay factor of a token in 2 * kLanes channels.
    struct Factor {
        Vec low, high;
        CULA_INLINE void operator*=(Factor other) { low *= other.low, high *= other.high; }
    };
    CULA_INLINE Factor decay_of(int token, int channel) const {
        if (!per_channel_) {
            const Vec x = broadcast(buffers_.token_decay[token]);
            return {x, x};
        }
        const float* p = buffers_.decay + token * channels_ + channel;
        return {load(p), load(p + kLanes)};
    }
    CULA_INLINE void store_scaled(Word* dst, const float* src, int token, int channel, Factor factor) const {
        const float* p = src + token * channels_ + channel;
        store_words(words_at(dst + token * words_, channel), load(p) * factor.low,
                    load(p + kLanes) * factor.high);
    }

    // Multiplies rows [begin, end) of q and k by the product of decays from `begin` through the row itself.
    void scale_from(int begin, int end, Word* q, Word* k) {
        for (int c = 0; c < channels_; c += 2 * kLanes) {
            Factor factor{broadcast(1.0f), broadcast(1.0f)};
            for (int i = begin; i < end; ++i) {
                factor *= decay_of(i, c);
                if (with_output_) store_scaled(q, buffers_.q, i, c, factor);
                if (solves_) store_scaled(k, buffers_.k, i, c, factor);
            }
        }
    }

    // Multiplies keys [begin, end) by the product of the decays after each.
    void scale_toward(int begin, int end, Word* k) {
        for (int c = 0; c < channels_; c += 2 * kLanes) {
            Factor factor{broadcast(1.0f), broadcast(1.0f)};
            for (int i = end - 1; i >= begin; --i) {
                store_scaled(k, buffers_.k, i, c, factor);
                factor *= decay_of(i, c);
            }
        }
    }

    void scale_operands() {
        scale_from(0, padded_, buffers_.q_decayed, buffers_.k_decayed);
        // The same backwards for K+, packed by pairs of tokens. At the end the product is the decay of the
        // whole chunk.
        for (int c = 0; c < channels_; c += 2 * kLanes) {
            Factor factor{broadcast(1.0f), broadcast(1.0f)};
            for (int i = padded_ - 2; i >= 0; i -= 2) {
                const float *even = buffers_.k + i * channels_ + c, *odd = even + channels_;
                Word* words = buffers_.k_remaining + i / kPerWord<Word> * channels_ + c;
                const Factor later = factor;
                factor *= decay_of(i + 1, c);
                store_row_pair(words, channels_, load(even) * factor.low, load(odd) * later.low);
                store_row_pair(words + kLanes, channels_, load(even + kLanes) * factor.high,
                               load(odd + kLanes) * later.high);
                factor *= decay_of(i, c);
            }
            store(buffers_.chunk_decay + c, factor.low);
            store(buffers_.chunk_decay + c + kLanes, factor.high);
        }
        transpose_words(buffers_.k_remaining_t, token_words(), buffers_.k_remaining, channels_, token_words(),
                        channels_);
        if (task_.total_decay)
            for (int c = 0; c < channels_; ++c) own_.decay_so_far[c] *= buffers_.chunk_decay[c];
    }

    int token_words() const { return padded_ / kPerWord<Word>; }

    // --- score: scores A = tril(q k^T), overlaps L = tril(k k^T, -1), decay included ---

    void score() {
        if (!with_output_ && !solves_) return;
        if (per_channel_)
            score_by_channel();
        else
            score_by_token();
        if (!with_output_) return;
        to_words(buffers_.scores_w, buffers_.scores);
        if (kSplit && solves_) to_lost_words(buffers_.scores_lost_w, buffers_.scores);
    }

    void score_by_token() {
        const ScanBuffers<Word>& b = buffers_;
        for (int i = 0; i < padded_; ++i) {
            for (int c = 0; c < channels_; c += 2 * kLanes) {
                const Factor one{broadcast(1.0f), broadcast(1.0f)};
                if (with_output_) store_scaled(b.q_anchored, b.q, i, c, one);
                store_scaled(b.k_anchored, b.k, i, c, one);
            }
        }
        transpose_words(b.k_toward_t, padded_, b.k_anchored, words_, padded_, words_);
        if (with_output_)
            product(false, padded_, padded_, words_, b.q_anchored, words_, b.k_toward_t, padded_, b.scores,
                    kChunk);
        if (solves_)
            product(false, padded_, padded_, words_, b.k_anchored, words_, b.k_toward_t, padded_, b.overlaps,
                    kChunk);
        zero(b.row_decay, kChunk);
        for (int i = 0; i < padded_; ++i) {
            for (int j = 0; j < padded_; j += kLanes) {
                store(b.row_decay + j, load(b.row_decay + j) * b.token_decay[i]);
            }
            b.row_decay[i] = 1.0f;
            for (int j = 0; j < padded_; j += kLanes) {
                const Vec factor = load(b.row_decay + j);
                float *score = b.scores + i * kChunk + j, *overlap = b.overlaps + i * kChunk + j;
                if (with_output_) store(score, load(score) * factor);
                if (solves_) store(overlap, load(overlap) * factor);
            }
        }
    }

    void score_by_channel() {
        for (int half = kChunk / 2; half >= kLeaf; half /= 2)
            for (int begin = 0; begin + half < padded_; begin += 2 * half)
                score_across(begin, begin + half, half);
        for (int begin = 0; begin < count_; begin += kLeaf) score_leaf(begin);
    }

    // Rows [border, border + half) against columns [begin, border).
    void score_across(int begin, int border, int half) {
        const ScanBuffers<Word>& b = buffers_;
        scale_from(border, border + half, b.q_anchored, b.k_anchored);
        scale_toward(begin, border, b.k_toward);
        transpose_words(b.k_toward_t, half, b.k_toward + begin * words_, words_, half, words_);
        const auto multiply = [&](const Word* rows, float* dst) {
            product(false, half, half, words_, rows + border * words_, words_, b.k_toward_t, half,
                    dst + border * kChunk + begin, kChunk);
        };
        if (with_output_) multiply(b.q_anchored, b.scores);
        if (solves_) multiply(b.k_anchored, b.overlaps);
    }

    void score_leaf(int begin) {
        if (with_output_) score_leaf_of(begin, buffers_.q, true, buffers_.scores);
        if (solves_) score_leaf_of(begin, buffers_.k, false, buffers_.overlaps);
    }

    // dst[i][j] = sum over c of rows[i][c] k[j][c] (product of the decays j + 1 to i), for i > j, with
    // `diagonal` also for i = j.
    void score_leaf_of(int begin, const float* rows, bool diagonal, float* dst) {
        constexpr int kVecs = kChannelMultiple / kLanes;
        const float *key = buffers_.k + begin * channels_, *decay = buffers_.decay + begin * channels_;
        rows += begin * channels_;
        for (int j = 0; j < kLeaf; ++j) {
            Vec partial[kLeaf] = {};
            for (int c = 0; c < channels_; c += kChannelMultiple) {
                Vec carried[kVecs];
                CULA_UNROLL
                for (int x = 0; x < kVecs; ++x) carried[x] = load(key + j * channels_ + c + x * kLanes);
                if (diagonal)
                    for (int x = 0; x < kVecs; ++x)
                        partial[j] += load(rows + j * channels_ + c + x * kLanes) * carried[x];
                for (int i = j + 1; i < kLeaf; ++i) {
                    Vec dot{};
                    CULA_UNROLL
                    for (int x = 0; x < kVecs; ++x) {
                        carried[x] *= load(decay + i * channels_ + c + x * kLanes);
                        dot += load(rows + i * channels_ + c + x * kLanes) * carried[x];
                    }
                    partial[i] += dot;
                }
            }
            for (int i = 0; i < kLeaf; i += kLanes) {
                Vec group[kLanes];
                CULA_UNROLL
                for (int x = 0; x < kLanes; ++x) group[x] = partial[i + x];
                store(buffers_.leaf + j * kLeaf + i, sums(group));
            }
        }
        transpose(dst + begin * kChunk + begin, kChunk, buffers_.leaf, kLeaf, kLeaf, kLeaf);
    }

    // --- solve: inverse = (I + diag(beta) overlaps)^-1 diag(beta), by forward substitution ---

    void solve() {
        constexpr int kVecs = kChunk / kLanes;
        const float *overlaps = buffers_.overlaps, *beta = buffers_.beta;
        float* inverse = buffers_.inverse;
        zero(inverse, kChunk * kChunk);
        for (int i = 0; i < count_; ++i) {
            Vec row[2][kVecs] = {};
            // Row j of the inverse ends at column j.
            const auto subtract = [&](int j, Vec(&acc)[kVecs]) {
                const Vec factor = broadcast(overlaps[i * kChunk + j]);
                for (int x = 0; x <= j / kLanes; ++x)
                    acc[x] -= factor * load(inverse + j * kChunk + x * kLanes);
            };
            int j = 0;
            for (; j + 1 < i; j += 2) subtract(j, row[0]), subtract(j + 1, row[1]);
            if (j < i) subtract(j, row[0]);
            for (int x = 0; x <= i / kLanes; ++x)
                store(inverse + i * kChunk + x * kLanes, (row[0][x] + row[1][x]) * beta[i]);
            inverse[i * kChunk + i] += beta[i];
        }
        to_words(buffers_.inverse_w, inverse);
        if constexpr (kSplit) to_lost_words(buffers_.inverse_lost_w, inverse);
    }

    void to_words(Word* dst, const float* src) const {
        for (int i = 0; i < padded_; ++i)
            for (int j = 0; j < padded_; j += 2 * kLanes)
                store_words(words_at(dst + i * token_words(), j), load(src + i * kChunk + j),
                            load(src + i * kChunk + j + kLanes));
    }

    // The low words that belong to to_words(); they replace src.
    void to_lost_words(Word* dst, float* src) const {
        for (int x = 0; x < padded_ * kChunk; x += kLanes) store(src + x, lost(load(src + x)));
        to_words(dst, src);
    }

    // dst (+)= lower B for a lower triangular [tokens x tokens] operand.
    void lower_product(bool add, const Word* lower, const Word* b, float* dst) const {
        constexpr int kRows = kTokenMultiple;
        for (int i = 0; i < padded_; i += kRows)
            product(add, kRows, columns_, (i + kRows) / kPerWord<Word>, lower + i * token_words(),
                    token_words(), b, columns_, dst + i * columns_, columns_);
    }

    // --- read: U = T (V - K^ S) ---

    void read() {
        const ScanBuffers<Word>& b = buffers_;
        product(false, padded_, columns_, words_, b.k_decayed, words_, b.state_w, columns_, b.read, columns_);
        for (int x = 0; x < padded_ * columns_; x += kLanes)
            store(b.values + x, load(b.values + x) - load(b.read + x));
        pack_rows(b.values_w, columns_, b.values, columns_, padded_, columns_);
        lower_product(false, b.inverse_w, b.values_w, b.read);
        if constexpr (kSplit) lower_product(true, b.inverse_lost_w, b.values_w, b.read);
        pack_rows(b.writes_w, columns_, b.read, columns_, padded_, columns_);
        if constexpr (kSplit) pack_lost_rows(b.writes_lost_w, columns_, b.read, columns_, padded_, columns_);
    }

    // --- output: O = Q~ S + A U ---

    void output(std::int64_t token) {
        const ScanBuffers<Word>& b = buffers_;
        product(false, padded_, columns_, words_, b.q_decayed, words_, b.state_w, columns_, b.out, columns_);
        lower_product(true, b.scores_w, b.writes_w, b.out);
        if (kSplit && solves_) {
            lower_product(true, b.scores_w, b.writes_lost_w, b.out);
            lower_product(true, b.scores_lost_w, b.writes_w, b.out);
        }
        for (int i = 0; i < count_; ++i)
            store_row(args_.o.ptr(task_.batch, token + i, task_.value_head, task_.v_begin), args_.o.dtype,
                      b.out + i * columns_, task_.v_count);
    }

    // --- carry: S <- diag(chunk_decay) S + K+^T U ---

    void carry() {
        const ScanBuffers<Word>& b = buffers_;
        for (int c = 0; c < channels_; ++c) {
            const Vec factor = broadcast(b.chunk_decay[c]);
            float* row = own_.state + c * columns_;
            for (int j = 0; j < columns_; j += kLanes) store(row + j, load(row + j) * factor);
        }
        const auto add = [&](const Word* writes) {
            product(true, channels_, columns_, token_words(), b.k_remaining_t, token_words(), writes,
                    columns_, own_.state, columns_);
        };
        add(b.writes_w);
        if (kSplit && solves_) add(b.writes_lost_w);
    }

    // --- state ---

    void load_initial() {
        float* state = own_.state;
        const StateView& view = task_.initial;
        zero(state, channels_ * columns_);
        if (task_.identity) {
            for (int j = 0; j < task_.v_count; ++j) state[(task_.v_begin + j) * columns_ + j] = 1.0f;
        } else if (view.data && (view.stride_k == 1 || key_dim_ == 1)) {
            zero(buffers_.transposed, columns_ * channels_);
            for (int j = 0; j < task_.v_count; ++j)
                load_row(buffers_.transposed + j * channels_, state_at(view, task_.v_begin + j, 0),
                         view.dtype, key_dim_, channels_);
            transpose(state, columns_, buffers_.transposed, channels_, columns_, channels_);
        } else if (view.data) {
            for (int c = 0; c < key_dim_; ++c)
                load_row(state + c * columns_, state_at(view, task_.v_begin, c), view.dtype, task_.v_count,
                         columns_);
        }
    }

    void store_state(const StateView& view) {
        const float* state = own_.state;
        if (view.stride_k == 1 || key_dim_ == 1) {
            transpose(buffers_.transposed, channels_, state, columns_, channels_, columns_);
            for (int j = 0; j < task_.v_count; ++j)
                store_row(state_at(view, task_.v_begin + j, 0), view.dtype,
                          buffers_.transposed + j * channels_, key_dim_);
        } else {
            for (int c = 0; c < key_dim_; ++c)
                store_row(state_at(view, task_.v_begin, c), view.dtype, state + c * columns_, task_.v_count);
        }
    }

    void store_checkpoints(std::int64_t done) {
        const TensorRef& states = args_.checkpoints;
        for (; next_checkpoint_ < task_.num_checkpoints && task_.checkpoints[next_checkpoint_].tokens <= done;
             ++next_checkpoint_)
            store_state({states.ptr(task_.checkpoints[next_checkpoint_].slot, task_.value_head), states.dtype,
                         states.stride[2], states.stride[3]});
    }

    const Args& args_;
    const ScanTask& task_;
    const bool solves_, per_channel_, with_output_;
    const int chunk_, columns_;
    const ScanBuffers<Word>& buffers_;
    const ScanState own_;
    const HeadInputs inputs_;
    const int key_dim_, channels_, words_;
    int count_ = 0;   // tokens of the current chunk
    int padded_ = 0;  // padded to kTokenMultiple
    std::int64_t next_checkpoint_ = 0;
};

template <class Word>
std::size_t scan_scratch_bytes(const Args& args, int v_count, int heads) {
    const int channels = round_up(static_cast<int>(args.q.size[3]), kChannelMultiple);
    const int columns = round_up(v_count, kColumnMultiple);
    Carver carver(nullptr);
    ScanBuffers<Word>::carve(carver, channels, columns);
    for (int i = 0; i < heads; ++i) ScanState::carve(carver, channels, columns);
    return carver.bytes();
}

// Runs up to kMaxScanHeads tasks that differ in their head alone, chunk by chunk side by side: the rows of
// neighbouring heads of one token are neighbours in memory, and are fetched together.
template <class Word>
void scan_heads(const Args& args, const ScanTask* tasks, int heads, std::byte* scratch) {
    const int channels = round_up(static_cast<int>(args.q.size[3]), kChannelMultiple);
    const int columns = round_up(tasks[0].v_count, kColumnMultiple);
    Carver carver(scratch);
    const auto buffers = ScanBuffers<Word>::carve(carver, channels, columns);
    for (int i = 0; i < kChunk * kChunk; ++i) buffers.scores[i] = buffers.overlaps[i] = 0.0f;
    configure_tiles();
    alignas(Scan<Word>) std::byte storage[kMaxScanHeads][sizeof(Scan<Word>)];
    Scan<Word>* scans[kMaxScanHeads];
    for (int i = 0; i < heads; ++i)
        scans[i] =
            new (storage[i]) Scan<Word>(args, tasks[i], buffers, ScanState::carve(carver, channels, columns));
    const int chunk = Scan<Word>::chunk_tokens(args, tasks[0]);
    for (std::int64_t done = 0; done < tasks[0].length; done += chunk)
        for (int i = 0; i < heads; ++i) scans[i]->step(done);
    for (int i = 0; i < heads; ++i) scans[i]->finish();
    release_tiles();
}

}  // namespace cula::cpu::CULA_CPU_TARGET
