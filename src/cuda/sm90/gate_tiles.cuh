// SPDX-License-Identifier: Apache-2.0
// Raw gates of prepare_channel by TMA: one thread loads the gates of a block of 16 tokens. TMA takes no L1
// lines and no load/store wavefronts, which are what bounds prepare_channel.
#pragma once

#include "cuda/chunked/block.cuh"
#include "cuda/pipe/tensor_maps.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/tma.cuh"

namespace cula::cuda::sm90 {

// The interface is described at chunked::NoGateTiles.
template <class T, int kKey>
struct GateTiles {
    static_assert(chunked::Parts<kKey>::kParts == 1);  // a warp's tile has all channels of a row
    CUtensorMap map{};
    bool there = false;

    explicit GateTiles(const DeviceArgs& a) {
        there = a.g.pieces &&
                encode_map(map, a.g, kDtype<T>, a.cu_seqlens ? 1 : a.sequences, a.tokens, a.value_heads,
                           a.key_dim, {kKey, chunked::kBlock, CU_TENSOR_MAP_SWIZZLE_NONE});
    }

    __device__ __forceinline__ bool has(int count) const { return there && count >= chunked::kBlock; }
    __device__ __forceinline__ void ask(std::uint16_t* to, std::uint64_t* full, std::int64_t batch,
                                        std::int64_t token, int value_head, int ahead) const {
        const std::uint32_t barrier = shared_address(full);
        TileCoordinates at{0, value_head, static_cast<int>(token), static_cast<int>(batch)};
        init_barrier(barrier, 1);
        publish_barriers();
        arrive_expecting(barrier, chunked::kBlock * kKey * static_cast<int>(sizeof(*to)));
        tma_load(shared_address(to), map, at, barrier);
        at.token += ahead;
        if (ahead > 0) tma_prefetch(map, at);
    }
    static __device__ __forceinline__ void wait(std::uint64_t* full) {
        wait_barrier(shared_address(full), 0);
    }
};

}  // namespace cula::cuda::sm90
