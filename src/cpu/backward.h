// SPDX-License-Identifier: Apache-2.0
// backward: the gradients of one sequence and one query/key head, in chunks of 64 writes. With Z = d loss / d
// state after a chunk, and the letters of ALGORITHM.md:
//
//     forwards    read, carry (chunk.h)                        keeps S, U, T and L of every chunk
//     backwards   dU = A^T dO + K+ Z
//                 dV = T^T dU                                  additive rules: dV = dU
//                 gradient (gradient.h)                        of S, Z, U, dO, dV: dq, dk, dg, dbeta
//                 Z  <- diag(Gamma_C) Z + Q~^T dO - K^^T dV    additive rules: without K^
//     at last     dh0 = Z
//
// With erase keys (chunk.h) V is beta o V and K^ is E^, and gradient gives de in the place of dk's rows:
//     dv = beta o dV,  dbeta = v o dV,  derase = de o k,  dk <- dk + de o erase
//
// then, in float32, through gate, sigmoid and norm (derivatives.h).
//
// A sequence of more than kMostChunks chunks keeps the states of every kBlockChunks-th chunk alone, and walks
// forwards once more through each block before it walks backwards.
//
// Value heads of a group follow each other; the gradients of q and k are summed in their order. A task shares
// nothing with others, so that bits do not depend on threads.
// A write is masked if its beta is nearer to zero than 2^-40. The solve takes 2^-40 in its place, so that
// dbeta = (dV / beta) . (U / beta) exists; its rows of U and dV then become zero.
// Compensated operands (chunk.h): A, T, dU and dV.
// Design page: docs/design/backward-cpu.md.
#pragma once

#include "cpu/derivatives.h"
#include "cpu/gradient.h"

namespace cula::cpu::CULA_CPU_TARGET {

inline constexpr std::int64_t kMostChunks = 1024, kBlockChunks = 16;

// What the walk backwards needs of a chunk's walk forwards.
struct Kept {
    float *state, *writes, *inverse, *overlaps;
};

// How a sequence is divided: into blocks of `block` chunks whose first states are kept.
struct Blocks {
    std::int64_t rows, chunks, block, count;

    CULA_INLINE Blocks(const Args& args, std::int64_t tokens)
        : rows(tokens * writes_per_token(args)),
          chunks((rows + kChunk - 1) / kChunk),
          block(chunks > kMostChunks ? kBlockChunks : chunks),
          count(chunks > kMostChunks ? (chunks + kBlockChunks - 1) / kBlockChunks : 1) {}
};

template <class Word>
struct BackwardBuffers {
    // Operands of the walk backwards, all row-major.
    Word *q_decayed_t, *k_decayed_t;                              // [channels, tokens]
    Word* k_remaining;                                            // [writes, channels]
    Word *scores_t, *scores_lost_t, *inverse_t, *inverse_lost_t;  // [rows, rows]
    // Packed as B operands, [rows, columns].
    Word *d_o_w, *d_writes_w, *d_writes_lost_w;
    float* d_writes;                    // dU, [writes, columns]
    float* Z;                           // [channels, columns]
    float *gate_bias, *bias_sum, *row;  // [channels]
    double* parameters;                 // [1 + channels]: the head's dA_log and ddt_bias
    float* starts;                      // [blocks, channels, columns]: the states before several blocks
    float* kept;                        // of the chunks of one block
    float *d_q, *d_k;                   // [chunks, rows, channels]: sums over several value heads
    std::int64_t state_size, kept_size;

    static BackwardBuffers carve(Carver& carver, const Args& args, std::int64_t tokens, int channels,
                                 int columns) {
        BackwardBuffers b;
        const Wanted wanted(args);
        const Blocks blocks(args, tokens);
        const bool groups = args.v.size[2] > args.q.size[2];
        const auto operand = [&](Word*& p, int rows, int width) {
            p = carver.take<Word>(rows * width / kPerWord<Word>);
        };
        for (Word** p : {&b.q_decayed_t, &b.k_decayed_t, &b.k_remaining}) operand(*p, kChunk, channels);
        for (Word** p : {&b.scores_t, &b.scores_lost_t, &b.inverse_t, &b.inverse_lost_t})
            operand(*p, kChunk, kChunk);
        for (Word** p : {&b.d_o_w, &b.d_writes_w, &b.d_writes_lost_w}) operand(*p, kChunk, columns);
        b.state_size = channels * columns;
        b.kept_size = b.state_size + kChunk * columns + 2 * kChunk * kChunk;
        b.d_writes = carver.take<float>(kChunk * columns);
        b.Z = carver.take<float>(b.state_size);
        for (float** p : {&b.gate_bias, &b.bias_sum, &b.row}) *p = carver.take<float>(channels);
        b.parameters = carver.take<double>(1 + channels);
        b.starts = carver.take<float>(wanted.any() && blocks.count > 1 ? blocks.count * b.state_size : 0);
        b.kept = carver.take<float>(wanted.any() ? blocks.block * b.kept_size : 0);
        const std::int64_t sums = wanted.keys && groups ? blocks.chunks * kChunk * channels : 0;
        b.d_q = carver.take<float>(sums);
        b.d_k = carver.take<float>(sums);
        return b;
    }

