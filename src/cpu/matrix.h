// SPDX-License-Identifier: Apache-2.0
// Matrices of any strides and dtype to and from rows of floats. Included once per instruction set (simd.h).
#pragma once

#include "cpu/layers.h"
#include "cpu/simd.h"

namespace cula::cpu::CULA_CPU_TARGET {

CULA_INLINE int padded(int channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

CULA_INLINE Vec load_vec(const std::byte* p, Dtype dtype) {
    if (dtype == Dtype::kBFloat16) return load_bf16(reinterpret_cast<const std::uint16_t*>(p));
    if (dtype == Dtype::kFloat16) return load_fp16(reinterpret_cast<const std::uint16_t*>(p));
    return load(reinterpret_cast<const float*>(p));
}

CULA_INLINE void store_vec(std::byte* p, Dtype dtype, Vec x) {
    if (dtype == Dtype::kBFloat16)
        store_bf16(reinterpret_cast<std::uint16_t*>(p), x);
    else if (dtype == Dtype::kFloat16)
        store_fp16(reinterpret_cast<std::uint16_t*>(p), x);
    else
        store(reinterpret_cast<float*>(p), x);
}

CULA_INLINE std::byte* at(const Matrix& m, std::int64_t row, std::int64_t column = 0) {
    return element(m.data, m.dtype, row * m.row + column * m.column);
}

typedef std::uint64_t WordVec __attribute__((vector_size(8 * kLanes)));

// Four bf16 per channel, side by side in memory, as they lie in a weight of width 4: element j of each lane.
CULA_INLINE Vec bf16_of(const WordVec& words, int j) {
    return from_bits(__builtin_convertvector(words >> (16 * j), BitVec) << 16);
}

CULA_INLINE void load_words(WordVec& words, const std::byte* p) { __builtin_memcpy(&words, p, sizeof words); }

// Rows [first, first + count) of `m` as floats, `stride` apart, with zeros from `channels` to padded().
inline void read_rows(float* dst, std::int64_t stride, const Matrix& m, std::int64_t first, int count,
                      int channels) {
    const int all = padded(channels);
    if (m.column == 1) {
        for (int r = 0; r < count; ++r) load_row(dst + r * stride, at(m, first + r), m.dtype, channels, all);
        return;
    }
    for (int r = 0; r < count; ++r)
        for (int c = channels; c < all; ++c) dst[r * stride + c] = 0.0f;
    int done = 0;
    if (m.dtype == Dtype::kBFloat16 && m.row == 1 && m.column == 4 && first == 0 && count == 4) {
        for (; done + kLanes <= channels; done += kLanes) {
            WordVec words;
            load_words(words, at(m, 0, done));
            CULA_UNROLL
            for (int j = 0; j < 4; ++j) store(dst + j * stride + done, bf16_of(words, j));
        }
    } else if (m.row == 1) {
        for (; done + kLanes <= channels && count >= kLanes; done += kLanes) {
            int r = 0;
            for (; r + kLanes <= count; r += kLanes) {
                Vec x[kLanes];
                CULA_UNROLL
                for (int i = 0; i < kLanes; ++i) x[i] = load_vec(at(m, first + r, done + i), m.dtype);
                transpose(x);
                CULA_UNROLL
                for (int i = 0; i < kLanes; ++i) store(dst + (r + i) * stride + done, x[i]);
            }
            for (; r < count; ++r)
                for (int i = 0; i < kLanes; ++i)
                    dst[r * stride + done + i] = load_scalar(at(m, first + r, done + i), m.dtype);
        }
    }
    for (int r = 0; r < count; ++r)
        for (int c = done; c < channels; ++c) dst[r * stride + c] = load_scalar(at(m, first + r, c), m.dtype);
}

inline void write_rows(const Matrix& m, std::int64_t first, const float* src, std::int64_t stride, int count,
                       int channels) {
    if (m.column == 1) {
        for (int r = 0; r < count; ++r) store_row(at(m, first + r), m.dtype, src + r * stride, channels);
        return;
    }
    int done = 0;
    if (m.row == 1) {
        for (; done + kLanes <= channels && count >= kLanes; done += kLanes) {
            int r = 0;
            for (; r + kLanes <= count; r += kLanes) {
                Vec x[kLanes];
                CULA_UNROLL
                for (int i = 0; i < kLanes; ++i) x[i] = load(src + (r + i) * stride + done);
                transpose(x);
                CULA_UNROLL
                for (int i = 0; i < kLanes; ++i) store_vec(at(m, first + r, done + i), m.dtype, x[i]);
            }
            for (; r < count; ++r)
                for (int i = 0; i < kLanes; ++i)
                    store_scalar(at(m, first + r, done + i), m.dtype, src[r * stride + done + i]);
        }
    }
    for (int r = 0; r < count; ++r)
        for (int c = done; c < channels; ++c) store_scalar(at(m, first + r, c), m.dtype, src[r * stride + c]);
}

inline void zero_rows(float* dst, std::int64_t stride, std::int64_t count, int channels) {
    for (std::int64_t r = 0; r < count; ++r)
        for (int c = 0; c < padded(channels); c += kLanes) store(dst + r * stride + c, Vec{});
}

}  // namespace cula::cpu::CULA_CPU_TARGET
