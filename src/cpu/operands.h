// SPDX-License-Identifier: Apache-2.0
// operands: what a chunk of 64 writes of one head multiplies, of its inputs: Q~, K^ and K+ of ALGORITHM.md,
// "Chunks", with erase keys E^ in the place of K^, V, beta and decays. chunk.h has what is done with them.
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
// token by token.
// With one decay per token no operand has it: a factor multiplies each score, and each row of the products
// with Q~, K^ and K+, or of what K+^T is multiplied by. The operands are then q and k as they were given,
// but for powers of two, and have no rounding; what norm and scale leave is part of the factors.
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
    float* e;  // the erase keys; those of rules that have none are k
    // With one decay per token the operands are not decayed.
    Word *q_decayed, *k_decayed;  // Q~, K^ (of erase keys: E^): decayed to the chunk's start; row-major
    Word* k_remaining;            // K+: decayed to the chunk's end; packed as a B operand
    Word* k_remaining_t;          // its transpose, [channels, token words]
    Word *q_anchored, *k_anchored, *k_toward, *k_toward_t;
    float *chunk_decay, *factors;  // [channels]; factors: running products of decays
    // [rows, rows]
    float *scores, *overlaps, *inverse;
    Word *scores_w, *scores_lost_w, *inverse_w, *inverse_lost_w;
    float *beta, *token_decay, *row_decay;
    // With one decay per token, of rows: the factors of Q~, K^ and K+, and what they have of norm and scale.
    float *of_q_decayed, *of_k_decayed, *of_k_remaining, *q_fraction, *k_fraction, *e_fraction;
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
        for (float** p : {&b.beta, &b.token_decay, &b.row_decay, &b.of_q_decayed, &b.of_k_decayed,
                          &b.of_k_remaining, &b.q_fraction, &b.k_fraction})
            matrix(*p, 1, kChunk);
        b.e_fraction = erases ? carver.take<float>(kChunk) : b.k_fraction;
        for (float** p : {&b.values, &b.read, &b.out}) matrix(*p, kChunk, columns);
        for (Word** p : {&b.values_w, &b.writes_w, &b.writes_lost_w}) operand(*p, kChunk, columns);
        operand(b.state_w, channels, columns);
        matrix(b.transposed, columns, channels);
        matrix(b.leaf, kLeaf, kLeaf);
        return b;
    }
};

template <class Word>
class Operands {
protected:
    // columns: value columns of the buffers. gate_bias: room for K floats. token_multiple: what tokens are
    // padded to a multiple of where they are not the rows of writes.
    Operands(const Args& args, const ScanTask& task, const ChunkBuffers<Word>& buffers, int columns,
             float* gate_bias, int token_multiple)
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
          words_(channels_ / kPerWord<Word>) {}

    // Whether the writes U of a chunk solve a triangular system (solve, read), or are its values.
    static constexpr bool solves(Update update) {
        switch (update) {
            case Update::kAdditive: return false;
            case Update::kDelta:
            case Update::kErase:
            case Update::kProduct:
            case Update::kDplr: return true;
        }
        return false;
    }

    // Whether words are halves of what they hold as floats: then operands of rules that solve are compensated
    // (chunk.h).
    static constexpr bool kSplit = kPerWord<Word> > 1;

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
            if (queries_ && i < tokens_)
                b.q_fraction[i] = fraction(inputs_.query(b.q + i * channels_, token_ + i));
            b.k_fraction[i] = fraction(inputs_.key(b.k + i * channels_, row_ + i));
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
            load_row_operands();
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

    // A factor without its sign and its power of two: from 1 up to 2. Words of floats have no need of it.
    static float fraction(float factor) {
        if constexpr (!kSplit) return 1.0f;
        std::uint32_t bits;
        __builtin_memcpy(&bits, &factor, sizeof bits);
        bits = (bits & 0x007fffffu) | 0x3f800000u;
        __builtin_memcpy(&factor, &bits, sizeof bits);
        return factor;
    }

    // With one decay per token: the rows of q, e and k without their fractions, and the factors of rows.
    void load_row_operands() {
        const ChunkBuffers<Word>& b = buffers_;
        load_token_decays();
        for (int i = count_; i < padded_; ++i) b.token_decay[i] = b.k_fraction[i] = 1.0f;
        for (int i = 0; erases_ && i < padded_; ++i) b.e_fraction[i] = 1.0f;
        if (queries_)
            for (int i = tokens_; i < padded_tokens_; ++i) b.q_fraction[i] = b.of_q_decayed[i] = 1.0f;
        if (queries_ || keys_) {
            if (queries_) q_rows_ = given_rows(b.q_decayed, b.q, b.q_fraction, padded_tokens_);
            k_rows_ = given_rows(b.k_anchored, b.k, b.k_fraction, padded_);
            e_rows_ = erases_ ? given_rows(b.k_decayed, b.e, b.e_fraction, padded_) : k_rows_;
        }
        float factor = 1.0f;
        for (int i = 0; i < padded_; ++i) {
            factor *= b.token_decay[i];
            b.of_k_decayed[i] = factor * b.e_fraction[i];
            if (queries_ && reads(i)) b.of_q_decayed[reader(i)] = factor * b.q_fraction[reader(i)];
        }
        factor = 1.0f;
        for (int i = padded_ - 1; i >= 0; --i) {
            b.of_k_remaining[i] = factor * b.k_fraction[i];
            factor *= b.token_decay[i];
        }
        fill(b.chunk_decay, channels_, factor);
    }

