// SPDX-License-Identifier: Apache-2.0
// The portable return (sm_80 and later): the walk of a backward pass from a sequence's last chunk to its
// first. It is the mirror of the portable carry (sm80/carry.cuh), and runs as the other half of its launches
// in a backward pass.
//
// Equation. A chunk of C = 64 tokens (32 for K = 256); Z is d loss / d state after the chunk [V, K]; dU, dV
// and dO are [V, C]:
//   write    dU = Z K+^T + dO A
//   solve    dV = dU T                              if the rule reads the state; else dV = dU
//   return   Z  = Z diag(decay) + dO Q~ - dV K^     without K^ if the rule does not read the state
// At last, d initial state = Z. With one decay per token K^, K+ and Q~ are k and q as they came, and factors
// per token multiply the columns of Z k^T, dO and dV instead.
//
// Grid: that of the carry, 32 to 256 threads: a warp per 16 value rows, at most 8. CTAs that make rows of M
// have no counterpart here, and end at once.
//
// Map: the Z before a segment is Z M^T + B', with the M of the carry's map. B' is what the walk
// makes of Z = 0, or, in a sequence's last segment, of the Z after the sequence.
//
// Role: there is one, with the barriers of the carry. Z stays in float accumulators from the last chunk to
// the first; dO is read from the stage where a product needs it. Of a compensated chunk A, T, dU and dV have
// a low word each, the latter two only in registers.
//
// Saved (backward/saved.cuh): Z before it changes, and dO and dV rounded to T. dV is also the gradient of v
// (with erase strengths of beta o v).
//
// kSeveral: tokens may write several times; chunks are then rows of writes (tile/tokens_of_rows.cuh).
// Rows that are not their token's last have a zero q and a zero dO.
//
// Shared memory: the stages of the carry, with dO where that has V. Registers: 255, one CTA per
// multiprocessor. K = 256 spills: Z alone takes 128 registers.
#pragma once

#include "cuda/backward/walk_params.cuh"
#include "cuda/chunked/cursor.cuh"
#include "cuda/chunked/stage.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::backward {

using chunked::CarryStage, chunked::ChunkOperands, chunked::copy_bytes, chunked::copy_tokens,
    chunked::in_pieces, chunked::kTokens, chunked::kWarpRows, chunked::LaneReads, chunked::multiply_carry,
    chunked::OperandTile, chunked::pack_step, chunked::RawTiles, chunked::RowWindow, chunked::Schedule,
    chunked::Segment, chunked::SegmentCursor, chunked::Tile, chunked::TriangleReads;

template <class T, int kKey>
__device__ __forceinline__ void save_state(T* to, const float (&state)[kKey / 8][4]) {
#pragma unroll
    for (int step = 0; step < kKey / 16; ++step) {
        Packed packed;
        pack_step<T, kKey>(packed, state, step);
        save_block(to, step, packed);
    }
}