    Kept of_chunk(std::int64_t index, int columns) const {
        float* state = kept + index * kept_size;
        float *writes = state + state_size, *inverse = writes + kChunk * columns;
        return {state, writes, inverse, inverse + kChunk * kChunk};
    }
};

template <class Word>
class Backward : Gradient<Word> {
public:
    // scan: the value head and the state that it starts from.
    Backward(const Args& args, const BackwardTask& task, const ScanTask& scan,
             const ChunkBuffers<Word>& buffers, const GradientBuffers<Word>& gradient,
             const BackwardBuffers<Word>& mine, int columns)
        : Base(args, scan, buffers, gradient, columns, mine.gate_bias),
          whole_(task),
          mine_(mine),
          shared_(buffers),
          blocks_(args, task.length),
          index_(static_cast<int>(scan.value_head - task.value_head)),
          keeps_(wanted_.any()) {
        this->least_beta_ = 0x1p-40f;
        this->zero(buffers.scores, kChunk * kChunk);
        this->zero(buffers.overlaps, kChunk * kChunk);
    }

    void run() {
        for (int i = 0; i < 1 + channels_; ++i) mine_.parameters[i] = 0.0;
        if (keeps_) walk_forwards();
        states_.read(mine_.Z, advance(whole_.d_final, index_ * whole_.d_final_step));
        for (std::int64_t block = blocks_.count; block-- > 0;) {
            if (keeps_ && block + 1 < blocks_.count) walk_block(block, true);
            for (std::int64_t chunk = end_of(block); chunk-- > block * blocks_.block;)
                step_back(chunk, keeps_ ? mine_.of_chunk(chunk - block * blocks_.block, columns_) : Kept{});
        }
        finish();
    }

private:
    using Base = Gradient<Word>;
    using Base::args_, Base::task_, Base::buffers_, Base::inputs_, Base::solves_, Base::erases_;
    using Base::columns_, Base::channels_, Base::key_dim_, Base::words_, Base::count_, Base::padded_;
    using Base::per_channel_, Base::writes_, Base::tokens_, Base::padded_tokens_, Base::states_;
    using Base::queries_, Base::keys_, Base::state_, Base::wanted_, Base::own_, Base::kSplit, Base::kStride;
    using Base::row_, Base::token_, Base::behind_, Base::k_rows_;

    std::int64_t end_of(std::int64_t block) const {
        return block + 1 < blocks_.count ? (block + 1) * blocks_.block : blocks_.chunks;
    }

    void begin_chunk(std::int64_t chunk) {
        const std::int64_t done = chunk * kChunk, left = blocks_.rows - done;
        Base::begin_chunk(task_.begin * writes_ + done, left < kChunk ? left : kChunk);
    }

    // What both walks know of a chunk lies where it is kept. L is needed once more for the gradient of one
    // decay per token.
    void use(const Kept& kept) {
        buffers_.read = kept.writes;
        buffers_.inverse = kept.inverse;
        buffers_.overlaps = per_channel_ ? shared_.overlaps : kept.overlaps;
    }

    // --- forwards ---

    // Keeps the states before all blocks, and everything of the last one.
    void walk_forwards() {
        if (blocks_.chunks == 0) return;
        states_.read(blocks_.count > 1 ? mine_.starts : mine_.kept, task_.initial);
        for (std::int64_t block = 0; block < blocks_.count; ++block)
            walk_block(block, block + 1 == blocks_.count);
    }

