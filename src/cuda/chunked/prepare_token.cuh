// SPDX-License-Identifier: Apache-2.0
// prepare_token: chunk operands <- q, k, gate, beta, with one
// decay per token or head, or none (GDN, DeltaNet, Lightning, ...)
//
// With G the running log2 decay of the chunk (ALGORITHM.md: score, solve; docs/design/prepare.md):
//   A[i, j] = scale (q_i . k_j) 2^(G_i - G_j), j <= i              scores
//   L[i, j] = (k_i . k_j) 2^(G_i - G_j), j < i                     overlaps
//   T = (I + diag(beta) L)^-1 diag(beta)                           inverse; rules that solve
//   q_factor = scale 2^G    k_factor = 2^G    k_rest = 2^(G_end - G)    decay = 2^G_end
// With qk_l2norm the norms of q and k are part of the factors.
//
// kReversed: for a walk from the last token to the first (docs/design/three-walks.md), whose decay is the
// same for every token. Its operands are those of q and k in each other's places, for readers that have
// changed places, too: the transposed A, and each factor under the other's name.
//
// kSeveral: for tokens that write several times (tile/tokens_of_rows.cuh). What is above is of rows of
// writes: those that are not their token's last have a zero query, and those that are not its first do not
// decay.
//
// Grid: one CTA per (chunk of the slab, `span` value heads that
// share q and k); 128 threads, a warp per block of 16 tokens.
//   K = 256: two blocks per chunk, and a warp per block and half of the channels.
//
// In this order; | is a barrier of the CTA:
//   load    all warps: q and k to registers, beta; warp w: the gates of value head w of the span
//   sum     warp w: running sums of those gates; all: squares of q and k, columns of k to shared memory |
//   norms   a thread per token |
//   then per value head of the span:
//   score   products of q and k as they are, times norms and 2^(G_i - G_j) in float; squares of overlaps
//   solve   diagonal blocks inverted, vote on compensation | scores to global memory, solve.cuh | |,
//           inverse to global memory |
//
// No operand is scaled before a product, and 2^(G_i - G_j) is
// at most 1: only inputs and chunk operands are rounded to T.
// Rows are loaded and laid out once for all value heads of the span.
//
// Budgets on sm_90: 128 registers, four CTAs per multiprocessor; 45.0, 51.0, 19.8 KiB for K = 64, 128, 256.
#pragma once

#include "cuda/chunked/block.cuh"
#include "cuda/chunked/plan.h"
#include "cuda/chunked/solve.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/rule.h"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/scan.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::chunked {

static_assert(kMostSpan == kPrepareThreads / 32);  // one warp sums the gates of one value head

template <int kKey>
struct TokenSmem {
    using P = Parts<kKey>;
    PairSquares<kKey> pairs;
    ColumnWords columns[P::kBlocks - 1][kKey / 32];
    float log_decay[kMostSpan][kTokens<kKey>];  // log2, running from the chunk's start
    float beta[kMostSpan][kTokens<kKey>];
    float squares[2][P::kParts][kTokens<kKey>];
    float norms[2][kTokens<kKey>];  // 1 / norm of q and of k, or 1
};

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
inline constexpr int kFewestTokenCtas = kTokenCtas;
#else
inline constexpr int kFewestTokenCtas = 3;
#endif

// What chunk operands does an update rule need?
template <Update kUpdate>
struct TokenRule {
    static_assert(kIsKnown<kUpdate>, "prepare_token: which chunk operands does this update rule need?");
};
template <>
struct TokenRule<Update::kAdditive> {
    static constexpr bool kSolves = false;
};
template <>
struct TokenRule<Update::kDelta> {
    static constexpr bool kSolves = true;  // the inverse, and low words of compensated chunks
};

