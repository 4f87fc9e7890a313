// SPDX-License-Identifier: Apache-2.0
// scan: prefill and segment maps of one head of a sequence, in chunks of 64 tokens.
//
// Equation, per chunk: score, solve, read and carry of chunk.h, and between the last two
//     output   O = Q~ S + A U
//
// Design page: docs/design/cpu.md.
#pragma once

#include <new>

#include "cpu/chunk.h"

namespace cula::cpu::CULA_CPU_TARGET {

// What one head keeps from one chunk to the next.
struct ScanState {
    float* state;  // [channels, columns]
    float *gate_bias, *decay_so_far;

    static ScanState carve(Carver& carver, int channels, int columns) {
        return {carver.take<float>(channels * columns), carver.take<float>(channels),
                carver.take<float>(channels)};
    }
};

template <class Word>
class Scan : Chunk<Word> {
public:
    Scan(const Args& args, const ScanTask& task, const ChunkBuffers<Word>& buffers, const ScanState& own)
        : Base(args, task, buffers, round_up(task.v_count, kColumnMultiple), own.state, own.gate_bias, kLeaf),
          own_(own) {
        queries_ = args.o.ndim != 0;
        load_initial();
        if (task_.total_decay) this->fill(own_.decay_so_far, channels_, 1.0f);
    }

    // The rows of the chunk that starts `done` rows into the sequence's `all`: a chunk ends where a state is
    // asked for on the way. Checkpoints lie at multiples of 64 tokens, where every 64 rows end, too.
    static std::int64_t chunk_rows(const Args& args, const ScanTask& task, std::int64_t done,
                                   std::int64_t all) {
        std::int64_t rows = all - done < kChunk ? all - done : kChunk;
        if (task.chunk_states.data) {
            const std::int64_t spacing = args.chunk_tokens * writes_per_token(args),
                               rest = spacing - done % spacing;
            if (rest < rows) rows = rest;
        }
        return rows;
    }

    // Processes the chunk of so many rows that starts `done` rows into the sequence.
    void step(std::int64_t done, std::int64_t rows) {
        store_checkpoints(done);
        const std::int64_t spacing = args_.chunk_tokens * writes_;
        if (task_.chunk_states.data && done % spacing == 0)
            states_.write(advance(task_.chunk_states, done / spacing * task_.chunk_states_stride), state_);
        this->begin_chunk(task_.begin * writes_ + done, rows);
        chunk();
    }

    void finish() {
        store_checkpoints(task_.length * writes_);
        if (task_.final.data) states_.write(task_.final, state_);
        for (int c = 0; task_.total_decay && c < key_dim_; ++c)
            task_.total_decay[c * task_.total_decay_stride] = own_.decay_so_far[c];
    }

private:
    using Base = Chunk<Word>;
    using Base::args_, Base::task_, Base::buffers_, Base::solves_, Base::queries_, Base::kSplit;
    using Base::columns_, Base::channels_, Base::key_dim_, Base::words_, Base::tokens_, Base::padded_tokens_;
    using Base::per_channel_, Base::q_rows_;
    using Base::token_, Base::writes_, Base::states_, Base::state_, Base::state_words_, Base::write_words_;

    void chunk() {
        this->load_inputs();
        this->scale_operands();
        if (task_.total_decay)
            for (int c = 0; c < channels_; ++c) own_.decay_so_far[c] *= buffers_.chunk_decay[c];
        this->score();
        if (queries_) pack_scores();
        if (solves_) {
            this->solve();
            this->pack_inverse();
        }
        this->load_values();
        this->pack_state();
        this->read();
        if (queries_) output();
        this->carry(state_);
    }

    void pack_scores() const {
        this->to_words(buffers_.scores_w, buffers_.scores, padded_tokens_);
        if (kSplit && solves_) this->to_lost_words(buffers_.scores_lost_w, buffers_.scores, padded_tokens_);
    }

    // --- output: O = Q~ S + A U ---

    void output() {
        const ChunkBuffers<Word>& b = buffers_;
        product(false, padded_tokens_, columns_, words_, q_rows_, words_, state_words_, columns_, b.out,
                columns_);
        if (!per_channel_) this->scale_rows(b.out, b.out, b.of_q_decayed, padded_tokens_);
        add_scored(b.scores_w, write_words_);
        if (kSplit && solves_) {
            add_scored(b.scores_w, b.writes_lost_w);
            add_scored(b.scores_lost_w, write_words_);
        }
        for (int i = 0; i < tokens_; ++i)
            store_token_row(args_.o, task_.batch, token_ + i, task_.value_head, task_.v_begin,
                            b.out + i * columns_, task_.v_count);
    }

    void add_scored(const Word* scores, const Word* writes) const {
        const int rows = this->score_rows(), stride = this->token_words();
        for (int i = 0; i < padded_tokens_; i += rows)
            product(true, rows, columns_, this->score_columns(i) / kPerWord<Word>, scores + i * stride,
                    stride, writes, columns_, buffers_.out + i * columns_, columns_);
    }

    void load_initial() {
        if (!task_.identity) return states_.read(state_, task_.initial);
        this->zero(state_, channels_ * columns_);
        for (int j = 0; j < task_.v_count; ++j) state_[(task_.v_begin + j) * columns_ + j] = 1.0f;
    }

    // After `done` rows.
    void store_checkpoints(std::int64_t done) {
        const TensorRef& states = args_.checkpoints;
        for (; next_checkpoint_ < task_.num_checkpoints &&
               task_.checkpoints[next_checkpoint_].tokens * writes_ <= done;
             ++next_checkpoint_)
            states_.write({states.ptr(task_.checkpoints[next_checkpoint_].slot, task_.value_head),
                           states.dtype, states.stride[2], states.stride[3]},
                          state_);
    }

    const ScanState own_;
    std::int64_t next_checkpoint_ = 0;
};

template <class Word>
std::size_t scan_scratch_bytes(const Args& args, int v_count, int heads) {
    const int channels = round_up(static_cast<int>(args.q.size[3]), kChannelMultiple);
    const int columns = round_up(v_count, kColumnMultiple);
    Carver carver(nullptr);
    ChunkBuffers<Word>::carve(carver, args, channels, columns);
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
    const auto buffers = ChunkBuffers<Word>::carve(carver, args, channels, columns);
    for (int i = 0; i < kChunk * kChunk; ++i) buffers.scores[i] = buffers.overlaps[i] = 0.0f;
    configure_tiles();
    alignas(Scan<Word>) std::byte storage[kMaxScanHeads][sizeof(Scan<Word>)];
    Scan<Word>* scans[kMaxScanHeads];
    for (int i = 0; i < heads; ++i)
        scans[i] =
            new (storage[i]) Scan<Word>(args, tasks[i], buffers, ScanState::carve(carver, channels, columns));
    const std::int64_t all = tasks[0].length * writes_per_token(args);
    for (std::int64_t done = 0, rows = 0; done < all; done += rows) {
        rows = Scan<Word>::chunk_rows(args, tasks[0], done, all);
        for (int i = 0; i < heads; ++i) scans[i]->step(done, rows);
    }
    for (int i = 0; i < heads; ++i) scans[i]->finish();
    release_tiles();
}

}  // namespace cula::cpu::CULA_CPU_TARGET