    void walk_block(std::int64_t block, bool keep) {
        queries_ = false;
        keys_ = solves_;
        const float* start = mine_.starts + block * mine_.state_size;
        if (blocks_.count > 1) copy(mine_.kept, start, mine_.state_size);
        const std::int64_t first = block * blocks_.block, end = end_of(block);
        for (std::int64_t chunk = first; chunk < end; ++chunk) {
            begin_chunk(chunk);
            const std::int64_t slot = keep ? chunk - first : 0;
            const Kept kept = mine_.of_chunk(slot, columns_);
            use(kept);
            state_ = kept.state;
            const bool last = chunk + 1 == end;
            if (last && keep && !solves_) return;
            this->load_inputs();
            this->scale_operands();
            if (solves_) {
                this->score();
                this->solve();
                this->pack_inverse();
            }
            this->load_values();
            this->pack_state();
            this->read();
            if (this->masked_) {
                copy(buffers_.values, kept.writes, padded_ * columns_);
                this->mask_rows(buffers_.values);
                this->set_writes(buffers_.values);
            }
            if (!last)
                this->carry(keep ? mine_.of_chunk(slot + 1, columns_).state : state_);
            else if (!keep)
                this->carry(mine_.starts + (block + 1) * mine_.state_size);
        }
    }

    // --- backwards ---

    void step_back(std::int64_t chunk, const Kept& kept) {
        begin_chunk(chunk);
        if (keeps_) use(kept);
        queries_ = true;
        keys_ = solves_ && !keeps_;
        this->load_inputs();
        turn_operands();
        this->score();
        turn_words(mine_.scores_t, mine_.scores_lost_t, buffers_.scores, padded_tokens_);
        if (solves_) {
            if (!keeps_) this->solve();
            turn_words(mine_.inverse_t, mine_.inverse_lost_t, buffers_.inverse, padded_);
        } else {
            this->load_values();
        }
        load_d_o();
        return_values();
        if (erases_) {
            write_strengths_and_values();
        } else {
            if (wanted_.beta) this->beta(kept.writes);
            if (this->masked_) {
                this->mask_rows(own_.d_values);
                if (keeps_) this->mask_rows(kept.writes);
            }
            store_d_v();
        }
        if (solves_)
            for (int x = 0; x < padded_ * columns_; x += kLanes)
                store(own_.d_values + x, -load(own_.d_values + x));
        if (keeps_) this->gradient(kept.state, mine_.Z, solves_ ? kept.writes : buffers_.values);
        return_state();
        if (wanted_.beta && args_.beta.ndim == 3) write_beta();
        if (wanted_.decay) per_channel_ ? write_channel_gates() : write_token_gates();
        if (wanted_.keys && erases_) divide_erase_keys();
        if (wanted_.keys) write_keys(chunk * kChunk * channels_);
    }

    // Q~ and K^ with tokens as the reduction, K+ with channels, all as left operands.
    void turn_operands() {
        const Word *q = own_.q_rows, *k = own_.k_rows;
        if (per_channel_) {
            this->pack_from(0, padded_, own_.q_rows, solves_ ? own_.k_rows : nullptr);
            this->scale_toward(0, padded_, mine_.k_remaining, buffers_.chunk_decay);
            k_rows_ = mine_.k_remaining;
        } else {
            const ChunkBuffers<Word>& b = buffers_;
            q = this->given_pairs(own_.q_rows, b.q, b.q_fraction, padded_tokens_);
            if (solves_) k = this->given_pairs(own_.k_rows, b.e, b.e_fraction, padded_);
        }
        const auto turn = [&](Word* dst, const Word* src, int rows) {
            transpose_words(dst, kStride, src, channels_, rows / kPerWord<Word>, channels_);
        };
        turn(mine_.q_decayed_t, q, padded_tokens_);
        if (solves_) turn(mine_.k_decayed_t, k, padded_);
    }

    // The words of a transposed matrix [rows, writes]; of delta rules the low words as well.
    void turn_words(Word* dst, Word* lost, const float* src, int rows) {
        Word* packed = own_.square_w;
        pack_rows(packed, kChunk, src, kChunk, rows, padded_);
        transpose_words(dst, kStride, packed, kChunk, rows / kPerWord<Word>, padded_);
        if (!kSplit || !solves_) return;
        pack_lost_rows(packed, kChunk, src, kChunk, rows, padded_);
        transpose_words(lost, kStride, packed, kChunk, rows / kPerWord<Word>, padded_);
    }

