// SPDX-License-Identifier: Apache-2.0
// Tensor maps (TMA descriptors) of the rows of q, k, v, o and g. A TMA tile of the carry is the tokens of a
// chunk x 64 channels of a head, and lies in shared memory as one panel of a Tile (chunked/chunk.cuh).
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>
#include <cstdint>

#include "cuda/device_args.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda {

inline constexpr int kTmaChannels = 64;
inline constexpr int kSwizzleAlignment = 1024;  // of tiles in the 128-byte swizzle: the pattern's length

// A TMA tile of 16-bit elements in shared memory: a row of 128 bytes per token.
template <int kTokens>
struct alignas(kSwizzleAlignment) TmaTile {
    static constexpr int kRowBytes = 2 * kTmaChannels;
    unsigned char bytes[kTokens * kRowBytes];
};

// The tensor maps of a carry; `inputs` and `outputs` tell whether they exist. Rows of another dtype than the
// call's, or not in whole aligned pieces of 16 bytes, have none.
struct CarryMaps {
    CUtensorMap v{}, o{}, q{}, k{};
    bool inputs = false, outputs = false;
};

struct TmaTileShape {
    int channels, tokens;
    CUtensorMapSwizzle swizzle;
};

// Whether cuTensorMapEncodeTiled (CUDA driver API) can encode such rows.
inline bool mappable(const TokenRows& rows, Dtype dtype, int width) {
    constexpr std::int64_t kMostStride = (std::int64_t{1} << 40) / 2;
    return rows.dtype == dtype && (rows.batch | rows.token | rows.head | width) % 8 == 0 &&
           std::min({rows.batch, rows.token, rows.head}) >= 0 &&
           std::max({rows.batch, rows.token, rows.head}) < kMostStride &&
           reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0;
}

// Encodes a map of [batches, tokens, heads, width]; false where that is not possible.
inline bool encode_map(CUtensorMap& map, const TokenRows& rows, Dtype dtype, std::int64_t batches,
                       std::int64_t tokens, int heads, int width, const TmaTileShape& tile) {
    static const auto encode = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                               &found),
              "cuTensorMapEncodeTiled");
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
    }();
    if (!mappable(rows, dtype, width)) return false;
    const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(heads),
                                 static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(batches)};
    const cuuint64_t strides[3] = {static_cast<cuuint64_t>(rows.head) * 2,
                                   static_cast<cuuint64_t>(rows.token) * 2,
                                   static_cast<cuuint64_t>(rows.batch) * 2};
    const cuuint32_t size[4] = {static_cast<cuuint32_t>(tile.channels), 1,
                                static_cast<cuuint32_t>(tile.tokens), 1},
                     steps[4] = {1, 1, 1, 1};
    return encode &&
           encode(
               &map,
               dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
               4, rows.data, sizes, strides, size, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, tile.swizzle,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The maps of a carry that reads v; k (and q, if `outputs`) if `keys`; and that writes o if `outputs`. A
// backward call may have no o.
inline CarryMaps carry_maps(const DeviceArgs& a, Dtype dtype, bool keys, bool outputs, int tile_tokens) {
    CarryMaps maps;
    const std::int64_t batches = a.cu_seqlens ? 1 : a.sequences;
    const int heads = a.value_heads / a.group;
    const auto map = [&](CUtensorMap& to, const TokenRows& rows, int of_heads, int width) {
        return encode_map(to, rows, dtype, batches, a.tokens, of_heads, width,
                          {kTmaChannels, tile_tokens, CU_TENSOR_MAP_SWIZZLE_128B});
    };
    maps.inputs =
        map(maps.v, a.v, a.value_heads, a.value_dim) &&
        (!keys || (map(maps.k, a.k, heads, a.key_dim) && (!outputs || map(maps.q, a.q, heads, a.key_dim))));
    maps.outputs = outputs && a.o.data && map(maps.o, a.o, a.value_heads, a.value_dim);
    return maps;
}

}  // namespace cula::cuda
