// SPDX-License-Identifier: Apache-2.0
// prepare_channel: chunk operands <- q, k, gate, beta, with one decay per channel (KDA, GLA)
//
// With G the running log2 decay of the chunk, per channel
// (ALGORITHM.md: score, solve; docs/design/prepare.md):
//   A = tril((q 2^G) (k 2^-G)^T)                          scores; q is multiplied by scale
//   L = tril((k 2^G) (k 2^-G)^T, -1)                      overlaps
//   T = (I + diag(beta) L)^-1 diag(beta)                  inverse; rules that solve
//   q_decayed = q 2^G    k_decayed = k 2^G    k_remaining = k 2^(G_end - G)    decay = 2^G_end
// Reader::kErase: rules with erase strengths have e = erase o k in the place of k in the rows of L and in
// k_decayed, and no beta: it is in the values (erase_operands.cuh). Reader::kUndecayed: the rows are pairs,
// of b and k in the place of k, with e = -a in first rows and 0 in second ones; and for a row that decays the
// G of the row before it wherever e or q reads (low_rank_rows.cuh).
//
// Grid: one CTA per (chunk of the slab, value head); 128 threads, a warp per block of 16 tokens.
//   K = 256: two blocks per chunk, and a warp per block and half of the channels.
//
// In this order; | is a barrier of the CTA:
//   load    all warps: gates, A_log and bias by cp.async or TMA, and what reads if it is not k by cp.async;
//           q, k and beta to registers
//   gate    a lane owns a few channels of its block: log2 decays, summed from the middle to both ends |
//   table   a thread per channel: factors from the chunk's start to each block, from each block to the
//           chunk's end, and between each two blocks |
//   score   a lane owns two tokens, eight channels of every 32. q, k 2^(G - middle) and k 2^(middle - G) give
//           the pairs within the block; times factors of the table they give q_decayed, k_decayed and
//           k_remaining (to global memory) and the columns for later blocks (to shared memory) |
//   cross   pairs with earlier blocks |
//   solve   overlaps to shared memory, diagonal blocks inverted, vote on compensation | scores to global
//           memory, solve.cuh | |, inverse to global memory
//
// Two ways to decay. Chunks decide for themselves, by a vote of the CTA:
//   anchored   as above, while 2^+-(G - middle) is in range: no half of a block decays by more than
//              2^-kMostLog2, if need be with the middle moved to where both halves decay alike.
//   stepped    pairs within a block on four levels (8, 4, 2, 1 tokens): both factors of a pair run from the
//              border between the two halves of its level, so they are at most 1 whatever the data.
//              Every other factor is one exponential of one sum.
//
// Precision of the scores of rules that do not solve: exact up to their
// own rounding to T, since no inverse adds an error of T's size.
// Operands whose factors are at most 1 are fp16 (11 bits), times
// a power of two that brings tokens of any size into its range.
// Operands whose factors may grow are two bf16 words each.
//
// Budgets on sm_90: 168 registers, three CTAs per multiprocessor (with low-rank keys, and erase keys of 256
// channels: at most 255, two); 37.1, 53.1, 52.8 KiB for K = 64, 128, 256, and 8, 16, 16 KiB more for what
// reads where it is not k (ReaderPieces; twice as much of float32).
#pragma once

#include <algorithm>

#include "cuda/chunked/channel_block.cuh"
#include "cuda/chunked/plan.h"
#include "cuda/chunked/solve.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/rule.h"
#include "cuda/tile/scan.cuh"

