// SPDX-License-Identifier: Apache-2.0
// gradient: what the backward pass makes of one chunk, between the state S before it and Z, d loss / d state
// after it. The letters are those of ALGORITHM.md; U are the writes of the chunk.
//
//     squares  dA = tril(dO U^T)            dL = -tril(dV U^T, -1)
//     ends     dQ~ = dO S^T                 dK^ = -dV S^T                dK+ = U Z^T
//     pairs    of rows i >= j:              dq_i += dA_ij D_ij k_j       dk_i += dL_ij D_ij k_j
//                                           dk_j += D_ij (dA_ij q_i + dL_ij k_i)
//     decay    dg_t, the sum over all paths that cross token t's decay:
//              rows i >= t of Q~ dQ~ + K^ dK^, columns j < t of K+ dK+, Gamma_C rowsum(S Z), and
//              pairs i >= t > j of D_ij k_j (dA_ij q_i + dL_ij k_i)
//
// Rows of Q, dQ, A, dA and dO are tokens, all others writes (chunk.h). A token decays before its first write
// and reads after its last: where a row of Q counts as a row of writes, it is that one.
//
// With erase keys e, K^ and k of rows are E^ and e, and so are dK^ and the dk of rows: de, which a later step
// divides between erase strengths and k. Columns stay keys.
//
// D_ij is the decay between two tokens, one factor per channel or one in all. Additive rules have no dL and
// no dK^. dbeta_i = (dV_i / beta_i) . (U_i / beta_i) needs no square.
//
// Decay. Every sum of dg has paths that cross the token, and no others. The textbook's suffix sum of
// q dq - k dk has pairs on one side of the token as well, which have to cancel: where decays are strong, dg
// and dA_log are lost in what rounding leaves of them.
// Rows and columns are anchored as in chunk.h: a set of rows has an anchor before them and a set of columns
// one after them, and all factors are at most 1. The chunk's start and end are anchors as well. The 16 x 16
// squares on the diagonal multiply the factors out. With one decay per token a matrix of D multiplies dA and
// dL instead.
//
// Compensated operands (chunk.h): dV, and dA and dL with one decay per channel. Where keys are nearly
// collinear and queries lie along them, dQ~ and dK^ nearly cancel in dg, and so do dA and dL.
#pragma once

#include "cpu/chunk.h"

namespace cula::cpu::CULA_CPU_TARGET {

// What of a chunk is wanted.
struct Wanted {
    bool keys, decay, beta;

    CULA_INLINE explicit Wanted(const Args& args)
        : keys(args.d_q || args.d_k || args.d_erase),
          decay(args.d_g || args.d_A_log || args.d_dt_bias),
          beta(static_cast<bool>(args.d_beta)) {}
    CULA_INLINE bool squares() const { return keys || decay; }
    CULA_INLINE bool any() const { return keys || decay || beta; }
};

// Scratch for the gradient of one chunk.
template <class Word>
struct GradientBuffers {
    // [rows, channels]
    float *d_q, *d_k, *d_g;                 // results
    float* d_e;                             // of erase keys; else d_k
    float *from_q, *from_k, *from_columns;  // of one set of rows and columns, before their decays
    Word *q_rows, *k_rows, *k_columns;      // operands of such a set, packed as B
    // [rows, rows]
    float *d_scores, *d_overlaps, *square;
    Word *square_w, *square_t_w;
    // [writes]; the log decay of algorithms with one decay per token
    float *d_beta, *d_log_decay;
    // [rows, columns]
    float *d_o, *d_values;
    Word *d_o_rows, *d_values_rows, *d_values_lost_rows, *writes_rows;  // row-major
    Word* writes_t;                                                     // packed as a B operand: U^T
    // [channels, columns]
    Word* state_rows;  // row-major
    Word* state_t;     // packed as a B operand: S^T or Z^T

