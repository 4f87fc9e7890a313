// SPDX-License-Identifier: Apache-2.0
// chunk: what scan.h and backward.h have in common: the operands of 64 writes of one head, and the recurrence
// over chunks, in the phases score, solve, read, carry.
//
// Equation, per chunk that starts from the state S (ALGORITHM.md, "Chunks", which also has the letters):
//     score    A = tril(Q~ K-^T),  L = tril(K^ K-^T, -1)
//     solve    T = (I + diag(beta) L)^-1 diag(beta)       additive rules: T = I
//     read     U = T (V - K^ S)                           additive rules: U = V
//     carry    S <- diag(Gamma_C) S + K+^T U
// With erase strengths, erase keys E take the place of K in L and in K^, and beta stays with the values:
//     score    L = tril(E^ K-^T, -1)
//     solve    T = (I + L)^-1
//     read     U = T (beta o V - E^ S)
//
// Rows. A chunk is 64 writes: a row of K, V, U, L and T each. It has a row of Q, A and O for each token whose
// last write it has, which reads that write, too. A token that writes n times has n rows, of which the first
// has its decay and the others have none; they may lie in several chunks. Row i of A has n columns more than
// the row before it.
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

#include "cpu/gemm.h"
#include "cpu/inputs.h"
#include "cpu/states.h"

namespace cula::cpu::CULA_CPU_TARGET {

inline constexpr int kChunk = kChunkTokens;
inline constexpr int kLeaf = 16;  // tokens of a diagonal square

// Scratch for one chunk. *_lost_w: low words. Rows of q, q_decayed, q_anchored, scores and out are tokens,
// all others writes.
template <class Word>
struct ChunkBuffers {
    // [rows, channels]
    float *q, *k, *decay;
    float* e;                     // the erase keys; those of rules that have none are k
    Word *q_decayed, *k_decayed;  // Q~, K^ (of erase keys: E^): decayed to the chunk's start; row-major
    Word* k_remaining;            // K+: decayed to the chunk's end; packed as a B operand
    Word* k_remaining_t;          // its transpose, [channels, token words]
    Word *q_anchored, *k_anchored, *k_toward, *k_toward_t;
    float *chunk_decay, *factors;  // [channels]; factors: running products of decays
    // [rows, rows]
    float *scores, *overlaps, *inverse;
    Word *scores_w, *scores_lost_w, *inverse_w, *inverse_lost_w;
    float *beta, *token_decay, *row_decay;
    // [rows, columns]
    float *values, *read, *out;
    float* strengths;  // with erase keys: beta
    Word *values_w, *writes_w, *writes_lost_w;
    Word* state_w;      // [channels, columns]
    float* transposed;  // [columns, channels]
    float* leaf;        // [kLeaf, kLeaf]

