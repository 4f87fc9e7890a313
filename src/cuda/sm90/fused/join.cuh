// SPDX-License-Identifier: Apache-2.0
// Segments of the fused prefill that join by themselves (Strategy Joined, docs/design/joined.md).
//
// All segments of a sequence run at once, from zero; the first one from the sequence's state. What the others
// lack is linear in the state S0 before them. A walk over the same chunks without values, and with the
// identity in the place of S, gives both parts of it:
//
//   outputs     o_t += S0 e_t, where e_t [K], the entry query of token t, has the output of row r as e_t[r]
//   the state   S0 M + B, where M and B are the states at the ends of both walks
//
// So the grid has pairs of CTAs for the rows of M, which come first, and then those for the rows of S. A CTA
// of S that has walked its segment waits for what earlier segments, and the M of its own, leave, and then
//
//   states    S0 <- S0 M + B over the segments before its own, 64 rows of it; the last segment goes on to the
//             final state
//   outputs   o += S0 e
//
// Where M has at most kVanished behind the segment's first chunk, as gates that forget have it, M counts as
// zero, and entry queries as zeros from there on.
//
// No CTA waits for one that comes later in the grid, so that it does not matter how many run at once (CTAs
// start in the order of their numbers). Flags (SegmentNotes::ended) are zeros before the launch.
//
// A row of S with a NaN or an infinity stays without numbers to the sequence's end, where 0 times it would be
// left out, too: segments note such rows of their B, and later ones store NaN in outputs and final states.
#pragma once

#include "cuda/chunked/cursor.cuh"
#include "cuda/pipe/tensor_maps.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/sm90/fused/config.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::sm90 {

using chunked::SegmentNotes;

inline constexpr float kVanished = 0x1p-100f;  // docs/design/joined.md has what is left out
inline constexpr int kMapBlocks = 2;           // row blocks of M: a pair

struct FusedMaps {
    CUtensorMap q{}, k{}, g{}, v{}, o{};
};
// entry: of the entry queries. columns: segments times value heads.
struct JoinedMaps : FusedMaps {
    CUtensorMap entry{};
    TokenRows entry_rows;
    Divisor value_blocks;
    std::int32_t columns = 0;
    SegmentNotes notes;
};
template <Cut kCut>
using MapsOf = std::conditional_t<kCut == Cut::kJoined, JoinedMaps, FusedMaps>;
template <int kKey, Cut kCut>
using CursorOf = SegmentCursor<kKey, kCut == Cut::kJoined>;

// The number of the CTA among row blocks, those of S before those of M, of one column after the other.
__device__ __forceinline__ int block_in_columns(const CarryParams& p, const JoinedMaps& maps) {
    const int of_s = p.value_blocks, block = static_cast<int>(blockIdx.x),
              block_of_s = block - maps.columns * kMapBlocks;
    if (block_of_s >= 0) return block_of_s + maps.value_blocks.divide(block_of_s) * kMapBlocks;
    const int column = block / kMapBlocks;
    return block + (column + 1) * of_s;
}
// The block of a cursor.
template <Cut kCut, class Shared>
__device__ __forceinline__ int own_block(const Shared& shared) {
    if constexpr (kCut == Cut::kJoined)
        return shared.block;
    else
        return static_cast<int>(blockIdx.x);
}

// Of a segment and head.
struct NotesOf {
    const DeviceArgs& a;
    const SegmentNotes& notes;
    int value_head;

    __device__ __forceinline__ std::int64_t column(int number) const {
        return std::int64_t{number} * a.value_heads + value_head;
    }
    __device__ __forceinline__ float* largest(int number) const {
        return notes.largest + column(number) * SegmentNotes::kMapSlots;
    }
    __device__ __forceinline__ std::uint64_t* broken(int number) const {
        return notes.broken + column(number) * SegmentNotes::value_slots(a.value_dim);
    }
    // One for each CTA: row blocks of S, then of M.
    __device__ __forceinline__ std::int32_t* ended(int number, int blocks) const {
        return notes.ended + column(number) * blocks;
    }
    __device__ __forceinline__ bool vanishes(int number) const {
        const auto* const at = reinterpret_cast<const float4*>(largest(number));
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < SegmentNotes::kMapSlots / 4; ++i) {
            const float4 x = __ldcg(at + i);
            most = max_or_nan(most, max_or_nan(max_or_nan(x.x, x.y), max_or_nan(x.z, x.w)));
        }
        return most <= kVanished;
    }
};

