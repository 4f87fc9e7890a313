// SPDX-License-Identifier: Apache-2.0
// Small matrix products on packed operands: C [m x n] = or += A [m x k] B [k x n], C in float.
//
// Operands consist of 32-bit words, which hold kPerWord neighbours along the reduction: one float, or two
// bf16. A is row-major, A[row][word]. B has a row of words for each word of the reduction, B[word][column].
// This is the layout that vdpbf16ps and AMX tiles read, and a transpose of words turns one operand into the
// other, whatever the words hold.
// Padding with zeros: m and n to multiples of 16, reductions over tokens to kTokenMultiple, reductions over
// channels to kChannelMultiple (inputs.h).
#pragma once

#include "cpu/simd.h"

namespace cula::cpu::CULA_CPU_TARGET {

// Two bf16, the earlier one in the lower half.
struct BfPair {
    std::uint32_t bits;
};

template <class Word>
inline constexpr int kPerWord = 1;
template <>
inline constexpr int kPerWord<BfPair> = 2;

// Tokens of a chunk are padded to a multiple of this, so that every reduction over tokens is a whole number
// of tile words.
inline constexpr int kTokenMultiple = 32;

CULA_INLINE void store_words(float* dst, Vec low, Vec high) {
    store(dst, low);
    store(dst + kLanes, high);
}

#if defined(__AVX512BF16__)
CULA_INLINE void store_words(BfPair* dst, Vec low, Vec high) {
    const __m512bh x = _mm512_cvtne2ps_pbh(high, low);
    __builtin_memcpy(dst, &x, sizeof x);
}
#endif

// The address in a row of words of channel c, a multiple of 2 * kLanes.
template <class Word>
CULA_INLINE Word* words_at(Word* row, int c) {
    return row + c / kPerWord<Word>;
}

// Stores rows r and r + 1 of a reduction, for the columns of one vector.
CULA_INLINE void store_row_pair(float* dst, std::int64_t stride, Vec even, Vec odd) {
    store(dst, even);
    store(dst + stride, odd);
}

#if defined(__AVX512BF16__)
CULA_INLINE void store_row_pair(BfPair* dst, std::int64_t, Vec even, Vec odd) {
    const BitVec x = (round_to_bf16(even) >> 16) | (round_to_bf16(odd) & 0xffff0000u);
    __builtin_memcpy(dst, &x, sizeof x);
}
#endif

// Packs a B operand from a float matrix [rows x columns]; the rows, an even number, are the reduction.
template <class Word>
inline void pack_rows(Word* dst, std::int64_t dst_stride, const float* src, std::int64_t src_stride, int rows,
                      int columns) {
    for (int r = 0; r < rows; r += 2) {
        Word* words = dst + r / kPerWord<Word> * dst_stride;
        for (int c = 0; c < columns; c += kLanes)
            store_row_pair(words + c, dst_stride, load(src + r * src_stride + c),
                           load(src + (r + 1) * src_stride + c));
    }
}

// Operands of a float matrix that has no gaps between its rows: packed as B, and row-major. `dst` holds the
// words, unless floats are the words.
template <class Word>
CULA_INLINE const Word* packed_rows([[maybe_unused]] Word* dst, const float* src, [[maybe_unused]] int rows,
                                    [[maybe_unused]] int columns) {
    if constexpr (kPerWord<Word> == 1) {
        return src;
    } else {
        pack_rows(dst, columns, src, columns, rows, columns);
        return dst;
    }
}
template <class Word>
CULA_INLINE const Word* row_words([[maybe_unused]] Word* dst, const float* src, [[maybe_unused]] int rows,
                                  [[maybe_unused]] int columns) {
    if constexpr (kPerWord<Word> == 1) {
        return src;
    } else {
        for (int x = 0; x < rows * columns; x += 2 * kLanes)
            store_words(words_at(dst, x), load(src + x), load(src + x + kLanes));
        return dst;
    }
}

// What rounding to bf16 takes away: the low word of a compensated operand.
CULA_INLINE Vec lost(Vec x) { return x - from_bits(round_to_bf16(x) & 0xffff0000u); }

// Packs the low words that belong to pack_rows().
template <class Word>
inline void pack_lost_rows(Word* dst, std::int64_t dst_stride, const float* src, std::int64_t src_stride,
                           int rows, int columns) {
    for (int r = 0; r < rows; r += 2)
        for (int c = 0; c < columns; c += kLanes)
            store_row_pair(dst + r / kPerWord<Word> * dst_stride + c, dst_stride,
                           lost(load(src + r * src_stride + c)), lost(load(src + (r + 1) * src_stride + c)));
}

template <class Word>
inline void transpose_words(Word* dst, std::int64_t dst_stride, const Word* src, std::int64_t src_stride,
                            int rows, int columns) {
    static_assert(sizeof(Word) == sizeof(float));
    transpose(reinterpret_cast<float*>(dst), dst_stride, reinterpret_cast<const float*>(src), src_stride,
              rows, columns);
}

CULA_INLINE Vec multiply_add(Vec c, float a, Vec b) { return c + a * b; }

#if defined(__AVX512BF16__)
CULA_INLINE Vec multiply_add(Vec c, BfPair a, Vec b) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a.bits))),
                            reinterpret_cast<__m512bh>(b));
}
#endif

