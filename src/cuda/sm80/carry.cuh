// SPDX-License-Identifier: Apache-2.0
// carry: o, final states <- chunk images, v, initial states      ALGORITHM.md: read, output, carry
//
// grid (value blocks * value heads * sequences)   a warp owns 16 value rows of S^T [V, K]
//
// S^T stands in float accumulators from the first chunk to the last; rounded and packed they are the A operand of the next
// product without a shuffle, and so are V^T - R^T and U^T. Every B operand is a row-major tile of the image in shared memory, so
// warps never exchange anything; they only share the copies:
//   R^T = S^T K^^T      U^T = (V^T - R^T) T^T      O^T = S^T Q~^T + U^T A^T      S^T = S^T diag(decay) + U^T K+
// Copies of chunk c + 1 run behind the products of chunk c where two images fit.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/chunk.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::sm80 {

inline constexpr int kWarpRows = 16;  // value rows of a warp
inline constexpr int kMaxCarryWarps = 8;

template <class T, int kKey>
struct CarryStage {
    ChunkImage<T, kKey> image;
    T values[kRows<kKey> * kMaxCarryWarps * kWarpRows];  // [warp][token][16]
};

struct CarryParams {
    int stages = 1;
    int value_blocks = 1;
};

template <class T, int kKey>
__device__ __forceinline__ void copy_image(CarryStage<T, kKey>& stage, const ChunkImage<T, kKey>& image, int thread, int threads) {
    constexpr int kUnits = sizeof(ChunkImage<T, kKey>) / 16;
    const auto* from = reinterpret_cast<const unsigned char*>(&image);
    const std::uint32_t to = shared_address(&stage.image);
    for (int x = thread; x < kUnits; x += threads) copy_async(to + x * 16, from + x * 16);
}

// product [16 x kTokens] += packed [16 x 16] (columns 16 step .. of tile [kTokens x 16 kSteps])^T, from token 16 first on.
template <class T, int kTokens, int kSteps>
__device__ __forceinline__ void multiply_step(float (&product)[kTokens / 8][4], const std::uint32_t (&packed)[4], const T* tile,
                                              int step, int first) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int column = 0; column < kTokens / 16; ++column) {
        if (column < first) continue;
        std::uint32_t m[4];
        const int row = column * 16 + lane % 8 + lane / 16 * 8, unit = 2 * step + lane / 8 % 2;
        load_matrices(m, shared_address(tile + Tile<kSteps * 16>::unit(row, unit) * 8));
        mma_16x8x16<T>(product[2 * column], packed, m[0], m[1]);
        mma_16x8x16<T>(product[2 * column + 1], packed, m[2], m[3]);
    }
}

// product [16 x kTokens] += packed [16 x kTokens] tile^T for a lower triangular tile.
template <class T, int kTokens>
__device__ __forceinline__ void multiply_lower(float (&product)[kTokens / 8][4], const std::uint32_t (&packed)[kTokens / 16][4],
                                               const T* tile) {
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step)
        multiply_step<T, kTokens, kTokens / 16>(product, packed[step], tile, step, step);
}

