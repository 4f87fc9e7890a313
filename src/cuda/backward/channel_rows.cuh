// SPDX-License-Identifier: Apache-2.0
// gradient_channel, what enters and leaves by rows: a lane holds tokens l / 4 and l / 4 + 8 of its warp's
// patch, and of each eight neighbouring channels, so that global memory is read and written in pieces of 16
// bytes.
#pragma once

#include "cuda/backward/channel_config.cuh"
#include "cuda/backward/derivatives.cuh"

namespace cula::cuda::backward {

// The lane's place in a call: the first channel, the first token, and which of its two rows exist.
struct RowPlace {
    std::int64_t token;
    int batch, channel;
    bool in[2];

    template <int kKey>
    __device__ __forceinline__ RowPlace(const ChannelPlace& place, const Patch<kKey>& patch, int key_dim)
        : token(place.begin + patch.first + patch.lane / 4),
          batch(place.batch),
          channel(patch.group * kGroup + patch.lane % 4 * 8) {
        const int left = place.count - patch.first - patch.lane / 4;
        in[0] = left > 0 && channel < key_dim, in[1] = left > 8 && channel < key_dim;
    }
    __device__ __forceinline__ std::int64_t offset(const TokenRows& rows, int head, int half) const {
        return rows.offset(batch, token + 8 * half, head) + channel * rows.last;
    }
};

// Eight channels of two tokens.
struct RowPair {
    float x[2][8];

    // Zeros where there is no row or channel. Rows that are no whole pieces are read element by element.
    __device__ __forceinline__ void load(const TokenRows& rows, const RowPlace& place, int head,
                                         int key_dim) {
        if (!rows.pieces) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    x[half][i] = place.in[half] && place.channel + i < key_dim
                                     ? load_float(rows.data, rows.dtype,
                                                  place.offset(rows, head, half) + i * rows.last)
                                     : 0.0f;
            return;
        }
        if (rows.dtype == Dtype::kFloat32) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 8; i += 4) {
                    const auto* from = static_cast<const float*>(rows.data) + place.offset(rows, head, half);
                    // A piece is four channels: the second may be missing.
                    const bool in = place.in[half] && place.channel + i < key_dim;
                    const float4 four =
                        in ? *reinterpret_cast<const float4*>(from + i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
                    x[half][i] = four.x, x[half][i + 1] = four.y, x[half][i + 2] = four.z,
                    x[half][i + 3] = four.w;
                }
        } else {
            uint4 words[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto* from =
                    static_cast<const unsigned short*>(rows.data) + place.offset(rows, head, half);
                words[half] = place.in[half] ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
            }
            if (rows.dtype == Dtype::kBFloat16)
                unpack<__nv_bfloat16>(words);
            else
                unpack<__half>(words);
        }
    }

    // From a raw patch of q or k.
    template <class T>
    __device__ __forceinline__ void load(const T* patch, int lane) {
        uint4 words[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            words[half] =
                *reinterpret_cast<const uint4*>(patch + (lane / 4 + 8 * half) * kGroup + lane % 4 * 8);
        unpack<T>(words);
    }

    // From columns of the warp's lanes, through shared memory.
    __device__ __forceinline__ void turn(const float (&column)[kBlock], PatchFloats& patch, int lane) {
        __syncwarp();
#pragma unroll
        for (int t = 0; t < kBlock; ++t) patch[t][lane] = column[t];
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 8; i += 4) load4(x[half] + i, &patch[lane / 4 + 8 * half][lane % 4 * 8 + i]);
    }

    // Zeros for channels beyond key_dim.
    __device__ __forceinline__ void mask(const RowPlace& place, int key_dim) {
        if (place.channel + 8 <= key_dim) return;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (place.channel + i >= key_dim) x[half][i] = 0.0f;
    }

    __device__ __forceinline__ void store(const TokenRows& rows, const RowPlace& place, int head,
                                          int key_dim) const {
        if (!rows.pieces) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (place.in[half] && place.channel + i < key_dim)
                        store_float(rows.data, rows.dtype, place.offset(rows, head, half) + i * rows.last,
                                    x[half][i]);
            return;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!place.in[half]) continue;
            const std::int64_t at = place.offset(rows, head, half);
            if (rows.dtype == Dtype::kFloat32) {
#pragma unroll
                for (int i = 0; i < 8; i += 4)
                    if (place.channel + i < key_dim)
                        *reinterpret_cast<float4*>(static_cast<float*>(rows.data) + at + i) = {
                            x[half][i], x[half][i + 1], x[half][i + 2], x[half][i + 3]};
            } else {
                *reinterpret_cast<uint4*>(static_cast<unsigned short*>(rows.data) + at) =
                    rows.dtype == Dtype::kBFloat16 ? pack<__nv_bfloat16>(half) : pack<__half>(half);
            }
        }
    }

    // Adds, or keeps, what the value heads so far have given; so_far: of the first row.
    __device__ __forceinline__ void add(const float* so_far, int row_pitch) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                float four[4];
                load4(four, so_far + 8 * half * row_pitch + i);
#pragma unroll
                for (int e = 0; e < 4; ++e) x[half][i + e] += four[e];
            }
    }
    __device__ __forceinline__ void keep(float* so_far, int row_pitch) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 8; i += 4)
                *reinterpret_cast<float4*>(so_far + 8 * half * row_pitch + i) = {
                    x[half][i], x[half][i + 1], x[half][i + 2], x[half][i + 3]};
    }

    // Dot products of the rows of two patches; sums[token].
    __device__ __forceinline__ void dots(const RowPair& other, float* sums, int lane) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) sum = fmaf(x[half][i], other.x[half][i], sum);
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (lane % 4 == 0) sums[lane / 4 + 8 * half] = sum;
        }
    }

private:
    template <class T>
    __device__ __forceinline__ void unpack(const uint4 (&words)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const std::uint32_t word[4] = {words[half].x, words[half].y, words[half].z, words[half].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack2<T>(word[i]);
                x[half][2 * i] = pair.x, x[half][2 * i + 1] = pair.y;
            }
        }
    }
    template <class T>
    __device__ __forceinline__ uint4 pack(int half) const {
        return {pack2<T>(x[half][0], x[half][1]), pack2<T>(x[half][2], x[half][3]),
                pack2<T>(x[half][4], x[half][5]), pack2<T>(x[half][6], x[half][7])};
    }
};

}  // namespace cula::cuda::backward