    void load_d_o() {
        const int loaded = args_.d_o ? tokens_ : 0;
        for (int i = 0; i < loaded; ++i)
            load_token_row(own_.d_o + i * columns_, args_.d_o, task_.batch, token_ + i, task_.value_head, 0,
                           task_.v_count, columns_);
        this->zero(own_.d_o + loaded * columns_, (padded_tokens_ - loaded) * columns_);
        d_o_words_ = packed_rows(mine_.d_o_w, own_.d_o, padded_tokens_, columns_);
    }

    // dU = A^T dO + K+ Z and dV = T^T dU, into d_values.
    void return_values() {
        const auto& m = mine_;
        float *d_writes = solves_ ? m.d_writes : own_.d_values, *d_values = own_.d_values;
        const auto add_scored = [&](const Word* turned) {
            this->turned_product(true, true, turned, d_o_words_, columns_, d_writes);
        };
        const auto add = [&](bool more, const Word* turned, const Word* b) {
            this->turned_product(false, more, turned, b, columns_, d_values);
        };
        const Word* Z = packed_rows(buffers_.state_w, m.Z, channels_, columns_);
        product(false, padded_, columns_, words_, k_rows_, words_, Z, columns_, d_writes, columns_);
        if (!per_channel_) this->scale_rows(d_writes, d_writes, buffers_.of_k_remaining, padded_);
        add_scored(m.scores_t);
        if (!solves_) return;
        if (kSplit) add_scored(m.scores_lost_t);
        const Word* words = packed_rows(m.d_writes_w, d_writes, padded_, columns_);
        add(false, m.inverse_t, words);
        if constexpr (!kSplit) return;
        pack_lost_rows(m.d_writes_lost_w, columns_, d_writes, columns_, padded_, columns_);
        add(true, m.inverse_t, m.d_writes_lost_w);
        add(true, m.inverse_lost_t, words);
    }

    void store_d_v() const {
        for (int i = 0; args_.d_v && i < count_; ++i)
            store_token_row(args_.d_v, task_.batch, row_ + i, task_.value_head, 0,
                            own_.d_values + i * columns_, task_.v_count);
    }

    // Z <- diag(chunk_decay) Z + Q~^T dO - K^^T dV; d_values are -dV. With one decay per token both rows are
    // lost.
    void return_state() {
        const auto& m = mine_;
        for (int c = 0; c < channels_; ++c)
            for (int x = c * columns_; x < (c + 1) * columns_; x += kLanes)
                store(m.Z + x, load(m.Z + x) * buffers_.chunk_decay[c]);
        const auto add = [&](const Word* turned, const Word* b, int rows) {
            product(true, channels_, columns_, rows / kPerWord<Word>, turned, kStride, b, columns_, m.Z,
                    columns_);
        };
        if (!per_channel_) {
            this->scale_rows(own_.d_o, own_.d_o, buffers_.of_q_decayed, padded_tokens_);
            d_o_words_ = packed_rows(m.d_o_w, own_.d_o, padded_tokens_, columns_);
            if (solves_) this->scale_rows(own_.d_values, own_.d_values, buffers_.of_k_decayed, padded_);
        }
        add(m.q_decayed_t, d_o_words_, padded_tokens_);
        if (!solves_) return;
        add(m.k_decayed_t, packed_rows(m.d_writes_w, own_.d_values, padded_, columns_), padded_);
        if constexpr (!kSplit) return;
        pack_lost_rows(m.d_writes_w, columns_, own_.d_values, columns_, padded_, columns_);
        add(m.k_decayed_t, m.d_writes_w, padded_);
    }

    void finish() {
        if (StateView d_initial = advance(whole_.d_initial, index_ * whole_.d_initial_step); d_initial.data) {
            if (!whole_.starts_from_state) this->zero(mine_.Z, channels_ * columns_);
            states_.write(d_initial, mine_.Z);
        }
        if (double* sums = whole_.parameters)
            for (int i = 0; i < 1 + key_dim_; ++i) sums[index_ * (1 + key_dim_) + i] = mine_.parameters[i];
    }

    // --- results of a chunk ---