template <class T, int kKey, bool kDelta>
__global__ void __launch_bounds__(kMaxCarryWarps * 32, 1)
    carry(const __grid_constant__ DeviceArgs a, const Schedule schedule, const ChunkImage<T, kKey>* images, const CarryParams p) {
    constexpr int kTokens = kRows<kKey>, kKeyTiles = kKey / 16, kTokenTiles = kTokens / 16;
    extern __shared__ __align__(128) unsigned char raw[];
    auto* stages = reinterpret_cast<CarryStage<T, kKey>*>(raw);

    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
    const int value_block = static_cast<int>(blockIdx.x) % p.value_blocks;
    const int value_head = static_cast<int>(blockIdx.x) / p.value_blocks % a.value_heads;
    const int rank = static_cast<int>(blockIdx.x) / p.value_blocks / a.value_heads;
    const std::int64_t n = schedule.order ? schedule.order[rank] : rank;
    const TokenRange tokens = tokens_of(a, n);
    const int row_base = (value_block * warps + warp) * kWarpRows;  // first value row of the warp
    const StateSlots slots = states_of(a, n);

    const int chunks = static_cast<int>((tokens.length + kTokens - 1) / kTokens);
    const int first_chunk =
        schedule.first_chunk ? schedule.first_chunk[n] : static_cast<int>(n * ((a.tokens + kTokens - 1) / kTokens));

    // --- copies ---
    const bool wide_values = (a.v.batch | a.v.token | a.v.head | a.value_dim) % 8 == 0 &&
                             reinterpret_cast<std::uintptr_t>(a.v.data) % 16 == 0;
    const auto copy_chunk = [&](int chunk) {
        CarryStage<T, kKey>& stage = stages[chunk % p.stages];
        copy_image(stage, images[static_cast<std::int64_t>(first_chunk + chunk) * a.value_heads + value_head], thread, threads);
        // A warp's values: two units of 16 bytes a token.
        T* values = stage.values + warp * kTokens * kWarpRows;
        for (int x = lane; x < kTokens * 2; x += 32) {
            const int token = x / 2, unit = x % 2, row = row_base + unit * 8;
            const bool in = chunk * kTokens + token < tokens.length;
            const T* from = static_cast<const T*>(a.v.data) +
                            a.v.offset(tokens.batch, tokens.begin + (in ? chunk * kTokens + token : 0), value_head) + row;
            T* to = values + token * kWarpRows + (unit ^ (token >> 2 & 1)) * 8;
            if (wide_values) {
                copy_async(shared_address(to), in && row < a.value_dim ? from : static_cast<const T*>(a.v.data),
                           in && row < a.value_dim ? 16 : 0);
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e) to[e] = in && row + e < a.value_dim ? from[e] : from_float<T>(0.0f);
            }
        }
    };

    // --- state ---
    float state[kKey / 8][4];  // [channel tile of 8][fragment]
    const auto row_of = [&](int e) { return row_base + lane / 4 + e / 2 * 8; };
    const auto channel_of = [&](int tile, int e) { return tile * 8 + lane % 4 * 2 + e % 2; };
    const auto each_element = [&](auto body) {
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = row_of(e), channel = channel_of(tile, e);
                body(state[tile][e], row, channel, row < a.value_dim && channel < a.key_dim);
            }
    };
    const auto load_state = [&](const States& states, std::int64_t slot) {
        const std::int64_t base = states.offset(slot, value_head);
        each_element([&](float& x, int row, int channel, bool in) {
            x = in ? load_float(states.data, states.dtype, base + row * states.v + channel * states.k) : 0.0f;
        });
    };
    const auto store_state = [&](const States& states, std::int64_t base) {
        each_element([&](float& x, int row, int channel, bool in) {
            if (in) store_float(states.data, states.dtype, base + row * states.v + channel * states.k, x);
        });
    };

    const auto zero_outputs = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin + lane / kWarpRows; t < end; t += 32 / kWarpRows)
            if (row_base + lane % kWarpRows < a.value_dim)
                store_float(a.o.data, a.o.dtype, a.o.offset(tokens.batch, t, value_head) + row_base + lane % kWarpRows, 0.0f);
    };
    // Tokens after the last sequence belong to nobody.
    if (a.cu_seqlens && n == a.sequences - 1) zero_outputs(tokens.begin + tokens.length, a.tokens);
    if (slots.skipped) return zero_outputs(tokens.begin, tokens.begin + tokens.length);
    if (chunks > 0) copy_chunk(0);
    commit_copies();
    if (slots.initial >= 0)
        load_state(a.initial, slots.initial);
    else
        each_element([](float& x, int, int, bool) { x = 0.0f; });

    const auto store_checkpoints = [&](std::int64_t done) {
        for_each_checkpoint(a, n, done, [&](std::int64_t slot) {
            store_state(a.checkpoints, a.checkpoints.offset(slot, value_head));
        });
    };
    const ChunkStates dense = a.chunk_states.data ? chunk_states_of(a, n, value_head) : ChunkStates{};

    for (int chunk = 0; chunk < chunks; ++chunk) {
        CarryStage<T, kKey>& stage = stages[chunk % p.stages];
        if (p.stages > 1) {
            if (chunk + 1 < chunks) copy_chunk(chunk + 1);
            commit_copies();
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        if (a.num_checkpoints) store_checkpoints(static_cast<std::int64_t>(chunk) * kTokens);
        if (chunk < dense.room) store_state(a.chunk_states, dense.offset + chunk * a.chunk_states.slot);

        const ChunkImage<T, kKey>& image = stage.image;
        // R^T = S^T K^^T and S^T Q~^T in one walk over the channels, so that each part of S^T is rounded and packed once.
        float read[kTokens / 8][4] = {}, out[kTokens / 8][4] = {};
#pragma unroll
        for (int step = 0; step < kKeyTiles; ++step) {
            std::uint32_t packed[4];
#pragma unroll
            for (int x = 0; x < 4; ++x)
                packed[x] = pack2<T>(state[2 * step + x / 2][x % 2 * 2], state[2 * step + x / 2][x % 2 * 2 + 1]);
            if constexpr (kDelta) multiply_step<T, kTokens, kKeyTiles>(read, packed, image.k_decayed, step, 0);
            multiply_step<T, kTokens, kKeyTiles>(out, packed, image.q_decayed, step, 0);
        }

        // V^T in the layout of accumulators: m[0], m[1]: rows 0-7 and 8-15 of tokens 0-7; m[2], m[3]: of tokens 8-15.
        std::uint32_t writes[kTokenTiles][4];
        {
            const T* values = stage.values + warp * kTokens * kWarpRows;
#pragma unroll
            for (int tile = 0; tile < kTokenTiles; ++tile) {
                const int token = tile * 16 + lane % 8 + lane / 16 * 8, unit = lane / 8 % 2;
                std::uint32_t m[4];
                load_matrices_transposed(m, shared_address(values + token * kWarpRows + (unit ^ (token >> 2 & 1)) * 8));
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    if constexpr (kDelta) {
                        const float2 v = unpack2<T>(m[x]);
                        const float* r = &read[2 * tile + x / 2][x % 2 * 2];
                        writes[tile][x] = pack2<T>(v.x - r[0], v.y - r[1]);
                    } else {
                        writes[tile][x] = m[x];
                    }
                }
            }
            if constexpr (kDelta) {
                float u[kTokens / 8][4] = {};
                multiply_lower<T, kTokens>(u, writes, image.inverse);
#pragma unroll
                for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
                    for (int x = 0; x < 4; ++x)
                        writes[tile][x] = pack2<T>(u[2 * tile + x / 2][x % 2 * 2], u[2 * tile + x / 2][x % 2 * 2 + 1]);
            }
        }
        {
            multiply_lower<T, kTokens>(out, writes, image.scores);
            // Turned 8 x 8 by 8 x 8, a lane holds two neighbouring rows of one token.
#pragma unroll
            for (int tile = 0; tile < kTokens / 8; ++tile)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int token = chunk * kTokens + tile * 8 + lane / 4, row = row_base + half * 8 + lane % 4 * 2;
                    const std::int64_t at = a.o.offset(tokens.batch, tokens.begin + token, value_head) + row;
                    if (a.o.dtype == Dtype::kFloat32) {
                        // Rare: written as it lies.
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int t = chunk * kTokens + tile * 8 + lane % 4 * 2 + e, r = row_base + half * 8 + lane / 4;
                            if (t < tokens.length && r < a.value_dim)
                                static_cast<float*>(a.o.data)[a.o.offset(tokens.batch, tokens.begin + t, value_head) + r] =
                                    out[tile][half * 2 + e];
                        }
                        continue;
                    }
                    const std::uint32_t word = transposed(pack2<T>(out[tile][half * 2], out[tile][half * 2 + 1]));
                    if (token >= tokens.length) continue;
                    T* to = static_cast<T*>(a.o.data) + at;
                    if (row + 1 < a.value_dim && at % 2 == 0 && reinterpret_cast<std::uintptr_t>(a.o.data) % 4 == 0) {
                        *reinterpret_cast<std::uint32_t*>(to) = word;
                    } else {
                        const float2 pair = unpack2<T>(word);
                        if (row < a.value_dim) to[0] = from_float<T>(pair.x);
                        if (row + 1 < a.value_dim) to[1] = from_float<T>(pair.y);
                    }
                }
        }
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile) {
            const float2 d = *reinterpret_cast<const float2*>(image.decay + channel_of(tile, 0));
            state[tile][0] *= d.x, state[tile][1] *= d.y, state[tile][2] *= d.x, state[tile][3] *= d.y;
        }
#pragma unroll
        for (int step = 0; step < kTokenTiles; ++step)
#pragma unroll
            for (int column = 0; column < kKeyTiles; ++column) {
                std::uint32_t m[4];
                load_matrices_transposed(
                    m, shared_address(image.k_remaining + Tile<kKey>::unit(step * 16 + lane % 16, 2 * column + lane / 16) * 8));
                mma_16x8x16<T>(state[2 * column], writes[step], m[0], m[1]);
                mma_16x8x16<T>(state[2 * column + 1], writes[step], m[2], m[3]);
            }
        __syncthreads();
        if (p.stages == 1) {
            if (chunk + 1 < chunks) copy_chunk(chunk + 1);
            commit_copies();
        }
    }
    if (a.num_checkpoints) store_checkpoints(tokens.length);
    if (slots.final >= 0) store_state(a.final, a.final.offset(slots.final, value_head));
}

}  // namespace cula::cuda::sm80
