// SPDX-License-Identifier: Apache-2.0
// Scales of the rows of float8 states (core/float8.h), on a state [V, K] with K contiguous or [K, V] with V
// contiguous. Magnitudes are compared as integers, among which NaN is the largest.
#pragma once

#include "core/float8.h"
#include "cpu/simd.h"
#include "cpu/task.h"

namespace cula::cpu::CULA_CPU_TARGET {

CULA_INLINE BitVec largest(BitVec a, BitVec b) { return a > b ? a : b; }

// Row j of x, [count, channels], times scales[j]. channels is a multiple of kLanes.
inline void scale_rows(float* x, int channels, const float* scales, std::int64_t stride, int count) {
    for (int j = 0; j < count; ++j)
        for (int c = 0; c < channels; c += kLanes)
            store(x + j * channels + c, load(x + j * channels + c) * scales[j * stride]);
}

// Column j of x, [channels, columns], times scales[j] for j below count. columns is a multiple of kLanes.
inline void scale_columns(float* x, int channels, int columns, const float* scales, std::int64_t stride,
                          int count) {
    for (int j = 0; j < columns; j += kLanes) {
        Vec scale{};
        for (int i = 0; i < kLanes && j + i < count; ++i) scale[i] = scales[(j + i) * stride];
        for (int c = 0; c < channels; ++c) store(x + c * columns + j, load(x + c * columns + j) * scale);
    }
}

// Chooses the scale of each row of x, [count, channels], and divides the row by it.
inline void choose_row_scales(float* x, int channels, float* scales, std::int64_t stride, int count) {
    for (int j = 0; j < count; ++j) {
        float* row = x + j * channels;
        BitVec most{};
        for (int c = 0; c < channels; c += kLanes) most = largest(most, bits(load(row + c)) & 0x7fffffffu);
        std::uint32_t all = 0;
        for (int i = 0; i < kLanes; ++i) all = all > most[i] ? all : most[i];
        const RowScale chosen = row_scale(__builtin_bit_cast(float, all));
        scales[j * stride] = chosen.scale;
        for (int c = 0; c < channels; c += kLanes) store(row + c, load(row + c) * chosen.inverse);
    }
}

// The same for the columns of x, [channels, columns].
inline void choose_column_scales(float* x, int channels, int columns, float* scales, std::int64_t stride,
                                 int count) {
    for (int j = 0; j < columns; j += kLanes) {
        BitVec most{};
        for (int c = 0; c < channels; ++c)
            most = largest(most, bits(load(x + c * columns + j)) & 0x7fffffffu);
        Vec inverse{};
        for (int i = 0; i < kLanes && j + i < count; ++i) {
            const RowScale chosen = row_scale(__builtin_bit_cast(float, static_cast<std::uint32_t>(most[i])));
            scales[(j + i) * stride] = chosen.scale;
            inverse[i] = chosen.inverse;
        }
        for (int c = 0; c < channels; ++c) store(x + c * columns + j, load(x + c * columns + j) * inverse);
    }
}

// The scales of the task's first row.
CULA_INLINE float* scales_from(const StateView& view, int row) {
    return view.scales + row * view.scale_stride;
}

}  // namespace cula::cpu::CULA_CPU_TARGET
