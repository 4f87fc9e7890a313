// SPDX-License-Identifier: Apache-2.0
// A strided view of memory that the caller owns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string_view>

namespace cula {

// kFloat8E4M3: four bits of exponent and three of mantissa, no infinity, the largest number 448.
enum class Dtype : std::uint8_t {
    kFloat64,
    kFloat32,
    kBFloat16,
    kFloat16,
    kFloat8E4M3,
    kInt64,
    kInt32,
    kBool,
};

// The size of one element in bytes.
[[gnu::always_inline]] constexpr std::size_t size_bytes(Dtype dtype) {
    switch (dtype) {
        case Dtype::kFloat64:
        case Dtype::kInt64: return 8;
        case Dtype::kFloat32:
        case Dtype::kInt32: return 4;
        case Dtype::kBFloat16:
        case Dtype::kFloat16: return 2;
        case Dtype::kFloat8E4M3:
        case Dtype::kBool: return 1;
    }
    return 0;
}

constexpr std::string_view name(Dtype dtype) {
    switch (dtype) {
        case Dtype::kFloat64: return "float64";
        case Dtype::kFloat32: return "float32";
        case Dtype::kBFloat16: return "bfloat16";
        case Dtype::kFloat16: return "float16";
        case Dtype::kFloat8E4M3: return "float8_e4m3fn";
        case Dtype::kInt64: return "int64";
        case Dtype::kInt32: return "int32";
        case Dtype::kBool: return "bool";
    }
    return "unknown";
}

inline constexpr int kMaxDims = 5;

// A view of up to kMaxDims dimensions. Sizes and strides are in elements; strides may be negative or zero. A
// view without dimensions (ndim = 0) is absent: an optional argument that was not given.
struct TensorRef {
    void* data = nullptr;
    Dtype dtype = Dtype::kFloat32;
    int ndim = 0;
    std::array<std::int64_t, kMaxDims> size{};
    std::array<std::int64_t, kMaxDims> stride{};

    [[gnu::always_inline]] explicit operator bool() const { return ndim > 0; }

    // The address of element (i, j, ...). Trailing indices that are left out are 0. T must match dtype.
    template <class T, class... Index>
    [[gnu::always_inline]] T* at(Index... index) const {
        std::int64_t offset = 0;
        int dim = 0;
        ((offset += static_cast<std::int64_t>(index) * stride[static_cast<std::size_t>(dim++)]), ...);
        return static_cast<T*>(data) + offset;
    }

    // The same address without a type, for code that chooses by dtype at run time.
    template <class... Index>
    [[gnu::always_inline]] void* ptr(Index... index) const {
        return at<std::byte>(
            (static_cast<std::int64_t>(index) * static_cast<std::int64_t>(size_bytes(dtype)))...);
    }

    // A dense row-major view. A stride that overflows becomes the largest int64, which every call refuses.
    static TensorRef contiguous(void* data, Dtype dtype, std::initializer_list<std::int64_t> sizes) {
        TensorRef ref{data, dtype, static_cast<int>(sizes.size()), {}, {}};
        std::size_t dim = 0;
        for (std::int64_t size : sizes) ref.size[dim++] = size;
        std::int64_t step = 1;
        while (dim-- > 0) {
            ref.stride[dim] = step;
            if (__builtin_mul_overflow(step, ref.size[dim], &step))
                step = std::numeric_limits<std::int64_t>::max();
        }
        return ref;
    }
};

}  // namespace cula