    static GradientBuffers carve(Carver& carver, const Args& args, int channels, int columns) {
        GradientBuffers b;
        const auto matrix = [&](float*& p, int rows, int width) { p = carver.take<float>(rows * width); };
        const auto operand = [&](Word*& p, int rows, int width) {
            p = carver.take<Word>(rows * width / kPerWord<Word>);
        };
        for (float** p : {&b.d_q, &b.d_k, &b.d_g, &b.from_q, &b.from_k, &b.from_columns})
            matrix(*p, kChunk, channels);
        b.d_e = takes_erase(args.algorithm.update) ? carver.take<float>(kChunk * channels) : b.d_k;
        for (Word** p : {&b.q_rows, &b.k_rows, &b.k_columns}) operand(*p, kChunk, channels);
        for (float** p : {&b.d_scores, &b.d_overlaps, &b.square}) matrix(*p, kChunk, kChunk);
        for (Word** p : {&b.square_w, &b.square_t_w}) operand(*p, kChunk, kChunk);
        for (float** p : {&b.d_beta, &b.d_log_decay}) matrix(*p, 1, kChunk);
        for (float** p : {&b.d_o, &b.d_values}) matrix(*p, kChunk, columns);
        for (Word** p : {&b.d_o_rows, &b.d_values_rows, &b.d_values_lost_rows, &b.writes_rows, &b.writes_t})
            operand(*p, kChunk, columns);
        for (Word** p : {&b.state_rows, &b.state_t}) operand(*p, channels, columns);
        return b;
    }
};

template <class Word>
class Gradient : protected Chunk<Word> {
protected:
    using Base = Chunk<Word>;
    using Base::args_, Base::task_, Base::buffers_, Base::solves_, Base::erases_, Base::per_channel_;
    using Base::columns_, Base::channels_, Base::key_dim_, Base::words_, Base::count_, Base::padded_;
    using Base::kSplit, Base::tokens_, Base::padded_tokens_, Base::writes_, Base::behind_;
    using typename Base::Factor;

    Gradient(const Args& args, const ScanTask& task, const ChunkBuffers<Word>& buffers,
             const GradientBuffers<Word>& own, int columns, float* gate_bias)
        : Base(args, task, buffers, columns, nullptr, gate_bias, kTokenMultiple), wanted_(args), own_(own) {}

    // S before the chunk, Z after it, and U. d_o, and in d_values -dV or, for additive rules, dV, have been
    // made; so have the scores and overlaps if one decay per token is differentiated.
    void gradient(const float* S, const float* Z, const float* U) {
        if (!wanted_.squares()) return;
        squares(U);
        ends(S, Z);
        if (per_channel_)
            pairs_by_channel();
        else
            pairs_by_token();
    }

    // Between the rows of words of a matrix [rows, rows].
    static constexpr int kStride = kChunk / kPerWord<Word>;

    // The low words that belong to row_words().
    static void lost_row_words(Word* dst, const float* src, int rows, int width) {
        for (int x = 0; x < rows * width; x += 2 * kLanes)
            store_words(words_at(dst, x), lost(load(src + x)), lost(load(src + x + kLanes)));
    }

    int column_words() const { return columns_ / kPerWord<Word>; }

    // dst (+)= A B of the operand of scores, [tokens x writes].
    void scored_product(const Word* scores, const Word* b, int width, float* dst) const {
        const int rows = this->score_rows();
        for (int i = 0; i < padded_tokens_; i += rows)
            product(true, rows, width, this->score_columns(i) / kPerWord<Word>, scores + i * kStride, kStride,
                    b, width, dst + i * width, width);
    }

    // dst (+)= T^T B of the turned operand of the inverse, [writes x writes], or A^T B of that of scores,
    // [writes x tokens].
    void turned_product(bool scores, bool add, const Word* turned, const Word* b, int width,
                        float* dst) const {
        constexpr int kRows = Base::kTriangleRows;
        const int end = (scores ? padded_tokens_ : padded_) / kPerWord<Word>;
        for (int i = 0; i < padded_; i += kRows) {
            const int row = scores ? (behind_ + i) / writes_ : i,
                      first = row / kRows * kRows / kPerWord<Word>;
            if (first >= end && add) return;
            product(add, kRows, width, end - first, turned + i * kStride + first, kStride, b + first * width,
                    width, dst + i * width, width);
        }
    }

