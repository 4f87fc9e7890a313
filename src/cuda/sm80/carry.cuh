// SPDX-License-Identifier: Apache-2.0
// The portable carry (sm_80 and later): outputs and final states from chunk operands, values and initial
// states; the affine map (M, B) of each segment; or what a backward pass needs of it (CarryMode). Design
// page: docs/design/carry-sm80.md.
//
// Equation. A chunk of C = 64 tokens (32 for K = 256); S is the recurrent state [V, K]; R, U, O, V are [V,
// C]:
//   read     R = S K^^T         U = (V - R) T^T       if the rule reads the state; else U = V
//   output   O = S Q~^T + U A^T                       if outputs are made
//   carry    S = S diag(decay) + U K+
// With one decay per token K^, K+ and Q~ are k and q as they came, and factors per token multiply the columns
// of R, S q^T and U instead. Maps: B is the final S from zero; M is the final S from the identity where all
// values are zero. (ALGORITHM.md writes the transposes.) With kSaves and kKeeps the S before every chunk and
// its U are stored as backward/saved.cuh says; kWalkMaps makes the maps that cut such a walk, and M^T
// besides. The modes of a reversed walk take the chunks of a sequence from the last one on; its scores are an
// upper triangle, of which prepare has left the transposed. Where tokens write several times a chunk is 64
// rows of writes (tile/tokens_of_rows.cuh), of which those that are a token's last read and store O.
//
// Grid: row blocks x value heads x segments, row blocks fastest. 32 to 256 threads: a warp per 16 value rows,
// at most 8. For maps that are matrices further row blocks are rows of M. With kSaves every second CTA is one
// of the return (return.cuh), which needs nothing that the carry makes.
//
// Role: there is one. Every warp copies its share of the next chunk and computes 16 rows of S. S stays in
// float accumulators from the first chunk to the last. Accumulators of mma.m16n8k16, rounded and packed, have
// the register layout of its A operand, so S, V - R and U pass from one product to the next without shuffles.
// All B operands are row-major tiles in shared memory. Warps exchange no data; they share the copies.
//   role        registers  waits for                            signals (all by __syncthreads)
//   each warp   255        its own cp.async group of chunk c    before the products: its copies have arrived
//                          the other warps' copies              after the products: it has read the stage,
//                          the other warps' reads               which may be overwritten
//
// Shared memory: two stages where they fit, else one. A stage is the chunk operands, q and k as they came
// (one decay per token), and 16 value rows for each of 8 warps. KiB per stage:
//   K                    64      128     256
//   decay per channel    60.4    84.6    63.1
//   decay per token      53.0    69.0    46.5
// With two stages the copies of chunk c + 1 are issued before the products of chunk c; with one, after them.
// Two always fit compute capability 9.0 and 10.x (227 KiB). 8.0 (163 KiB) has one for K = 128 with decay per
// channel; 8.6, 8.9 and 12.0 (99 KiB) have two only for K = 256 with decay per token.
//
// Registers: 255, one CTA per multiprocessor. K = 256 spills: S alone takes 128 registers.
//
// PDL (programmatic dependent launch, sm_90 and later): every CTA first waits for the kernels before it, then
// triggers. The next kernel so has only this one to wait for.
#pragma once

#include "cuda/backward/return.cuh"
#include "cuda/chunked/cursor.cuh"
#include "cuda/chunked/stage.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/rule.h"
#include "cuda/tile/store_row.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::sm80 {

using backward::CarrySlice, backward::return_segment, backward::save_block, backward::save_state,
    backward::WalkParams;
using chunked::CarryParams, chunked::CarryStage, chunked::ChunkOperands, chunked::copy_bytes,
    chunked::copy_tokens, chunked::DecayMap, chunked::in_pieces, chunked::kMaxCarryWarps, chunked::kTokens,
    chunked::kWarpRows, chunked::LaneReads, chunked::multiply_carry, chunked::OperandTile,
    chunked::own_segment, chunked::RawTiles, chunked::RowWindow, chunked::Schedule, chunked::Segment,
    chunked::SegmentCursor, chunked::Tile, chunked::TriangleReads;

