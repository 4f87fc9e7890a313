// SPDX-License-Identifier: Apache-2.0
// Tensor maps of dO and dV, for gradient kernels that read them by rows.
#pragma once

#include "cuda/chunked/chunk.cuh"
#include "cuda/pipe/tensor_maps.h"

namespace cula::cuda::sm90::gradients {

// Encodes the map of dO or dV, of which chunks are tiles in the 128-byte swizzle; false where there is none.
template <class T>
bool encode_rows(CUtensorMap& map, const DeviceArgs& a, const TokenRows& rows) {
    return rows.data && encode_map(map, rows, kDtype<T>, a.cu_seqlens ? 1 : a.sequences, a.tokens,
                                   a.value_heads, a.value_dim,
                                   {.channels = kTmaChannels,
                                    .rows = chunked::kTokens<128>,
                                    .swizzle = CU_TENSOR_MAP_SWIZZLE_128B});
}

}  // namespace cula::cuda::sm90::gradients
