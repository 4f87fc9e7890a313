// SPDX-License-Identifier: Apache-2.0
// Tools for checking arguments, shared by validate.cc, compose.cc and dispatch.cc. Sizes and strides are in
// elements.
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

inline constexpr std::int64_t kLargestDim = 256;  // K, and the V of one kernel call
// The fewest key channels of a prefill or a map in chunks. With fewer, one token may remove nearly all of a
// state. Chunks compute that as a difference, whose error is relative to the state before; token by token it
// is a product, whose error is relative to what remains.
inline constexpr std::int64_t kFewestChunkChannels = 16;
// Slots of a pool: indices are 32-bit numbers.
inline constexpr std::int64_t kMostSlots = std::int64_t{1} << 31;
// Writes of a token: kernels count the rows of a few tokens in 32 bits.
inline constexpr std::int64_t kMostWrites = std::int64_t{1} << 24;

// Calls fail(argument, expected, given), which must be in scope, unless `good`. It is a macro so that the
// strings are built only when they are needed: a valid call builds none.
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

// The limit on the bytes that a tensor spans, and on those it would have if its empty dimensions had one
// element each. Sums and products of a few such numbers stay far below the largest integer.
inline constexpr double kTooManyBytes = 0x1p56;

// Whether no size is negative and the tensor stays below kTooManyBytes. Computed in double, which does not
// overflow; rounding does not matter here.
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

// Whether the tensor has no elements.
inline bool empty(const TensorRef& ref) {
    bool any = false;
    for (std::size_t i = 0; i < static_cast<std::size_t>(ref.ndim); ++i) any = any || ref.size[i] == 0;
    return any;
}

// The bytes [first, end), counted from the data pointer, that hold the elements of a tensor that fits().
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

// Whether the address of every element is a multiple of the element's size.
inline bool aligned(const TensorRef& ref) {
    const std::size_t bytes = size_bytes(ref.dtype);
    return bytes <= 1 || (reinterpret_cast<std::uintptr_t>(ref.data) & (bytes - 1)) == 0;
}

// The requirements on the memory of every tensor: fits(), not null, aligned(). fail(argument, expected,
// given) must be in scope.
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

// Whether two elements of a tensor that fits() may share an address: sorted by stride, a dimension must step
// over the whole reach of all smaller ones.
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

// Whether each element that both tensors have lies at the same address in both.
inline bool same_places(const TensorRef& a, const TensorRef& b) {
    bool same = a.data == b.data && a.dtype == b.dtype && a.ndim == b.ndim;
    for (std::size_t i = 0; same && i < static_cast<std::size_t>(a.ndim); ++i)
        same = a.stride[i] == b.stride[i] || std::min(a.size[i], b.size[i]) <= 1;
    return same;
}

// Whether two tensors share no byte, as far as strides show it. They share none if their extents are
// disjoint; or if, for some stride of one of them, their extents are disjoint within every period of that
// stride, like two tensors that share the pages of a pool.
inline bool apart(const TensorRef& a, const TensorRef& b) {
    // The extent within one period, which strides that are multiples of it do not leave.
    const auto within = [](const TensorRef& ref, std::int64_t period) {
        TensorRef rest = ref;
        const auto bytes = static_cast<std::int64_t>(size_bytes(ref.dtype));
        for (std::size_t i = 0; i < static_cast<std::size_t>(ref.ndim); ++i)
            if (period > 0 && ref.stride[i] * bytes % period == 0 && rest.size[i] > 1) rest.size[i] = 1;
        return extent_of(rest);
    };
    const auto address = [](const TensorRef& ref) { return reinterpret_cast<std::uintptr_t>(ref.data); };
    // The distance in bytes from the first byte of a to the first byte of b.
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
