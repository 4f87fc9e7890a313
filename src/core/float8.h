// SPDX-License-Identifier: Apache-2.0
// States of eight bits: the format float8_e4m3fn as a storage type, and the scale that a row of a state is
// stored with.
//
// A row is the K numbers of one value channel. With `most` its largest magnitude, it is stored as
//     scale = most / 448        code = x 448 / most, rounded to nearest, ties to even
// in float32, and read as scale * code. So each number is within half a step of the format of its scale times
// a number up to 448: 2^-4 of its own size, or 2^-10 of the scale where it is smaller than 2^-6 scales.
//
// Rows of zeros, and those whose scale no normal float32 holds (most < 5.3e-36), have scale 0 and read as
// zeros. A row with a NaN or an infinity has scale NaN, so that all of it reads as NaN.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace cula {

// float8_e4m3fn (OCP 8-bit floating point, E4M3): a sign, four bits of exponent biased by 7, three of
// mantissa. Code 0x7f is NaN; there is no infinity, and the largest number is 448. Widening is exact.
// Narrowing rounds to nearest, ties to even; what would be above 448 becomes NaN.
struct Float8E4M3 {
    std::uint8_t bits = 0;

    constexpr Float8E4M3() = default;

    explicit constexpr Float8E4M3(float value) {
        const auto word = std::bit_cast<std::uint32_t>(value);
        const std::uint32_t sign = word >> 24 & 0x80u, magnitude = word & 0x7fff'ffffu;
        std::uint32_t code = 0;
        if (magnitude > 0x43e8'0000u) {  // 464, which still rounds to 448
            code = 0x7fu;
        } else if (magnitude < 0x3c80'0000u) {  // 2^-6: one ulp of 2^14 is the subnormal step 2^-9, so the
                                                // addition rounds
            code = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) -
                   std::bit_cast<std::uint32_t>(0x1p14f);
        } else {
            constexpr std::uint32_t kRebias = (127u - 7u) << 23;
            code = (magnitude - kRebias + 0x7'ffffu + (magnitude >> 20 & 1u)) >> 20;
        }
        bits = static_cast<std::uint8_t>(sign | code);
    }

    constexpr operator float() const {
        const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24, code = bits & 0x7fu;
        if (code < 8) {
            const float magnitude = static_cast<float>(code) * 0x1p-9f;
            return sign ? -magnitude : magnitude;
        }
        if (code == 0x7fu) return std::bit_cast<float>(sign | 0x7fc0'0000u);
        return std::bit_cast<float>(sign | ((code << 20) + ((127u - 7u) << 23)));
    }
};

struct RowScale {
    float scale, inverse;  // inverse: what a number of the row is multiplied by to be stored
};

// most: the largest magnitude of a row; infinite or NaN if one of its numbers is.
// Always inline, because code that is compiled once per instruction set uses it (cpu/simd.h).
[[gnu::always_inline]] constexpr RowScale row_scale(float most) {
    constexpr float kLargest = 448.0f, kMost = std::numeric_limits<float>::max(),
                    kLeast = std::numeric_limits<float>::min(),
                    kNan = std::numeric_limits<float>::quiet_NaN();
    if (!(most <= kMost)) return {kNan, kNan};
    const float scale = most / kLargest;
    if (scale < kLeast) return {0.0f, 0.0f};
    return {scale, kLargest / most};
}

}  // namespace cula
