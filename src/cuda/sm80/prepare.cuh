// SPDX-License-Identifier: Apache-2.0
// prepare: scores, inverse, scaled operands of every chunk <- q, k, gate, beta      ALGORITHM.md: score, solve
//
// grid (chunks * value heads)   2 K threads   phases
//   load    a thread holds 16 tokens of two channels: q, k and decay in registers
//   leaf    pairs of tokens in one block of 16: levels 8, 4, 2, 1. On each level a token is either past a border or before it;
//           its factor is the product of decays from the border, at most 1, whatever the data: nothing overflows, no branch
//   cross   pairs in different blocks: rows from their block's start, columns to their block's end, the blocks between as a
//           factor per channel on the column side
//   emit    operands for the carry, scaled to the chunk's start and end, straight to global memory
//   solve   (I + diag(beta) L)^-1 diag(beta) in float: substitution in 16 x 16 blocks, merged
//
// Rows of q and k are products of one warp-wide multiply: scores and overlaps come together.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/chunk.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::sm80 {

inline constexpr int kBlock = 16;  // tokens of a block

template <class T, int kKey>
struct PrepareSmem {
    static constexpr int kTokens = kRows<kKey>, kBlocks = kTokens / kBlock;
    static constexpr int kPairs = kBlocks * (kBlocks - 1) / 2;
    static constexpr int kStride = kTokens + 1;

    union {
        struct {
            T rows[2][kBlocks][kBlock * kKey];         // by level parity
            T columns[2][kBlocks][kBlock / 2 * kKey];
        } leaf;
        struct {
            T q[kTokens * kKey], k[kTokens * kKey];
            T columns[kPairs > 0 ? kPairs : 1][kBlock * kKey];
        } cross;
        struct {
            float inverse[kTokens * kStride];
            float product[kTokens / 2 * (kTokens / 2 + 1)];
        } solve;
    };
    float scores[kTokens * kStride], overlaps[kTokens * kStride];
    float block_decay[kBlocks][kKey];
    float token_sums[3][kTokens][kKey / 64];  // q q, k k, q k: one part a warp
    float token_decay[kTokens], beta[kTokens];
    ChunkPlace place;
};

// Sums of 16 values over the warp: lane 2 i and 2 i + 1 receive the sum of x[i].
__device__ __forceinline__ float warp_sums(float (&x)[16]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int step = 16, count = 8; step > 1; step /= 2, count /= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i >= count) continue;
            const float keep = upper ? x[i + count] : x[i], give = upper ? x[i] : x[i + count];
            x[i] = keep + __shfl_xor_sync(0xffffffffu, give, step);
        }
    }
    return x[0] + __shfl_xor_sync(0xffffffffu, x[0], 1);
}