template <class T, int kKey, bool kReversed = false, bool kSeveral = false>
__global__ void __launch_bounds__(kPrepareThreads, kFewestTokenCtas)
    prepare_token(const __grid_constant__ DeviceArgs a, const Schedule schedule, int span,
                  TokenChunk<T, kKey>* chunks, std::int32_t* is_compensated, float* fading) {
    static_assert(!kReversed || !kSeveral);
    follow_kernels_before_carry<kKey>(schedule);
    using P = Parts<kKey>;
    constexpr int kRows = kTokens<kKey>;
    extern __shared__ __align__(128) unsigned char raw[];
    auto& s = *reinterpret_cast<TokenSmem<kKey>*>(raw);

    // A span is a power of two. The chunk's number comes from a plain division, not from a Divisor:
    // what follows from that would be in uniform registers, and ptxas spills where K = 256.
    const int first_of_all = static_cast<int>(blockIdx.x) * span,
              column = static_cast<int>(static_cast<unsigned>(first_of_all) /
                                        static_cast<unsigned>(a.value_heads)),
              first_head = first_of_all - column * a.value_heads;
    // CTAs go through memory upwards, as the prefetches expect.
    const int number = kReversed ? schedule.slab_end - schedule.slab_begin - 1 - column : column;
    const int head = a.by_group.divide(first_head), thread = static_cast<int>(threadIdx.x),
              lane = thread % 32, warp = role_of_warp();
    const ChunkPlace place = place_of<kRows, kReversed>(a, schedule, number);
    if (place.count <= 0) return;

    const bool solves =
        !kReversed && answer_for(a.algorithm.update, []<Update kUpdate>(UpdateConstant<kUpdate>) {
            return TokenRule<kUpdate>::kSolves;
        });
    const int block = warp % P::kBlocks, part = warp / P::kBlocks, first = block * kBlock;

    BlockRows<P::kGroups> q, k;
    // A warp whose block has no tokens reads the chunk's first token, and mask_moving() drops it.
    const int count = place.count - first;
    const std::int64_t begin = place.begin + (count > 0 ? first : 0);
    // Only the first of the value heads that share a head prefetches.
    const int ahead = first_head == head * a.group ? tokens_ahead<kKey>(a, schedule, begin) : 0;
    if constexpr (kSeveral) {
        const TokensOfWrites tokens(a.writes, begin);
        q.template fetch<T>(a.q, place.batch, tokens.first_token, head, count, part * P::kChannels, a.key_dim,
                            ahead / a.writes, tokens);
    } else {
        q.template fetch<T>(kReversed ? a.k : a.q, place.batch, begin, head, count, part * P::kChannels,
                            a.key_dim, ahead);
    }
    k.template fetch<T>(kReversed ? a.q : a.k, place.batch, begin, head, count, part * P::kChannels,
                        a.key_dim, ahead);
    constexpr int kBetas = kMostSpan * kRows / kPrepareThreads;  // of a thread
    TokenNumber betas[kBetas];
#pragma unroll
    for (int i = 0; i < kBetas; ++i) {
        const int of = (thread + i * kPrepareThreads) / kRows, t = thread % kRows;
        if (solves && of < span)
            betas[i].ask(a.beta, place.batch, place.begin + t, first_head + of, t < place.count);
    }
    if (per_chunk<kKey>(schedule) && thread == 0)
        lead_carry(is_compensated + std::int64_t{number} * a.value_heads + first_head, span);
    if (warp < span) {
        const int value_head = first_head + warp;
        // A lane takes two neighbouring tokens (one where a
        // chunk has 32), then the warp scans over the lanes.
        constexpr int kEach = kRows / 32;
        const bool per_token = a.algorithm.decay == kTokenDecay;
        const TokensOfRows<kSeveral> of_chunk(a.writes, place.begin);
        TokenNumber raw_gates[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int t = lane * kEach + i;
            if (per_token)
                raw_gates[i].ask(a.g, place.batch, of_chunk.first_token + of_chunk.token(t), value_head,
                                 t < place.count && of_chunk.is_first(t));
        }
        const HeadGate gate(a, value_head);
        float sum[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            sum[i] = 0.0f;
            if (lane * kEach + i < place.count && of_chunk.is_first(lane * kEach + i)) {
                const float of_gate = per_token ? gate.log2_decay(raw_gates[i].value(a.g) + gate.bias) : 0.0f;
                sum[i] = max_or_nan(of_gate + gate.gamma2, kLeastLog2Decay);
            }
        }
        running_sums(sum);
#pragma unroll
        for (int i = 0; i < kEach; ++i) s.log_decay[warp][lane * kEach + i] = sum[i];
    }
#pragma unroll
    for (int i = 0; i < kBetas; ++i) {
        const int of = (thread + i * kPrepareThreads) / kRows, t = thread % kRows;
        if (of < span)
            s.beta[of][t] = solves && t < place.count ? solved_beta_of(a, betas[i].value(a.beta)) : 0.0f;
    }
    if constexpr (kSeveral)
        q.mask_moving(count, part * P::kChannels, a.key_dim, TokensOfWrites(a.writes, begin));
    else
        q.mask_moving(count, part * P::kChannels, a.key_dim);
    k.mask_moving(count, part * P::kChannels, a.key_dim);
    if (a.qk_l2norm) {
        square_tokens<T, true>(s.squares[0][part] + first, q);
        square_tokens<T, true>(s.squares[1][part] + first, k);
    }
    if (block < P::kBlocks - 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int g = 0; g < P::kGroups; ++g)
                s.columns[block][part * P::kGroups + g][half][lane] = as_uint4(k.word[half][g]);
    }
    __syncthreads();
    const std::int64_t first_operands = std::int64_t{number} * a.value_heads + first_head;
    if (solves && fading && warp < span) {
        float grows_by = 0.0f;
#pragma unroll
        for (int t = 0; t < kRows; t += 32) grows_by += growth(s.beta[warp][t + lane]);
        grows_by = sum_over_warp(grows_by);
        if (lane == 0)
            fading[first_operands + warp] = a.qk_l2norm ? s.log_decay[warp][kRows - 1] + grows_by : 0.0f;
    }

    for (int i = thread; i < 2 * kRows; i += kPrepareThreads) {
        const int which = i / kRows, token = i % kRows;
        float norm = 1.0f;
        if (a.qk_l2norm) {
            float sum = 0.0f;
#pragma unroll
            for (int p = 0; p < P::kParts; ++p) sum += s.squares[which][p][token];
            norm = rsqrtf(sum + 1e-6f);
        }
        s.norms[which][token] = token < place.count ? norm : 0.0f;
    }
    __syncthreads();