// block: the CTA's number among those of the return. kMap: makes B' of the segment, and nothing else.
template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kMap, bool kSeveral>
__device__ __forceinline__ void return_segment(const DeviceArgs& a, const Schedule& schedule,
                                               const ChunkOperands<T, kKey, kPerChannel>* operands,
                                               const WalkParams<T, kKey>& p, int block) {
    constexpr int kRows = kTokens<kKey>, kBlocks = kRows / 16;
    using Stage = CarryStage<T, kKey, kPerChannel>;
    using Operands = ChunkOperands<T, kKey, kPerChannel>;
    using RawT = RawTiles<T, kKey>;
    extern __shared__ __align__(128) unsigned char raw_memory[];
    auto* stages = reinterpret_cast<Stage*>(raw_memory);

    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
    const SegmentCursor<kKey, false> cursor(a, schedule, p, own_segment<kKey, false>(a, schedule, p, block),
                                            warp, warps, block);
    const Segment& segment = cursor.segment;
    if (segment.sequence < 0) return;
    const bool ends_walk = segment.rank == 0, starts_walk = segment.rank + 1 == segment.count;
    if constexpr (kMap)
        if (ends_walk || !p.walks_backwards || cursor.rows.first >= warps * kWarpRows * p.value_blocks)
            return;
    const Gradients& d = p.d;
    const int value_head = cursor.value_head, row_base = cursor.rows.first;
    const std::uint32_t shared_base = shared_address(raw_memory);

    // --- copies ---
    const bool wide_rows = !d.d_o.data || (d.d_o.dtype == kDtype<T> && in_pieces(d.d_o, a.value_dim));
    const bool wide_keys = kPerChannel || (in_pieces(a.q, a.key_dim) && in_pieces(a.k, a.key_dim));
    const std::int64_t first_operands = std::int64_t{segment.slot} * a.value_heads + value_head;
    // Loaded two chunks before it is used, so that nothing waits for the load.
    const auto compensated_at = [&](int chunk) {
        return kReadsState && chunk >= 0
                   ? written_before(p.is_compensated + first_operands + std::int64_t{chunk} * a.value_heads)
                   : 0;
    };
    const auto copy_chunk = [&](int chunk, bool odd, std::int32_t compensated) {
        Stage& stage = stages[odd];
        const std::uint32_t stage_at = shared_base + (odd ? static_cast<std::uint32_t>(sizeof(Stage)) : 0u);
        const int begin = Operands::begin(kReadsState, kReadsState && compensated);
        const auto* from = reinterpret_cast<const unsigned char*>(operands + first_operands +
                                                                  std::int64_t{chunk} * a.value_heads) +
                           begin + lane * 16;
        copy_bytes(stage_at + begin + lane * 16, from, Operands::end(false) - begin, warp, warps, lane);
        const int left = cursor.count(chunk);
        const std::int64_t t0 = cursor.token(chunk);
        const TokensOfRows<kSeveral> tokens(a.writes, t0);
        if constexpr (!kPerChannel) {
            const int head = a.by_group.divide(value_head);
            copy_tokens<T, kRows, kKey>(stage.raw.q, stage_at + offsetof(Stage, raw), a.q,
                                        a.q.offset(cursor.batch, tokens.first_token, head), left, a.key_dim,
                                        wide_keys, thread, threads, tokens);
            copy_tokens<T, kRows, kKey>(stage.raw.k, stage_at + offsetof(Stage, raw) + offsetof(RawT, k), a.k,
                                        a.k.offset(cursor.batch, t0, head), left, a.key_dim, wide_keys,
                                        thread, threads);
        }
        // A lane keeps its unit of eight value rows and advances by kStep tokens, after which the swizzle
        // repeats.
        constexpr int kUnits = kWarpRows / 8, kStep = 32 / kUnits;
        const int unit = lane % kUnits, row = row_base + unit * 8;
        int place = Tile<kRows, kWarpRows>::unit(lane / kUnits, unit);
        std::int64_t at = d.d_o.offset(cursor.batch, t0 + lane / kUnits, value_head) + row;
        [[maybe_unused]] const std::int64_t first_at =
            d.d_o.offset(cursor.batch, tokens.first_token, value_head) + row;
        T* rows = stage.values[warp];
        const std::uint32_t rows_at = stage_at + offsetof(Stage, values) + warp * sizeof(stage.values[0]);
#pragma unroll 1
        for (int token = lane / kUnits; token < kRows;
             token += kStep, place += kStep * kUnits, at += kStep * d.d_o.token) {
            if constexpr (kSeveral) at = first_at + tokens.token(token) * d.d_o.token;
            if (wide_rows) {
                const bool in = d.d_o.data && token < left && row < a.value_dim && tokens.is_last(token);
                copy_async(rows_at + place * 16,
                           in ? static_cast<const void*>(static_cast<const T*>(d.d_o.data) + at) : operands,
                           in ? 16 : 0);
            } else {
#pragma unroll 1
                for (int e = 0; e < 8; ++e)
                    rows[place * 8 + e] =
                        from_float<T>(token < left && row + e < a.value_dim && tokens.is_last(token)
                                          ? load_float(d.d_o.data, d.d_o.dtype, at + e)
                                          : 0.0f);
            }
        }
    };

    // --- state ---
    float state[kKey / 8][4];  // Z: [tile of 8 channels][accumulator fragment]
    int chunk = segment.chunks - 1;
    bool odd = false;
    std::int32_t compensated = compensated_at(chunk), compensated_next = compensated_at(chunk - 1);
    if (chunk >= 0) copy_chunk(chunk, odd, compensated);
    commit_copies();
    {
        States from{};
        std::int64_t slot = 0;
        if (starts_walk && cursor.ends_sequence)
            from = d.d_final, slot = segment.sequence;
        else if (starts_walk)
            from = p.slab_d_end;
        else if (!kMap)
            from = p.ends, slot = cursor.number;
        if (from.data)
            chunked::load_state<kKey>(state, from, from.offset(slot, value_head), cursor.rows);
        else
            chunked::each_pair(state, [](float2& pair, int, int) { pair = {0.0f, 0.0f}; });
    }

    const LaneReads<OperandTile<kKey, kPerChannel>, false> key_reads;
    const LaneReads<OperandTile<kKey, kPerChannel>, true> carry_reads;
    const TriangleReads<kRows, true> pair_reads;
    const LaneReads<Tile<kRows, kWarpRows>, false> row_reads;

    // The lane's first value row in d_v, after the transpose below.
    const int lane_row = cursor.rows.row(), lane_channel = RowWindow::channel(),
              lane_value = row_base + lane % 4 * 2;
    const bool stores_d_v = !kMap && d.d_v.data, rounds_d_v = stores_d_v && d.d_v.dtype == kDtype<T>,
               pairs_out = (d.d_v.batch | d.d_v.token | d.d_v.head | a.value_dim) % 2 == 0 &&
                           reinterpret_cast<std::uintptr_t>(d.d_v.data) % 4 == 0;
#pragma unroll 1
    for (; chunk >= 0; --chunk) {
        const Operands& of = stages[odd].operands;
        const std::uint32_t stage_at = shared_base + (odd ? static_cast<std::uint32_t>(sizeof(Stage)) : 0u);
        const std::int32_t compensated_after = compensated_at(chunk - 2);
        if (p.stages > 1) {
            if (chunk > 0) copy_chunk(chunk - 1, !odd, compensated_next);
            commit_copies();
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();

        std::uint32_t k_write = stage_at, q_return = stage_at, k_return = stage_at;
        if constexpr (kPerChannel) {
            k_write += offsetof(Operands, k_remaining), q_return += offsetof(Operands, q_decayed);
            k_return += offsetof(Operands, k_decayed);
        } else {
            q_return += offsetof(Stage, raw), k_write += offsetof(Stage, raw) + offsetof(RawT, k);
            k_return = k_write;
        }
        const std::uint32_t rows_at = stage_at + offsetof(Stage, values) + warp * sizeof(stages->values[0]);
        // Per-token factors of the lane's two neighbouring tokens in 8-token tile `tile`.
        const auto per_token = [&](const float* factor, int tile) {
            return *reinterpret_cast<const float2*>(factor + tile * 8 + lane % 4 * 2);
        };
        ReturnSlice<T, kKey>* slice = nullptr;
        if (!kMap && p.saved.returned && row_base < a.value_dim)
            slice = p.saved.returned + p.saved.index(segment.slot + chunk, value_head, row_base / kWarpRows);

        // --- write: dU ---
        float d_writes[kRows / 8][4] = {};
        {
            const auto reads = key_reads.again();
#pragma unroll
            for (int step = 0; step < kKey / 16; ++step) {
                Packed packed;
                pack_step<T, kKey>(packed, state, step);
                if (slice) save_block(slice->d_state, step, packed);
                multiply_step<T, kRows>(d_writes, packed, k_write, reads, step);
            }
        }
        if constexpr (!kPerChannel) {
#pragma unroll
            for (int x = 0; x < kRows / 8; ++x) {
                const float2 rest = per_token(of.k_rest, x);
                d_writes[x][0] *= rest.x, d_writes[x][1] *= rest.y, d_writes[x][2] *= rest.x,
                    d_writes[x][3] *= rest.y;
            }
        }
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile) {
            float2 decay;
            if constexpr (kPerChannel)
                decay = *reinterpret_cast<const float2*>(of.decay + tile * 8 + lane_channel);
            else
                decay = {of.decay[0], of.decay[0]};
            state[tile][0] *= decay.x, state[tile][1] *= decay.y, state[tile][2] *= decay.x,
                state[tile][3] *= decay.y;
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            // dO in the layout of an A operand: words 0 and 1 have value rows 0-7 and 8-15 of tokens 0-7,
            // words 2 and 3 those of tokens 8-15.
            Packed d_o;
            load_matrices_transposed(d_o, row_reads.at(rows_at, block, 0));
            if (slice) save_block(slice->d_outputs, block, d_o);
            multiply_triangle_rows<T, kRows>(d_writes, d_o, stage_at + offsetof(Operands, scores), pair_reads,
                                             block);
            if (kReadsState && compensated)
                multiply_triangle_rows<T, kRows>(d_writes, d_o, stage_at + offsetof(Operands, scores_low),
                                                 pair_reads, block);
            if constexpr (!kPerChannel) {
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float2 factor = per_token(of.q_factor, 2 * block + x / 2),
                                 pair = unpack2<T>(d_o[x]);
                    d_o[x] = pack2_finite<T>(pair.x * factor.x, pair.y * factor.y);
                }
            }
            multiply_carry<T, kKey>(state, d_o, q_return, carry_reads.again(), block);
        }

        // --- solve: dV ---
        float solved[kReadsState ? kRows / 8 : 1][4] = {};
        if constexpr (kReadsState) {
#pragma unroll
            for (int step = 0; step < kBlocks; ++step) {
                Packed packed, rest;
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float2 pair{d_writes[2 * step + x / 2][x % 2 * 2],
                                      d_writes[2 * step + x / 2][x % 2 * 2 + 1]};
                    packed[x] = pack2<T>(pair.x, pair.y);
                    rest[x] = compensated ? pack_rest<T>(pair, packed[x]) : 0u;
                }
                const std::uint32_t inverse_at = stage_at + offsetof(Operands, inverse);
                multiply_triangle_rows<T, kRows>(solved, packed, inverse_at, pair_reads, step);
                if (compensated) {
                    multiply_triangle_rows<T, kRows>(solved, rest, inverse_at, pair_reads, step);
                    multiply_triangle_rows<T, kRows>(
                        solved, packed, stage_at + offsetof(Operands, inverse_low), pair_reads, step);
                }
            }
        }
        const auto& d_values = [&]() -> const auto& {
            if constexpr (kReadsState)
                return solved;
            else
                return d_writes;
        }();

        // --- return: Z, and what is stored of dV ---
        const int left = cursor.count(chunk);
        const std::int64_t first_out = d.d_v.offset(cursor.batch, cursor.token(chunk), value_head);
        if (stores_d_v && !rounds_d_v) {
            float* floats =
                static_cast<float*>(d.d_v.data) + first_out + lane_channel * d.d_v.token + lane_row;
#pragma unroll
            for (int tile = 0; tile < kRows / 8; ++tile, floats += 8 * d.d_v.token)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (tile * 8 + lane_channel + e % 2 < left && lane_row + e / 2 * 8 < a.value_dim)
                        floats[e % 2 * d.d_v.token + e / 2 * 8] = d_values[tile][e];
        }
        T* to = static_cast<T*>(d.d_v.data) + lane_value + first_out + lane / 4 * d.d_v.token;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            Packed packed, returned, rest;
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const float* pair = &d_values[2 * block + x / 2][x % 2 * 2];
                packed[x] = pack2<T>(pair[0], pair[1]);
                if constexpr (kReadsState) {
                    float2 factor{-1.0f, -1.0f};
                    if constexpr (!kPerChannel) {
                        factor = per_token(of.k_factor, 2 * block + x / 2);
                        factor = {-factor.x, -factor.y};
                    }
                    const float2 product{pair[0] * factor.x, pair[1] * factor.y};
                    returned[x] = pack2_finite<T>(product.x, product.y);
                    rest[x] = compensated ? pack_rest<T>(product, returned[x]) : 0u;
                }
            }
            if constexpr (kReadsState) {
                const auto reads = carry_reads.again();
                multiply_carry<T, kKey>(state, returned, k_return, reads, block);
                if (compensated) multiply_carry<T, kKey>(state, rest, k_return, reads, block);
            }
            if (slice) save_block(slice->d_values, block, packed);
