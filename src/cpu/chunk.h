// SPDX-License-Identifier: Apache-2.0
// chunk: what scan.h and backward.h have in common: the recurrence over chunks of 64 writes of one head, in
// the phases score, solve, read, carry.
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

#include "cpu/operands.h"

namespace cula::cpu::CULA_CPU_TARGET {

template <class Word>
class Chunk : protected Operands<Word> {
protected:
    using Base = Operands<Word>;
    using Base::args_, Base::task_, Base::solves_, Base::erases_, Base::per_channel_, Base::queries_;
    using Base::channels_, Base::words_, Base::tokens_, Base::count_, Base::padded_tokens_, Base::padded_;
    using Base::keys_, Base::token_multiple_, Base::columns_, Base::buffers_, Base::key_dim_;
    using Base::masked_, Base::q_rows_, Base::e_rows_, Base::k_rows_, Base::kSplit;

    // state: S; the others as those of Operands.
    Chunk(const Args& args, const ScanTask& task, const ChunkBuffers<Word>& buffers, int columns,
          float* state, float* gate_bias, int token_multiple)
        : Base(args, task, buffers, columns, gate_bias, token_multiple),
          states_{buffers.transposed, key_dim_, channels_, columns, task.v_begin, task.v_count},
          state_(state) {}

    // Triangular operands are multiplied by so many rows at a time.
    static constexpr int kTriangleRows = kPerWord<Word> > 1 ? kTokenMultiple : kLeaf;

    // Rows of A are multiplied by so many at a time, and the block that begins with row i has so many
    // columns.
    int score_rows() const { return token_multiple_ < kTriangleRows ? token_multiple_ : kTriangleRows; }
    int score_columns(int i) const {
        const int columns = round_up(this->first_row(i + score_rows()), kTriangleRows);
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
        transpose_words(b.k_toward_t, padded_, k_rows_, words_, padded_, words_);
        const auto multiply = [&](int i, int count, int columns, const Word* rows, float* dst) {
            product(false, count, columns, words_, rows + i * words_, words_, b.k_toward_t, padded_,
                    dst + i * kChunk, kChunk);
        };
        for (int i = 0; queries_ && i < padded_tokens_; i += score_rows())
            multiply(i, score_rows(), score_columns(i), q_rows_, b.scores);
        for (int i = 0; keys_ && i < padded_; i += kTriangleRows)
            multiply(i, kTriangleRows, i + kTriangleRows, e_rows_, b.overlaps);
        this->zero(b.row_decay, kChunk);
        for (int i = 0; i < padded_; ++i) {
            for (int j = 0; j < padded_; j += kLanes) {
                store(b.row_decay + j, load(b.row_decay + j) * b.token_decay[i]);
            }
            b.row_decay[i] = 1.0f;
            const bool scores_too = queries_ && this->reads(i);
            const int of_token = scores_too ? this->reader(i) : 0;
            float* scores = b.scores + of_token * kChunk;
            for (int j = 0; j < padded_; j += kLanes) {
                const Vec factor = load(b.row_decay + j) * load(b.k_fraction + j);
                float* overlap = b.overlaps + i * kChunk + j;
                if (scores_too) store(scores + j, load(scores + j) * (factor * b.q_fraction[of_token]));
                if (keys_) store(overlap, load(overlap) * (factor * b.e_fraction[i]));
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
        this->scale_from(border, border + half, b.q_anchored, b.k_anchored);
        this->scale_toward(begin, border, b.k_toward, b.factors);
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
        this->zero(inverse, kChunk * kChunk);
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
                store_words(words_at(dst + i * this->token_words(), j), load(src + i * kChunk + j),
                            load(src + i * kChunk + j + kLanes));
    }

    // The low words that belong to to_words().
    void to_lost_words(Word* dst, const float* src, int rows) const {
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < padded_; j += 2 * kLanes)
                store_words(words_at(dst + i * this->token_words(), j), lost(load(src + i * kChunk + j)),
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
            product(add, kRows, columns_, (i + kRows) / kPerWord<Word>, lower + i * this->token_words(),
                    this->token_words(), b, columns_, dst + i * columns_, columns_);
    }

    // --- read: U = T (V - K^ S), of erase keys E^; additive rules: U = V ---

    // The words of T and of the state, and V, have been made. `read` ends with U.
    void read() {
        const ChunkBuffers<Word>& b = buffers_;
        if (!solves_) return set_writes(b.values);
        product(false, padded_, columns_, words_, e_rows_, words_, state_words_, columns_, b.read, columns_);
        for (int i = 0; i < padded_; ++i) {
            const float factor = per_channel_ ? 1.0f : b.of_k_decayed[i];
            for (int x = i * columns_; x < (i + 1) * columns_; x += kLanes)
                store(b.values + x, load(b.values + x) - load(b.read + x) * factor);
        }
        const Word* differences = packed_rows(b.values_w, b.values, padded_, columns_);
        lower_product(false, b.inverse_w, differences, b.read);
        if constexpr (kSplit) lower_product(true, b.inverse_lost_w, differences, b.read);
        set_writes(b.read);
    }

    // U, whose words are for the output and, with decays per channel, for carry().
    void set_writes(const float* writes) {
        writes_rows_ = writes;
        if (queries_ || per_channel_) pack_writes(writes);
    }

    void pack_writes(const float* writes) {
        const ChunkBuffers<Word>& b = buffers_;
        write_words_ = packed_rows(b.writes_w, writes, padded_, columns_);
        if (kSplit && solves_) pack_lost_rows(b.writes_lost_w, columns_, writes, columns_, padded_, columns_);
    }

    // Makes the rows of masked writes zero in a matrix [writes, columns].
    void mask_rows(float* rows) const {
        for (int i = 0; i < count_; ++i)
            if (masked_ >> i & 1) this->zero(rows + i * columns_, columns_);
    }

    // --- carry: S <- diag(chunk_decay) S + K+^T U ---

    // Writes the state after the chunk to `next`, which may be state_. V is lost with one decay per token.
    void carry(float* next) {
        const ChunkBuffers<Word>& b = buffers_;
        if (!per_channel_) {
            this->scale_rows(b.values, writes_rows_, b.of_k_remaining, padded_);
            pack_writes(b.values);
        }
        for (int c = 0; c < channels_; ++c) {
            const Vec factor = broadcast(b.chunk_decay[c]);
            const float* row = state_ + c * columns_;
            for (int j = 0; j < columns_; j += kLanes) store(next + c * columns_ + j, load(row + j) * factor);
        }
        const auto add = [&](const Word* writes) {
            product(true, channels_, columns_, this->token_words(), b.k_remaining_t, this->token_words(),
                    writes, columns_, next, columns_);
        };
        add(write_words_);
        if (kSplit && solves_) add(b.writes_lost_w);
    }

    const StateMemory states_;
    float* state_;                                                // [channels, columns]
    const Word *state_words_ = nullptr, *write_words_ = nullptr;  // of S and U, packed
    const float* writes_rows_ = nullptr;                          // U
};

}  // namespace cula::cpu::CULA_CPU_TARGET
