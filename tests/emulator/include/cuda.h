// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA driver API that makes tensor maps.
#pragma once

#include <cstdint>

using CUresult = int;
inline constexpr CUresult CUDA_SUCCESS = 0;
using cuuint32_t = std::uint32_t;
using cuuint64_t = std::uint64_t;

// What describes the tensor and its tiles; dimensions from the innermost on, strides in bytes. swizzle_mask:
// the bits of the number of a row of 128 bytes that are XORed into the number of a unit of 16 bytes.
struct alignas(64) CUtensorMap {
    void* base;
    std::uint32_t rank, element_bytes, swizzle_mask;
    std::uint64_t sizes[5], strides[5];
    std::uint32_t box[5];
};

enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE,
    CU_TENSOR_MAP_SWIZZLE_32B,
    CU_TENSOR_MAP_SWIZZLE_64B,
    CU_TENSOR_MAP_SWIZZLE_128B,
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_128B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
