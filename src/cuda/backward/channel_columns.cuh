// SPDX-License-Identifier: Apache-2.0
// gradient_channel, columns: a lane holds two neighbouring channels of the eight tokens of half a block. They
// are loaded and stored by words of two channels, of which 16 lanes have a row of the warp's patch.
#pragma once

#include "cuda/backward/channel_config.cuh"
#include "cuda/backward/derivatives.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/store_gradient.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::backward {

// Numbers of the lane: channel e of token t at 2 t + e.
using Column = float[2 * kHalf];

// The lane's column in a patch of floats.
struct ColumnFloats {
    float* first;

    template <int kKey>
    __device__ __forceinline__ ColumnFloats(PatchFloats& floats, const Patch<kKey>& patch)
        : first(&floats[patch.half * kHalf][patch.lane % 16 * 2]) {}

    // x[i] of a Column.
    __device__ __forceinline__ float& element(int i) const { return first[i / 2 * kFloatsPitch + i % 2]; }
};

// The warp's patch from accumulators to columns, through `turned` of shared memory.
template <int kKey>
__device__ __forceinline__ void turn_patch(Column& to, const float (&x)[4][4], PatchFloats& turned,
                                           const Patch<kKey>& patch) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<float2*>(&turned[patch.lane / 4 + 8 * half][8 * n + patch.lane % 4 * 2]) = {
                x[n][2 * half], x[n][2 * half + 1]};
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kHalf; ++t) {
        const float2 pair = load_pair(shared_address(&turned[patch.half * kHalf + t][patch.lane % 16 * 2]));
        to[2 * t] = pair.x, to[2 * t + 1] = pair.y;
    }
}

// Which rows of a chunk a tensor has: all of them, one for each token, or, where tokens are two rows
// (RowsOfPairs), the first or the second ones. A row that it has not is zeros when loaded, and not stored.
enum class Rows : std::uint8_t { kAll, kFirst, kSecond };
constexpr bool has_row(Rows rows, int row) {
    return rows == Rows::kAll || (row % 2 == 1) == (rows == Rows::kSecond);
}
// The token of a row, from that of row 0 on.
constexpr int token_of_row(Rows rows, int row) { return rows == Rows::kAll ? row : row / 2; }

// The lane's place in a call.
struct ColumnPlace {
    std::int64_t token;                   // of the first row
    int batch, channel, count, channels;  // count, channels: how many rows and channels exist

    // rows_of_token: 2 where tokens are two rows.
    template <int kKey>
    __device__ __forceinline__ ColumnPlace(const ChannelPlace& place, const Patch<kKey>& patch, int key_dim,
                                           int rows_of_token = 1)
        : token((place.begin + patch.token) / rows_of_token),
          batch(place.batch),
          channel(patch.channel),
          count(patch.channel < key_dim ? place.count - patch.token : 0),
          channels(key_dim - patch.channel) {}

    __device__ __forceinline__ std::int64_t offset(const TokenRows& rows, int head) const {
        return rows.offset(batch, token, head) + channel * rows.last;
    }
    __device__ __forceinline__ bool is_whole() const { return count >= kHalf && channels >= 2; }
    // Zeros for tokens and channels that do not exist.
    __device__ __forceinline__ void mask(Column& x) const {
        if (is_whole()) return;
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i)
            if (i / 2 >= count || i % 2 >= channels) x[i] = 0.0f;
    }
};

template <class T>
__device__ __forceinline__ void unpack_column(Column& x, const std::uint32_t (&words)[kHalf]) {
#pragma unroll
    for (int t = 0; t < kHalf; ++t) {
        const float2 pair = unpack2<T>(words[t]);
        x[2 * t] = pair.x, x[2 * t + 1] = pair.y;
    }
}

// Are rows read and written by words of two channels? If not, element by element, through a patch of shared
// memory in which each lane touches its own column alone: loops that are not unrolled keep the code small.
__device__ __forceinline__ bool by_words(const TokenRows& rows) {
    return rows.pieces && rows.dtype != Dtype::kFloat64;
}

// Zeros where there is no token or channel.
template <Rows kRows = Rows::kAll>
__device__ __forceinline__ void load_column(Column& x, const TokenRows& rows, const ColumnPlace& place,
                                            int head, ColumnFloats column) {
    const std::int64_t at = place.offset(rows, head);
    const int pitch = static_cast<int>(rows.token);  // of pieces
    if (!by_words(rows)) {
#pragma unroll 1
        for (int i = 0; i < 2 * kHalf; ++i) {
            const bool in = i / 2 < place.count && i % 2 < place.channels && has_row(kRows, i / 2);
            column.element(i) =
                in ? load_float(rows.data, rows.dtype,
                                at + token_of_row(kRows, i / 2) * rows.token + i % 2 * rows.last)
                   : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) x[i] = column.element(i);
        return;
    }
    if (rows.dtype == Dtype::kFloat32) {
        const auto* from = static_cast<const float*>(rows.data) + at;
#pragma unroll
        for (int t = 0; t < kHalf; ++t) {
            const float2 pair = has_row(kRows, t) && t < place.count
                                    ? *reinterpret_cast<const float2*>(from + token_of_row(kRows, t) * pitch)
                                    : float2{0.0f, 0.0f};
            x[2 * t] = pair.x, x[2 * t + 1] = pair.y;
        }
        return;
    }
    const auto* from = static_cast<const std::uint16_t*>(rows.data) + at;
    std::uint32_t words[kHalf];
#pragma unroll
    for (int t = 0; t < kHalf; ++t)
        words[t] = has_row(kRows, t) ? load32_if(from + token_of_row(kRows, t) * pitch, t < place.count) : 0u;
    if (rows.dtype == Dtype::kBFloat16)
        unpack_column<__nv_bfloat16>(x, words);
    else
        unpack_column<__half>(x, words);
}

