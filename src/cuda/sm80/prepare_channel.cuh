// SPDX-License-Identifier: Apache-2.0
// prepare, decay per channel: scores, inverse, scaled operands of every chunk <- q, k, gate, beta      ALGORITHM.md:
// score, solve
//
// grid (chunks of the slab * value heads)   128 threads, a warp per block of 16 tokens   phases
//   gate    a lane owns a few channels of its warp's block: log decays, summed from the block's middle to both ends
//   table   per block and channel: the factors from the chunk's start, to its end, and to the middle of every later
//   block score   a lane turns to two tokens: q and k with exp(G - middle), k with exp(middle - G) are the operands of
//   the block's own
//           pairs, times a factor of the table those of pairs with other blocks, and what the carry reads
//   solve   (I + diag(beta) K K^T)^-1 diag(beta)
//
// exp(+-(G - middle)) stays in range unless eight tokens decay by more than kMostLog2. A chunk that holds more takes
// the exact way: pairs inside a block on four levels (8, 4, 2, 1), each token's factor running from the border between
// the two halves of its level, at most 1 whatever the data; all other factors from one exponent. Chunks decide for
// themselves.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/sm80/block.cuh"
#include "cuda/sm80/solve.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::sm80 {

template <class T>
inline constexpr float kMostLog2 = 100.0f;
template <>
inline constexpr float kMostLog2<__half> = 4.0f;

template <int kKey>
struct ChannelSmem {
    using P = Parts<kKey>;
    union {
        float gates[kPrepareThreads / 32][kBlock * P::kChannels];
        PairSquares<kKey> pairs;
    };
    union {
        std::uint16_t raw_gates[kPrepareThreads / 32][kBlock * P::kChannels];
        Columns<kKey> columns[P::kPairs];
        Square<kTokens<kKey>> inverse;
    };
    float head[P::kBlocks][kKey],
        tail[P::kBlocks][kKey];  // log2 decay from a block's start to its middle, from there to its end
    float from_start[P::kBlocks][kKey], to_end[P::kBlocks][kKey], between[P::kPairs][kKey];
    float beta[kTokens<kKey>];
    float norms[2][P::kParts][kTokens<kKey>];
};

// Pair of blocks (row, column): the place of its columns and factors.
__device__ __forceinline__ constexpr int pair_of(int row, int column) { return row * (row - 1) / 2 + column; }

// The gates of one block: a lane owns kChannels / 32 neighbouring channels, and nobody else touches their places in
// shared memory until the sums stand there.
template <int kKey>
struct BlockGates {
    using P = Parts<kKey>;
    static constexpr int kOwned = P::kChannels / 32;

    const DeviceArgs& a;
    float* sums;          // [token][channel], units of four permuted by the token
    std::uint16_t* raw;   // [token][channel]
    int channel, count;   // the lane's first channel; tokens of the block that exist
    bool narrow = false;  // 16-bit gates wait in raw, all others as floats in sums
    const int lane = static_cast<int>(threadIdx.x) % 32;

    __device__ __forceinline__ float* place(int token) const {
        if constexpr (kOwned == 4) return sums + token * P::kChannels + (lane ^ (token & 1)) * 4;
        return sums + token * P::kChannels + (lane / 2 ^ (token & 1)) * 4 + lane % 2 * 2;
    }

    __device__ __forceinline__ void load(std::int64_t row) {
        const TokenRows& g = a.g;
        const bool wide = (g.batch | g.token | g.head | a.key_dim) % kOwned == 0 && channel < a.key_dim &&
                          reinterpret_cast<std::uintptr_t>(g.data) % (4 * kOwned) == 0;
        narrow = wide && (g.dtype == Dtype::kBFloat16 || g.dtype == Dtype::kFloat16);
        if (narrow) {
            const auto* from = static_cast<const std::uint16_t*>(g.data) + row + channel;
            const std::uint32_t to = shared_address(raw + lane * kOwned);
#pragma unroll
            for (int t = 0; t < kBlock; ++t)
                copy_async_cached<2 * kOwned>(to + t * P::kChannels * 2, from + (t < count ? t : 0) * g.token);
        } else if (wide && g.dtype == Dtype::kFloat32) {
            const auto* from = static_cast<const float*>(g.data) + row + channel;
#pragma unroll
            for (int t = 0; t < kBlock; ++t)
                copy_async_cached<4 * kOwned>(shared_address(place(t)), from + (t < count ? t : 0) * g.token);
        } else {
#pragma unroll 1
            for (int t = 0; t < kBlock; ++t)
#pragma unroll
                for (int i = 0; i < kOwned; ++i)
                    place(t)[i] = t < count && channel + i < a.key_dim
                                      ? load_float(g.data, g.dtype, row + t * g.token + channel + i)
                                      : 0.0f;
        }
        commit_copies();
    }

