// SPDX-License-Identifier: Apache-2.0
// Division by a number that the host knows before the launch.
#pragma once

#include <cstdint>

#include "cuda/host_device.h"

namespace cula::cuda {

// x / value for 0 <= x < 2^31, computed as a multiplication by `factor` = 2^shift / value, rounded up, and a
// shift, where 2^(shift - 31) >= value. A default Divisor divides by 1.
struct Divisor {
    std::uint32_t value = 1, factor = 1u << 31, shift = 31;

    Divisor() = default;
    explicit Divisor(std::uint32_t by) : value(by > 0 ? by : 1) {
        while ((std::uint64_t{1} << (shift - 31)) < value) ++shift;
        factor = static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + value - 1) / value);
    }
    CULA_HOST_DEVICE std::uint32_t divide(std::uint32_t x) const {
        return static_cast<std::uint32_t>(static_cast<std::uint64_t>(x) * factor >> shift);
    }
    CULA_HOST_DEVICE std::int32_t divide(std::int32_t x) const {
        return static_cast<std::int32_t>(divide(static_cast<std::uint32_t>(x)));
    }
};

}  // namespace cula::cuda
