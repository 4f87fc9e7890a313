// SPDX-License-Identifier: Apache-2.0
// Tensor maps (TMA descriptors) of the rows of q, k, v, o and g. A TMA tile of the carry is the rows of a
// chunk x 64 channels of a head, and lies in shared memory as one panel of a Tile (chunked/chunk.cuh).
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>
#include <array>
#include <cstddef>
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
    int channels, rows;
    CUtensorMapSwizzle swizzle;
    // If not 0, the tile has so many rows for each token, of which the tensor has one, and its place is given
    // by WriteCoordinates. Otherwise rows are tokens.
    int writes = 0;
};

// Whether cuTensorMapEncodeTiled (CUDA driver API) can encode such rows.
inline bool mappable(const TokenRows& rows, Dtype dtype, int width) {
    constexpr std::int64_t kMostStride = (std::int64_t{1} << 40) / 2;
    return rows.dtype == dtype && (rows.batch | rows.token | rows.head | width) % 8 == 0 &&
           std::min({rows.batch, rows.token, rows.head}) >= 0 &&
           std::max({rows.batch, rows.token, rows.head}) < kMostStride &&
           reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0;
}

// Encodes a map of [batches, tokens, heads, width], or, for a tile with writes, of [batches, tokens, 1,
// heads, width]; false where that is not possible.
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
    struct Dimension {
        std::int64_t size, stride;  // in elements
        int tile;
    };
    std::array<Dimension, 5> dimensions{{{width, 1, tile.channels}, {heads, rows.head, 1}}};
    std::size_t rank = 2;
    if (tile.writes) dimensions[rank++] = {1, rows.token, tile.writes};
    dimensions[rank++] = {tokens, rows.token, tile.rows / std::max(tile.writes, 1)};
    dimensions[rank++] = {batches, rows.batch, 1};
    cuuint64_t sizes[5], bytes[5];
    cuuint32_t of_tile[5], steps[5];
    for (std::size_t i = 0; i < rank; ++i) {
        sizes[i] = static_cast<cuuint64_t>(dimensions[i].size);
        bytes[i] = static_cast<cuuint64_t>(dimensions[i].stride) * 2;
        of_tile[i] = static_cast<cuuint32_t>(dimensions[i].tile), steps[i] = 1;
    }
    return encode && encode(&map,
                            dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                            static_cast<cuuint32_t>(rank), rows.data, sizes, bytes + 1, of_tile, steps,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, tile.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// What a carry reads and writes by its maps: v; k (and q, if `outputs`) if `keys`; o if `outputs`. A backward
// call may have no o.
struct CarryTiles {
    bool keys, outputs;
    int rows;  // of a chunk
    // Whether tokens may write several times. Then q has rows of tokens, and either o or, in the return of a
    // backward pass, v (which is d_o) has.
    bool several = false, returns = false;
};
inline CarryMaps carry_maps(const DeviceArgs& a, Dtype dtype, const CarryTiles& of) {
    CarryMaps maps;
    const std::int64_t batches = a.cu_seqlens ? 1 : a.sequences;
    const int heads = a.value_heads / a.group;
    const auto map = [&](CUtensorMap& to, const TokenRows& rows, int of_heads, int width, bool of_tokens) {
        const int writes = of.several && of_tokens ? a.writes : 0;
        return encode_map(to, rows, dtype, batches, a.tokens / std::max(writes, 1), of_heads, width,
                          {kTmaChannels, of.rows, CU_TENSOR_MAP_SWIZZLE_128B, writes});
    };
    maps.inputs = map(maps.v, a.v, a.value_heads, a.value_dim, of.returns) &&
                  (!of.keys || (map(maps.k, a.k, heads, a.key_dim, false) &&
                                (!of.outputs || map(maps.q, a.q, heads, a.key_dim, true))));
    maps.outputs = of.outputs && a.o.data && map(maps.o, a.o, a.value_heads, a.value_dim, !of.returns);
    return maps;
}

}  // namespace cula::cuda