namespace cula::cuda::chunked {

// Two CTAs where the registers of three would spill; with erase keys, where they would spill more than a few.
template <int kKey, bool kSolves, Reader kReader>
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
inline constexpr int kFewestChannelCtas =
    kReader == Reader::kUndecayed || (kReader == Reader::kErase && kKey > 128) ? 2 : kChannelCtas;
#elif __CUDA_ARCH__ >= 1000
inline constexpr int kFewestChannelCtas = kSolves || kKey > 128 ? 2 : kChannelCtas;
#else
inline constexpr int kFewestChannelCtas = kSolves ? 2 : kChannelCtas;
#endif

// What chunk operands does an update rule need?
template <Update kUpdate>
struct ChannelRule {
    static_assert(kIsKnown<kUpdate>, "prepare_channel: which chunk operands does this update rule need?");
};
template <>
struct ChannelRule<Update::kAdditive> {
    static constexpr bool kSolves = false;
};
template <>
struct ChannelRule<Update::kDelta> {
    static constexpr bool kSolves = true;  // the inverse, k_decayed, and low words of compensated chunks
};

template <class T, int kKey, Update kUpdate, class GateTiles, Reader kReader = Reader::kKey>
__global__ void __launch_bounds__(kPrepareThreads,
                                  kFewestChannelCtas<kKey, ChannelRule<kUpdate>::kSolves, kReader>)
    prepare_channel(const __grid_constant__ DeviceArgs a, const __grid_constant__ GateTiles gate_tiles,
                    const Schedule schedule, ChannelChunk<T, kKey>* chunks, std::int32_t* is_compensated,
                    float* fading) {
    follow_kernels_before_carry<kKey>(schedule);
    using P = Parts<kKey>;
    constexpr int kRows = kTokens<kKey>, kOwned = P::kChannels / 32;
    constexpr bool kSolves = ChannelRule<kUpdate>::kSolves, kFading = kSolves && kFades<kKey, true>,
                   kErases = erases(kReader), kPairs = kReader == Reader::kUndecayed;
    extern __shared__ __align__(128) unsigned char raw[];
    auto& s = *reinterpret_cast<ChannelSmem<kKey>*>(raw);

    // Plain divisions, not Divisors: what follows from a Divisor
    // would be in uniform registers, and ptxas spills in score.
    const int number = static_cast<int>(blockIdx.x / static_cast<unsigned>(a.value_heads)),
              value_head = static_cast<int>(blockIdx.x) - number * a.value_heads;
    const int head = static_cast<int>(static_cast<unsigned>(value_head) / static_cast<unsigned>(a.group)),
              thread = static_cast<int>(threadIdx.x);
    const ChunkPlace place = place_of<kRows>(a, schedule, number);
    if (place.count <= 0) return;

    auto& operands = s.operands;
    using Block = ChannelBlock<T, kKey, kSolves, kReader>;
    const Block block{a, operands, chunks[blockIdx.x], role_of_warp()};
    const int lane = block.lane, first = block.first, first_channel = block.part * P::kChannels;

    // --- load, gate ---
    // A warp whose block has no tokens reads the chunk's first token, and mask() drops it.
    const int count = place.count - first;
    // The first token of the warp's block. With kPairs it has half as many tokens as rows.
    const std::int64_t begin = (place.begin + (count > 0 ? first : 0)) / (kPairs ? 2 : 1);
    const BlockGates<T, kKey, kPairs> gates{a, operands.group[block.warp][0].gates,
                                            operands.raw_gates[block.warp], first_channel, count};
    const int ahead = kPairs ? 0 : tokens_ahead<kKey>(a, schedule, begin),
              head_ahead =
                  // Only the first of the value heads that share a head prefetches
              value_head == head * a.group ? ahead : 0;
    const bool boxed = gate_tiles.has(count);
    if (!boxed)
        gates.load(a.g.offset(place.batch, begin, value_head), ahead);
    else if (lane == 0)
        gate_tiles.ask(gates.raw, s.gates_there + block.warp, place.batch, begin, value_head, ahead);
    // The bias waits where the lane's sums will stand, and A_log where
    // lane 0's will. They arrive with the gates, by the same wait.
    float *const head_sums = operands.head[block.block] + gates.channel, *const tail_sums =
                                                                             operands.tail[block.block] +
                                                                             gates.channel;
    float* const A_log = operands.tail[block.block] + first_channel;
    if (lane == 0) copy_floats_if<1>(A_log, a.A_log.data + value_head * a.A_log.head, a.A_log.data);
    const float* const bias_of_head = a.dt_bias.data + value_head * a.dt_bias.head;
    if (a.dt_bias.pieces) {
        copy_floats_if<kOwned>(head_sums, bias_of_head + gates.channel, gates.channel < a.key_dim);
    } else {
#pragma unroll 1
        for (int i = 0; i < kOwned; ++i)
            copy_floats_if<1>(head_sums + i, bias_of_head + (gates.channel + i) * a.dt_bias.channel,
                              a.dt_bias.data && gates.channel + i < a.key_dim);
    }
    const TokenRows& reading = kPairs ? a.a_key : a.erase;
    const ReaderPieces<T, kKey, kReader> readers{reinterpret_cast<uint4*>(raw + sizeof(s)) + thread};
    if constexpr (kErases)
        readers.copy(reading, place.batch, begin, value_head, count, first_channel + lane % 4 * 8, a.key_dim);
    commit_copies();
    TokenNumber beta_asked;
    if (kSolves && !kErases)
        beta_asked.ask(a.beta, place.batch, place.begin + thread, value_head, thread < place.count);
    typename Block::Rows q, k;
    // From `channel` on.
    const auto fetch_keys = [&](auto& q, auto& k, int channel, int ahead) {
        if constexpr (kPairs) {
            const bool second = lane / 4 % 2 != 0;
            const TokenRows of = second ? a.k : a.b_key;
            q.template fetch<T>(a.q, place.batch, begin, head, count, channel, a.key_dim, 0, RowsOfPairs{});
            k.template fetch<T>(of, place.batch, begin, second ? head : value_head, count, channel, a.key_dim,
                                0, BothRowsOfPairs{});
        } else {
            q.template fetch<T>(a.q, place.batch, begin, head, count, channel, a.key_dim, ahead);
            k.template fetch<T>(a.k, place.batch, begin, head, count, channel, a.key_dim, ahead);
        }
    };
    const auto mask_keys = [&](auto& q, auto& k, int channel) {
        q.mask(count, channel, a.key_dim);
        k.mask(count, channel, a.key_dim);
        if constexpr (kPairs) q.mask_first_of_pairs();
    };
    fetch_keys(q, k, first_channel, head_ahead);
    const auto load_reader = [&](typename Block::Reading& to, int g, int half) {
        if constexpr (kErases) readers.load(to, reading, g, half);
    };
    if (per_chunk<kKey>(schedule) && thread == 0) {
        mark_unprepared(is_compensated + blockIdx.x, 1);
        lead_carry();
    }
    const bool fades = kFading && fading && a.qk_l2norm;
    bool unanchored = false, out_of_range = false;
    float fades_by = 0.0f;
    {
        float head_sum[kOwned], tail_sum[kOwned];
        wait_copies<0>();
        __syncwarp();
        if (boxed) gate_tiles.wait(s.gates_there + block.warp);
        const HeadGate head_gate(value_head, a.gate, *A_log, a.lower_bound, 0.0f);
        float bias[kOwned];
#pragma unroll
        for (int i = 0; i < kOwned; ++i) bias[i] = head_sums[i];
        gates.sum(head_gate, bias, head_sum, tail_sum);
        if (fades) fades_by = gates.slowest();
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            const float worst =
                gates.channel + i < a.key_dim ? fmaxf(fabsf(head_sum[i]), fabsf(tail_sum[i])) : 0.0f;
            unanchored |= worst > kMostLog2<T, kSolves>, out_of_range |= worst > kOutOfRangeLog2;
        }
        __syncwarp();  // all lanes have read A_log
        gates.put(head_sum, head_sums), gates.put(tail_sum, tail_sums);
        if (unanchored) unanchored = gates.balance(head_sums, tail_sums, kMostLog2<T, kSolves>);
        if constexpr (kSolves) {
            out_of_range = __any_sync(0xffffffffu, out_of_range);
            if (lane == 0) s.out_of_range[thread / 32] = out_of_range;
        }
    }
    if (kSolves && thread < kRows)
        s.beta[thread] = thread >= place.count ? 0.0f
                         : kErases             ? 1.0f
                                               : solved_beta_of(a, beta_asked.value(a.beta));
    mask_keys(q, k, first_channel);
    if (!kSolves || a.qk_l2norm) {
        square_tokens<T>(s.norms[0][block.part] + first, q);
        square_tokens<T>(s.norms[1][block.part] + first, k);
    }
    const bool stepped = __syncthreads_or(unanchored);
    bool two_steps = false;
    if (kSolves && !stepped)
#pragma unroll
        for (int w = 0; w < kPrepareThreads / 32; ++w) two_steps |= s.out_of_range[w] != 0;
    if (kFading && fading) {
        const float grows_by =
            fades ? sum_over_warp(growth(lane < kBlock ? s.beta[first + lane] : 0.0f)) : 0.0f;
        if (lane == 0) s.fading[block.block] = fades_by + grows_by;
    }