template <Rows kRows = Rows::kAll>
__device__ __forceinline__ void store_column(const Column& x, const TokenRows& rows, const ColumnPlace& place,
                                             int head, ColumnFloats column) {
    const std::int64_t at = place.offset(rows, head);
    const int pitch = static_cast<int>(rows.token);  // of pieces
    if (!by_words(rows)) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) column.element(i) = x[i];
#pragma unroll 1
        for (int i = 0; i < 2 * kHalf; ++i)
            if (i / 2 < place.count && i % 2 < place.channels && has_row(kRows, i / 2))
                store_gradient(rows.data, rows.dtype,
                               at + token_of_row(kRows, i / 2) * rows.token + i % 2 * rows.last,
                               column.element(i));
        return;
    }
    if (rows.dtype == Dtype::kFloat32) {
        auto* to = static_cast<float*>(rows.data) + at;
#pragma unroll
        for (int t = 0; t < kHalf; ++t)
            if (has_row(kRows, t) && t < place.count)
                *reinterpret_cast<float2*>(to + token_of_row(kRows, t) * pitch) = {x[2 * t], x[2 * t + 1]};
        return;
    }
    auto* to = static_cast<std::uint16_t*>(rows.data) + at;
    std::uint32_t words[kHalf];
    if (rows.dtype == Dtype::kBFloat16) {
#pragma unroll
        for (int t = 0; t < kHalf; ++t) words[t] = pack2<__nv_bfloat16>(x[2 * t], x[2 * t + 1]);
    } else {
#pragma unroll
        for (int t = 0; t < kHalf; ++t) words[t] = pack2<__half>(x[2 * t], x[2 * t + 1]);
    }
#pragma unroll
    for (int t = 0; t < kHalf; ++t)
        if (has_row(kRows, t) && t < place.count)
            *reinterpret_cast<std::uint32_t*>(to + token_of_row(kRows, t) * pitch) = words[t];
}

// dt_bias of the lane's channels.
__device__ __forceinline__ float2 load_bias(const DeviceArgs& a, const ColumnPlace& place, int value_head) {
    float2 bias = {0.0f, 0.0f};
    if (!a.dt_bias.data || place.channels <= 0) return bias;
    const float* from = a.dt_bias.data + value_head * a.dt_bias.head + place.channel * a.dt_bias.channel;
    bias.x = from[0];
    if (place.channels > 1) bias.y = from[a.dt_bias.channel];
    return bias;
}

// decay <- the decays of value head `value_head`, those of absent tokens, channels and rows being 1.
template <Rows kRows = Rows::kAll>
__device__ __forceinline__ void load_decays(Column& decay, const DeviceArgs& a, const ColumnPlace& place,
                                            int value_head, ColumnFloats column) {
    const float2 bias = load_bias(a, place, value_head);
    load_column<kRows>(decay, a.g, place, value_head, column);
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) decay[i] += i % 2 ? bias.y : bias.x;
    HeadGate(a, value_head).log2_decays(decay);
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) decay[i] = exp2_fast(max_or_nan(decay[i], kLeastLog2Decay));
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i)
        if (!has_row(kRows, i / 2)) decay[i] = 1.0f;
    if (place.is_whole()) return;
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i)
        if (i / 2 >= place.count || i % 2 >= place.channels) decay[i] = 1.0f;
}

// From the gradients of log decays to those of the gate, d_a, and the lane's sums of them: for dA_log without
// its factor, and, by channel, ddt_bias.
template <Rows kRows = Rows::kAll>
struct GateSums {
    float rate = 0.0f, bias[2] = {};

    __device__ __forceinline__ GateSums(const DeviceArgs& a, Column& d_a, const ColumnPlace& place,
                                        int value_head, ColumnFloats column) {
        if (a.gate != Gate::kLogDecay) {
            Column x;
            load_column<kRows>(x, a.g, place, value_head, column);
            const float2 offset = load_bias(a, place, value_head);
#pragma unroll
            for (int i = 0; i < 2 * kHalf; ++i) x[i] += i % 2 ? offset.y : offset.x;
            // One branch on the kind of gate for all numbers.
            if (a.gate == Gate::kSoftplus)
                differentiate<Gate::kSoftplus>(a, d_a, x, value_head);
            else
                differentiate<Gate::kBounded>(a, d_a, x, value_head);
        }
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) bias[i % 2] += d_a[i];
    }

private:
    template <Gate kGate>
    __device__ __forceinline__ void differentiate(const DeviceArgs& a, Column& d_a, const Column& x,
                                                  int value_head) {
        GateDerivative derivative(a, value_head);
        derivative.kind = kGate;
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) {
            const GateGradient gradient = derivative(x[i], d_a[i]);
            d_a[i] = gradient.of_x;
            rate += gradient.of_rate;
        }
    }
};

}  // namespace cula::cuda::backward
