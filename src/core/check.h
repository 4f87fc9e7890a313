// SPDX-License-Identifier: Apache-2.0
// What the checks of arguments share.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "cula/tensor.h"

namespace cula {

inline constexpr std::int64_t kLargestDim = 256;  // of K and V
// Of a prefill or a map in chunks. With fewer key channels a token may take nearly all of a state away, which
// chunks compute as a difference and tokens as a product, whose error goes with it.
inline constexpr std::int64_t kFewestChunkChannels = 16;
inline constexpr std::int64_t kMostSlots = std::int64_t{1}
                                           << 31;  // of a pool: indices are numbers of 32 bits

// Where a fail(argument, expected, given) is in scope. A macro, so that the words are put together only when
// they are needed: a valid call makes no strings.
#define CULA_REQUIRE(good, argument, expected, given) \
    do {                                              \
        if (!(good)) fail(argument, expected, given); \
    } while (false)

inline std::string list_of(const TensorRef& ref, const std::array<std::int64_t, kMaxDims>& numbers) {
    std::string text = "[";
    for (int i = 0; i < std::min(ref.ndim, kMaxDims); ++i)
        text += (i ? ", " : "") + std::to_string(numbers[static_cast<std::size_t>(i)]);
    return text + (ref.ndim > kMaxDims ? ", ...]" : "]");
}

inline std::string shape_of(const TensorRef& ref) { return list_of(ref, ref.size); }

inline std::string layout_of(const TensorRef& ref) {
    return "shape " + shape_of(ref) + ", strides " + list_of(ref, ref.stride);
}

// No tensor spans as many bytes, or would have as many if its empty dimensions had an element each: sums and
// products of a few such numbers are still far from the largest integer.
inline constexpr double kTooManyBytes = 0x1p56;

// Whether no size is negative, and nothing about the tensor is as large as that: with numbers that do not
// overflow, whose rounding does not matter here.
inline bool fits(const TensorRef& ref) {
    const auto bytes = static_cast<double>(size_bytes(ref.dtype));
    double all = bytes, reach = 0.0;
    bool good = ref.ndim <= kMaxDims;
    for (std::size_t i = 0; good && i < static_cast<std::size_t>(ref.ndim); ++i) {
        const auto size = static_cast<double>(ref.size[i]);
        good = ref.size[i] >= 0;
        all *= std::max(size, 1.0);
        reach += std::fabs(static_cast<double>(ref.stride[i])) * std::max(size - 1.0, 1.0);
    }
    return good && all < kTooManyBytes && reach * bytes < kTooManyBytes;
}

inline bool empty(const TensorRef& ref) {
    bool any = false;
    for (std::size_t i = 0; i < static_cast<std::size_t>(ref.ndim); ++i) any = any || ref.size[i] == 0;
    return any;
}

// The bytes from `first` up to `end`, counted from the tensor's data, that the elements of a tensor that fits
// lie in.
struct Extent {
    std::int64_t first = 0, end = 0;
};

inline Extent extent_of(const TensorRef& ref) {
    const auto bytes = static_cast<std::int64_t>(size_bytes(ref.dtype));
    Extent extent{0, bytes};
    if (empty(ref)) return {};
    for (std::size_t i = 0; i < static_cast<std::size_t>(ref.ndim); ++i) {
        const std::int64_t reach = (ref.size[i] - 1) * ref.stride[i] * bytes;
        (reach < 0 ? extent.first : extent.end) += reach;
    }
    return extent;
}

// Whether the elements' addresses are multiples of their size.
inline bool aligned(const TensorRef& ref) {
    const std::size_t bytes = size_bytes(ref.dtype);
    return bytes <= 1 || (reinterpret_cast<std::uintptr_t>(ref.data) & (bytes - 1)) == 0;
}

// What the memory of a tensor is refused for, whatever it is for. Where a fail(argument, expected, given) is
// in scope.
#define CULA_REQUIRE_MEMORY(argument, ref)                                                                  \
    do {                                                                                                    \
        CULA_REQUIRE(fits(ref), argument, "have sizes that are not negative and span less than 2^56 bytes", \
                     layout_of(ref));                                                                       \
        CULA_REQUIRE((ref).data != nullptr || empty(ref), argument, "point to memory", "a null pointer");   \
        CULA_REQUIRE(                                                                                       \
            aligned(ref), argument, "start at a multiple of its elements' size",                            \
            std::to_string(reinterpret_cast<std::uintptr_t>((ref).data) % size_bytes((ref).dtype)) +        \
                " bytes beyond one of " + std::to_string(size_bytes((ref).dtype)));                         \
    } while (false)

// Whether two elements share an address, of a tensor that fits.
inline bool overlaps_itself(const TensorRef& ref) {
    struct Step {
        std::int64_t stride, size;
    };
    std::array<Step, kMaxDims> dims{};
    std::size_t count = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(ref.ndim); ++i) {
        if (ref.size[i] == 0) return false;
        if (ref.size[i] == 1) continue;
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

// Whether both have every element, as far as both have it, at one address.
inline bool same_places(const TensorRef& a, const TensorRef& b) {
    bool same = a.data == b.data && a.dtype == b.dtype && a.ndim == b.ndim;
    for (std::size_t i = 0; same && i < static_cast<std::size_t>(a.ndim); ++i)
        same = a.stride[i] == b.stride[i] || std::min(a.size[i], b.size[i]) <= 1;
    return same;
}

// Whether no byte of one is a byte of the other, as far as that shows: their extents are apart, or, like
// those of two tensors that share the pages of a pool, apart within every period of a stride that one of them
// has.
inline bool apart(const TensorRef& a, const TensorRef& b) {
    // Within a period, which strides that are multiples of it do not leave.
    const auto within = [](const TensorRef& ref, std::int64_t period) {
        TensorRef rest = ref;
        const auto bytes = static_cast<std::int64_t>(size_bytes(ref.dtype));
        for (std::size_t i = 0; i < static_cast<std::size_t>(ref.ndim); ++i)
            if (period > 0 && ref.stride[i] * bytes % period == 0 && rest.size[i] > 1) rest.size[i] = 1;
        return extent_of(rest);
    };
    const auto address = [](const TensorRef& ref) { return reinterpret_cast<std::uintptr_t>(ref.data); };
    // How far the first byte of b lies behind that of a.
    const auto behind = [&](const Extent& of_a, const Extent& of_b) {
        return static_cast<std::int64_t>(address(b) - address(a)) + of_b.first - of_a.first;
    };
    const Extent all_a = within(a, 0), all_b = within(b, 0);
    const std::int64_t bytes_a = all_a.end - all_a.first, bytes_b = all_b.end - all_b.first;
    if (bytes_a == 0 || bytes_b == 0) return true;
    const std::int64_t distance = behind(all_a, all_b);
    if (distance >= bytes_a || -distance >= bytes_b) return true;
    for (const TensorRef* ref : {&a, &b}) {
        for (std::size_t i = 0; i < static_cast<std::size_t>(ref->ndim); ++i) {
            const std::int64_t period =
                std::abs(ref->stride[i]) * static_cast<std::int64_t>(size_bytes(ref->dtype));
            if (period == 0) continue;
            const Extent of_a = within(a, period), of_b = within(b, period);
            const std::int64_t from = (behind(of_a, of_b) % period + period) % period;
            if (from >= of_a.end - of_a.first && from + of_b.end - of_b.first <= period) return true;
        }
    }
    return false;
}

}  // namespace cula