#pragma unroll
            for (int half = 0; half < 2; ++half, to += 8 * d.d_v.token)
#pragma unroll
                for (int y = 0; y < 2; ++y) {
                    // The lane then has two neighbouring value rows of a token.
                    const std::uint32_t word = transposed(packed[2 * half + y]);
                    if (!rounds_d_v || block * 16 + half * 8 + lane / 4 >= left ||
                        lane_value + y * 8 >= a.value_dim)
                        continue;
                    if (pairs_out) {
                        *reinterpret_cast<std::uint32_t*>(to + y * 8) = word;
                    } else {
                        const float2 pair = unpack2<T>(word);
                        to[y * 8] = from_float<T>(pair.x);
                        if (lane_value + y * 8 + 1 < a.value_dim) to[y * 8 + 1] = from_float<T>(pair.y);
                    }
                }
        }
        __syncthreads();
        if (p.stages == 1) {
            if (chunk > 0) copy_chunk(chunk - 1, odd, compensated_next);
            commit_copies();
        } else {
            odd = !odd;
        }
        compensated = compensated_next, compensated_next = compensated_after;
    }

    States to{};
    std::int64_t slot = 0;
    if constexpr (kMap) {
        to = p.map_z, slot = cursor.number;
    } else if (!ends_walk) {
        return;
    } else if (!cursor.starts_sequence) {
        to = p.slab_d_start;
    } else {
        to = d.d_initial, slot = segment.sequence;
        if (cursor.slots.initial < 0)
            chunked::each_pair(state, [](float2& pair, int, int) { pair = {0.0f, 0.0f}; });
    }
    if (to.data) chunked::store_state<kKey>(state, to, to.offset(slot, value_head), cursor.rows);
}

}  // namespace cula::cuda::backward
