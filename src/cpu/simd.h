// SPDX-License-Identifier: Apache-2.0
// Vectors of the widest float register of the instruction set that this file is compiled for, as compiler
// vector extensions.
//
// Everything in src/cpu that includes this file is compiled once per instruction set, into a namespace of its
// own (cula::cpu::avx2, ...). Such code must not instantiate inline functions of other namespaces: the linker
// would keep one copy for all instruction sets, compiled with the flags of one. tools/check_isa_objects.py
// checks this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "cula/tensor.h"

#define CULA_INLINE [[gnu::always_inline]] inline
// For loops over arrays of vectors: only unrolled do the arrays stay in registers.
#define CULA_UNROLL _Pragma("GCC unroll 16")

namespace cula::cpu::CULA_CPU_TARGET {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef std::uint32_t BitVec __attribute__((vector_size(4 * kLanes)));

// While an object of this class lives, subnormal operands and results count as zero. Strong decays would
// otherwise fill the state with subnormals, on which a multiply-add takes a hundred times longer.
class FlushSubnormals {
public:
#if defined(__x86_64__)
    CULA_INLINE FlushSubnormals() : saved_(__builtin_ia32_stmxcsr()) {
        __builtin_ia32_ldmxcsr(saved_ | 0x8040u);
    }
    CULA_INLINE ~FlushSubnormals() { __builtin_ia32_ldmxcsr(saved_); }

private:
    unsigned saved_;
#elif defined(__aarch64__)
    CULA_INLINE FlushSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" ::"r"(saved_ | (std::uint64_t{1} << 24)));
    }
    CULA_INLINE ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

private:
    std::uint64_t saved_;
#endif
};

CULA_INLINE Vec load(const float* p) {
    Vec x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

CULA_INLINE void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof x); }

CULA_INLINE Vec broadcast(float x) { return x - Vec{}; }

CULA_INLINE BitVec bits(Vec x) { return reinterpret_cast<BitVec>(x); }
CULA_INLINE Vec from_bits(BitVec x) { return reinterpret_cast<Vec>(x); }

CULA_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
CULA_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

// interleave_low: element J is a[J], or b[J - kStep] if J has the bit kStep. interleave_high is the
// complement. (The masks keep indices in range for steps that this width does not have; those results are not
// used.)
template <int kStep, int... J>
CULA_INLINE Vec interleave_low(Vec a, Vec b, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(a, b, (((J & kStep) ? kLanes + J - kStep : J) & (2 * kLanes - 1))...);
}
template <int kStep, int... J>
CULA_INLINE Vec interleave_high(Vec a, Vec b, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(a, b, (((J & kStep) ? kLanes + J : J + kStep) & (2 * kLanes - 1))...);
}

template <int kStep>
CULA_INLINE void transpose_step(Vec (&x)[kLanes]) {
    constexpr std::make_integer_sequence<int, kLanes> lanes{};
    CULA_UNROLL
    for (int i = 0; i < kLanes; ++i) {
        if (i & kStep) continue;
        const Vec a = x[i], b = x[i + kStep];
        x[i] = interleave_low<kStep>(a, b, lanes);
        x[i + kStep] = interleave_high<kStep>(a, b, lanes);
    }
}

// Transposes a square of kLanes x kLanes in registers.
CULA_INLINE void transpose(Vec (&x)[kLanes]) {
    transpose_step<1>(x);
    transpose_step<2>(x);
    if constexpr (kLanes > 4) transpose_step<4>(x);
    if constexpr (kLanes > 8) transpose_step<8>(x);
}

// dst[c][r] = src[r][c]; rows and columns are multiples of kLanes.
inline void transpose(float* dst, std::int64_t dst_stride, const float* src, std::int64_t src_stride,
                      int rows, int columns) {
    for (int r = 0; r < rows; r += kLanes) {
        for (int c = 0; c < columns; c += kLanes) {
            Vec x[kLanes];
            CULA_UNROLL
            for (int i = 0; i < kLanes; ++i) x[i] = load(src + (r + i) * src_stride + c);
            transpose(x);
            CULA_UNROLL
            for (int i = 0; i < kLanes; ++i) store(dst + (c + i) * dst_stride + r, x[i]);
        }
    }
}