    static ChunkBuffers carve(Carver& carver, const Args& args, int channels, int columns) {
        ChunkBuffers b;
        const auto matrix = [&](float*& p, int rows, int width) { p = carver.take<float>(rows * width); };
        const auto operand = [&](Word*& p, int rows, int width) {
            p = carver.take<Word>(rows * width / kPerWord<Word>);
        };
        matrix(b.q, kChunk, channels);
        matrix(b.k, kChunk, channels);
        matrix(b.decay, kChunk, channels);
        const bool erases = takes_erase(args.algorithm.update);
        b.e = erases ? carver.take<float>(kChunk * channels) : b.k;
        matrix(b.strengths, erases ? kChunk : 0, columns);
        for (Word** p : {&b.q_decayed, &b.k_decayed, &b.k_remaining, &b.k_remaining_t, &b.q_anchored,
                         &b.k_anchored, &b.k_toward, &b.k_toward_t})
            operand(*p, kChunk, channels);
        for (float** p : {&b.chunk_decay, &b.factors}) matrix(*p, 1, channels);
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
class Chunk {
protected:
    // columns: value columns of the buffers. state: S; gate_bias: room for K floats. token_multiple: what
    // tokens are padded to a multiple of where they are not the rows of writes.
    Chunk(const Args& args, const ScanTask& task, const ChunkBuffers<Word>& buffers, int columns,
          float* state, float* gate_bias, int token_multiple)
        : args_(args),
          task_(task),
          solves_(solves(args.algorithm.update)),
          erases_(takes_erase(args.algorithm.update)),
          per_channel_(varies_by_channel(args.algorithm.decay)),
          keys_(solves_),
          writes_(static_cast<int>(writes_per_token(args))),
          token_multiple_(writes_ > 1 ? token_multiple : kTokenMultiple),
          columns_(columns),
          buffers_(buffers),
          inputs_(args, task, gate_bias),
          key_dim_(inputs_.key_dim),
          channels_(inputs_.padded_key_dim),
          words_(channels_ / kPerWord<Word>),
          states_{buffers.transposed, key_dim_, channels_, columns, task.v_begin, task.v_count},
          state_(state) {}

    // Whether the writes U of a chunk solve a triangular system (solve, read), or are its values.
    static constexpr bool solves(Update update) {
        switch (update) {
            case Update::kAdditive: return false;
            case Update::kDelta:
            case Update::kErase:
            case Update::kProduct: return true;
        }
        return false;
    }

    // Whether operands of rules that solve are compensated.
    static constexpr bool kSplit = kPerWord<Word> > 1;

    // Triangular operands are multiplied by so many rows at a time.
    static constexpr int kTriangleRows = kPerWord<Word> > 1 ? kTokenMultiple : kLeaf;

    static void fill(float* x, int count, float value) {
        for (int i = 0; i < count; ++i) x[i] = value;
    }
    static void zero(float* x, int count) { fill(x, count, 0.0f); }

    // The next chunk has rows [row, row + count) of k.
    void begin_chunk(std::int64_t row, std::int64_t count) {
        row_ = row;
        token_ = row / writes_;
        behind_ = static_cast<int>(row % writes_);
        count_ = static_cast<int>(count);
        tokens_ = (behind_ + count_) / writes_;
        padded_ = round_up(count_, kTokenMultiple);
        padded_tokens_ = round_up(tokens_, token_multiple_);
    }

    // The row of the first write of token `i`, counted as rows of q are; negative: in a chunk before. Token
    // tokens_ may begin in the chunk, too.
    int first_row(int i) const { return i * writes_ - behind_; }
    // Whether a row is the last write of its token, and which row of q reads after it.
    bool reads(int row) const { return row < count_ && (behind_ + row + 1) % writes_ == 0; }
    int reader(int row) const { return (behind_ + row + 1) / writes_ - 1; }

    // --- inputs ---

    void load_inputs() {
        const ChunkBuffers<Word>& b = buffers_;
        for (int i = 0; i < count_; ++i) {
            if (queries_ && i < tokens_) inputs_.query(b.q + i * channels_, token_ + i);
            inputs_.key(b.k + i * channels_, row_ + i);
            if (erases_) inputs_.erase_key(b.e + i * channels_, b.k + i * channels_, row_ + i);
            if (per_channel_) inputs_.channel_decays(b.decay + i * channels_, row_ + i);
        }
        // Padding tokens write nothing and do not decay.
        const int padding = (padded_ - count_) * channels_;
        if (queries_) zero(b.q + tokens_ * channels_, (padded_tokens_ - tokens_) * channels_);
        zero(b.k + count_ * channels_, padding);
        if (erases_) zero(b.e + count_ * channels_, padding);
        if (per_channel_)
            fill(b.decay + count_ * channels_, padding, 1.0f);
        else
            load_token_decays();
        for (int i = count_; i < padded_; ++i) b.token_decay[i] = 1.0f;
        if (!solves_) return;
        masked_ = 0;
        if (erases_) {
            fill(b.beta, padded_, 1.0f);
            return load_strengths();
        }
        inputs_.betas(b.beta, row_, count_);
        for (int i = 0; i < count_; ++i) {
            if (!(__builtin_fabsf(b.beta[i]) < least_beta_)) continue;
            b.beta[i] = least_beta_;
            masked_ |= std::uint64_t{1} << i;
        }
        for (int i = count_; i < padded_; ++i) b.beta[i] = 0.0f;
    }

    // One decay per token, of rows: that of the token for its first write, 1 for all others.
    void load_token_decays() {
        float* decays = buffers_.token_decay;
        const int first = behind_ ? 1 : 0, end = (behind_ + count_ + writes_ - 1) / writes_;
        inputs_.token_decays(decays, token_ + first, end - first);
        for (int row = writes_ > 1 ? count_ - 1 : -1; row >= 0; --row) {
            const bool begins = (behind_ + row) % writes_ == 0;
            decays[row] = begins ? decays[(behind_ + row) / writes_ - first] : 1.0f;
        }
    }

    // The write strengths of values, where they are not those of the solve.
    void load_strengths() {
        const int loaded = task_.identity ? 0 : count_;
        float of_tokens[kChunk];
        const bool per_value = args_.beta.ndim == 4;
        if (!per_value) inputs_.betas(of_tokens, row_, loaded);
        for (int i = 0; i < loaded; ++i) {
            float* row = buffers_.strengths + i * columns_;
            if (per_value)
                inputs_.value_betas(row, row_ + i, task_.v_begin, task_.v_count, columns_);
            else
                fill(row, columns_, of_tokens[i]);
        }
    }

    void load_values() {
        float* values = buffers_.values;
        const int loaded = task_.identity ? 0 : count_;
        for (int i = 0; i < loaded; ++i)
            load_row(values + i * columns_,
                     args_.v.ptr(task_.batch, row_ + i, task_.value_head, task_.v_begin), args_.v.dtype,
                     task_.v_count, columns_);
        for (int x = 0; erases_ && x < loaded * columns_; x += kLanes)
            store(values + x, load(values + x) * load(buffers_.strengths + x));
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

    // Running products of decays, of all channels. Token after token, so that rows are read as they lie.
    CULA_INLINE static Factor load_factor(const float* factors, int channel) {
        return {load(factors + channel), load(factors + channel + kLanes)};
    }
    CULA_INLINE static void store_factor(float* factors, int channel, Factor factor) {
        store(factors + channel, factor.low);
        store(factors + channel + kLanes, factor.high);
    }

    // Multiplies rows [begin, end) of q and e by the product of decays from `begin` through the row itself,
    // for scores and for overlaps; q where its rows are those of writes.
    void scale_from(int begin, int end, Word* q, Word* k) {
        const bool queries = queries_ && writes_ == 1;
        float* factors = buffers_.factors;
        fill(factors, channels_, 1.0f);
        for (int i = begin; i < end; ++i)
            for (int c = 0; c < channels_; c += 2 * kLanes) {
                Factor factor = load_factor(factors, c);
                factor *= decay_of(i, c);
                store_factor(factors, c, factor);
                if (queries) store_scaled(q, buffers_.q, i, c, factor);
                if (keys_) store_scaled(k, buffers_.e, i, c, factor);
            }
    }

    // The same of q alone, where tokens write several times: all rows, by the decays of tokens.
    void scale_queries(Word* q) {
        float* factors = buffers_.factors;
        fill(factors, channels_, 1.0f);
        for (int i = 0; i < padded_tokens_; ++i)
            for (int c = 0; c < channels_; c += 2 * kLanes) {
                const Factor factor = next_query_factor(factors, i, c);
                store_scaled(q, buffers_.q, i, c, factor);
            }
    }
    CULA_INLINE Factor next_query_factor(float* factors, int token, int channel) const {
        Factor factor = load_factor(factors, channel);
        if (token < tokens_ && first_row(token) >= 0) factor *= decay_of(first_row(token), channel);
        store_factor(factors, channel, factor);
        return factor;
    }

    // Multiplies keys [begin, end) by the product of the decays after each; `all` gets that of all decays.
    void scale_toward(int begin, int end, Word* k, float* all) {
        fill(all, channels_, 1.0f);
        for (int i = end - 1; i >= begin; --i)
            for (int c = 0; c < channels_; c += 2 * kLanes) {
                Factor factor = load_factor(all, c);
                store_scaled(k, buffers_.k, i, c, factor);
                factor *= decay_of(i, c);
                store_factor(all, c, factor);
            }
    }

    // The same packed as B operands whose reduction is over the tokens; `end - begin` is even.
    void pack_from(int begin, int end, Word* q, Word* k) {
        float* factors = buffers_.factors;
        fill(factors, channels_, 1.0f);
        for (int i = begin; i < end; i += 2)
            for (int c = 0; c < channels_; c += 2 * kLanes) {
                Factor factor = load_factor(factors, c);
                factor *= decay_of(i, c);
                const Factor even = factor;
                factor *= decay_of(i + 1, c);
                store_factor(factors, c, factor);
                if (q) store_pair(q, buffers_.q, begin, i, c, even, factor);
                if (k) store_pair(k, buffers_.e, begin, i, c, even, factor);
            }
    }
    void pack_queries(Word* q) {
        float* factors = buffers_.factors;
        fill(factors, channels_, 1.0f);
        for (int i = 0; i < padded_tokens_; i += 2)
            for (int c = 0; c < channels_; c += 2 * kLanes) {
                const Factor even = next_query_factor(factors, i, c),
                             odd = next_query_factor(factors, i + 1, c);
                store_pair(q, buffers_.q, 0, i, c, even, odd);
            }
    }
    void pack_toward(int begin, int end, Word* k, float* all) {
        fill(all, channels_, 1.0f);
        for (int i = end - 2; i >= begin; i -= 2)
            for (int c = 0; c < channels_; c += 2 * kLanes) {
                Factor factor = load_factor(all, c);
                const Factor later = factor;
                factor *= decay_of(i + 1, c);
                store_pair(k, buffers_.k, begin, i, c, factor, later);
                factor *= decay_of(i, c);
                store_factor(all, c, factor);
            }
    }
    CULA_INLINE void store_pair(Word* dst, const float* src, int begin, int token, int channel, Factor even,
                                Factor odd) const {
        const float *first = src + token * channels_ + channel, *second = first + channels_;
        Word* words = dst + (token - begin) / kPerWord<Word> * channels_ + channel;
        store_row_pair(words, channels_, load(first) * even.low, load(second) * odd.low);
        store_row_pair(words + kLanes, channels_, load(first + kLanes) * even.high,
                       load(second + kLanes) * odd.high);
    }

    void scale_operands() {
        scale_from(0, padded_, buffers_.q_decayed, buffers_.k_decayed);
        if (queries_ && writes_ > 1) scale_queries(buffers_.q_decayed);
        pack_toward(0, padded_, buffers_.k_remaining, buffers_.chunk_decay);
        transpose_words(buffers_.k_remaining_t, token_words(), buffers_.k_remaining, channels_, token_words(),
                        channels_);
    }

    int token_words() const { return padded_ / kPerWord<Word>; }

    // Rows of A are multiplied by so many at a time, and the block that begins with row i has so many
    // columns.
    int score_rows() const { return token_multiple_ < kTriangleRows ? token_multiple_ : kTriangleRows; }
    int score_columns(int i) const {
        const int columns = round_up(first_row(i + score_rows()), kTriangleRows);
        return columns < padded_ ? columns : padded_;
    }

    // --- score: scores A = tril(q k^T), overlaps L = tril(e k^T, -1), decay included ---

    void score() {
        if (!queries_ && !keys_) return;
        if (per_channel_)
            score_by_channel();
        else
            score_by_token();
    }

    void score_by_token() {
        const ChunkBuffers<Word>& b = buffers_;
        const Word* keys = row_words(b.k_anchored, b.k, padded_, channels_);
        const Word* erasers = erases_ ? row_words(b.k_toward, b.e, padded_, channels_) : keys;
        const Word* queries = queries_ ? row_words(b.q_anchored, b.q, padded_tokens_, channels_) : nullptr;
        transpose_words(b.k_toward_t, padded_, keys, words_, padded_, words_);
        const auto multiply = [&](int i, int count, int columns, const Word* rows, float* dst) {
            product(false, count, columns, words_, rows + i * words_, words_, b.k_toward_t, padded_,
                    dst + i * kChunk, kChunk);
        };
        for (int i = 0; queries_ && i < padded_tokens_; i += score_rows())
            multiply(i, score_rows(), score_columns(i), queries, b.scores);
        for (int i = 0; keys_ && i < padded_; i += kTriangleRows)
            multiply(i, kTriangleRows, i + kTriangleRows, erasers, b.overlaps);
        zero(b.row_decay, kChunk);
        for (int i = 0; i < padded_; ++i) {
            for (int j = 0; j < padded_; j += kLanes) {
                store(b.row_decay + j, load(b.row_decay + j) * b.token_decay[i]);
            }
            b.row_decay[i] = 1.0f;
            const bool scores_too = queries_ && reads(i);
            float* scores = b.scores + (scores_too ? reader(i) * kChunk : 0);
            for (int j = 0; j < padded_; j += kLanes) {
                const Vec factor = load(b.row_decay + j);
                float* overlap = b.overlaps + i * kChunk + j;
                if (scores_too) store(scores + j, load(scores + j) * factor);
                if (keys_) store(overlap, load(overlap) * factor);
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
        const ChunkBuffers<Word>& b = buffers_;
        scale_from(border, border + half, b.q_anchored, b.k_anchored);
        scale_toward(begin, border, b.k_toward, b.factors);
        transpose_words(b.k_toward_t, half, b.k_toward + begin * words_, words_, half, words_);
        const auto multiply = [&](const Word* rows, float* dst) {
            product(false, half, half, words_, rows + border * words_, words_, b.k_toward_t, half,
                    dst + border * kChunk + begin, kChunk);
        };
        if (queries_) multiply(b.q_anchored, b.scores);
        if (keys_) multiply(b.k_anchored, b.overlaps);
    }

    void score_leaf(int begin) {
        if (queries_) score_leaf_of(begin, buffers_.q, true, buffers_.scores);
        if (keys_) score_leaf_of(begin, buffers_.e, false, buffers_.overlaps);
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
    }

    void to_words(Word* dst, const float* src, int rows) const {
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < padded_; j += 2 * kLanes)
                store_words(words_at(dst + i * token_words(), j), load(src + i * kChunk + j),
                            load(src + i * kChunk + j + kLanes));
    }

    // The low words that belong to to_words().
    void to_lost_words(Word* dst, const float* src, int rows) const {
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < padded_; j += 2 * kLanes)
                store_words(words_at(dst + i * token_words(), j), lost(load(src + i * kChunk + j)),
                            lost(load(src + i * kChunk + j + kLanes)));
    }

    void pack_inverse() const {
        to_words(buffers_.inverse_w, buffers_.inverse, padded_);
        if constexpr (kSplit) to_lost_words(buffers_.inverse_lost_w, buffers_.inverse, padded_);
    }

    void pack_state() { state_words_ = packed_rows(buffers_.state_w, state_, channels_, columns_); }

    // dst (+)= lower B for a lower triangular [writes x writes] operand.
    void lower_product(bool add, const Word* lower, const Word* b, float* dst) const {
        constexpr int kRows = kTriangleRows;
        for (int i = 0; i < padded_; i += kRows)
            product(add, kRows, columns_, (i + kRows) / kPerWord<Word>, lower + i * token_words(),
                    token_words(), b, columns_, dst + i * columns_, columns_);
    }

    // --- read: U = T (V - K^ S), of erase keys E^; additive rules: U = V ---

    // The words of T and of the state, and V, have been made. `read` ends with U.
    void read() {
        const ChunkBuffers<Word>& b = buffers_;
        if (!solves_) return pack_writes(b.values);
        product(false, padded_, columns_, words_, b.k_decayed, words_, state_words_, columns_, b.read,
                columns_);
        for (int x = 0; x < padded_ * columns_; x += kLanes)
            store(b.values + x, load(b.values + x) - load(b.read + x));
        const Word* differences = packed_rows(b.values_w, b.values, padded_, columns_);
        lower_product(false, b.inverse_w, differences, b.read);
        if constexpr (kSplit) lower_product(true, b.inverse_lost_w, differences, b.read);
        pack_writes(b.read);
    }

    void pack_writes(const float* writes) {
        const ChunkBuffers<Word>& b = buffers_;
        write_words_ = packed_rows(b.writes_w, writes, padded_, columns_);
        if (kSplit && solves_) pack_lost_rows(b.writes_lost_w, columns_, writes, columns_, padded_, columns_);
    }

    // Makes the rows of masked writes zero in a matrix [writes, columns].
    void mask_rows(float* rows) const {
        for (int i = 0; i < count_; ++i)
            if (masked_ >> i & 1) zero(rows + i * columns_, columns_);
    }

    // --- carry: S <- diag(chunk_decay) S + K+^T U ---

    // Writes the state after the chunk to `next`, which may be state_.
    void carry(float* next) {
        const ChunkBuffers<Word>& b = buffers_;
        for (int c = 0; c < channels_; ++c) {
            const Vec factor = broadcast(b.chunk_decay[c]);
            const float* row = state_ + c * columns_;
            for (int j = 0; j < columns_; j += kLanes) store(next + c * columns_ + j, load(row + j) * factor);
        }
        const auto add = [&](const Word* writes) {
            product(true, channels_, columns_, token_words(), b.k_remaining_t, token_words(), writes,
                    columns_, next, columns_);
        };
        add(write_words_);
        if (kSplit && solves_) add(b.writes_lost_w);
    }

    const Args& args_;
    const ScanTask& task_;
    const bool solves_, erases_, per_channel_;
    bool queries_ = false, keys_;  // whether q, Q~ and A are made; whether K^ and L are
    const int writes_;             // of a token
    const int token_multiple_;
    float least_beta_ = 0.0f;   // betas nearer to zero count as this
    std::uint64_t masked_ = 0;  // the writes of the chunk whose beta is nearer, by their bit
    const int columns_;
    ChunkBuffers<Word> buffers_;
    const HeadInputs inputs_;
    const int key_dim_, channels_, words_;
    const StateMemory states_;
    std::int64_t row_ = 0, token_ = 0;    // of the current chunk: its first row of k, and that one's token
    int behind_ = 0;                      // the writes of that token in chunks before
    int tokens_ = 0, count_ = 0;          // the rows of q, and those of k
    int padded_tokens_ = 0, padded_ = 0;  // padded to token_multiple_, and to kTokenMultiple
    float* state_;                        // [channels, columns]
    const Word *state_words_ = nullptr, *write_words_ = nullptr;  // of S and U, packed
};

}  // namespace cula::cpu::CULA_CPU_TARGET