// One register block of C: kRows x (kVecs * kLanes).
template <int kRows, int kVecs, class Word>
CULA_INLINE void product_block(bool add, int words, const Word* a, std::int64_t lda, const Word* b,
                               std::int64_t ldb, float* c, std::int64_t ldc) {
    Vec acc[kRows][kVecs];
    CULA_UNROLL
    for (int r = 0; r < kRows; ++r) {
        CULA_UNROLL
        for (int j = 0; j < kVecs; ++j) acc[r][j] = add ? load(c + r * ldc + j * kLanes) : Vec{};
    }
    for (int w = 0; w < words; ++w) {
        Vec row[kVecs];
        CULA_UNROLL
        for (int j = 0; j < kVecs; ++j)
            row[j] = load(reinterpret_cast<const float*>(b + w * ldb) + j * kLanes);
        CULA_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const Word factor = a[r * lda + w];
            CULA_UNROLL
            for (int j = 0; j < kVecs; ++j) acc[r][j] = multiply_add(acc[r][j], factor, row[j]);
        }
    }
    CULA_UNROLL
    for (int r = 0; r < kRows; ++r) {
        CULA_UNROLL
        for (int j = 0; j < kVecs; ++j) store(c + r * ldc + j * kLanes, acc[r][j]);
    }
}

template <class Word>
inline void product(bool add, int m, int n, int words, const Word* a, std::int64_t lda, const Word* b,
                    std::int64_t ldb, float* c, std::int64_t ldc) {
    // 16 accumulators of 32 registers, or 8 of 16: enough for two fused multiply-adds per cycle at a latency
    // of 4.
    constexpr int kRows = kLanes == 16 ? 8 : kLanes == 8 ? 4 : 2;
    constexpr int kVecs = kLanes == 4 ? 4 : 2;
    constexpr int kColumns = kVecs * kLanes;
    int j = 0;
    for (; j + kColumns <= n; j += kColumns)
        for (int i = 0; i < m; i += kRows)
            product_block<kRows, kVecs>(add, words, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
    if constexpr (kColumns > 16)
        for (; j < n; j += kLanes)
            for (int i = 0; i < m; i += kRows)
                product_block<kRows, 1>(add, words, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
}

#if defined(__AMX_BF16__)

// Eight tiles of 16 rows x 64 bytes. A thread configures them once per task.
inline void configure_tiles() {
    struct alignas(64) Config {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    const Config config;
    _tile_loadconfig(&config);
}
inline void release_tiles() { _tile_release(); }

// One or two by one or two tiles of C, in tile registers 0 to 3; A in 4 and 5, B in 6 and 7.
template <bool kTwoRows, bool kTwoColumns>
CULA_INLINE void tile_block(bool add, int words, const BfPair* a, std::int64_t lda, const BfPair* b,
                            std::int64_t ldb, float* c, std::int64_t ldc) {
    const std::int64_t a_bytes = 4 * lda, b_bytes = 4 * ldb, c_bytes = 4 * ldc;
    if (add) {
        _tile_loadd(0, c, c_bytes);
        if constexpr (kTwoColumns) _tile_loadd(1, c + 16, c_bytes);
        if constexpr (kTwoRows) _tile_loadd(2, c + 16 * ldc, c_bytes);
        if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, c + 16 * ldc + 16, c_bytes);
    } else {
        _tile_zero(0);
        if constexpr (kTwoColumns) _tile_zero(1);
        if constexpr (kTwoRows) _tile_zero(2);
        if constexpr (kTwoRows && kTwoColumns) _tile_zero(3);
    }
    for (int w = 0; w < words; w += 16) {
        _tile_loadd(4, a + w, a_bytes);
        _tile_loadd(6, b + w * ldb, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kTwoColumns) {
            _tile_loadd(7, b + w * ldb + 16, b_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (kTwoRows) {
            _tile_loadd(5, a + 16 * lda + w, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (kTwoRows && kTwoColumns) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    if constexpr (kTwoColumns) _tile_stored(1, c + 16, c_bytes);
    if constexpr (kTwoRows) _tile_stored(2, c + 16 * ldc, c_bytes);
    if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, c + 16 * ldc + 16, c_bytes);
}

template <bool kTwoRows>
CULA_INLINE void tile_rows(bool add, int n, int words, const BfPair* a, std::int64_t lda, const BfPair* b,
                           std::int64_t ldb, float* c, std::int64_t ldc) {
    int j = 0;
    for (; j + 32 <= n; j += 32) tile_block<kTwoRows, true>(add, words, a, lda, b + j, ldb, c + j, ldc);
    if (j < n) tile_block<kTwoRows, false>(add, words, a, lda, b + j, ldb, c + j, ldc);
}

inline void product(bool add, int m, int n, int words, const BfPair* a, std::int64_t lda, const BfPair* b,
                    std::int64_t ldb, float* c, std::int64_t ldc) {
    int i = 0;
    for (; i + 32 <= m; i += 32) tile_rows<true>(add, n, words, a + i * lda, lda, b, ldb, c + i * ldc, ldc);
    if (i < m) tile_rows<false>(add, n, words, a + i * lda, lda, b, ldb, c + i * ldc, ldc);
}

#else

inline void configure_tiles() {}
inline void release_tiles() {}

#endif

}  // namespace cula::cpu::CULA_CPU_TARGET