// The rows of a warp of M at the segment's begin: of the identity.
template <int kKey>
__device__ __forceinline__ void identity(float (&state)[kKey / 8][4], const chunked::RowWindow& rows) {
    chunked::each_pair(state, [&](float2& pair, int row, int channel) {
        const int r = rows.row() + row, c = chunked::RowWindow::channel() + channel;
        pair = {r == c && r < rows.end ? 1.0f : 0.0f, r == c + 1 && r < rows.end ? 1.0f : 0.0f};
    });
}

// --- What a CTA does behind its walk ---

inline constexpr int kJoinWarps = 16, kJoinThreads = 32 * kJoinWarps;

// Rows of M and of S have some floats more than channels, so that the lanes of an operand are in different
// banks. Entry queries come for two chunks of the plan at once.
template <class T, int kKey>
struct JoinShared {
    static constexpr int kMapPitch = kKey + 8, kStatePitch = kKey + 4, kTokens = 2 * chunked::kTokens<kKey>,
                         kPlaces = 3;  // of entry queries and outputs
    using States = chunked::Tile<kWarpgroupRows, kKey>;
    using Queries = chunked::Tile<kTokens, kKey>;
    using Outputs = chunked::Tile<kTokens, kWarpgroupRows>;
    union {
        float m[2][kKey * kMapPitch];
        struct {
            alignas(128) T queries[kPlaces][kTokens * kKey], outputs[kPlaces][kTokens * kWarpgroupRows];
        } entries;
    };
    float state[kWarpgroupRows * kStatePitch];
    alignas(128) T entered[kWarpgroupRows * kKey];  // S0 as an operand
};

// The part of a warp in S: 16 rows by 32 channels, as accumulators.
template <class T, int kKey>
struct JoinedRows {
    using Smem = JoinShared<T, kKey>;
    static constexpr int kColumns = 32, kTiles = kColumns / 8, kWarps = kKey / kColumns;  // of 16 rows
    static_assert(kWarpgroupRows / 16 * kWarps == kJoinWarps);
    const int thread, lane = thread % 32, warp = thread / 32;
    const int row = warp / kWarps * 16 + lane / 4, first = warp % kWarps * kColumns;
    float sums[kTiles][4];

    // Calls body(pair of sums, row of the CTA, channel).
    template <class Body>
    __device__ __forceinline__ void each(Body body) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float2 pair{sums[tile][2 * half], sums[tile][2 * half + 1]};
                body(pair, row + 8 * half, first + 8 * tile + lane % 4 * 2);
                sums[tile][2 * half] = pair.x, sums[tile][2 * half + 1] = pair.y;
            }
    }
    // sums += S M, whose numbers are rounded to TF32: B and M have errors of bfloat16 operands.
    __device__ __forceinline__ void multiply(const float* state, const float* m) {
        const auto rounded = [](float x) {
            std::uint32_t word;
            asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
            return word;
        };
        state += row * Smem::kStatePitch + lane % 4;
        m += lane % 4 * Smem::kMapPitch + first + lane / 4;
#pragma unroll 2
        for (int k = 0; k < kKey; k += 8, state += 8, m += 8 * Smem::kMapPitch) {
            std::uint32_t left[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) left[i] = rounded(state[i % 2 * 8 * Smem::kStatePitch + i / 2 * 4]);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
                mma_16x8x8_tf32(sums[tile], left, rounded(m[8 * tile]),
                                rounded(m[8 * tile + 4 * Smem::kMapPitch]));
        }
    }
};