// What a carry leaves in memory.
enum class CarryMode : std::uint8_t {
    kOutputs,   // outputs and final states
    kKeeps,     // both, and what kSaves saves
    kMaps,      // the maps of segments
    kSaves,     // for a backward pass: the states before chunks and what these write
    kWalkMaps,  // the maps of segments of both walks of a backward pass
    // Of a walk from the last token to the first (docs/design/three-walks.md):
    kReversedOutputs,
    kReversedMaps,
};
constexpr bool is_reversed(CarryMode mode) {
    return mode == CarryMode::kReversedOutputs || mode == CarryMode::kReversedMaps;
}
constexpr bool makes_outputs(CarryMode mode) {
    return mode == CarryMode::kOutputs || mode == CarryMode::kKeeps || mode == CarryMode::kReversedOutputs;
}
constexpr bool makes_maps(CarryMode mode) {
    return mode == CarryMode::kMaps || mode == CarryMode::kReversedMaps || mode == CarryMode::kWalkMaps;
}
constexpr bool saves(CarryMode mode) { return mode == CarryMode::kSaves || mode == CarryMode::kKeeps; }
constexpr bool returns_too(CarryMode mode) {
    return mode == CarryMode::kSaves || mode == CarryMode::kWalkMaps;
}

// What does a chunk write?
template <Update kUpdate>
struct CarryRule {
    static_assert(kIsKnown<kUpdate>, "carry of sm80: what does a chunk write under this update rule?");
};
template <>
struct CarryRule<Update::kAdditive> {
    static constexpr bool kReadsState = false;  // U = V
};
template <>
struct CarryRule<Update::kDelta> {
    static constexpr bool kReadsState = true;  // U = (V - R) T^T
};

template <class T, int kKey, CarryMode kMode>
using CarryParamsOf =
    std::conditional_t<saves(kMode) || returns_too(kMode), WalkParams<T, kKey>, CarryParams>;

