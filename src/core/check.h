// SPDX-License-Identifier: Apache-2.0
// What the checks of arguments share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "cula/tensor.h"

namespace cula {

inline constexpr std::int64_t kLargestDim = 256;  // of K and V

// Where a fail(argument, expected, given) is in scope. A macro, so that the words are put together only when they are
// needed: a valid call makes no strings.
#define CULA_REQUIRE(good, argument, expected, given) \
    do {                                              \
        if (!(good)) fail(argument, expected, given); \
    } while (false)

inline std::string shape_of(const TensorRef& ref) {
    std::string text = "[";
    for (int i = 0; i < ref.ndim; ++i) text += (i ? ", " : "") + std::to_string(ref.size[static_cast<std::size_t>(i)]);
    return text + "]";
}

// Whether two elements share an address.
inline bool overlaps_itself(const TensorRef& ref) {
    struct Step {
        std::int64_t stride, size;
    };
    std::array<Step, kMaxDims> dims{};
    std::size_t count = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(ref.ndim); ++i) {
        if (ref.size[i] <= 1) continue;
        std::size_t at = count++;
        for (; at > 0 && dims[at - 1].stride > std::abs(ref.stride[i]); --at) dims[at] = dims[at - 1];
        dims[at] = {std::abs(ref.stride[i]), ref.size[i]};
    }
    std::int64_t reach = 0;
    for (auto [stride, size] : std::span(dims).first(count)) {
        if (stride <= reach) return true;
        reach += stride * (size - 1);
    }
    return false;
}

}  // namespace cula
