// SPDX-License-Identifier: Apache-2.0
// Elements of a tensor of any floating dtype, converted on the way in and out. Widening is exact.
#pragma once

#include "core/float16.h"
#include "core/float8.h"
#include "cula/tensor.h"

namespace cula::reference {

template <class T, class... Index>
T read(const TensorRef& ref, Index... index) {
    switch (ref.dtype) {
        case Dtype::kFloat64: return static_cast<T>(*ref.at<const double>(index...));
        case Dtype::kFloat32: return static_cast<T>(*ref.at<const float>(index...));
        case Dtype::kBFloat16: return static_cast<T>(*ref.at<const BFloat16>(index...));
        case Dtype::kFloat16: return static_cast<T>(*ref.at<const Float16>(index...));
        case Dtype::kFloat8E4M3: return static_cast<T>(*ref.at<const Float8E4M3>(index...));
        default: return T{};
    }
}

template <class T, class... Index>
void write(const TensorRef& ref, T value, Index... index) {
    switch (ref.dtype) {
        case Dtype::kFloat64: *ref.at<double>(index...) = static_cast<double>(value); break;
        case Dtype::kFloat32: *ref.at<float>(index...) = static_cast<float>(value); break;
        case Dtype::kBFloat16: *ref.at<BFloat16>(index...) = BFloat16(static_cast<float>(value)); break;
        case Dtype::kFloat16: *ref.at<Float16>(index...) = Float16(static_cast<float>(value)); break;
        case Dtype::kFloat8E4M3: *ref.at<Float8E4M3>(index...) = Float8E4M3(static_cast<float>(value)); break;
        default: break;
    }
}

// The last two dimensions at the given leading indices: one head's state [V, K] inside a pool or a buffer of
// snapshots.
template <class... Index>
TensorRef matrix_at(const TensorRef& ref, Index... index) {
    const auto rows = static_cast<std::size_t>(ref.ndim - 2), columns = rows + 1;
    return {.data = ref.ptr(index...),
            .dtype = ref.dtype,
            .ndim = 2,
            .size = {ref.size[rows], ref.size[columns]},
            .stride = {ref.stride[rows], ref.stride[columns]}};
}

// The scales [V] of that state, where its dtype has some.
template <class... Index>
TensorRef scales_at(const TensorRef& ref, Index... index) {
    if (!ref) return {};
    return {.data = ref.ptr(index...),
            .dtype = ref.dtype,
            .ndim = 1,
            .size = {ref.size[2]},
            .stride = {ref.stride[2]}};
}

}  // namespace cula::reference