template <class T, int kKey, Update kUpdate, bool kPerChannel, CarryMode kMode>
__global__ void __launch_bounds__(kMaxCarryWarps * 32, 1)
    carry(const __grid_constant__ DeviceArgs a, const Schedule schedule,
          const ChunkOperands<T, kKey, kPerChannel>* operands,
          const __grid_constant__ CarryParamsOf<T, kKey, kMode> p) {
    pdl_wait();
    pdl_trigger();
    constexpr bool kMaps = makes_maps(kMode), kSaves = saves(kMode), kReversed = is_reversed(kMode),
                   kSeveral = kMayWriteSeveral<kPerChannel, kUpdate>;
    using Tokens = TokensOfRows<kSeveral>;
    int block = static_cast<int>(blockIdx.x);  // among the CTAs of the carry
    if constexpr (returns_too(kMode)) {
        const bool returns = p.template returns<kMaps>(block);
        block = p.template own_block<kMaps>(block);
        if (returns) {
            return_segment<T, kKey, CarryRule<kUpdate>::kReadsState, kPerChannel, kMaps, kSeveral>(
                a, schedule, operands, p, block);
            return;
        }
    }
    constexpr int kRows = kTokens<kKey>, kBlocks = kRows / 16;
    constexpr bool kReadsState = CarryRule<kUpdate>::kReadsState;
    static_assert(!kReversed || (!kReadsState && !kPerChannel));
    using Stage = CarryStage<T, kKey, kPerChannel>;
    using Operands = ChunkOperands<T, kKey, kPerChannel>;
    using RawT = RawTiles<T, kKey>;
    extern __shared__ __align__(128) unsigned char raw_memory[];
    auto* stages = reinterpret_cast<Stage*>(raw_memory);

    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
    const SegmentCursor<kKey, kMaps, kReversed> cursor(
        a, schedule, p, own_segment<kKey, kMaps>(a, schedule, p, block), warp, warps, block);
    if constexpr (makes_outputs(kMode)) cursor.template zero_skipped<kSeveral>(schedule);
    if (cursor.nothing()) return;
    if constexpr (kMode == CarryMode::kWalkMaps)
        if (!cursor.of_m && !has_diagonal_map(kUpdate) && !p.walks_forwards) return;
    const Segment& segment = cursor.segment;
    const int value_head = cursor.value_head, row_base = cursor.rows.first;
    const bool of_m = cursor.of_m;

    const std::uint32_t shared_base = shared_address(raw_memory);

    // --- copies ---
    const bool wide_values = in_pieces(a.v, a.value_dim);
    const bool wide_keys = kPerChannel || (in_pieces(a.q, a.key_dim) && in_pieces(a.k, a.key_dim));
    const Operands* first_operands =
        operands + static_cast<std::int64_t>(segment.slot) * a.value_heads + value_head;
    const std::int32_t* is_compensated =
        kReadsState ? p.is_compensated + static_cast<std::int64_t>(segment.slot) * a.value_heads + value_head
                    : nullptr;
    // Loaded two chunks before it is used, so that nothing waits for the load.
    const auto compensated_at = [&](int chunk) {
        return kReadsState && chunk < segment.chunks
                   ? written_before(is_compensated + static_cast<std::int64_t>(chunk) * a.value_heads)
                   : 0;
    };
    const auto copy_chunk = [&](int chunk, std::int32_t compensated) {
        const bool odd = chunk % p.stages;
        Stage& stage = stages[odd];
        const std::uint32_t stage_at = shared_base + (odd ? static_cast<std::uint32_t>(sizeof(Stage)) : 0u);
        {
            const int begin = Operands::begin(kReadsState, kReadsState && compensated),
                      bytes = Operands::end(!makes_outputs(kMode)) - begin;
            const auto* from = reinterpret_cast<const unsigned char*>(
                                   first_operands + static_cast<std::int64_t>(chunk) * a.value_heads) +
                               begin + lane * 16;
            const std::uint32_t to = stage_at + begin + lane * 16;
            copy_bytes(to, from, bytes, warp, warps, lane);
        }
        const int left = cursor.count(chunk);
        const std::int64_t t0 = cursor.token(chunk);
        if constexpr (!kPerChannel) {
            const int head = a.by_group.divide(value_head);
            if constexpr (makes_outputs(kMode)) {
                const Tokens tokens(a.writes, t0);
                copy_tokens<T, kRows, kKey>(stage.raw.q, stage_at + offsetof(Stage, raw), a.q,
                                            a.q.offset(cursor.batch, tokens.first_token, head), left,
                                            a.key_dim, wide_keys, thread, threads, tokens);
            }
            copy_tokens<T, kRows, kKey>(stage.raw.k, stage_at + offsetof(Stage, raw) + offsetof(RawT, k), a.k,
                                        a.k.offset(cursor.batch, t0, head), left, a.key_dim, wide_keys,
                                        thread, threads);
        }
        if (of_m) return;
        constexpr int kUnits = kWarpRows / 8;
        T* values = stage.values[warp];
        const std::uint32_t values_at = stage_at + offsetof(Stage, values) + warp * sizeof(stage.values[0]);
        // A lane keeps its unit and advances by kStep tokens, after which the swizzle repeats.
        constexpr int kStep = 32 / kUnits;
        const int unit = lane % kUnits, row = row_base + unit * 8,
                  place = Tile<kRows, kWarpRows>::unit(lane / kUnits, unit);
        const T* from = static_cast<const T*>(a.v.data) + a.v.offset(cursor.batch, t0, value_head) + row +
                        lane / kUnits * a.v.token;
        if (wide_values) {
            const bool in = row < a.value_dim;
#pragma unroll 1
            for (int i = 0; i < kRows; i += 2 * kStep, from += 2 * kStep * a.v.token) {
                const bool first = in && i + lane / kUnits < left,
                           second = in && i + kStep + lane / kUnits < left;
                copy_async(values_at + place * 16 + i * kUnits * 16, first ? from : a.v.data, first ? 16 : 0);
                copy_async(values_at + place * 16 + (i + kStep) * kUnits * 16,
                           second ? from + kStep * a.v.token : a.v.data, second ? 16 : 0);
            }
            return;
        }
#pragma unroll 1
        for (int i = 0; i < kRows; i += kStep, from += kStep * a.v.token)
#pragma unroll 1
            for (int e = 0; e < 8; ++e)
                values[(place + i * kUnits) * 8 + e] =
                    i + lane / kUnits < left && row + e < a.value_dim ? from[e] : from_float<T>(0.0f);
    };

    // --- state ---
    float state[kKey / 8][4];  // S: [tile of 8 channels][accumulator fragment]
    std::int32_t compensated = compensated_at(0), compensated_next = compensated_at(1);
    if (segment.chunks > 0) copy_chunk(0, compensated);
    commit_copies();
    cursor.first_state(state);

    const LaneReads<OperandTile<kKey, kPerChannel>, false> key_reads;
    const TriangleReads<kRows, kReversed> pair_reads;
    const LaneReads<OperandTile<kKey, kPerChannel>, true> carry_reads;
    const LaneReads<Tile<kRows, kWarpRows>, false> value_reads;

    DecayMap<kMaps && has_diagonal_map(kUpdate) ? kKey : 0, kPerChannel> decay_map(cursor);

    const int lane_row = cursor.rows.row(), lane_channel = RowWindow::channel();
    // The lane's first value row in outputs, after the transpose below.
    const int lane_value = row_base + lane % 4 * 2;
    const bool pairs_out = (a.o.batch | a.o.token | a.o.head | a.value_dim) % 2 == 0 &&
                           reinterpret_cast<std::uintptr_t>(a.o.data) % 4 == 0;
    for (int chunk = 0;; ++chunk) {
        cursor.store_asked(state, chunk);
        if (chunk == segment.chunks) break;
        const bool odd = chunk % p.stages;
        const Operands& operands = stages[odd].operands;
        const std::uint32_t stage_at = shared_base + (odd ? static_cast<std::uint32_t>(sizeof(Stage)) : 0u);
        const std::int32_t compensated_after = compensated_at(chunk + 2);
        if (p.stages > 1) {
            if (chunk + 1 < segment.chunks) copy_chunk(chunk + 1, compensated_next);
            commit_copies();
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();

        if constexpr (kMaps && has_diagonal_map(kUpdate)) decay_map.pass(operands.decay);
        std::uint32_t k_read = stage_at, q_read = stage_at, k_carry = stage_at;
        if constexpr (kPerChannel) {
            k_read += offsetof(Operands, k_decayed), q_read += offsetof(Operands, q_decayed);
            k_carry += offsetof(Operands, k_remaining);
        } else {
            q_read += offsetof(Stage, raw), k_read += offsetof(Stage, raw) + offsetof(RawT, k);
            k_carry = k_read;
        }
        // Per-token factors of the lane's two neighbouring tokens in 8-token tile `tile`.
        const auto per_token = [&](const float* factor, int tile) {
            return *reinterpret_cast<const float2*>(factor + tile * 8 + lane % 4 * 2);
        };
        CarrySlice<T, kKey>* slice = nullptr;
        if constexpr (kSaves)
            if (p.saved.carried && row_base < a.value_dim)
                slice =
                    p.saved.carried + p.saved.index(segment.slot + chunk, value_head, row_base / kWarpRows);
        // product = S tile^T, times a factor per token. S is rounded and packed in each call: a packed copy
        // kept for both calls would take the registers of another product. to: where S is saved, if it is.
        const auto read_state = [&](float(&product)[kRows / 8][4], std::uint32_t tile, const float* factor,
                                    [[maybe_unused]] T* to) {
            const auto reads = key_reads.again();
#pragma unroll
            for (int step = 0; step < kKey / 16; ++step) {
                Packed packed;
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float* pair = &state[2 * step + x / 2][x % 2 * 2];
                    packed[x] = pack2_again<T>(pair[0], pair[1]);
                }
                if constexpr (kSaves)
                    if (to) save_block(to, step, packed);
                multiply_step<T, kRows>(product, packed, tile, reads, step);
            }
            if constexpr (!kPerChannel) {
#pragma unroll
                for (int x = 0; x < kRows / 8; ++x) {
                    const float2 scale = per_token(factor, x);
                    product[x][0] *= scale.x, product[x][1] *= scale.y, product[x][2] *= scale.x,
                        product[x][3] *= scale.y;
                }
            }
        };

        // V, then V - R, in the layout of an A operand: words 0 and 1 have value rows 0-7 and 8-15 of tokens
        // 0-7, words 2 and 3 those of tokens 8-15. After the next product, U.
        Packed writes[kBlocks];
        const float *q_factor = nullptr, *k_factor = nullptr;
        if constexpr (!kPerChannel) q_factor = operands.q_factor, k_factor = operands.k_factor;
        if constexpr (kSaves && !kReadsState)
            if (slice) save_state<T, kKey>(slice->state, state);
        {
            float read[kRows / 8][4] = {};
            if constexpr (kReadsState) read_state(read, k_read, k_factor, slice ? slice->state : nullptr);
            const std::uint32_t values_at =
                stage_at + offsetof(Stage, values) + warp * sizeof(stages->values[0]);
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                std::uint32_t m[4] = {};
                if (!of_m) load_matrices_transposed(m, value_reads.at(values_at, block, 0));
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    writes[block][x] = m[x];
                    if constexpr (kReadsState) {
                        const float2 v = unpack2<T>(m[x]);
                        const float* r = &read[2 * block + x / 2][x % 2 * 2];
                        writes[block][x] = pack2<T>(v.x - r[0], v.y - r[1]);
                    }
                }
            }
        }
        // Compensated chunk: the low words of U are kept in shared memory, in the place of this warp's
        // values, which have been read.
        auto* rests = reinterpret_cast<std::uint32_t*>(stages[odd].values[warp]) + lane;
        const auto load_rest = [&](Packed& rest, int block) {
#pragma unroll
            for (int x = 0; x < 4; ++x) rest[x] = rests[(block * 4 + x) * 32];
        };
        if constexpr (kReadsState) {
            float u[kRows / 8][4] = {};
#pragma unroll
            for (int step = 0; step < kBlocks; ++step)
                multiply_triangle<T, kRows>(u, writes[step], stage_at + offsetof(Operands, inverse),
                                            pair_reads, step);
            if (compensated) {
#pragma unroll
                for (int step = 0; step < kBlocks; ++step)
                    multiply_triangle<T, kRows>(u, writes[step], stage_at + offsetof(Operands, inverse_low),
                                                pair_reads, step);
                __syncwarp();
            }
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float2 pair{u[2 * block + x / 2][x % 2 * 2], u[2 * block + x / 2][x % 2 * 2 + 1]};
                    writes[block][x] = pack2<T>(pair.x, pair.y);
                    if (compensated) rests[(block * 4 + x) * 32] = pack_rest<T>(pair, writes[block][x]);
                }
        }
        if constexpr (kSaves) {
            if (slice)
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) save_block(slice->writes, block, writes[block]);
        }
        if constexpr (makes_outputs(kMode)) {
            float out[kRows / 8][4] = {};
            read_state(out, q_read, q_factor, nullptr);
#pragma unroll
            for (int step = 0; step < kBlocks; ++step) {
                const std::uint32_t scores = stage_at + offsetof(Operands, scores);
                if constexpr (kReversed)
                    multiply_triangle_rows<T, kRows>(out, writes[step], scores, pair_reads, step);
                else
                    multiply_triangle<T, kRows>(out, writes[step], scores, pair_reads, step);
            }
            if constexpr (kReadsState) {
                if (compensated) {
#pragma unroll
                    for (int step = 0; step < kBlocks; ++step) {
                        Packed rest;
                        load_rest(rest, step);
                        multiply_triangle<T, kRows>(out, rest, stage_at + offsetof(Operands, scores),
                                                    pair_reads, step);
                        multiply_triangle<T, kRows>(
                            out, writes[step], stage_at + offsetof(Operands, scores_low), pair_reads, step);
                    }
                }
            }
            const int left = kReversed && !a.o.data ? 0 : cursor.count(chunk);
            const Tokens tokens(a.writes, cursor.token(chunk));
            const std::int64_t first_out = a.o.offset(cursor.batch, tokens.first_token, value_head);
            if (a.o.dtype == Dtype::kFloat32) {
#pragma unroll
                for (int tile = 0; tile < kRows / 8; ++tile)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int token = tile * 8 + lane_channel + e % 2, row = lane_row + e / 2 * 8;
                        if (token < left && row < a.value_dim && tokens.is_last(token))
                            store_row(static_cast<float*>(a.o.data) + first_out +
                                          tokens.token(token) * a.o.token + row,
                                      out[tile][e]);
                    }
            }
            T* to = static_cast<T*>(a.o.data) + lane_value + first_out + lane / 4 * a.o.token;
            const std::int64_t eight_tokens = 8 * a.o.token;
            // Each 8 x 8 matrix is transposed in registers: a lane then has two neighbouring value rows of a
            // token.