template <int kStep, int... J>
CULA_INLINE Vec swap_lanes(Vec x, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(x, x, ((J ^ kStep) & (kLanes - 1))...);
}

// The sum over the lanes, added pairwise, so that the order is the same for every instruction set of one
// width.
CULA_INLINE float sum(Vec x) {
    constexpr std::make_integer_sequence<int, kLanes> lanes{};
    if constexpr (kLanes > 8) x += swap_lanes<8>(x, lanes);
    if constexpr (kLanes > 4) x += swap_lanes<4>(x, lanes);
    x += swap_lanes<2>(x, lanes);
    x += swap_lanes<1>(x, lanes);
    return x[0];
}

// Lane j of the result is sum(x[j]).
CULA_INLINE Vec sums(Vec (&x)[kLanes]) {
    constexpr std::make_integer_sequence<int, kLanes> lanes{};
    const auto halve = [&]<int kStep>(std::integral_constant<int, kStep>) {
        CULA_UNROLL
        for (int i = 0; i < kLanes; ++i) {
            if ((i & kStep) || (i & (kStep - 1))) continue;
            x[i] = interleave_low<kStep>(x[i], x[i + kStep], lanes) +
                   interleave_high<kStep>(x[i], x[i + kStep], lanes);
        }
    };
    halve(std::integral_constant<int, 1>{});
    halve(std::integral_constant<int, 2>{});
    if constexpr (kLanes > 4) halve(std::integral_constant<int, 4>{});
    if constexpr (kLanes > 8) halve(std::integral_constant<int, 8>{});
    return x[0];
}

// --- transcendental functions, relative error a few units of the last place ---

// exp(r) for |r| <= ln 2 / 2.
CULA_INLINE Vec exp_near_zero(Vec r) {
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * (r * r) + r + 1.0f;
}
// x - n ln 2, with ln 2 as the sum of two numbers.
CULA_INLINE Vec without_powers(Vec x, Vec n) { return x - n * 0.693359375f + n * 2.12194440e-4f; }

// 0 below -87, so that no result is subnormal; infinity above 88, with AVX-512 above 88.72.
CULA_INLINE Vec exp(Vec x) {
#if defined(__AVX512F__)
    // At 90 the result has overflowed. A NaN stays one, as the second operand of `min`, and as not less.
    const Vec bounded = _mm512_min_ps(broadcast(90.0f), x);
    const Vec n = _mm512_roundscale_ps(bounded * 1.44269504f, 0);  // to the nearest integer
    const __mmask16 in = _mm512_cmp_ps_mask(x, broadcast(-87.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(in, exp_near_zero(without_powers(bounded, n)), n);
#else
    constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
    const Vec bounded = min(max(x, broadcast(-87.0f)), broadcast(88.0f));
    const Vec shifted = bounded * 1.44269504f + kRoundMagic;
    const Vec p = exp_near_zero(without_powers(bounded, shifted - kRoundMagic));
    const Vec y = from_bits(bits(p) + (bits(shifted) << 23));
    const Vec infinity = broadcast(__builtin_inff());
    return x < -87.0f ? Vec{} : (x > 88.0f ? infinity : (x == x ? y : x));
#endif
}

// log(1 + e) for e >= 0.
CULA_INLINE Vec log1p(Vec e) {
    const Vec u = e + 1.0f;
    // u = 2^n m with m in [sqrt(1/2), sqrt(2))
    const BitVec offset = bits(u) - 0x3f3504f3u;
    const IntVec n = reinterpret_cast<IntVec>(offset) >> 23;
    const Vec m = from_bits((offset & 0x007fffffu) + 0x3f3504f3u);
    const Vec f = m - 1.0f;
    Vec p = f * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    const Vec z = f * f, nf = __builtin_convertvector(n, Vec);
    const Vec log_u = p * f * z - z * 0.5f + f + nf * -2.12194440e-4f + nf * 0.693359375f;
    // A first-order correction for what rounding took from u.
    const Vec lost = (e - (u - 1.0f)) / u;
    return e > 1e30f ? log_u : log_u + lost;
}

CULA_INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

CULA_INLINE Vec softplus(Vec x) {
    const Vec y = log1p(exp(min(broadcast(20.0f), x)));  // in this order a NaN stays one
    return x > 20.0f ? x : y;
}

// --- conversion ---

CULA_INLINE float bf16_to_float(std::uint16_t x) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(x) << 16);
}

