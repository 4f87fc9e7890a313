// SPDX-License-Identifier: Apache-2.0
// Tensor maps of dO and dV, for gradient kernels that read them by rows.
#pragma once

#include "cuda/backward/gradients.h"
#include "cuda/backward/saved.cuh"
#include "cuda/chunked/chunk.cuh"
#include "cuda/pipe/tensor_maps.h"

namespace cula::cuda::sm90::gradients {

// Encodes the maps of dO and, of rules that solve, dV, of which chunks are tiles in the 128-byte swizzle;
// false where there are none.
template <class T>
bool encode_rows(backward::FromRows& rows, const DeviceArgs& a, const backward::Gradients& d, bool solves) {
    const auto encode = [&](CUtensorMap& map, const TokenRows& of) {
        return of.data && encode_map(map, of, kDtype<T>, a.cu_seqlens ? 1 : a.sequences, a.tokens,
                                     a.value_heads, a.value_dim,
                                     {.channels = kTmaChannels,
                                      .rows = chunked::kTokens<128>,
                                      .swizzle = CU_TENSOR_MAP_SWIZZLE_128B});
    };
    return encode(rows.d_o, d.d_o) && (!solves || encode(rows.d_v, d.d_v));
}

}  // namespace cula::cuda::sm90::gradients