template <class T, int kKey>
__global__ void __launch_bounds__(2 * kKey)
    prepare(const __grid_constant__ DeviceArgs a, const Schedule schedule, ChunkImage<T, kKey>* images) {
    using Smem = PrepareSmem<T, kKey>;
    constexpr int kTokens = Smem::kTokens, kBlocks = Smem::kBlocks, kStride = Smem::kStride;
    constexpr int kThreadsPerBlock = kKey / 2, kWarpsPerBlock = kKey / 64;
    static_assert(kThreadsPerBlock * 4 == 2 * kKey);
    extern __shared__ __align__(128) unsigned char raw[];
    Smem& s = *reinterpret_cast<Smem*>(raw);

    const int value_head = static_cast<int>(blockIdx.x) % a.value_heads, chunk = static_cast<int>(blockIdx.x) / a.value_heads;
    const int head = value_head / a.group;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    if (thread == 0) s.place = place_of(a, schedule, chunk);
    __syncthreads();
    const ChunkPlace place = s.place;
    if (place.count <= 0) return;

    const bool delta = a.algorithm.update == Update::kDelta, per_channel = a.algorithm.decay == Decay::kPerChannel;
    const HeadGate gate(a, value_head);
    ChunkImage<T, kKey>& image = images[static_cast<std::int64_t>(chunk) * a.value_heads + value_head];

    if (thread < kTokens) {
        const bool in = thread < place.count;
        s.token_decay[thread] =
            in && !per_channel ? exp2_fast(token_log2_decay(a, gate, place.batch, place.begin + thread, value_head)) : 1.0f;
        s.beta[thread] = in && delta ? beta_of(a, load_float(a.beta.data, a.beta.dtype,
                                                             a.beta.offset(place.batch, place.begin + thread, value_head)))
                                     : 0.0f;
    }

    // --- load ---
    const int block = thread / kThreadsPerBlock, c = 2 * (thread % kThreadsPerBlock), first = block * kBlock;
    const bool active = block < kBlocks;  // K = 256 has two blocks and threads for four
    std::uint32_t q[kBlock], k[kBlock];
    float2 decay[kBlock];
    {
        const bool pairs = (a.key_dim | a.q.batch | a.q.token | a.q.head | a.k.batch | a.k.token | a.k.head) % 2 == 0 &&
                           (reinterpret_cast<std::uintptr_t>(a.q.data) | reinterpret_cast<std::uintptr_t>(a.k.data)) % 4 == 0;
        const float bias0 = per_channel && c < a.key_dim ? channel_bias(a, value_head, c) : 0.0f;
        const float bias1 = per_channel && c + 1 < a.key_dim ? channel_bias(a, value_head, c + 1) : 0.0f;
        const auto load_pair = [&](const TokenRows& rows, std::int64_t t) -> std::uint32_t {
            const T* p = static_cast<const T*>(rows.data) + rows.offset(place.batch, t, head) + c;
            if (pairs) return c < a.key_dim ? __ldg(reinterpret_cast<const std::uint32_t*>(p)) : 0u;
            const float low = c < a.key_dim ? to_float(p[0]) : 0.0f, high = c + 1 < a.key_dim ? to_float(p[1]) : 0.0f;
            return pack2<T>(low, high);
        };
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            const std::int64_t t = place.begin + first + i;
            const bool in = active && first + i < place.count;
            q[i] = in ? load_pair(a.q, t) : 0u;
            k[i] = in ? load_pair(a.k, t) : 0u;
            decay[i] = {1.0f, 1.0f};
            if (in && per_channel) {
                const std::int64_t row = a.g.offset(place.batch, t, value_head) + c;
                const float g0 = c < a.key_dim ? load_float(a.g.data, a.g.dtype, row) : 0.0f;
                const float g1 = c + 1 < a.key_dim ? load_float(a.g.data, a.g.dtype, row + 1) : 0.0f;
                decay[i] = {exp2_fast(gate.log2_decay(g0 + bias0)), exp2_fast(gate.log2_decay(g1 + bias1))};
            }
        }
    }

    // Sums over the channels of each token: norms, and the scores of a token with itself.
    {
        float qq[kBlock], kk[kBlock], qk[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            const float2 x = unpack2<T>(q[i]), y = unpack2<T>(k[i]);
            qq[i] = x.x * x.x + x.y * x.y, kk[i] = y.x * y.x + y.y * y.y, qk[i] = x.x * y.x + x.y * y.y;
        }
        const float sums[3] = {warp_sums(qq), warp_sums(kk), warp_sums(qk)};
        if (active && lane % 2 == 0) {
            // After halving over lane bits 16, 8, 4, 2 the sum of value i lies at the lane with i's bits reversed into them.
            const int i = (lane & 16 ? 8 : 0) | (lane & 8 ? 4 : 0) | (lane & 4 ? 2 : 0) | (lane & 2 ? 1 : 0);
#pragma unroll
            for (int x = 0; x < 3; ++x) s.token_sums[x][first + i][warp % kWarpsPerBlock] = sums[x];
        }
    }
    __syncthreads();
    const auto token_sum = [&](int which, int token) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarpsPerBlock; ++w) sum += s.token_sums[which][token][w];
        return sum;
    };
    const auto q_norm = [&](int token) { return a.scale * (a.qk_l2norm ? rsqrtf(token_sum(0, token) + 1e-6f) : 1.0f); };
    const auto k_norm = [&](int token) { return a.qk_l2norm ? rsqrtf(token_sum(1, token) + 1e-6f) : 1.0f; };
    if (!per_channel && active) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) decay[i] = {s.token_decay[first + i], s.token_decay[first + i]};
    }
    // Norms go into the operands before they are rounded once more.
    const auto scaled = [&](std::uint32_t word, float norm, float2 factor) {
        const float2 x = unpack2<T>(word);
        return pack2<T>(x.x * norm * factor.x, x.y * norm * factor.y);
    };
    const auto put = [&](T* tile, int row, std::uint32_t word) {
        *reinterpret_cast<std::uint32_t*>(tile + Tile<kKey>::offset(row, c)) = word;
    };

    // --- leaf ---
    const auto leaf_level = [&](auto half_constant, int parity) {
        constexpr int kHalf = decltype(half_constant)::value;
        T *rows = s.leaf.rows[parity][block], *columns = s.leaf.columns[parity][block];
        float2 factor{1.0f, 1.0f};
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            const int pair = i / (2 * kHalf), x = i % (2 * kHalf);
            if (x < kHalf) continue;
            if (x == kHalf) factor = {1.0f, 1.0f};
            factor = {factor.x * decay[i].x, factor.y * decay[i].y};
            put(rows, pair * 2 * kHalf + x - kHalf, scaled(q[i], q_norm(first + i), factor));
            put(rows, pair * 2 * kHalf + x, scaled(k[i], k_norm(first + i), factor));
        }