CULA_INLINE std::uint16_t float_to_bf16(float x) {
    const std::uint32_t u = __builtin_bit_cast(std::uint32_t, x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
    return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Does not create float subnormals, which FlushSubnormals makes zero.
CULA_INLINE float fp16_to_float(std::uint16_t x) {
    const std::uint32_t sign = (x & 0x8000u) << 16, rest = x & 0x7fffu;
    if (rest >= 0x7c00u) return __builtin_bit_cast(float, sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
    if (rest >= 0x400u) return __builtin_bit_cast(float, sign | ((rest << 13) + (112u << 23)));
    const float magnitude = static_cast<float>(static_cast<std::int32_t>(rest)) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

CULA_INLINE std::uint16_t float_to_fp16(float x) {
    const std::uint32_t u = __builtin_bit_cast(std::uint32_t, x), sign = (u >> 16) & 0x8000u,
                        rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
    if (rest >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 2^16 or more
    if (rest < 0x38800000u) {  // subnormal: let a float addition round at 2^-24
        const float shifted = __builtin_bit_cast(float, rest) + 0.5f;
        return static_cast<std::uint16_t>(sign | (__builtin_bit_cast(std::uint32_t, shifted) - 0x3f000000u));
    }
    return static_cast<std::uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

CULA_INLINE Vec load_bf16(const std::uint16_t* p) {
#if defined(__AVX512F__)
    return from_bits(reinterpret_cast<BitVec>(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16)));
#elif defined(__AVX2__)
    return from_bits(reinterpret_cast<BitVec>(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16)));
#else
    Vec x;
    for (int i = 0; i < kLanes; ++i) x[i] = bf16_to_float(p[i]);
    return x;
#endif
}

CULA_INLINE Vec load_fp16(const std::uint16_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    Vec x;
    for (int i = 0; i < kLanes; ++i) x[i] = fp16_to_float(p[i]);
    return x;
#endif
}

// Rounds to bf16, to nearest even, in the upper half of each lane. A NaN stays one: to round its bits could
// carry into the sign.
CULA_INLINE BitVec round_to_bf16(Vec x) {
    const BitVec rounded = bits(x) + 0x7fffu + ((bits(x) >> 16) & 1u);
    return x == x ? rounded : bits(x) | 0x400000u;
}

CULA_INLINE void store_bf16(std::uint16_t* p, Vec x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
#elif defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(round_to_bf16(x) >> 16)));
#elif defined(__AVX2__)
    const __m256i y = reinterpret_cast<__m256i>(round_to_bf16(x) >> 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
#else
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(x[i]);
#endif
}

CULA_INLINE void store_fp16(std::uint16_t* p, Vec x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_fp16(x[i]);
#endif
}

// float8_e4m3fn, as Float8E4M3 of core/float8.h has it. Widening creates no float subnormals.
CULA_INLINE Vec load_float8(const std::uint8_t* p) {
    typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    const BitVec word = __builtin_convertvector(bytes, BitVec), code = word & 0x7fu;
    const Vec small = __builtin_convertvector(reinterpret_cast<IntVec>(code), Vec) * 0x1p-9f;
    const BitVec magnitude = code < 8u       ? bits(small)
                             : code == 0x7fu ? BitVec{} + 0x7fc00000u
                                             : (code << 20) + (120u << 23);
    return from_bits(magnitude | (word & 0x80u) << 24);
}

// Rounds to nearest even. The addition of the small numbers rounds them to multiples of 2^-9, the subnormal
// step.
CULA_INLINE void store_float8(std::uint8_t* p, Vec x) {
    typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));
    const BitVec magnitude = bits(x) & 0x7fffffffu;
    const BitVec small = bits(from_bits(magnitude) + 0x1p14f) - __builtin_bit_cast(std::uint32_t, 0x1p14f),
                 normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    const BitVec code = magnitude > 0x43e80000u ? BitVec{} + 0x7fu : magnitude < 0x3c800000u ? small : normal;
    const Bytes bytes = __builtin_convertvector(code | ((bits(x) >> 24) & 0x80u), Bytes);
    __builtin_memcpy(p, &bytes, sizeof bytes);
}

CULA_INLINE float load_scalar(const void* p, Dtype dtype) {
    switch (dtype) {
        case Dtype::kFloat32: return *static_cast<const float*>(p);
        case Dtype::kBFloat16: return bf16_to_float(*static_cast<const std::uint16_t*>(p));
        case Dtype::kFloat16: return fp16_to_float(*static_cast<const std::uint16_t*>(p));
        case Dtype::kFloat8E4M3: {
            std::uint8_t codes[kLanes] = {*static_cast<const std::uint8_t*>(p)};
            return load_float8(codes)[0];
        }
        case Dtype::kFloat64: return static_cast<float>(*static_cast<const double*>(p));
        default: return 0.0f;
    }
}

CULA_INLINE void store_scalar(void* p, Dtype dtype, float x) {
    switch (dtype) {
        case Dtype::kFloat32: *static_cast<float*>(p) = x; break;
        case Dtype::kBFloat16: *static_cast<std::uint16_t*>(p) = float_to_bf16(x); break;
        case Dtype::kFloat16: *static_cast<std::uint16_t*>(p) = float_to_fp16(x); break;
        case Dtype::kFloat8E4M3: {
            std::uint8_t codes[kLanes];
            store_float8(codes, broadcast(x));
            *static_cast<std::uint8_t*>(p) = codes[0];
            break;
        }
        case Dtype::kFloat64: *static_cast<double*>(p) = static_cast<double>(x); break;
        default: break;
    }
}

CULA_INLINE std::byte* element(void* p, Dtype dtype, std::int64_t index) {
    return static_cast<std::byte*>(p) + index * static_cast<std::int64_t>(size_bytes(dtype));
}
CULA_INLINE const std::byte* element(const void* p, Dtype dtype, std::int64_t index) {
    return static_cast<const std::byte*>(p) + index * static_cast<std::int64_t>(size_bytes(dtype));
}

// Loads dst[0, count) from contiguous memory of any floating dtype, and zeros up to `padded`.
inline void load_row(float* dst, const void* src, Dtype dtype, int count, int padded) {
    int i = 0;
    if (dtype == Dtype::kFloat32)
        for (; i + kLanes <= count; i += kLanes) store(dst + i, load(static_cast<const float*>(src) + i));
    if (dtype == Dtype::kBFloat16)
        for (; i + kLanes <= count; i += kLanes)
            store(dst + i, load_bf16(static_cast<const std::uint16_t*>(src) + i));
    if (dtype == Dtype::kFloat16)
        for (; i + kLanes <= count; i += kLanes)
            store(dst + i, load_fp16(static_cast<const std::uint16_t*>(src) + i));
    if (dtype == Dtype::kFloat8E4M3)
        for (; i + kLanes <= count; i += kLanes)
            store(dst + i, load_float8(static_cast<const std::uint8_t*>(src) + i));
    for (; i < count; ++i) dst[i] = load_scalar(element(src, dtype, i), dtype);
    for (; i < padded; ++i) dst[i] = 0.0f;
}

// Stores `count` floats to contiguous memory of any floating dtype.
inline void store_row(void* dst, Dtype dtype, const float* src, int count) {
    int i = 0;
    if (dtype == Dtype::kFloat32)
        for (; i + kLanes <= count; i += kLanes) store(static_cast<float*>(dst) + i, load(src + i));
    if (dtype == Dtype::kBFloat16)
        for (; i + kLanes <= count; i += kLanes)
            store_bf16(static_cast<std::uint16_t*>(dst) + i, load(src + i));
    if (dtype == Dtype::kFloat16)
        for (; i + kLanes <= count; i += kLanes)
            store_fp16(static_cast<std::uint16_t*>(dst) + i, load(src + i));
    if (dtype == Dtype::kFloat8E4M3)
        for (; i + kLanes <= count; i += kLanes)
            store_float8(static_cast<std::uint8_t*>(dst) + i, load(src + i));
    for (; i < count; ++i) store_scalar(element(dst, dtype, i), dtype, src[i]);
}

}  // namespace cula::cpu::CULA_CPU_TARGET