    // dbeta of U and, in d_values, dV.
    void beta(const float* U) {
        for (int i = 0; i < count_; ++i) {
            const float over_beta = 1.0f / buffers_.beta[i];
            Vec dot{};
            for (int j = i * columns_; j < (i + 1) * columns_; j += kLanes)
                dot += (load(own_.d_values + j) * over_beta) * (load(U + j) * over_beta);
            own_.d_beta[i] = sum(dot);
        }
    }

private:
    // --- squares: dA, dL; what they have above the diagonal means nothing ---

    void squares(const float* U) {
        const GradientBuffers<Word>& b = own_;
        d_o_rows_ = row_words(b.d_o_rows, b.d_o, padded_tokens_, columns_);
        if (solves_) d_value_rows_ = row_words(b.d_values_rows, b.d_values, padded_, columns_);
        if (kSplit && solves_) lost_row_words(b.d_values_lost_rows, b.d_values, padded_, columns_);
        write_rows_ = row_words(b.writes_rows, U, padded_, columns_);
        transpose_words(b.writes_t, padded_, write_rows_, column_words(), padded_, column_words());
        const auto multiply = [&](bool add, int i, int count, int columns, const Word* rows, float* dst) {
            product(add, count, columns, column_words(), rows + i * column_words(), column_words(),
                    b.writes_t, padded_, dst + i * kChunk, kChunk);
        };
        for (int i = 0; i < padded_tokens_; i += this->score_rows())
            multiply(false, i, this->score_rows(), this->score_columns(i), d_o_rows_, b.d_scores);
        constexpr int kRows = Base::kTriangleRows;
        for (int i = 0; solves_ && i < padded_; i += kRows) {
            multiply(false, i, kRows, i + kRows, d_value_rows_, b.d_overlaps);
            if (kSplit) multiply(true, i, kRows, i + kRows, b.d_values_lost_rows, b.d_overlaps);
        }
    }

    // --- rows and columns of one anchor ---

    // Adds rows [begin, end): from_q and from_k, whose operands were decayed to the anchor before `begin`.
    // The first rows of a chunk start the sums.
    template <bool kFirst>
    void add_rows(int begin, int end) {
        const GradientBuffers<Word>& b = own_;
        float* factors = buffers_.factors;
        this->fill(factors, channels_, 1.0f);
        for (int i = begin; i < end; ++i) {
            Vec dot{};
            for (int c = 0; c < channels_; c += kLanes) {
                const int at = i * channels_ + c;
                const Vec factor = load(factors + c) * channel_decay(i, c), q = load(b.from_q + at) * factor;
                store(factors + c, factor);
                Vec term = q * load(buffers_.q + at), k{};
                if (solves_) {
                    k = load(b.from_k + at) * factor;
                    term += k * load(buffers_.e + at);
                }
                store(b.d_q + at, kFirst ? q : load(b.d_q + at) + q);
                if (kFirst && erases_) store(b.d_k + at, Vec{});
                if (kFirst || solves_) store(b.d_e + at, kFirst ? k : load(b.d_e + at) + k);
                if (!wanted_.decay) continue;
                if (per_channel_)
                    store(b.from_q + at, term);
                else
                    dot += term;
            }
            if (wanted_.decay && !per_channel_) b.d_log_decay[i] = sum(dot);
        }
        if (!wanted_.decay) return;
        if (!per_channel_) {
            float all = 0.0f;
            for (int i = end - 1; i >= begin; --i) b.d_log_decay[i] = all += b.d_log_decay[i];
            return;
        }
        float* all = factors;
        this->zero(all, channels_);
        for (int i = end - 1; i >= begin; --i)
            for (int c = 0; c < channels_; c += kLanes) {
                const int at = i * channels_ + c;
                const Vec x = load(all + c) + load(b.from_q + at);
                store(all + c, x);
                store(b.d_g + at, load(b.d_g + at) + x);
            }
    }