    // With erase keys: dv and dbeta of dV, which is that of beta o V.
    void write_strengths_and_values() {
        for (int i = 0; i < count_; ++i) {
            const float *strengths = buffers_.strengths + i * columns_, *d = own_.d_values + i * columns_;
            float* row = buffers_.values + i * columns_;
            if (wanted_.beta) {
                load_token_row(row, args_.v, task_.batch, row_ + i, task_.value_head, 0, task_.v_count,
                               columns_);
                Vec dot{};
                for (int j = 0; j < columns_; j += kLanes) {
                    const Vec of_value = load(row + j) * load(d + j);
                    store(row + j, of_value);
                    dot += of_value;
                }
                own_.d_beta[i] = sum(dot);
                if (args_.beta.ndim == 4) write_value_betas(row_ + i, row);
            }
            for (int j = 0; j < columns_; j += kLanes) store(row + j, load(strengths + j) * load(d + j));
            if (args_.d_v)
                store_token_row(args_.d_v, task_.batch, row_ + i, task_.value_head, 0, row, task_.v_count);
        }
    }

    void write_value_betas(std::int64_t token, float* d_betas) {
        float given[kLanes];
        for (int j = 0; j < columns_; j += kLanes) {
            for (int x = 0; x < kLanes; ++x)
                given[x] = j + x < task_.v_count
                               ? load_scalar(args_.beta.ptr(task_.batch, token, task_.value_head, j + x),
                                             args_.beta.dtype)
                               : 0.0f;
            store(d_betas + j, beta_derivative(inputs_, load(given), load(d_betas + j)));
        }
        store_token_row(args_.d_beta, task_.batch, token, task_.value_head, 0, d_betas, task_.v_count);
    }

    // Of de: derase, and what k gets.
    void divide_erase_keys() {
        for (int i = 0; i < count_; ++i) {
            float *d_e = own_.d_e + i * channels_, *d_k = own_.d_k + i * channels_;
            const float* k = buffers_.k + i * channels_;
            load_token_row(mine_.row, args_.erase, task_.batch, row_ + i, task_.value_head, 0, key_dim_,
                           channels_);
            for (int c = 0; c < channels_; c += kLanes) {
                const Vec given = load(mine_.row + c), of_key = load(d_e + c);
                store(d_k + c, load(d_k + c) + of_key * inputs_.erase(given));
                store(d_e + c, erase_derivative(inputs_, given, of_key * load(k + c)));
            }
            if (args_.d_erase)
                store_token_row(args_.d_erase, task_.batch, row_ + i, task_.value_head, 0, d_e, key_dim_);
        }
    }

    void write_beta() {
        float logits[kChunk] = {};
        for (int i = 0; i < count_; ++i)
            logits[i] =
                load_scalar(args_.beta.ptr(task_.batch, row_ + i, task_.value_head), args_.beta.dtype);
        for (int i = 0; i < count_; i += kLanes)
            store(logits + i, beta_derivative(inputs_, load(logits + i), load(own_.d_beta + i)));
        for (int i = 0; i < count_; ++i)
            store_scalar(args_.d_beta.ptr(task_.batch, row_ + i, task_.value_head), args_.d_beta.dtype,
                         logits[i]);
    }

    void write_channel_gates() {
        const GateDerivative derivative{inputs_};
        this->zero(mine_.bias_sum, channels_);
        Vec log_rate{};
        for (int i = 0; i < count_; ++i) {
            float* d_g = own_.d_g + i * channels_;
            load_token_row(mine_.row, args_.g, task_.batch, row_ + i, task_.value_head, 0, key_dim_,
                           channels_);
            for (int c = 0; c < channels_; c += kLanes) {
                const GateGradient gradient =
                    derivative(load(mine_.row + c), load(inputs_.gate_bias + c), load(d_g + c));
                store(d_g + c, gradient.of_x);
                store(mine_.bias_sum + c, load(mine_.bias_sum + c) + gradient.of_x);
                log_rate += gradient.of_log_rate;
            }
            if (args_.d_g)
                store_token_row(args_.d_g, task_.batch, row_ + i, task_.value_head, 0, d_g, key_dim_);
        }
        mine_.parameters[0] += static_cast<double>(sum(log_rate) * derivative.log_rate_factor());
        for (int c = 0; c < key_dim_; ++c) mine_.parameters[1 + c] += static_cast<double>(mine_.bias_sum[c]);
    }

