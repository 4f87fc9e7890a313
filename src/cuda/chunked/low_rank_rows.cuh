// SPDX-License-Identifier: Apache-2.0
// low_rank_rows: rows of v and d_o, and keys, of a delta rule with erase keys <- v, d_o, a, b (RWKV-7)
// low_rank_outputs: o or d_v <- its rows
//
// A token of S <- S diag(decay) + (S a) b^T + v k^T, o = S q is two rows (docs/design/low-rank-cuda.md):
//
//            decay    reads    key    value    query
//   first      g       -a       b       0        0      reads before it decays (Reader::kUndecayed)
//   second     0        0       k       v        q
//
// prepare_channel and gradient_channel make rows of keys and gates from those of the call. a and b are copied
// where they do not come in whole pieces of T.
//
// Neither kernel overlaps with its neighbours (PDL): the next one starts when low_rank_rows has ended, so
// that it may read rows by way of the read-only cache.
//
// Grid: 256 threads; kKey / 8 lanes per token and value head, eight channels at a time each. No shared
// memory.
#pragma once

#include "cuda/chunked/low_rank.h"
#include "cuda/tile/eight.cuh"

namespace cula::cuda::chunked {

// A token and value head of the grid, and the lane's first channel. The rows of the token are 2 token and
// 2 token + 1.
template <int kKey>
struct LowRankPlace {
    static constexpr int kLanes = kKey / 8;
    std::int64_t batch, token;
    int value_head, first;
    bool exists;

    // count: tokens times value heads of all sequences.
    __device__ __forceinline__ LowRankPlace(const DeviceArgs& a, std::int64_t count)
        : first(static_cast<int>(threadIdx.x) % kLanes * 8) {
        const std::int64_t number = (std::int64_t{blockIdx.x} * kEraseThreads + threadIdx.x) / kLanes;
        exists = number < count;
        const std::int64_t of_token = exists ? number / a.value_heads : 0;
        batch = of_token / a.tokens, token = of_token % a.tokens;
        value_head = exists ? static_cast<int>(number - of_token * a.value_heads) : 0;
    }
    __device__ __forceinline__ std::int64_t at(const TokenRows& rows, int head) const {
        return rows.offset(batch, token, head);
    }
    // Of both rows in a tensor of rows.
    __device__ __forceinline__ std::int64_t at_row(const TokenRows& rows, int second) const {
        return rows.offset(batch, 2 * token + second, value_head);
    }
};

template <class T, int kKey>
__global__ void __launch_bounds__(kEraseThreads)
    low_rank_rows(const __grid_constant__ DeviceArgs a, const __grid_constant__ TokenRows d_o,
                  const __grid_constant__ LowRankTensors to, std::int64_t count) {
    using Place = LowRankPlace<kKey>;
    const Place place(a, count);
    if (!place.exists) return;
    constexpr float kZeros[8] = {};
    const auto put = [&](const TokenRows& rows, int i, const float(&second)[8]) {
        store_made<T>(rows, place.at_row(rows, 0), i, kZeros);
        store_made<T>(rows, place.at_row(rows, 1), i, second);
    };
    if (const int i = place.first; i < a.key_dim && to.a_key.data) {
        float x[8];
        load_eight<T>(x, a.a_key, place.at(a.a_key, place.value_head), i, a.key_dim);
        store_made<T>(to.a_key, place.at(to.a_key, place.value_head), i, x);
        load_eight<T>(x, a.b_key, place.at(a.b_key, place.value_head), i, a.key_dim);
        store_made<T>(to.b_key, place.at(to.b_key, place.value_head), i, x);
    }
#pragma unroll 1
    for (int i = place.first; i < a.value_dim; i += Place::kLanes * 8) {
        float x[8];
        load_eight<T>(x, a.v, place.at(a.v, place.value_head), i, a.value_dim);
        put(to.v, i, x);
        if (!to.d_o.data) continue;
        load_eight<T>(x, d_o, place.at(d_o, place.value_head), i, a.value_dim);
        put(to.d_o, i, x);
    }
}

template <class T, int kKey>
__global__ void __launch_bounds__(kEraseThreads)
    low_rank_outputs(const __grid_constant__ DeviceArgs a, const __grid_constant__ TokenRows outputs,
                     const __grid_constant__ TokenRows rows, std::int64_t count) {
    using Place = LowRankPlace<kKey>;
    const Place place(a, count);
    // Tokens before the first sequence, of a malformed cu_seqlens, have no rows.
    if (!place.exists || (a.cu_seqlens && place.token < Offsets(a).at(0))) return;
    const std::int64_t to = place.at(outputs, place.value_head), from = place.at_row(rows, 1);
    // Nor have those behind the last.
    const bool has_rows = !a.cu_seqlens || place.token < Offsets(a).at(a.sequences);
#pragma unroll 1
    for (int i = place.first; i < a.value_dim; i += Place::kLanes * 8) {
        float x[8] = {};
        if (has_rows) load_eight<T>(x, rows, from, i, a.value_dim);
        put_eight<T>(outputs, to, i, a.value_dim, x);
    }
}

}  // namespace cula::cuda::chunked