    // What add_rows<true> does of all rows, where tokens write several times, with one decay per token or
    // none.
    void add_first_rows_apart() {
        const GradientBuffers<Word>& b = own_;
        for (int i = 0; i < padded_; ++i) b.d_log_decay[i] = 0.0f;
        // Multiplies a row by `factor`, and adds its part in the decays to that of row `at` of writes.
        const auto add = [&](float* from, const float* operand, float* dst, int row, int at, float factor) {
            Vec dot{};
            for (int c = row * channels_; c < (row + 1) * channels_; c += kLanes) {
                const Vec x = load(from + c) * factor;
                store(dst + c, x);
                dot += x * load(operand + c);
            }
            b.d_log_decay[at] += sum(dot);
        };
        float of_writes = 1.0f, of_tokens = 1.0f;
        for (int i = 0; i < padded_; ++i)
            add(b.from_k, buffers_.e, b.d_e, i, i, of_writes *= buffers_.token_decay[i]);
        if (erases_) this->zero(b.d_k, padded_ * channels_);
        for (int i = 0; i < tokens_; ++i) {
            const int first = this->first_row(i);
            if (first >= 0) of_tokens *= buffers_.token_decay[first];
            add(b.from_q, buffers_.q, b.d_q, i, first + writes_ - 1, of_tokens);
        }
        this->zero(b.d_q + tokens_ * channels_, (padded_tokens_ - tokens_) * channels_);
        float all = 0.0f;
        for (int i = padded_ - 1; i >= 0; --i) b.d_log_decay[i] = all += b.d_log_decay[i];
    }

    // Adds columns [begin, end): from_columns, whose operands were decayed to the anchor after `end` - 1.
    void add_columns(int begin, int end) {
        const GradientBuffers<Word>& b = own_;
        float dots[kChunk];
        float* factors = buffers_.factors;
        this->fill(factors, channels_, 1.0f);
        for (int i = end - 1; i >= begin; --i) {
            Vec dot{};
            for (int c = 0; c < channels_; c += kLanes) {
                const int at = i * channels_ + c;
                const Vec factor = load(factors + c), k = load(b.from_columns + at) * factor,
                          term = k * load(buffers_.k + at);
                store(factors + c, factor * channel_decay(i, c));
                store(b.d_k + at, load(b.d_k + at) + k);
                if (!wanted_.decay) continue;
                if (per_channel_)
                    store(b.from_columns + at, term);
                else
                    dot += term;
            }
            dots[i] = sum(dot);
        }
        if (!wanted_.decay) return;
        if (!per_channel_) {
            float all = 0.0f;
            for (int i = begin; i < end; ++i) {
                b.d_log_decay[i] += all;
                all += dots[i];
            }
            return;
        }
        float* all = factors;
        this->zero(all, channels_);
        for (int i = begin; i < end; ++i)
            for (int c = 0; c < channels_; c += kLanes) {
                const int at = i * channels_ + c;
                const Vec x = load(all + c);
                store(b.d_g + at, load(b.d_g + at) + x);
                store(all + c, x + load(b.from_columns + at));
            }
    }

    CULA_INLINE Vec channel_decay(int token, int channel) const {
        if (!per_channel_) return broadcast(buffers_.token_decay[token]);
        return load(buffers_.decay + token * channels_ + channel);
    }

    // --- ends: rows that read S, columns that write to Z ---

    void ends(const float* S, const float* Z) {
        const GradientBuffers<Word>& b = own_;
        const auto multiply = [&](bool add, int count, const Word* rows, float* dst) {
            product(add, count, channels_, column_words(), rows, column_words(), b.state_t, channels_, dst,
                    channels_);
        };
        turn_state(S);
        multiply(false, padded_tokens_, d_o_rows_, b.from_q);
        if (solves_) multiply(false, padded_, d_value_rows_, b.from_k);
        if (kSplit && solves_) multiply(true, padded_, b.d_values_lost_rows, b.from_k);
        if (wanted_.decay && per_channel_) through_channels(S, Z);
        if (writes_ > 1)
            add_first_rows_apart();
        else
            add_rows<true>(0, padded_);
        if (wanted_.decay && !per_channel_) through_token(S, Z);
        turn_state(Z);
        multiply(false, padded_, write_rows_, b.from_columns);
        add_columns(0, padded_);
    }