    // Of the tokens whose first write the chunk has.
    void write_token_gates() {
        const GateDerivative derivative{inputs_};
        float gates[kChunk] = {}, *d_g = own_.d_log_decay;
        const int first = behind_ ? 1 : 0, count = (behind_ + count_ + writes_ - 1) / writes_ - first;
        const std::int64_t token = token_ + first;
        for (int i = 0; i < count; ++i) {
            gates[i] = load_scalar(args_.g.ptr(task_.batch, token + i, task_.value_head), args_.g.dtype);
            d_g[i] = d_g[this->first_row(first + i)];
        }
        for (int i = count; i < round_up(count, kLanes); ++i) d_g[i] = 0.0f;
        Vec bias{}, log_rate{};
        for (int i = 0; i < count; i += kLanes) {
            const GateGradient gradient =
                derivative(load(gates + i), broadcast(inputs_.gate_bias_scalar), load(d_g + i));
            store(d_g + i, gradient.of_x);
            bias += gradient.of_x;
            log_rate += gradient.of_log_rate;
        }
        mine_.parameters[0] += static_cast<double>(sum(log_rate) * derivative.log_rate_factor());
        mine_.parameters[1] += static_cast<double>(sum(bias));
        for (int i = 0; args_.d_g && i < count; ++i)
            store_scalar(args_.d_g.ptr(task_.batch, token + i, task_.value_head), args_.d_g.dtype, d_g[i]);
    }

    // at: of the chunk, in the sums over value heads.
    void write_keys(std::int64_t at) {
        float *d_q = own_.d_q, *d_k = own_.d_k;
        const bool first = index_ == 0, last = index_ + 1 == whole_.group;
        if (!first) {
            add(d_q, mine_.d_q + at, padded_tokens_ * channels_);
            add(d_k, mine_.d_k + at, padded_ * channels_);
        }
        if (!last) {
            copy(mine_.d_q + at, d_q, padded_tokens_ * channels_);
            copy(mine_.d_k + at, d_k, padded_ * channels_);
            return;
        }
        for (int i = 0; i < tokens_; ++i)
            write_key_gradient(inputs_, args_.q, args_.d_q, token_ + i, static_cast<float>(args_.scale),
                               d_q + i * channels_, mine_.row);
        for (int i = 0; i < count_; ++i)
            write_key_gradient(inputs_, args_.k, args_.d_k, row_ + i, 1.0f, d_k + i * channels_, mine_.row);
    }

    static void add(float* dst, const float* src, int count) {
        for (int x = 0; x < count; x += kLanes) store(dst + x, load(src + x) + load(dst + x));
    }
    static void copy(float* dst, const float* src, std::int64_t count) {
        for (std::int64_t x = 0; x < count; x += kLanes) store(dst + x, load(src + x));
    }

    const BackwardTask& whole_;
    const BackwardBuffers<Word>& mine_;
    const ChunkBuffers<Word>& shared_;
    const Blocks blocks_;
    const int index_;  // of the value head in its group
    const bool keeps_;
    const Word* d_o_words_ = nullptr;  // dO, packed
};

template <class Word>
struct BackwardScratch {
    ChunkBuffers<Word> chunk;
    GradientBuffers<Word> gradient;
    BackwardBuffers<Word> mine;
    int columns;

    // Reductions over the value columns are whole tiles.
    BackwardScratch(Carver& carver, const Args& args, std::int64_t tokens) {
        const int channels = round_up(static_cast<int>(args.q.size[3]), kChannelMultiple);
        columns = round_up(static_cast<int>(args.v.size[3]), kTokenMultiple);
        chunk = ChunkBuffers<Word>::carve(carver, args, channels, columns);
        gradient = GradientBuffers<Word>::carve(carver, args, channels, columns);
        mine = BackwardBuffers<Word>::carve(carver, args, tokens, channels, columns);
    }
};

template <class Word>
std::size_t backward_scratch_bytes(const Args& args, std::int64_t tokens) {
    Carver carver(nullptr);
    BackwardScratch<Word>(carver, args, tokens);
    return carver.bytes();
}

template <class Word>
void backward_heads(const Args& args, const BackwardTask& task, std::byte* scratch) {
    Carver carver(scratch);
    const BackwardScratch<Word> buffers(carver, args, task.length);
    configure_tiles();
    for (int i = 0; i < task.group; ++i) {
        ScanTask scan{};
        scan.batch = task.batch, scan.begin = task.begin, scan.length = task.length;
        scan.head = task.head, scan.value_head = task.value_head + i;
        scan.v_count = static_cast<int>(args.v.size[3]);
        scan.initial = advance(task.initial, i * task.initial_step);
        Backward<Word>(args, task, scan, buffers.chunk, buffers.gradient, buffers.mine, buffers.columns)
            .run();
    }
    release_tiles();
}

}  // namespace cula::cpu::CULA_CPU_TARGET