    // log2 decays of token t.
    __device__ __forceinline__ void decays(float (&x)[kOwned], const HeadGate& gate, const float (&bias)[kOwned],
                                           int t) const {
        if (narrow) {
            const auto* from = reinterpret_cast<const std::uint32_t*>(raw + t * P::kChannels + lane * kOwned);
#pragma unroll
            for (int i = 0; i < kOwned; i += 2) {
                const float2 pair =
                    a.g.dtype == Dtype::kBFloat16 ? unpack2<__nv_bfloat16>(from[i / 2]) : unpack2<__half>(from[i / 2]);
                x[i] = pair.x, x[i + 1] = pair.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kOwned; ++i) x[i] = place(t)[i];
        }
        gate.log2_decays(x, bias);
#pragma unroll
        for (int i = 0; i < kOwned; ++i) x[i] = t < count ? fmaxf(x[i], kLeastLog2Decay) : 0.0f;
    }

    // Sums from the middle, after token 7, outward; the whole to the middle (head) and from it (tail).
    __device__ __forceinline__ void sum(const HeadGate& gate, float (&head)[kOwned], float (&tail)[kOwned]) const {
        float bias[kOwned];
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            bias[i] = channel + i < a.key_dim ? channel_bias(a, gate.value_head, channel + i) : 0.0f;
            head[i] = tail[i] = 0.0f;
        }
#pragma unroll 2
        for (int t = kBlock / 2; t < kBlock; ++t) {
            float x[kOwned];
            decays(x, gate, bias, t);
#pragma unroll
            for (int i = 0; i < kOwned; ++i) place(t)[i] = tail[i] += x[i];
        }
#pragma unroll 2
        for (int t = kBlock / 2 - 1; t >= 0; --t) {
            float x[kOwned];
            decays(x, gate, bias, t);
#pragma unroll
            for (int i = 0; i < kOwned; ++i) place(t)[i] = -head[i], head[i] += x[i];
        }
    }
};

template <class T, int kKey>
struct ChannelBlock {
    using P = Parts<kKey>;
    using Rows = BlockRows<P::kGroups>;

    ChannelSmem<kKey>& s;
    ChannelImage<T, kKey>& image;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int block = warp % P::kBlocks, part = warp / P::kBlocks, first = block * kBlock;