    // The words of a state, with the value columns as the reduction.
    void turn_state(const float* state) {
        const Word* rows = row_words(own_.state_rows, state, channels_, columns_);
        transpose_words(own_.state_t, channels_, rows, column_words(), channels_, column_words());
    }

    // What passes the whole chunk, Gamma_C rowsum(S Z): starts dg, or is added to it.
    void through_channels(const float* S, const float* Z) {
        float* first = own_.d_g;
        for (int c = 0; c < channels_; ++c) first[c] = sum(row_dot(S, Z, c)) * buffers_.chunk_decay[c];
        for (int i = 1; i < padded_; ++i)
            for (int c = 0; c < channels_; c += kLanes) store(first + i * channels_ + c, load(first + c));
    }
    void through_token(const float* S, const float* Z) {
        Vec dot{};
        for (int c = 0; c < channels_; ++c) dot += row_dot(S, Z, c);
        const float all = sum(dot) * buffers_.chunk_decay[0];
        for (int i = 0; i < padded_; ++i) own_.d_log_decay[i] += all;
    }
    CULA_INLINE Vec row_dot(const float* S, const float* Z, int c) const {
        Vec even{}, odd{};
        for (int j = c * columns_; j < (c + 1) * columns_; j += 2 * kLanes) {
            even += load(S + j) * load(Z + j);
            odd += load(S + j + kLanes) * load(Z + j + kLanes);
        }
        return even + odd;
    }

    // --- pairs, one decay per channel ---

    void pairs_by_channel() {
        for (int half = kChunk / 2; half >= kLeaf; half /= 2)
            for (int begin = 0; begin + half < padded_; begin += 2 * half)
                pairs_across(begin, begin + half, half);
        for (int begin = 0; begin < count_; begin += kLeaf) pairs_of_leaf(begin);
    }

    // Rows [border, border + half) with columns [begin, border).
    void pairs_across(int begin, int border, int half) {
        // Tiles reduce over kTokenMultiple tokens at a time; those beyond `half` are zero.
        const int tokens = kPerWord<Word> > 1 ? round_up(half, kTokenMultiple) : half;
        const GradientBuffers<Word>& b = own_;
        this->pack_from(border, border + half, b.q_rows, solves_ ? b.k_rows : nullptr);
        this->pack_toward(begin, border, b.k_columns, buffers_.factors);
        for (Word* operand : {b.q_rows, b.k_rows, b.k_columns})
            for (int x = half * words_; x < tokens * words_; ++x) operand[x] = {};
        const auto multiply = [&](bool add, const Word* square, const Word* operand, float* dst) {
            product(add, half, channels_, tokens / kPerWord<Word>, square, kStride, operand, channels_, dst,
                    channels_);
        };
        const int block = border * kChunk + begin;
        float *from_q = b.from_q + border * channels_, *from_k = b.from_k + border * channels_,
              *from_columns = b.from_columns + begin * channels_;
        // The words of one square, or its low words, with their rows and columns.
        const auto square = [&](bool low, const float* src, const Word* rows, float* from_rows, bool add) {
            take_square(src + block, half, low);
            multiply(low, b.square_w, b.k_columns, from_rows);
            multiply(low || add, b.square_t_w, rows, from_columns);
        };
        square(false, b.d_scores, b.q_rows, from_q, false);
        if (kSplit && solves_) square(true, b.d_scores, b.q_rows, from_q, true);
        if (solves_) square(false, b.d_overlaps, b.k_rows, from_k, true);
        if (kSplit && solves_) square(true, b.d_overlaps, b.k_rows, from_k, true);
        add_rows<false>(border, border + half);
        add_columns(begin, border);
    }

