// SPDX-License-Identifier: Apache-2.0
// From a call's run-time values to the types and constants of a kernel instance.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cula/tensor.h"

namespace cula::cuda {

template <class T>
struct Type {
    using type = T;
};

// Calls body(constant K) for the smallest instantiated key dimension that holds the problem's.
template <class Body>
auto with_key(std::int64_t key_dim, Body body) {
    if (key_dim <= 64) return body(std::integral_constant<int, 64>{});
    if (key_dim <= 128) return body(std::integral_constant<int, 128>{});
    return body(std::integral_constant<int, 256>{});
}

template <class Body>
auto with_dtype(Dtype dtype, Body body) {
    if (dtype == Dtype::kBFloat16) return body(Type<__nv_bfloat16>{});
    if (dtype == Dtype::kFloat16) return body(Type<__half>{});
    return body(Type<float>{});
}

}  // namespace cula::cuda