    // log2 of the decay between the block's middle and token, for eight channels of group g.
    __device__ __forceinline__ void gates(float (&x)[8], int token, int g) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int unit = 8 * g + lane % 4 * 2 + i;
            load4(x + 4 * i, s.gates[warp] + token * P::kChannels + (unit ^ (token & 1)) * 4);
        }
    }
    __device__ __forceinline__ void table(float (&x)[8], const float* row, int g) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) load4(x + 4 * i, row + part * P::kChannels + 32 * g + lane % 4 * 8 + 4 * i);
    }

    __device__ __forceinline__ void put(T* tile, int half, int g, const Words& words) const {
        const int unit = (part * P::kChannels) / 8 + 4 * g + lane % 4;
        *reinterpret_cast<uint4*>(tile + Tile<kKey>::unit(first + lane / 4 + 8 * half, unit) * 8) = as_uint4(words);
    }
    __device__ __forceinline__ void put_columns(int later, int half, int g, const Words& words) const {
        s.columns[pair_of(later, block)].words[part * P::kGroups + g][half][lane] = as_uint4(words);
    }
    __device__ __forceinline__ void get_columns(Words (&words)[2], int earlier, int g) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 x = s.columns[pair_of(block, earlier)].words[part * P::kGroups + g][half][lane];
            words[half][0] = x.x, words[half][1] = x.y, words[half][2] = x.z, words[half][3] = x.w;
        }
    }

    static __device__ __forceinline__ void unpack(float (&x)[8], const Words& words, float scale) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 pair = unpack2<T>(words[w]);
            x[2 * w] = pair.x * scale, x[2 * w + 1] = pair.y * scale;
        }
    }
    static __device__ __forceinline__ void pack(Words& words, const float (&x)[8]) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = pack2<T>(x[2 * w], x[2 * w + 1]);
    }
    static __device__ __forceinline__ void pack_product(Words& words, const float (&x)[8], const float (&y)[8]) {
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = pack2<T>(x[2 * w] * y[2 * w], x[2 * w + 1] * y[2 * w + 1]);
    }
    // words = x exp2(sign gate + exponent)
    static __device__ __forceinline__ void pack_exact(Words& words, const float (&x)[8], const float (&gate)[8],
                                                      float sign, const float (&exponent)[8]) {
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = x[i] * exp2_fast(sign * gate[i] + exponent[i]);
        pack(words, y);
    }

    // The common way: operands of all kinds from q and k, which become the rows that meet other blocks' columns, and
    // the products inside the block.
    __device__ __forceinline__ void score(Rows& q, Rows& k, const float2 (&norm)[2], bool delta,
                                          float (&own)[2][2][4]) const {
#pragma unroll
        for (int g = 0; g < P::kGroups; ++g) {
            Words columns[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float gate[8], x[8], factor[8];
                Words words;
                gates(gate, lane / 4 + 8 * half, g);
                table(factor, s.from_start[block], g);
                float fall[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) fall[i] = exp2_fast(gate[i]);
                unpack(x, q.word[half][g], norm[half].x);
#pragma unroll
                for (int i = 0; i < 8; ++i) x[i] *= fall[i];
                pack(q.word[half][g], x);
                pack_product(words, x, factor);
                put(image.q_decayed, half, g, words);

                float column[8];
                unpack(column, k.word[half][g], norm[half].y);
#pragma unroll
                for (int i = 0; i < 8; ++i) x[i] = column[i] * fall[i], column[i] *= exp2_fast(-gate[i]);
                pack(k.word[half][g], x);
                if (delta) {
                    pack_product(words, x, factor);
                    put(image.k_decayed, half, g, words);
                }
                pack(columns[half], column);
                table(factor, s.to_end[block], g);
                pack_product(words, column, factor);
                put(image.k_remaining, half, g, words);
#pragma unroll
                for (int later = 1; later < P::kBlocks; ++later) {
                    if (later <= block) continue;
                    table(factor, s.between[pair_of(later, block)], g);
                    pack_product(words, column, factor);
                    put_columns(later, half, g, words);
                }
            }
            multiply_group<T>(own[0], q.word[0][g], q.word[1][g], columns[0], columns[1]);
            if (delta) multiply_group<T>(own[1], k.word[0][g], k.word[1][g], columns[0], columns[1]);
        }
    }

    // The exact way reads q and k again, group by group: load(q, k, g). First the products inside the block. A pair of
    // tokens belongs to the level of the highest bit in which their numbers differ; whatever a level computes for other
    // pairs is dropped, be it infinite.
    template <class Load>
    __device__ __forceinline__ void score_exact(Load load, const float2 (&norm)[2], float (&own)[2][2][4]) const {
        BlockRows<1> q, k;
        float self[2] = {};
#pragma unroll 1
        for (int level = kBlock / 2; level > 0; level /= 2) {
            float product[2][2][4] = {};
#pragma unroll 1
            for (int g = 0; g < P::kGroups; ++g) {
                load(q, k, g);
                Words columns[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int token = lane / 4 + 8 * half;
                    if (level == 1) self[half] += dot<T>(q, k, half);
                    float gate[8], border[8], x[8];
                    gates(gate, token, g);
                    gates(border, token / (2 * level) * (2 * level) + level - 1, g);
#pragma unroll
                    for (int i = 0; i < 8; ++i) gate[i] -= border[i], border[i] = 0.0f;
                    unpack(x, q.word[half][0], norm[half].x);
                    pack_exact(q.word[half][0], x, gate, 1.0f, border);
                    unpack(x, k.word[half][0], norm[half].y);
                    pack_exact(k.word[half][0], x, gate, 1.0f, border);
                    pack_exact(columns[half], x, gate, -1.0f, border);
                }
                multiply_group<T>(product[0], q.word[0][0], q.word[1][0], columns[0], columns[1]);
                multiply_group<T>(product[1], k.word[0][0], k.word[1][0], columns[0], columns[1]);
            }
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = lane / 4 + e / 2 * 8, j = 8 * tile + lane % 4 * 2 + e % 2;
                    if (j < i && (i ^ j) / level == 1)
                        own[0][tile][e] = product[0][tile][e], own[1][tile][e] = product[1][tile][e];
                }
        }
        // A token with itself.
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (lane % 4 * 2 + e == lane / 4) own[0][half][2 * half + e] = self[half] * norm[half].x * norm[half].y;
    }

    // Then the operands, and after a barrier the products with earlier blocks, from this block's start.
    template <class Load>
    __device__ __forceinline__ void operands_exact(Load load, const float2 (&norm)[2], bool delta) const {
        BlockRows<1> q, k;
#pragma unroll 1
        for (int g = 0; g < P::kGroups; ++g) {
            load(q, k, g);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float gate[8], x[8], exponent[8];
                Words words;
                gates(gate, lane / 4 + 8 * half, g);
                table(exponent, s.from_start[block], g);
                unpack(x, q.word[half][0], norm[half].x);
                pack_exact(words, x, gate, 1.0f, exponent);
                put(image.q_decayed, half, g, words);
                unpack(x, k.word[half][0], norm[half].y);
                if (delta) {
                    pack_exact(words, x, gate, 1.0f, exponent);
                    put(image.k_decayed, half, g, words);
                }
                table(exponent, s.to_end[block], g);
                pack_exact(words, x, gate, -1.0f, exponent);
                put(image.k_remaining, half, g, words);
                for (int later = block + 1; later < P::kBlocks; ++later) {
                    table(exponent, s.between[pair_of(later, block)], g);
                    pack_exact(words, x, gate, -1.0f, exponent);
                    put_columns(later, half, g, words);
                }
            }
        }
    }
    template <class Load>
    __device__ __forceinline__ void cross_exact(Load load, const float2 (&norm)[2],
                                                float (&cross)[P::kBlocks - 1][2][2][4]) const {
        BlockRows<1> q, k;
#pragma unroll 1
        for (int g = 0; g < P::kGroups; ++g) {
            load(q, k, g);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float gate[8], x[8], exponent[8];
                gates(gate, lane / 4 + 8 * half, g);
                table(exponent, s.head[block], g);
                unpack(x, q.word[half][0], norm[half].x);
                pack_exact(q.word[half][0], x, gate, 1.0f, exponent);
                unpack(x, k.word[half][0], norm[half].y);
                pack_exact(k.word[half][0], x, gate, 1.0f, exponent);
            }
#pragma unroll
            for (int earlier = 0; earlier < P::kBlocks - 1; ++earlier) {
                if (earlier >= block) continue;
                Words columns[2];
                get_columns(columns, earlier, g);
                multiply_group<T>(cross[earlier][0], q.word[0][0], q.word[1][0], columns[0], columns[1]);
                multiply_group<T>(cross[earlier][1], k.word[0][0], k.word[1][0], columns[0], columns[1]);
            }
        }
    }
    __device__ __forceinline__ void cross(const Rows& q, const Rows& k, bool delta, int earlier,
                                          float (&product)[2][2][4]) const {
#pragma unroll
        for (int g = 0; g < P::kGroups; ++g) {
            Words columns[2];
            get_columns(columns, earlier, g);
            multiply_group<T>(product[0], q.word[0][g], q.word[1][g], columns[0], columns[1]);
            if (delta) multiply_group<T>(product[1], k.word[0][g], k.word[1][g], columns[0], columns[1]);
        }
    }
};

