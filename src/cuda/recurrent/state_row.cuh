// SPDX-License-Identifier: Apache-2.0
// States as the token-by-token kernels hold them in registers, and their way from and to tensors of any
// strides and dtype.
#pragma once

#include "cuda/device_args.h"
#include "cuda/recurrent/lanes.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/float8.cuh"

namespace cula::cuda::recurrent {

// A row of a state in eight lanes, loaded and stored element by element, with the strides and dtype of each
// tensor.
template <int kKey>
struct StateRow {
    static constexpr int kPerLane = kKey / kLanesPerRow;

    float x[kPerLane];

    // The lane's elements in a tensor of states: of `size` bytes each, the first one, and their stride.
    struct Elements {
        char* first;
        std::int64_t stride;
        int channels;  // from the lane's first on; 0 where there is no such row

        __device__ __forceinline__ Elements(const DeviceArgs& a, const States& s, std::int64_t offset,
                                            int row, int row_end, int size)
            : first(static_cast<char*>(s.data) + (offset + row * s.v + lane_channel(0) * s.k) * size),
              stride(s.k * size),
              channels(row < row_end ? a.key_dim - lane_channel(0) : 0) {}
        // Element i's channel, counted from that of the first.
        static __device__ __forceinline__ int channel(int i) { return i / 4 * kLanesPerRow * 4 + i % 4; }
        __device__ __forceinline__ char* at(int c) const { return first + c * stride; }
        __device__ __forceinline__ bool has(int c) const { return c < channels; }
    };
    static __device__ __forceinline__ Elements elements(const DeviceArgs& a, const States& s,
                                                        std::int64_t offset, int row, int row_end) {
        return {a, s, offset, row, row_end, s.dtype == Dtype::kFloat32 ? 4 : 2};
    }

    // Calls body(four, channel) for four neighbouring elements and the first one's channel, in a loop whose
    // code is that of four: all fours take turns in the first place, and at last are where they were.
    template <class Body>
    __device__ __forceinline__ void each_four(Body body) {
#pragma unroll 1
        for (int i = 0; i < kPerLane; i += 4) {
            float four[4] = {x[0], x[1], x[2], x[3]};
            body(four, Elements::channel(i));
#pragma unroll
            for (int e = 0; e < kPerLane; ++e) x[e] = e + 4 < kPerLane ? x[e + 4] : four[e + 4 - kPerLane];
        }
    }

    __device__ __forceinline__ void load(const DeviceArgs& a, const States& s, std::int64_t offset, int row,
                                         int row_end) {
        const Elements from = elements(a, s, offset, row, row_end);
        const Element type = element(s.dtype);
        constexpr int kBatch = kPerLane < 16 ? kPerLane : 16;  // loads come before what waits for them
#pragma unroll
        for (int first = 0; first < kPerLane; first += kBatch) {
            RawFloat raw[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int c = Elements::channel(first + i);
                raw[i].load_coherent(from.at(c), type, from.has(c));
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) x[first + i] = raw[i].value(type);
        }
    }

    // Of a slot of the initial states, which may be of float8.
    __device__ __forceinline__ void load_initial(const DeviceArgs& a, std::int64_t slot, int value_head,
                                                 int row, int row_end) {
        const States& s = a.initial;
        const std::int64_t offset = s.offset(slot, value_head);
        if (!a.initial_scales.data) return load(a, s, offset, row, row_end);
        const float scale = row < row_end ? *a.initial_scales.at(slot, value_head, row) : 0.0f;
        const Elements codes(a, s, offset, row, row_end, 1);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int c = Elements::channel(i);
            x[i] = __uint_as_float(codes.has(c) ? *reinterpret_cast<const std::uint8_t*>(codes.at(c))
                                                : std::uint32_t{0});
        }
        each_four([&](float(&four)[4], int channel) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                four[e] = codes.has(channel + e) ? float8_numbers(__float_as_uint(four[e])).x * scale : 0.0f;
        });
    }

    // In a slot of the final states, which may be of float8. Called by all threads.
    __device__ __forceinline__ void store_final(const DeviceArgs& a, std::int64_t slot, int value_head,
                                                int row, int row_end) {
        const States& s = a.final;
        const std::int64_t offset = s.offset(slot, value_head);
        if (!a.final_scales.data) return store(a, s, offset, row, row_end);
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) most = larger_magnitude(most, x[i]);
        const RowScale chosen = row_scale(row_largest(most));
        if (row < row_end && threadIdx.x % kLanesPerRow == 0)
            *a.final_scales.at(slot, value_head, row) = chosen.scale;
        const Elements codes(a, s, offset, row, row_end, 1);
        each_four([&](const float(&four)[4], int channel) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (codes.has(channel + e))
                    *reinterpret_cast<std::uint8_t*>(codes.at(channel + e)) =
                        static_cast<std::uint8_t>(float8_codes(four[e] * chosen.inverse, 0.0f));
        });
    }

    __device__ __forceinline__ void store(const DeviceArgs& a, const States& s, std::int64_t offset, int row,
                                          int row_end) {
        const Elements to = elements(a, s, offset, row, row_end);
        const Element type = element(s.dtype);
        each_four([&](const float(&four)[4], int channel) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                store_float_if(to.at(channel + e), type, four[e], to.has(channel + e));
        });
    }
};

}  // namespace cula::cuda::recurrent
