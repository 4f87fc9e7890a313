// SPDX-License-Identifier: Apache-2.0
// prepare, one decay per token: scores, inverse and factors of every chunk <- q, k, gate, beta      ALGORITHM.md:
// score, solve
//
// grid (chunks of the slab * value heads)   128 threads, a warp per block of 16 tokens
//
// q and k go into the products as they are; norms, scale and exp(G_i - G_j) multiply the results. Nothing is rounded
// but the inputs and what the carry reads.
#pragma once

#include "cuda/sm80/block.cuh"
#include "cuda/sm80/solve.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::sm80 {

template <int kKey>
struct TokenSmem {
    using P = Parts<kKey>;
    PairSquares<kKey> pairs;
    union {
        Columns<kKey> columns[P::kBlocks - 1];
        Square<kTokens<kKey>> inverse;
    };
    float log_decay[kTokens<kKey>];  // log2, from the chunk's start
    float beta[kTokens<kKey>];
    float norms[2][P::kParts][kTokens<kKey>];
};

template <class T, int kKey>
__global__ void __launch_bounds__(kPrepareThreads, 4)
    prepare_token(const __grid_constant__ DeviceArgs a, const Schedule schedule, TokenImage<T, kKey>* images,
                  std::int32_t* exact_writes) {
    using P = Parts<kKey>;
    constexpr int kRows = kTokens<kKey>;
    extern __shared__ __align__(128) unsigned char raw[];
    auto& s = *reinterpret_cast<TokenSmem<kKey>*>(raw);

    const int value_head = static_cast<int>(blockIdx.x) % a.value_heads,
              number = static_cast<int>(blockIdx.x) / a.value_heads;
    const int head = value_head / a.group, thread = static_cast<int>(threadIdx.x), lane = thread % 32,
              warp = thread / 32;
    const ChunkPlace place = place_of(a, schedule, number);
    if (place.count <= 0) return;

    const bool delta = a.algorithm.update == Update::kDelta;
    const std::int64_t at = static_cast<std::int64_t>(number) * a.value_heads + value_head;
    TokenImage<T, kKey>& image = images[at];
    const int block = warp % P::kBlocks, part = warp / P::kBlocks, first = block * kBlock;

    BlockRows<P::kGroups> q, k;
    // A block without tokens reads the chunk's first one, and drops it.
    const int count = place.count - first;
    const std::int64_t begin = place.begin + (count > 0 ? first : 0);
    q.template fetch<T>(a.q, place.batch, begin, head, count, part * P::kChannels, a.key_dim);
    k.template fetch<T>(a.k, place.batch, begin, head, count, part * P::kChannels, a.key_dim);
    if (warp == 0) {
        // Two neighbouring tokens a lane (one where a chunk has 32), then a scan over the lanes.
        constexpr int kEach = kRows / 32;
        const HeadGate gate(a, value_head);
        float sum[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int t = lane * kEach + i;
            sum[i] = t < place.count
                         ? fmaxf(token_log2_decay(a, gate, place.batch, place.begin + t, value_head), kLeastLog2Decay)
                         : 0.0f;
            if (i > 0) sum[i] += sum[i - 1];
        }
        float before = sum[kEach - 1];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        before = __shfl_up_sync(0xffffffffu, before, 1);
        if (lane == 0) before = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) s.log_decay[lane * kEach + i] = before + sum[i];
    }
    if (thread < kRows)
        s.beta[thread] = delta && thread < place.count
                             ? beta_of(a, load_float(a.beta.data, a.beta.dtype,
                                                     a.beta.offset(place.batch, place.begin + thread, value_head)))
                             : 0.0f;
    q.mask(count, part * P::kChannels, a.key_dim);
    k.mask(count, part * P::kChannels, a.key_dim);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = first + lane / 4 + 8 * half;
        if (a.qk_l2norm) {
            const float qq = dot<T>(q, q, half), kk = dot<T>(k, k, half);
            if (lane % 4 == 0) s.norms[0][part][token] = qq, s.norms[1][part][token] = kk;
        }
        if (block < P::kBlocks - 1) {
#pragma unroll
            for (int g = 0; g < P::kGroups; ++g)
                s.columns[block].words[part * P::kGroups + g][half][lane] = as_uint4(k.word[half][g]);
        }
    }
    __syncthreads();

    const auto norm = [&](int which, int token) {
        if (!a.qk_l2norm) return 1.0f;
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < P::kParts; ++p) sum += s.norms[which][p][token];
        return rsqrtf(sum + 1e-6f);
    };
    if (thread < kRows) {
        const float q_norm = a.scale * norm(0, thread), k_norm = norm(1, thread), log_decay = s.log_decay[thread];
        const float whole = s.log_decay[kRows - 1];
        image.q_factor[thread] = q_norm * exp2_fast(log_decay);
        image.k_factor[thread] = k_norm * exp2_fast(log_decay);
        image.k_rest[thread] = thread < place.count ? k_norm * exp2_fast(whole - log_decay) : 0.0f;
        image.decay[thread] = exp2_fast(whole);
    }

    // --- score ---
    float squares = 0.0f;
    const int rows[2] = {first + lane / 4, first + lane / 4 + 8};
    const float row_decay[2] = {s.log_decay[rows[0]], s.log_decay[rows[1]]};
    const float q_scale[2] = {a.scale * norm(0, rows[0]), a.scale * norm(0, rows[1])};
    const float k_scale[2] = {s.beta[rows[0]] * norm(1, rows[0]), s.beta[rows[1]] * norm(1, rows[1])};
    const auto store = [&](float(&scores)[2][4], float(&overlaps)[2][4], int column, float2& sum) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int j = column + 8 * tile + lane % 4 * 2 + e % 2;
                const float factor = norm(1, j) * exp2_fast(row_decay[e / 2] - s.log_decay[j]);
                scores[tile][e] *= q_scale[e / 2] * factor;
                overlaps[tile][e] *= k_scale[e / 2] * factor;
            }
        store_product(s.pairs.scores, scores, first, column, part > 0);
        if (!delta) return;
        const float2 more = store_product(s.pairs.overlaps, overlaps, first, column, part > 0);
        sum = {sum.x + more.x, sum.y + more.y};
    };