    // Rows without their fractions as operands: row-major, and packed as B.
    const Word* given_rows(Word* dst, const float* src, const float* fractions, int rows) const {
        if constexpr (!kSplit) return src;
        for (int i = 0; i < rows; ++i) {
            const float divisor = 1.0f / fractions[i];
            for (int c = i * channels_; c < (i + 1) * channels_; c += 2 * kLanes)
                store_words(words_at(dst, c), load(src + c) * divisor, load(src + c + kLanes) * divisor);
        }
        return dst;
    }
    const Word* given_pairs(Word* dst, const float* src, const float* fractions, int rows) const {
        if constexpr (!kSplit) return src;
        for (int i = 0; i < rows; i += 2) {
            const float even = 1.0f / fractions[i], odd = 1.0f / fractions[i + 1];
            const float *first = src + i * channels_, *second = first + channels_;
            for (int c = 0; c < channels_; c += kLanes)
                store_row_pair(dst + i / 2 * channels_ + c, channels_, load(first + c) * even,
                               load(second + c) * odd);
        }
        return dst;
    }

    // Multiplies rows of `columns_` by the factors of rows.
    void scale_rows(float* dst, const float* src, const float* factors, int rows) const {
        for (int i = 0; i < rows; ++i)
            for (int x = i * columns_; x < (i + 1) * columns_; x += kLanes)
                store(dst + x, load(src + x) * factors[i]);
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
            load_token_row(values + i * columns_, args_.v, task_.batch, row_ + i, task_.value_head,
                           task_.v_begin, task_.v_count, columns_);
        for (int x = 0; erases_ && x < loaded * columns_; x += kLanes)
            store(values + x, load(values + x) * load(buffers_.strengths + x));
        zero(values + loaded * columns_, (padded_ - loaded) * columns_);
    }

    // --- decay, one per channel ---

    // The decay factor of a token in 2 * kLanes channels.
    struct Factor {
        Vec low, high;
        CULA_INLINE void operator*=(Factor other) { low *= other.low, high *= other.high; }
    };
    CULA_INLINE Factor decay_of(int token, int channel) const {
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
    // for scores and for overlaps.
    void scale_from(int begin, int end, Word* q, Word* k) {
        float* factors = buffers_.factors;
        fill(factors, channels_, 1.0f);
        for (int i = begin; i < end; ++i)
            for (int c = 0; c < channels_; c += 2 * kLanes) {
                Factor factor = load_factor(factors, c);
                factor *= decay_of(i, c);
                store_factor(factors, c, factor);
                if (queries_) store_scaled(q, buffers_.q, i, c, factor);
                if (keys_) store_scaled(k, buffers_.e, i, c, factor);
            }
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
                store_pair(q, buffers_.q, begin, i, c, even, factor);
                if (k) store_pair(k, buffers_.e, begin, i, c, even, factor);
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
        const ChunkBuffers<Word>& b = buffers_;
        const Word* remaining = b.k_remaining;
        if (per_channel_) {
            scale_from(0, padded_, b.q_decayed, b.k_decayed);
            q_rows_ = b.q_decayed, e_rows_ = b.k_decayed;
            pack_toward(0, padded_, b.k_remaining, b.chunk_decay);
        } else {
            remaining = given_pairs(b.k_remaining, b.k, b.k_fraction, padded_);
        }
        transpose_words(b.k_remaining_t, token_words(), remaining, channels_, token_words(), channels_);
    }

    int token_words() const { return padded_ / kPerWord<Word>; }

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
    std::int64_t row_ = 0, token_ = 0;    // of the current chunk: its first row of k, and that one's token
    int behind_ = 0;                      // the writes of that token in chunks before
    int tokens_ = 0, count_ = 0;          // the rows of q, and those of k
    int padded_tokens_ = 0, padded_ = 0;  // padded to token_multiple_, and to kTokenMultiple
    // Row-major: Q~, K^ or E^, and K+ where it differs from K^ in its factors alone.
    const Word *q_rows_ = nullptr, *e_rows_ = nullptr, *k_rows_ = nullptr;
};

}  // namespace cula::cpu::CULA_CPU_TARGET