#pragma unroll
        for (int i = kBlock - 1; i >= 0; --i) {
            const int pair = i / (2 * kHalf), x = i % (2 * kHalf);
            if (x >= kHalf) continue;
            if (x == kHalf - 1) factor = {1.0f, 1.0f};
            put(columns, pair * kHalf + x, scaled(k[i], k_norm(first + i), factor));
            factor = {factor.x * decay[i].x, factor.y * decay[i].y};
        }
        barrier(1 + block, kThreadsPerBlock);
        if (warp % kWarpsPerBlock != parity % kWarpsPerBlock) return;
        float product[4] = {};
#pragma unroll
        for (int step = 0; step < kKey / 32; ++step) {
            std::uint32_t m0[4], m1[4], n[4];
            const int row = lane % 16, unit = lane / 16;
            load_matrices(m0, shared_address(rows + Tile<kKey>::unit(row, 4 * step + unit) * 8));
            load_matrices(m1, shared_address(rows + Tile<kKey>::unit(row, 4 * step + 2 + unit) * 8));
            load_matrices(n, shared_address(columns + Tile<kKey>::unit(lane % 8, 4 * step + lane / 8) * 8));
            mma_16x8x16<T>(product, m0, n[0], n[1]);
            mma_16x8x16<T>(product, m1, n[2], n[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = lane / 4 + (e / 2) * 8, column = lane % 4 * 2 + e % 2;
            const int pair = row / (2 * kHalf), x = row % (2 * kHalf);
            if (column / kHalf != pair) continue;
            const int i = first + pair * 2 * kHalf + kHalf + x % kHalf, j = first + pair * 2 * kHalf + column % kHalf;
            (x < kHalf ? s.scores : s.overlaps)[i * kStride + j] = product[e];
        }
    };
    if (active) {
        leaf_level(std::integral_constant<int, 8>{}, 0);
        leaf_level(std::integral_constant<int, 4>{}, 1);
        leaf_level(std::integral_constant<int, 2>{}, 0);
        leaf_level(std::integral_constant<int, 1>{}, 1);
        if (thread % kThreadsPerBlock < kBlock) {
            const int i = first + thread % kThreadsPerBlock;
            s.scores[i * kStride + i] = token_sum(2, i) * q_norm(i) * k_norm(i);
        }
        float2 total{1.0f, 1.0f};
#pragma unroll
        for (int i = 0; i < kBlock; ++i) total = {total.x * decay[i].x, total.y * decay[i].y};
        s.block_decay[block][c] = total.x;
        s.block_decay[block][c + 1] = total.y;
    }
    __syncthreads();

    // --- cross, emit ---
    if (active) {
        // Products of the blocks before this one and after it.
        float2 before{1.0f, 1.0f}, after{1.0f, 1.0f};
        float2 between[kBlocks];  // of the blocks after this one up to block b, b not counted
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const float2 d{s.block_decay[b][c], s.block_decay[b][c + 1]};
            if (b < block) before = {before.x * d.x, before.y * d.y};
            between[b] = after;
            if (b > block) after = {after.x * d.x, after.y * d.y};
        }
        if (block == kBlocks - 1) {
            const float2 d{s.block_decay[block][c], s.block_decay[block][c + 1]};
            image.decay[c] = before.x * d.x;
            image.decay[c + 1] = before.y * d.y;
        }
        float2 factor{1.0f, 1.0f};
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            const int row = first + i;
            factor = {factor.x * decay[i].x, factor.y * decay[i].y};
            const float2 whole{factor.x * before.x, factor.y * before.y};
            put(s.cross.q, row, scaled(q[i], q_norm(row), factor));
            put(image.q_decayed, row, scaled(q[i], q_norm(row), whole));
            if (!delta) continue;
            put(s.cross.k, row, scaled(k[i], k_norm(row), factor));
            put(image.k_decayed, row, scaled(k[i], k_norm(row), whole));
        }
        factor = {1.0f, 1.0f};