    // The words, or the low words, of half x half elements and of their transpose, padded with zeros to 32
    // x 32.
    void take_square(const float* src, int half, bool low) {
        const GradientBuffers<Word>& b = own_;
        for (int i = 0; i < kTokenMultiple; ++i)
            for (int j = 0; j < kTokenMultiple; j += kLanes) {
                const Vec x = i < half && j < half ? load(src + i * kChunk + j) : Vec{};
                store(b.square + i * kChunk + j, low ? lost(x) : x);
            }
        square_words(b.square_w, kTokenMultiple, kTokenMultiple);
        float* turned = b.square + kTokenMultiple;
        transpose(turned, kChunk, b.square, kChunk, kTokenMultiple, kTokenMultiple);
        for (int i = 0; i < half; ++i)
            for (int j = 0; j < kTokenMultiple; j += 2 * kLanes)
                store_words(words_at(b.square_t_w + i * kStride, j), load(turned + i * kChunk + j),
                            load(turned + i * kChunk + j + kLanes));
    }
    void square_words(Word* dst, int rows, int columns) const {
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < columns; j += 2 * kLanes)
                store_words(words_at(dst + i * kStride, j), load(own_.square + i * kChunk + j),
                            load(own_.square + i * kChunk + j + kLanes));
    }

    // Pairs of the tokens [begin, begin + kLeaf), one after another.
    void pairs_of_leaf(int begin) {
        for (int c = 0; c < channels_; c += kLanes) {
            if (solves_)
                leaf_channels<true>(begin, begin * channels_ + c);
            else
                leaf_channels<false>(begin, begin * channels_ + c);
        }
    }

    template <bool kSolves>
    CULA_INLINE void leaf_channels(int begin, int at) {
        const GradientBuffers<Word>& b = own_;
        const float *q = buffers_.q + at, *k = buffers_.k + at, *e = buffers_.e + at,
                    *decay = buffers_.decay + at;
        float *d_q = b.d_q + at, *d_k = b.d_k + at, *d_e = b.d_e + at, *d_g = b.d_g + at;
        const float *d_scores = b.d_scores + begin * kChunk + begin,
                    *d_overlaps = b.d_overlaps + begin * kChunk + begin;
        // d_e is d_k where there are no erase keys, so each is loaded right before it is stored.
        Vec crossing[kLeaf];  // of the pairs of row i, by their column
        for (int i = 0; i < kLeaf; ++i) {
            const Vec query = load(q + i * channels_), reader = kSolves ? load(e + i * channels_) : Vec{},
                      diagonal = broadcast(d_scores[i * kChunk + i]);
            store(d_k + i * channels_, load(d_k + i * channels_) + diagonal * query);
            Vec factor = broadcast(1.0f), of_query = diagonal * load(k + i * channels_), of_reader{};
            for (int j = i - 1; j >= 0; --j) {
                factor *= load(decay + (j + 1) * channels_);
                const Vec decayed = load(k + j * channels_) * factor,
                          of_q = broadcast(d_scores[i * kChunk + j]);
                Vec row = of_q * query;
                of_query += of_q * decayed;
                if constexpr (kSolves) {
                    const Vec of_k = broadcast(d_overlaps[i * kChunk + j]);
                    row += of_k * reader;
                    of_reader += of_k * decayed;
                }
                store(d_k + j * channels_, load(d_k + j * channels_) + factor * row);
                crossing[j] = decayed * row;
            }
            store(d_q + i * channels_, load(d_q + i * channels_) + of_query);
            if (kSolves) store(d_e + i * channels_, load(d_e + i * channels_) + of_reader);
            if (!wanted_.decay) continue;
            Vec through{};
            for (int j = 0; j < i; ++j) {
                through += crossing[j];
                store(d_g + (j + 1) * channels_, load(d_g + (j + 1) * channels_) + through);
            }
        }
    }

    // --- pairs, one decay per token or none ---