// What a CTA does when it has walked its segment, whose number and row block these are. By all threads.
// shared: memory that no role uses any more.
template <class T, int kKey>
struct Join {
    using Smem = JoinShared<T, kKey>;
    const DeviceArgs& a;
    const CarryParams& p;
    const JoinedMaps& maps;
    Smem& shared;
    const Segment segment;
    int number, value_head, row_block;
    const int thread, first_row = row_block * kWarpgroupRows;

    __device__ __forceinline__ NotesOf notes() const { return {a, maps.notes, value_head}; }
    static __device__ __forceinline__ void sync() {
        named_barrier_sync<kJoinThreads>(nth(Paired::NamedBarrier::kJoin, 0));
    }

    // Says that what the CTA has stored is there.
    __device__ __forceinline__ void publish_end() const {
        __syncthreads();
        if (thread > 0) return;
        __threadfence();
        publish(notes().ended(number, static_cast<int>(p.row_blocks.value)) + row_block, 1);
    }
    // Waits for the same rows of earlier segments, for their M, and for that of the own one.
    __device__ __forceinline__ void wait() const {
        const int blocks = static_cast<int>(p.row_blocks.value), each = 1 + kMapBlocks;
#pragma unroll 1
        for (int i = thread; i < (segment.rank + 1) * each; i += 32) {
            const int rank = i / each, which = i % each;
            if (which == 0 ? rank == segment.rank : rank == 0) continue;
            const std::int32_t* const flag = notes().ended(number - segment.rank + rank, blocks) +
                                             (which == 0 ? row_block : blocks - which);
            while (!published(flag)) __nanosleep(32);
        }
    }

    // Of the CTA's first row, in B of segment `rank`.
    __device__ __forceinline__ const float* b_of(int rank) const {
        return static_cast<const float*>(p.map_b.data) +
               p.map_b.offset(number - segment.rank + rank, value_head) + first_row * kKey;
    }
    // M of a segment to one of two places; zeros where it has no row.
    __device__ __forceinline__ void copy_map(int rank, int place) const {
        const float* const from = static_cast<const float*>(p.map_m.data) +
                                  p.map_m.offset(number - segment.rank + rank, value_head);
#pragma unroll 2
        for (int i = thread; i < kKey * kKey / 4; i += kJoinThreads) {
            const int row = i / (kKey / 4), channel = i % (kKey / 4) * 4;
            copy_async(shared_address(&shared.m[place][row * Smem::kMapPitch + channel]),
                       from + (row < a.key_dim ? row * kKey + channel : 0), row < a.key_dim ? 16 : 0);
        }
    }

    // rows: the state before segment `from`, then that before segment `to`. Keeps that before the own one,
    // S0, as an operand.
    __device__ __forceinline__ void pass(JoinedRows<T, kKey>& rows, int from, int to) const {
        if (from < to) copy_map(from, 0);
        commit_copies();
#pragma unroll 1
        for (int rank = from;; ++rank) {
            if (rank == segment.rank) put_operand(rows);
            if (rank == to) return;
            const int place = (rank - from) % 2;
            put_state(rows);
            if (rank + 1 < to) copy_map(rank + 1, place ^ 1);
            commit_copies();
            load_b(rows, rank);
            wait_copies<1>();
            sync();
            rows.multiply(shared.state, shared.m[place]);
            rows.each([&](float2& pair, int, int channel) {  // of channels that M does not have
                if (channel >= a.key_dim) pair = {};
            });
            sync();  // all have read S and M
        }
    }
    __device__ __forceinline__ void load_b(JoinedRows<T, kKey>& rows, int rank) const {
        const float* const from = b_of(rank);
        rows.each([&](float2& pair, int row, int channel) {
            pair = first_row + row < a.value_dim && channel < a.key_dim
                       ? __ldcg(reinterpret_cast<const float2*>(from + row * kKey + channel))
                       : float2{};
        });
    }
    __device__ __forceinline__ void put_state(JoinedRows<T, kKey>& rows) const {
        rows.each([&](const float2& pair, int row, int channel) {
            *reinterpret_cast<float2*>(&shared.state[row * Smem::kStatePitch + channel]) = pair;
        });
    }
    __device__ __forceinline__ void put_operand(JoinedRows<T, kKey>& rows) const {
        rows.each([&](const float2& pair, int row, int channel) {
            const int at = Smem::States::unit(row, channel / 8) * 8 + channel % 8;
            *reinterpret_cast<std::uint32_t*>(&shared.entered[at]) = pack2<T>(pair.x, pair.y);
        });
    }