#pragma unroll
        for (int i = kBlock - 1; i >= 0; --i) {
            const int row = first + i;
            put(image.k_remaining, row, scaled(k[i], k_norm(row), {factor.x * after.x, factor.y * after.y}));
#pragma unroll
            for (int b = 1; b < kBlocks; ++b)
                if (b > block)
                    put(s.cross.columns[b * (b - 1) / 2 + block], i,
                        scaled(k[i], k_norm(row), {factor.x * between[b].x, factor.y * between[b].y}));
            factor = {factor.x * decay[i].x, factor.y * decay[i].y};
        }
    }
    __syncthreads();

    // A warp takes rows of q or k of one block, against all blocks before it.
    for (int unit = warp; unit < 2 * kBlocks; unit += 2 * kKey / 32) {
        const int b = unit / 2;
        const bool of_k = unit % 2;
        if (b == 0 || (of_k && !delta)) continue;
        const T* rows = of_k ? s.cross.k : s.cross.q;
        float* dst = of_k ? s.overlaps : s.scores;
        for (int j = 0; j < b; ++j) {
            const T* columns = s.cross.columns[b * (b - 1) / 2 + j];
            float product[2][4] = {};
#pragma unroll
            for (int step = 0; step < kKey / 16; ++step) {
                std::uint32_t m[4], n[4];
                load_matrices(m, shared_address(rows + Tile<kKey>::unit(b * kBlock + lane % 16, 2 * step + lane / 16) * 8));
                load_matrices(n, shared_address(columns + Tile<kKey>::unit(lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2) * 8));
                mma_16x8x16<T>(product[0], m, n[0], n[1]);
                mma_16x8x16<T>(product[1], m, n[2], n[3]);
            }
#pragma unroll
            for (int x = 0; x < 2; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    dst[(b * kBlock + lane / 4 + e / 2 * 8) * kStride + j * kBlock + x * 8 + lane % 4 * 2 + e % 2] = product[x][e];
        }
    }
    __syncthreads();

    // --- solve ---
    const auto emit = [&](T* tile, auto value) {
        for (int x = thread; x < kTokens * kTokens / 2; x += 2 * kKey) {
            const int row = x / (kTokens / 2), column = x % (kTokens / 2) * 2;
            *reinterpret_cast<std::uint32_t*>(tile + Tile<kTokens>::offset(row, column)) =
                pack2<T>(column <= row ? value(row, column) : 0.0f, column + 1 <= row ? value(row, column + 1) : 0.0f);
        }
    };
    emit(image.scores, [&](int i, int j) { return s.scores[i * kStride + j]; });
    if (!delta) return;
    float* inverse = s.solve.inverse;
    if (thread < kTokens) {
        // Column `thread` of its diagonal block: x_i = [i = j] - beta_i sum_{m < i} L_im x_m.
        const int b = thread / kBlock * kBlock, j = thread % kBlock;
        float x[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int m = 0; m < i; ++m) sum += s.overlaps[(b + i) * kStride + b + m] * x[m];
            x[i] = (i == j ? 1.0f : 0.0f) - s.beta[b + i] * sum;
            if (i < j) x[i] = 0.0f;
            inverse[(b + i) * kStride + b + j] = x[i];
        }
    }
    __syncthreads();
    // Lower left corners: X21 = -X22 (diag(beta) L21) X11, for halves of 16 and then 32.
    for (int half = kBlock; half < kTokens; half *= 2) {
        const int corners = kTokens / (2 * half);
        for (int x = thread; x < corners * half * half; x += 2 * kKey) {
            const int corner = x / (half * half) * 2 * half, i = x / half % half, j = x % half;
            float sum = 0.0f;
            for (int m = j; m < half; ++m)
                sum += s.overlaps[(corner + half + i) * kStride + corner + m] * inverse[(corner + m) * kStride + corner + j];
            s.solve.product[(corner / 2 + i) * (half + 1) + j] = s.beta[corner + half + i] * sum;
        }
        __syncthreads();
        for (int x = thread; x < corners * half * half; x += 2 * kKey) {
            const int corner = x / (half * half) * 2 * half, i = x / half % half, j = x % half;
            float sum = 0.0f;
            for (int m = 0; m <= i; ++m)
                sum += inverse[(corner + half + i) * kStride + corner + half + m] * s.solve.product[(corner / 2 + m) * (half + 1) + j];
            inverse[(corner + half + i) * kStride + corner + j] = -sum;
        }
        __syncthreads();
    }
    emit(image.inverse, [&](int i, int j) { return inverse[i * kStride + j] * s.beta[j]; });
}

}  // namespace cula::cuda::sm80
