// SPDX-License-Identifier: Apache-2.0
// The 16-bit floating-point formats as storage types. Widening to float is exact and implicit; narrowing
// rounds to nearest, ties to even, and is explicit. Arithmetic happens in float.
#pragma once

#include <bit>
#include <cstdint>

namespace cula {

// float32 with the low 16 bits of the mantissa dropped.
struct BFloat16 {
    std::uint16_t bits = 0;

    constexpr BFloat16() = default;

    explicit constexpr BFloat16(float value) {
        const auto word = std::bit_cast<std::uint32_t>(value);
        if ((word & 0x7fff'ffffu) > 0x7f80'0000u)
            bits = static_cast<std::uint16_t>(word >> 16 | 0x40u);  // rounding could turn a NaN into infinity
        else
            bits = static_cast<std::uint16_t>((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
    }

    constexpr operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

// IEEE 754 binary16.
struct Float16 {
    std::uint16_t bits = 0;

    constexpr Float16() = default;

    explicit constexpr Float16(float value) {
        const auto word = std::bit_cast<std::uint32_t>(value);
        const std::uint32_t sign = word >> 16 & 0x8000u, magnitude = word & 0x7fff'ffffu;
        std::uint32_t half = 0;
        if (magnitude > 0x7f80'0000u) {
            half = 0x7e00u;
        } else if (magnitude >=
                   0x4780'0000u) {  // 2^16; smaller numbers that round up to it become infinity below
            half = 0x7c00u;
        } else if (magnitude < 0x3880'0000u) {  // 2^-14: one ulp of 0.5f is the subnormal step 2^-24, so the
                                                // addition rounds
            half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
                   std::bit_cast<std::uint32_t>(0.5f);
        } else {
            constexpr std::uint32_t kRebias = (127u - 15u) << 23;
            half = (magnitude - kRebias + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
        }
        bits = static_cast<std::uint16_t>(sign | half);
    }

    constexpr operator float() const {
        const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
        const std::uint32_t exponent = bits >> 10 & 0x1fu, mantissa = bits & 0x3ffu;
        if (exponent == 0) {
            const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
            return sign ? -magnitude : magnitude;
        }
        const std::uint32_t biased = exponent == 0x1fu ? 0xffu : exponent + (127u - 15u);
        return std::bit_cast<float>(sign | biased << 23 | mantissa << 13);
    }
};

}  // namespace cula