    void pairs_by_token() {
        const GradientBuffers<Word>& b = own_;
        decay_squares();
        if (wanted_.decay) cross_tokens();
        if (!wanted_.keys) return;
        const Word *k = packed_rows(b.k_columns, buffers_.k, padded_, channels_),
                   *q = packed_rows(b.q_rows, buffers_.q, padded_tokens_, channels_);
        for (int x = 0; x < padded_tokens_ * kChunk; x += kLanes) store(b.square + x, load(b.d_scores + x));
        square_words(b.square_w, padded_tokens_, padded_);
        scored_product(b.square_w, k, channels_, b.d_q);
        turn_square(b.d_scores, padded_tokens_);
        square_words(b.square_w, padded_, padded_tokens_);
        turned_product(true, true, b.square_w, q, channels_, b.d_k);
        if (!solves_) return;
        turn_square(b.d_overlaps, padded_);  // rows and columns of dL in one product: both meet k
        for (int x = 0; x < padded_ * kChunk; x += kLanes)
            store(b.square + x, load(b.square + x) + load(b.d_overlaps + x));
        square_words(b.square_w, padded_, padded_);
        product(true, padded_, channels_, padded_ / kPerWord<Word>, b.square_w, kStride, k, channels_, b.d_k,
                channels_);
    }

    void turn_square(const float* src, int rows) {
        transpose(own_.square, kChunk, src, kChunk, rows, padded_);
    }

    // Multiplies dA and dL by the decays between their tokens and makes them zero above the diagonal.
    // `square` gets what each pair has to do with the decay between its tokens; the scores have it already.
    void decay_squares() {
        const GradientBuffers<Word>& b = own_;
        float* factors = buffers_.row_decay;
        for (int i = 0; i < padded_; ++i) {
            const bool reads = this->reads(i);
            const int row = i * kChunk, of_token = reads ? this->reader(i) * kChunk : 0;
            float *d_scores = b.d_scores + of_token, *d_overlaps = b.d_overlaps + row;
            const float *scores = buffers_.scores + of_token, *overlaps = buffers_.overlaps + row;
            float* pairs = b.square + row;
            if (reads)
                for (int j = 0; wanted_.decay && j < i; ++j) pairs[j] = d_scores[j] * scores[j];
            else
                this->zero(pairs, i);
            for (int j = 0; wanted_.decay && solves_ && j < i; ++j) pairs[j] += d_overlaps[j] * overlaps[j];
            for (int j = 0; j < i; ++j) factors[j] *= buffers_.token_decay[i];
            factors[i] = 1.0f;
            for (int j = 0; reads && j < i; ++j) d_scores[j] *= factors[j];
            for (int j = 0; solves_ && j < i; ++j) d_overlaps[j] *= factors[j];
            for (int j = i + 1; reads && j < padded_; ++j) d_scores[j] = 0.0f;
            for (int j = i; j < padded_; ++j) d_overlaps[j] = 0.0f;
        }
        for (int i = tokens_; i < padded_tokens_; ++i) this->zero(b.d_scores + i * kChunk, padded_);
    }

    // The sums over pairs i >= t > j.
    void cross_tokens() {
        float* columns = buffers_.row_decay;  // the sums over i >= t
        this->zero(columns, kChunk);
        for (int t = padded_ - 1; t >= 0; --t) {
            const float* pairs = own_.square + t * kChunk;
            Vec sums{};
            int j = 0;
            for (; j + kLanes <= t; j += kLanes) {
                const Vec column = load(columns + j) + load(pairs + j);
                store(columns + j, column);
                sums += column;
            }
            float all = sum(sums);
            for (; j < t; ++j) all += columns[j] += pairs[j];
            own_.d_log_decay[t] += all;
        }
    }

protected:
    const Wanted wanted_;
    const GradientBuffers<Word> own_;

private:
    const Word *d_o_rows_ = nullptr, *d_value_rows_ = nullptr,
               *write_rows_ = nullptr;  // dO, dV, U, row-major
};

}  // namespace cula::cpu::CULA_CPU_TARGET