template <class T, int kKey>
__global__ void __launch_bounds__(kPrepareThreads, 3)
    prepare_channel(const __grid_constant__ DeviceArgs a, const Schedule schedule, ChannelImage<T, kKey>* images,
                    std::int32_t* exact_writes) {
    using P = Parts<kKey>;
    constexpr int kRows = kTokens<kKey>, kOwned = P::kChannels / 32;
    extern __shared__ __align__(128) unsigned char raw[];
    auto& s = *reinterpret_cast<ChannelSmem<kKey>*>(raw);

    const int value_head = static_cast<int>(blockIdx.x) % a.value_heads,
              number = static_cast<int>(blockIdx.x) / a.value_heads;
    const int head = value_head / a.group, thread = static_cast<int>(threadIdx.x);
    const ChunkPlace place = place_of(a, schedule, number);
    if (place.count <= 0) return;

    const bool delta = a.algorithm.update == Update::kDelta;
    const std::int64_t at = static_cast<std::int64_t>(number) * a.value_heads + value_head;
    ChannelBlock<T, kKey> block{s, images[at]};
    const int lane = block.lane, first = block.first;
    if (thread < kRows)
        s.beta[thread] = delta && thread < place.count
                             ? beta_of(a, load_float(a.beta.data, a.beta.dtype,
                                                     a.beta.offset(place.batch, place.begin + thread, value_head)))
                             : 0.0f;

    // --- gate ---
    // A block without tokens reads the chunk's first one, and drops it.
    const int count = place.count - first;
    const std::int64_t begin = place.begin + (count > 0 ? first : 0);
    BlockGates<kKey> gates{a, s.gates[block.warp], s.raw_gates[block.warp], block.part * P::kChannels + lane * kOwned,
                           count};
    gates.load(a.g.offset(place.batch, begin, value_head));
    typename ChannelBlock<T, kKey>::Rows q, k;
    q.template fetch<T>(a.q, place.batch, begin, head, count, block.part * P::kChannels, a.key_dim);
    k.template fetch<T>(a.k, place.batch, begin, head, count, block.part * P::kChannels, a.key_dim);
    bool wild = false;
    {
        float head_sum[kOwned], tail_sum[kOwned];
        wait_copies<0>();
        __syncwarp();
        gates.sum(HeadGate(a, value_head), head_sum, tail_sum);
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            wild |= fmaxf(fabsf(head_sum[i]), fabsf(tail_sum[i])) > kMostLog2<T>;
            s.head[block.block][gates.channel + i] = head_sum[i], s.tail[block.block][gates.channel + i] = tail_sum[i];
        }
    }
    q.mask(count, block.part * P::kChannels, a.key_dim);
    k.mask(count, block.part * P::kChannels, a.key_dim);
    if (a.qk_l2norm) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float qq = dot<T>(q, q, half), kk = dot<T>(k, k, half);
            if (lane % 4 == 0) {
                s.norms[0][block.part][first + lane / 4 + 8 * half] = qq;
                s.norms[1][block.part][first + lane / 4 + 8 * half] = kk;
            }
        }
    }
    const bool exact = __syncthreads_or(wild);

    // --- table ---
    for (int c = thread; c < kKey; c += kPrepareThreads) {
        const auto entry = [&](float x) { return exact ? x : exp2_fast(x); };
        float head_sum[P::kBlocks], whole[P::kBlocks], tail_sum[P::kBlocks], start = 0.0f, end = 0.0f;
#pragma unroll
        for (int b = 0; b < P::kBlocks; ++b)
            head_sum[b] = s.head[b][c], tail_sum[b] = s.tail[b][c], whole[b] = head_sum[b] + tail_sum[b];
#pragma unroll
        for (int b = 0; b < P::kBlocks; ++b) {
            s.from_start[b][c] = entry(start + head_sum[b]);
            start += whole[b];
            float gap = tail_sum[b];
#pragma unroll
            for (int later = b + 1; later < P::kBlocks; ++later) {
                s.between[pair_of(later, b)][c] = entry(exact ? gap : gap + head_sum[later]);
                gap += whole[later];
            }
        }
#pragma unroll
        for (int b = P::kBlocks - 1; b >= 0; --b) {
            s.to_end[b][c] = entry(end + tail_sum[b]);
            end += whole[b];
        }
        block.image.decay[c] = exp2_fast(start);
    }
    float2 norm[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        norm[half] = {a.scale, 1.0f};
        if (!a.qk_l2norm) continue;
        float qq = 0.0f, kk = 0.0f;
#pragma unroll
        for (int p = 0; p < P::kParts; ++p) {
            qq += s.norms[0][p][first + lane / 4 + 8 * half];
            kk += s.norms[1][p][first + lane / 4 + 8 * half];
        }
        norm[half] = {a.scale * rsqrtf(qq + 1e-6f), rsqrtf(kk + 1e-6f)};
    }
    __syncthreads();

    // --- score ---
    float own[2][2][4] = {};  // q k^T and k k^T of the block
    float squares = 0.0f;
    const float beta[2] = {s.beta[first + lane / 4], s.beta[first + lane / 4 + 8]};
    const auto store = [&](const float(&scores)[2][4], float(&overlaps)[2][4], int column, float2& sum) {
        store_product(s.pairs.scores, scores, first, column, block.part > 0);
        if (!delta) return;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) overlaps[tile][e] *= beta[e / 2];
        const float2 more = store_product(s.pairs.overlaps, overlaps, first, column, block.part > 0);
        sum = {sum.x + more.x, sum.y + more.y};
    };
    if (!exact) {
        block.score(q, k, norm, delta, own);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < P::kParts; ++p) {
            if (block.part == p) {
                float2 sum{0.0f, 0.0f};
                store(own[0], own[1], first, sum);
#pragma unroll 1
                for (int earlier = 0; earlier < block.block; ++earlier) {
                    float product[2][2][4] = {};
                    block.cross(q, k, delta, earlier, product);
                    store(product[0], product[1], earlier * kBlock, sum);
                }
                squares = fmaxf(token_sum(sum.x), token_sum(sum.y));
            }
            if (p + 1 < P::kParts) __syncthreads();
        }
    } else {
        const auto load_group = [&](BlockRows<1>& q1, BlockRows<1>& k1, int g) {
            const int channel = block.part * P::kChannels + 32 * g;
            q1.template fetch<T>(a.q, place.batch, begin, head, count, channel, a.key_dim);
            k1.template fetch<T>(a.k, place.batch, begin, head, count, channel, a.key_dim);
            q1.mask(count, channel, a.key_dim);
            k1.mask(count, channel, a.key_dim);
        };
        block.score_exact(load_group, norm, own);
        block.operands_exact(load_group, norm, delta);
        __syncthreads();
        float cross[P::kBlocks - 1][2][2][4] = {};
        block.cross_exact(load_group, norm, cross);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < P::kParts; ++p) {
            if (block.part == p) {
                float2 sum{0.0f, 0.0f};
                store(own[0], own[1], first, sum);
#pragma unroll
                for (int earlier = 0; earlier < P::kBlocks - 1; ++earlier)
                    if (earlier < block.block) store(cross[earlier][0], cross[earlier][1], earlier * kBlock, sum);
                squares = fmaxf(token_sum(sum.x), token_sum(sum.y));
            }
            if (p + 1 < P::kParts) __syncthreads();
        }
    }
    const bool coupled = __syncthreads_or(squares > kMostSquares && block.part == P::kParts - 1);

    emit_lower<T>(block.image.scores, s.pairs.scores, nullptr, false);
    if (!delta) return;
    invert(s.pairs.overlaps, s.inverse);
    emit_lower<T>(block.image.inverse, s.inverse, s.beta, false);
    if (coupled) {
        emit_lower<T>(block.image.inverse_low, s.inverse, s.beta, true);
        emit_lower<T>(block.image.scores_low, s.pairs.scores, nullptr, true);
    }
    if (thread == 0) exact_writes[at] = coupled;
}

}  // namespace cula::cuda::sm80