    // --- table ---
    for (int c = thread; c < kKey; c += kPrepareThreads) {
        const auto entry = [&](float x) { return stepped ? x : exp2_fast(x); };
        float head_sum[P::kBlocks], whole[P::kBlocks], tail_sum[P::kBlocks], start = 0.0f, end = 0.0f;
#pragma unroll
        for (int b = 0; b < P::kBlocks; ++b)
            head_sum[b] = operands.head[b][c], tail_sum[b] = operands.tail[b][c],
            whole[b] = head_sum[b] + tail_sum[b];
#pragma unroll
        for (int b = 0; b < P::kBlocks; ++b) {
            if (!kSolves) operands.head[b][c] = entry(head_sum[b]);
            operands.table.from_start[b][c] = entry(start + head_sum[b]);
            start += whole[b];
            float gap = two_steps ? 0.0f : tail_sum[b];
#pragma unroll
            for (int later = b + 1; later < P::kBlocks; ++later) {
                operands.table.between[pair_of<P::kBlocks>(later, b)][c] =
                    entry(stepped || !kSolves ? gap : gap + head_sum[later]);
                gap += whole[later];
            }
        }
#pragma unroll
        for (int b = P::kBlocks - 1; b >= 0; --b) {
            operands.table.to_end[b][c] = entry(two_steps ? end : end + tail_sum[b]);
            if (two_steps) operands.tail[b][c] = exp2_fast(tail_sum[b]);
            end += whole[b];
        }
        block.chunk.decay[c] = exp2_fast(start);
    }
    TokenScales<kSolves> scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = first + lane / 4 + 8 * half;
        float2 sum{0.0f, 0.0f}, whole{a.scale, 1.0f};
        if (!kSolves || a.qk_l2norm) {
#pragma unroll
            for (int p = 0; p < P::kParts; ++p) sum.x += s.norms[0][p][token], sum.y += s.norms[1][p][token];
        }
        if (a.qk_l2norm) whole = {a.scale * rsqrtf(sum.x + 1e-6f), rsqrtf(sum.y + 1e-6f)};
        if (kPairs && RowsOfPairs::is_first(lane / 4)) whole.y = 1.0f;  // b has no norm
        scales.set(half, whole, sum);
        if (!kSolves) s.back[token] = scales.back[half].y;
    }
    __syncthreads();
    if (kFading && fading && thread == 0) {
        float sum = 0.0f;
#pragma unroll
        for (int b = 0; b < P::kBlocks; ++b) sum += s.fading[b];
        fading[blockIdx.x] = sum;
    }

    // --- score ---
    float own[2][2][4] = {};  // q k^T and k k^T within the block
    const auto scaled_back = [&](float(&scores)[2][4], int column) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                scores[tile][e] *= scales.back[e / 2].x * s.back[column + 8 * tile + lane % 4 * 2 + e % 2];
    };
    const auto scaled = [&](float(&overlaps)[2][4]) {
        const float beta[2] = {s.beta[first + lane / 4], s.beta[first + lane / 4 + 8]};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) overlaps[tile][e] *= beta[e / 2];
    };
    typename ChannelBlock<T, kKey, kSolves>::Cross cross = {};
    if (!stepped) {
        block.score(q, k, load_reader, scales, two_steps, own);
        __syncthreads();
        block.cross(q, k, cross);
    } else {
        const auto load_group = [&](BlockRows<1>& q1, BlockRows<1>& k1, int g) {
            const int channel = first_channel + 32 * g;
            fetch_keys(q1, k1, channel, 0);
            mask_keys(q1, k1, channel);
        };
        block.score_stepped(load_group, load_reader, scales, own);
#pragma unroll 1
        for (int g = 0; g < P::kGroups; ++g) {
            if (g > 0) __syncthreads();
            block.operands_stepped(load_group, load_reader, scales, g);
            __syncthreads();
            block.cross_stepped(load_group, load_reader, scales, g, cross);
        }
    }
    // --- solve ---
    const bool last = block.part == P::kParts - 1;
    const auto each_product = [&](auto body) {
        body(own[0], own[1], block.block, std::true_type{});
#pragma unroll
        for (int earlier = 0; earlier < P::kBlocks - 1; ++earlier)
            if (earlier < block.block) body(cross[earlier][0], cross[earlier][1], earlier, std::false_type{});
    };
    if constexpr (P::kParts > 1) {
#pragma unroll
        for (int p = 0; p < P::kParts; ++p) {
            __syncthreads();  // products take the place of their operands
            if (block.part != p) continue;
            each_product([&](float(&scores)[2][4], float(&overlaps)[2][4], int column, auto) {
                add_product(s.pairs.scores, scores, first, column * kBlock, p > 0);
                if (kSolves) add_product(s.pairs.overlaps, overlaps, first, column * kBlock, p > 0);
            });
        }
    }
    float2 squares{0.0f, 0.0f};
    each_product([&](float(&scores)[2][4], float(&overlaps)[2][4], int column, auto diagonal) {
        if (!kSolves) scaled_back(scores, column * kBlock);
        if (!kSolves) return;
        scaled(overlaps);
        add_squares<decltype(diagonal)::value>(squares, overlaps);
    });
    zero_above_diagonal(own[0]);
    // The warp's row of blocks of scores: staging memory.
    float* const slots = s.pairs.scores.at(first, 0, 0, 0);
    const auto emit_scores = [&](T* triangle, auto low) {
        constexpr bool kLow = decltype(low)::value;
        __syncwarp();
        each_product([&](float(&scores)[2][4], float(&)[2][4], int column, auto) {
            turn_block<kLow, T>(slots + column * kSlot, scores);
        });
        __syncwarp();
#pragma unroll
        for (int column = 0; column < P::kBlocks; ++column)
            if (column <= block.block)
                put_block(triangle + Triangle<kRows>::block_begin(block.block, column) * 8,
                          slots + column * kSlot);
    };
    __syncthreads();  // products take the place of their operands
    if (kSolves && last) {
        each_product([&](float(&)[2][4], float(&overlaps)[2][4], int column, auto) {
            store_block(s.pairs.overlaps, overlaps, first, column * kBlock);
        });
        __syncwarp();
        invert_diagonal(s.pairs.overlaps, block.block);
    }
    const bool compensated = kSolves && __syncthreads_or(last && needs_compensation(squares));
    if (last) {
        emit_scores(block.chunk.scores, std::false_type{});
        if (compensated) emit_scores(block.chunk.scores_low, std::true_type{});
        if constexpr (kSolves)
            emit_inverse<T, kKey>(block.chunk, s.pairs.overlaps, s.beta, slots, block.block, compensated);
    }
    if (per_chunk<kKey>(schedule)) __syncthreads();
    if (thread != 0) return;
    if constexpr (kSolves)
        hand_over<kKey>(schedule, is_compensated + blockIdx.x, compensated);
    else if (per_chunk<kKey>(schedule))
        publish(is_compensated + blockIdx.x, 0);
}

}  // namespace cula::cuda::chunked
