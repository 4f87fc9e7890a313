// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tile/convert.cuh"

namespace cula::cuda {

// Element i of a gradient. Those of gates and write strengths may be float64, as these may.
__device__ __forceinline__ void store_gradient(void* data, Dtype dtype, std::int64_t i, float x) {
    if (dtype == Dtype::kFloat64)
        static_cast<double*>(data)[i] = static_cast<double>(x);
    else
        store_float(data, dtype, i, x);
}

}  // namespace cula::cuda