#pragma unroll
            for (int tile = 0; tile < kRows / 8; ++tile, to += eight_tokens)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const std::uint32_t word =
                        transposed(round_row<T>(out[tile][half * 2], out[tile][half * 2 + 1]));
                    if (a.o.dtype == Dtype::kFloat32) continue;
                    if (tile * 8 + lane / 4 >= left || lane_value + half * 8 >= a.value_dim) continue;
                    if constexpr (kSeveral) {
                        const int row = tile * 8 + lane / 4;
                        if (!tokens.is_last(row)) continue;
                        to = static_cast<T*>(a.o.data) + lane_value + first_out +
                             tokens.token(row) * a.o.token;
                    }
                    if (pairs_out) {
                        move_row(to + half * 8, word);
                    } else {
                        const float2 pair = unpack2<T>(word);
                        to[half * 8] = from_float<T>(pair.x);
                        if (lane_value + half * 8 + 1 < a.value_dim) to[half * 8 + 1] = from_float<T>(pair.y);
                    }
                }
        }
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile) {
            float2 d;
            if constexpr (kPerChannel)
                d = *reinterpret_cast<const float2*>(operands.decay + tile * 8 + lane_channel);
            else
                d = {operands.decay[0], operands.decay[0]};
            state[tile][0] *= d.x, state[tile][1] *= d.y, state[tile][2] *= d.x, state[tile][3] *= d.y;
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            Packed rest = {};
            if (kReadsState && compensated) load_rest(rest, block);
            if constexpr (!kPerChannel) {
                // U times the decay from each token to the chunk's end. Of a compensated chunk both words of
                // U are summed, multiplied and split again.
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float2 factor = per_token(operands.k_rest, 2 * block + x / 2);
                    float2 pair = unpack2<T>(writes[block][x]);
                    if constexpr (kReadsState) {
                        const float2 more = unpack2<T>(rest[x]);
                        pair = {pair.x + more.x, pair.y + more.y};
                    }
                    pair = {pair.x * factor.x, pair.y * factor.y};
                    writes[block][x] = pack2_finite<T>(pair.x, pair.y);
                    if constexpr (kReadsState) rest[x] = pack_rest<T>(pair, writes[block][x]);
                }
            }
            const auto reads = carry_reads.again();
            multiply_carry<T, kKey>(state, writes[block], k_carry, reads, block);
            if (kReadsState && compensated) multiply_carry<T, kKey>(state, rest, k_carry, reads, block);
        }
        __syncthreads();
        if (p.stages == 1) {
            if (chunk + 1 < segment.chunks) copy_chunk(chunk + 1, compensated_next);
            commit_copies();
        }
        compensated = compensated_next, compensated_next = compensated_after;
    }
    if constexpr (kMaps && has_diagonal_map(kUpdate))
        if (block % p.row_blocks.value == 0 && warp == 0) decay_map.store(cursor);
    if constexpr (kMode == CarryMode::kWalkMaps)
        if (of_m)
            chunked::store_state<kKey>(state, p.map_m_turned,
                                       p.map_m_turned.offset(cursor.number, value_head), cursor.rows);
}

}  // namespace cula::cuda::sm80