#pragma unroll 1
    for (int of = 0; of < span; ++of) {
        TokenChunk<T, kKey>& chunk = chunks[first_operands + of];
        const float *const log_decays = s.log_decay[of], *const beta = s.beta[of];
        if (thread < kRows) {
            const float q_norm = a.scale * s.norms[0][thread], k_norm = s.norms[1][thread],
                        log_decay = log_decays[thread];
            const float whole = log_decays[kRows - 1];
            (kReversed ? chunk.k_rest : chunk.q_factor)[thread] = q_norm * exp2_fast(log_decay);
            chunk.k_factor[thread] = k_norm * exp2_fast(log_decay);
            (kReversed ? chunk.q_factor : chunk.k_rest)[thread] = k_norm * exp2_fast(whole - log_decay);
            chunk.decay[thread] = exp2_fast(whole);
        }

        // --- score ---
        float2 squares{0.0f, 0.0f};
        const int rows[2] = {first + lane / 4, first + lane / 4 + 8};
        const float row_decay[2] = {log_decays[rows[0]], log_decays[rows[1]]};
        const float q_scale[2] = {a.scale * s.norms[0][rows[0]], a.scale * s.norms[0][rows[1]]};
        const float k_scale[2] = {beta[rows[0]] * s.norms[1][rows[0]], beta[rows[1]] * s.norms[1][rows[1]]};
        const auto store = [&](float(&scores)[2][4], float(&overlaps)[2][4], int earlier) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int j = earlier * kBlock + 8 * tile + lane % 4 * 2 + e % 2;
                    const float factor = s.norms[1][j] * exp2_fast(row_decay[e / 2] - log_decays[j]);
                    scores[tile][e] *= q_scale[e / 2] * factor;
                    overlaps[tile][e] *= k_scale[e / 2] * factor;
                }
            const bool add = P::kParts > 1 && part > 0;
            add_product(s.pairs.scores, scores, first, earlier * kBlock, add);
            if (!solves) return;
            if (earlier < block) {
                add_product(s.pairs.overlaps, overlaps, first, earlier * kBlock, add);
                add_squares<false>(squares, overlaps);
            } else {
                add_product(s.pairs.overlaps, overlaps, first, first, add);
                add_squares<true>(squares, overlaps);
            }
        };
#pragma unroll
        for (int p = 0; p < P::kParts; ++p) {
            if (part == p) {
#pragma unroll 1
                for (int earlier = 0; earlier <= block; ++earlier) {
                    float product[2][2][4] = {};
#pragma unroll
                    for (int g = 0; g < P::kGroups; ++g) {
                        Words column[2];
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const uint4 x = earlier < block
                                                ? s.columns[earlier][part * P::kGroups + g][half][lane]
                                                : as_uint4(k.word[half][g]);
                            column[half][0] = x.x, column[half][1] = x.y, column[half][2] = x.z,
                            column[half][3] = x.w;
                        }
                        multiply_group<T>(product[0], q.word[0][g], q.word[1][g], column[0], column[1]);
                        if (solves)
                            multiply_group<T>(product[1], k.word[0][g], k.word[1][g], column[0], column[1]);
                    }
                    store(product[0], product[1], earlier);
                }
            }
            if (P::kParts > 1 && p + 1 < P::kParts) __syncthreads();
        }
        const bool last = part == P::kParts - 1;
        if (solves && last) {
            __syncwarp();
            invert_diagonal(s.pairs.overlaps, block);
        }
        const bool compensated = __syncthreads_or(last && needs_compensation(squares));
        if (last) {
            emit_lower<false>(chunk.scores, s.pairs.scores, block);
            if (compensated) emit_lower<true>(chunk.scores_low, s.pairs.scores, block);
            // The block's row of scores has been stored, so its memory serves as staging memory.
            if (solves)
                emit_inverse<T, kKey>(chunk, s.pairs.overlaps, beta, s.pairs.scores.at(first, 0, 0, 0), block,
                                      compensated);
        }
        if (per_chunk<kKey>(schedule) || of + 1 < span) __syncthreads();
        if (thread == 0) hand_over<kKey>(schedule, is_compensated + first_operands + of, compensated);
    }
}

}  // namespace cula::cuda::chunked