    // The lanes that segments 0 to segment.rank - 1 have noted of slot `slot` of the CTA. Warp-collective.
    __device__ __forceinline__ std::uint64_t broken(int slot) const {
        const int lane = thread % 32;
        std::uint64_t found = 0;
#pragma unroll 1
        for (int i = lane; i < segment.rank; i += 32)
            found |= __ldcg(
                reinterpret_cast<const unsigned long long*>(notes().broken(number - segment.rank + i)) +
                first_row / chunked::kWarpRows + slot);
        return __reduce_or_sync(0xffffffffu, static_cast<unsigned>(found)) |
               std::uint64_t{__reduce_or_sync(0xffffffffu, static_cast<unsigned>(found >> 32))} << 32;
    }
    // Whether these are lanes of row `row` of a slot: of rows from 8 on they are in the high word; four each.
    static __device__ __forceinline__ bool has_row(std::uint64_t lanes, int row) {
        return (lanes >> 4 * row & 15) != 0;
    }

    __device__ __forceinline__ void store_final(JoinedRows<T, kKey>& rows, std::int64_t slot) const {
        const std::uint64_t lanes = broken(rows.row / chunked::kWarpRows);
        const bool lost[2] = {has_row(lanes, rows.row % 8), has_row(lanes, rows.row % 8 + 8)};
        rows.each([&](float2& pair, int row, int) {
            if (lost[(row - rows.row) / 8]) pair = {NAN, NAN};
        });
        put_state(rows);
        sync();
        const std::int64_t base = a.final.offset(slot, value_head) + first_row * a.final.v;
        const int count = min(a.value_dim - first_row, kWarpgroupRows) * kKey;
#pragma unroll 1
        for (int i = thread; i < count; i += kJoinThreads) {
            const int row = i / kKey, channel = i % kKey;
            if (channel < a.key_dim)
                store_float(a.final.data, a.final.dtype, base + row * a.final.v + channel * a.final.k,
                            shared.state[row * Smem::kStatePitch + channel]);
        }
    }