#pragma unroll
    for (int p = 0; p < P::kParts; ++p) {
        if (part == p) {
            float2 sum{0.0f, 0.0f};
#pragma unroll 1
            for (int earlier = 0; earlier <= block; ++earlier) {
                float product[2][2][4] = {};
#pragma unroll
                for (int g = 0; g < P::kGroups; ++g) {
                    Words column[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint4 x = earlier < block ? s.columns[earlier].words[part * P::kGroups + g][half][lane]
                                                        : as_uint4(k.word[half][g]);
                        column[half][0] = x.x, column[half][1] = x.y, column[half][2] = x.z, column[half][3] = x.w;
                    }
                    multiply_group<T>(product[0], q.word[0][g], q.word[1][g], column[0], column[1]);
                    if (delta) multiply_group<T>(product[1], k.word[0][g], k.word[1][g], column[0], column[1]);
                }
                store(product[0], product[1], earlier * kBlock, sum);
            }
            squares = fmaxf(token_sum(sum.x), token_sum(sum.y));
        }
        if (P::kParts > 1 && p + 1 < P::kParts) __syncthreads();
    }
    const bool coupled = __syncthreads_or(squares > kMostSquares && part == P::kParts - 1);

    emit_lower<T>(image.scores, s.pairs.scores, nullptr, false);
    if (!delta) return;
    invert(s.pairs.overlaps, s.inverse);
    emit_lower<T>(image.inverse, s.inverse, s.beta, false);
    if (coupled) {
        emit_lower<T>(image.inverse_low, s.inverse, s.beta, true);
        emit_lower<T>(image.scores_low, s.pairs.scores, nullptr, true);
    }
    if (thread == 0) exact_writes[at] = coupled;
}

}  // namespace cula::cuda::sm80