    // o += S0 e of the first `count` tokens of the segment.
    __device__ __forceinline__ void add_entries(int count) const {
        constexpr int kTokens = Smem::kTokens, kTokenTiles = 2, kTiles = 2;
        const TokenRange tokens = tokens_of(a, segment.sequence);
        const std::int64_t begin = tokens.begin + std::int64_t{segment.chunk} * chunked::kTokens<kKey>;
        auto& entries = shared.entries;
        T* const outputs =
            static_cast<T*>(a.o.data) + a.o.offset(tokens.batch, begin, value_head) + first_row;
        const T* const queries = static_cast<const T*>(maps.entry_rows.data) +
                                 maps.entry_rows.offset(tokens.batch, begin, value_head);
        // The thread's pieces of 16 bytes: of entry queries a unit of channels, of outputs one of rows, of
        // every kStep-th and kOutputStep-th token.
        constexpr int kUnits = kKey / 8, kStep = kJoinThreads / kUnits, kOutputUnits = kWarpgroupRows / 8,
                      kOutputStep = kJoinThreads / kOutputUnits;
        static_assert(kStep % 8 == 0 && kOutputStep % 8 == 0);  // the same swizzle in all of them
        constexpr int kStepBytes = Smem::Queries::unit(kStep, 0) * 16,
                      kOutputStepBytes = Smem::Outputs::unit(kOutputStep, 0) * 16;
        const int query_unit = thread % kUnits, query_token = thread / kUnits,
                  output_unit = thread % kOutputUnits, output_token = thread / kOutputUnits;
        const bool has_query = query_unit * 8 < a.key_dim,
                   has_output = first_row + output_unit * 8 < a.value_dim;
        const T* const query = queries + query_token * maps.entry_rows.token + query_unit * 8;
        T* const output = outputs + output_token * a.o.token + output_unit * 8;
        const std::uint32_t query_at = shared_address(entries.queries[0]) +
                                       Smem::Queries::unit(query_token, query_unit) * 16,
                            output_at = shared_address(entries.outputs[0]) +
                                        Smem::Outputs::unit(output_token, output_unit) * 16;
        constexpr int kPlaceBytes = sizeof(entries.queries[0]),
                      kOutputPlaceBytes = sizeof(entries.outputs[0]);
        // Entry queries and outputs to one of the places; nothing behind the last token.
        const auto copy = [&](int first, int place) {
            if (first >= count) return commit_copies();
#pragma unroll
            for (int i = 0; i < kTokens / kStep; ++i) {
                const int token = first + i * kStep;
                const bool in = has_query && token + query_token < count;
                copy_async(query_at + place * kPlaceBytes + i * kStepBytes,
                           query + (in ? token * maps.entry_rows.token : 0), in ? 16 : 0);
            }
#pragma unroll
            for (int i = 0; i < kTokens / kOutputStep; ++i) {
                const int token = first + i * kOutputStep;
                const bool in = has_output && token + output_token < count;
                copy_async(output_at + place * kOutputPlaceBytes + i * kOutputStepBytes,
                           output + (in ? token * a.o.token : 0), in ? 16 : 0);
            }
            commit_copies();
        };
        // A warp has 32 tokens of 128, and 16 of 64 value rows; a lane two neighbouring rows of a token.
        // Units of a row are permuted by an exclusive or with its number, so that from step to step two bits
        // of an address change, and every fourth time the panel.
        const int lane = thread % 32, warp = thread / 32, first_token = warp / 4 * 32, own = warp % 4 * 16;
        const std::uint32_t right_at = shared_address(shared.entered) +
                                       Smem::States::unit(own + lane / 16 * 8 + lane % 8, lane / 8 % 2) * 16,
                            left_at = shared_address(entries.queries[0]) +
                                      Smem::Queries::unit(first_token + lane % 16, lane / 16) * 16,
                            word_at = shared_address(entries.outputs[0]) +
                                      Smem::Outputs::unit(first_token + lane / 4, own / 8) * 16 +
                                      lane % 4 * 4;
        sync();  // nobody reads M any more
        constexpr int kAhead = Smem::kPlaces - 1;
#pragma unroll 1
        for (int i = 0; i < kAhead; ++i) copy(i * kTokens, i);
        int place = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += kTokens, place = place == kAhead ? 0 : place + 1) {
            copy(first + kAhead * kTokens, place == 0 ? kAhead : place - 1);
            wait_copies<kAhead>();
            sync();
            float sums[kTokenTiles][kTiles][4] = {};
#pragma unroll 4
            for (int step = 0; step < kKey / 16; ++step) {
                const std::uint32_t bits = step % 4 * 32;
                const int panel = step / 4 * 8;
                std::uint32_t right[4];
                load_matrices(right, (right_at ^ bits) + Smem::States::unit(0, panel) * 16);
#pragma unroll
                for (int tile = 0; tile < kTokenTiles; ++tile) {
                    std::uint32_t left[4];
                    load_matrices(
                        left, ((left_at + place * kPlaceBytes) ^ bits) +
                                  (Smem::Queries::unit(16 * tile, 0) + Smem::Queries::unit(0, panel)) * 16);
#pragma unroll
                    for (int pair = 0; pair < kTiles; ++pair)
                        mma_16x8x16<T>(sums[tile][pair], left, right[2 * pair], right[2 * pair + 1]);
                }
            }
#pragma unroll
            for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int pair = 0; pair < kTiles; ++pair) {
                        const std::uint32_t at = ((word_at + place * kOutputPlaceBytes) ^ pair * 16) +
                                                 Smem::Outputs::unit(16 * tile + 8 * half, 0) * 16;
                        const float2 was = unpack2<T>(load_word(at));
                        const float* const sum = sums[tile][pair] + 2 * half;
                        store_word(at, pack2<T>(was.x + sum[0], was.y + sum[1]));
                    }
            sync();
#pragma unroll
            for (int i = 0; i < kTokens / kOutputStep; ++i) {
                const int token = first + i * kOutputStep;
                std::uint32_t words[4];
                load_words(words, output_at + place * kOutputPlaceBytes + i * kOutputStepBytes);
                if (has_output && token + output_token < count)
                    *reinterpret_cast<uint4*>(output + token * a.o.token) = {words[0], words[1], words[2],
                                                                             words[3]};
            }
        }
        sync();  // before what follows in these places
    }
    // NaN in the outputs of rows that an earlier segment has noted.
    __device__ __forceinline__ void spoil_outputs(int count) const {
        const int lane = thread % 32, warp = thread / 32;
        const std::uint64_t lanes = broken(warp % 4);
        if (lanes == 0) return;
        const TokenRange tokens = tokens_of(a, segment.sequence);
        const std::int64_t begin = tokens.begin + std::int64_t{segment.chunk} * chunked::kTokens<kKey>;
        const int own = first_row + warp % 4 * 16;
        T* const outputs = static_cast<T*>(a.o.data) + a.o.offset(tokens.batch, begin, value_head) + own;
#pragma unroll 1
        for (int token = warp / 4 * 32 + lane; token < count; token += 128)
#pragma unroll 1
            for (int row = 0; row < 16 && own + row < a.value_dim; ++row)
                if (has_row(lanes, row)) outputs[token * a.o.token + row] = from_float<T>(NAN);
    }

    __device__ __forceinline__ void run() const {
        publish_end();
        const bool of_m = row_block >= p.value_blocks, last = segment.rank + 1 == segment.count;
        if (of_m || thread >= kJoinThreads || (segment.rank == 0 && !last)) return;
        if (thread < 32) wait();
        sync();
        __threadfence();
        const std::int64_t slot = last ? states_of(a, segment.sequence).final : -1;
        JoinedRows<T, kKey> rows{thread};
        if (segment.rank == 0) {
            if (slot < 0) return;
            load_b(rows, 0);
            return store_final(rows, slot);
        }
        const int first_number = number - segment.rank;
        int from = segment.rank;  // the state before that segment is a B
        for (unsigned vanished = 0; !vanished && from > 1;) {
            const int rank = from - 1 - thread % 32;
            vanished = __ballot_sync(0xffffffffu, rank < 1 || notes().vanishes(first_number + max(rank, 1)));
            from -= vanished ? __ffs(static_cast<int>(vanished)) - 1 : 32;
        }
        const bool vanished = notes().vanishes(number);
        const std::int64_t length = tokens_of(a, segment.sequence).length,
                           before = std::int64_t{segment.chunk} * chunked::kTokens<kKey>;
        const int count =
            static_cast<int>(min(length - before, std::int64_t{segment.chunks} * chunked::kTokens<kKey>));
        load_b(rows, from - 1);
        const bool makes_final = slot >= 0 && !vanished;
        pass(rows, from, segment.rank + (makes_final ? 1 : 0));
        if (slot >= 0) {
            if (!makes_final) load_b(rows, segment.rank);
            store_final(rows, slot);
        }
        add_entries(vanished ? min(count, chunked::kTokens<kKey>) : count);
        spoil_outputs(count);
    }
};

}  // namespace cula::cuda::sm90
