// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "core/carve.h"
#include "cuda/pipe/launch.h"
#include "cuda/sm80/carry.cuh"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/prepare.cuh"
#include "cuda/sm80/schedule.cuh"

namespace cula::cuda::sm80 {

template <class T, int kKey>
struct PrefillWorkspace {
    std::int32_t *first_chunk, *order;
    ChunkImage<T, kKey>* images;
    std::int32_t max_chunks;
    std::size_t bytes;

    PrefillWorkspace(const DeviceArgs& a, void* base) {
        constexpr int kTokens = kRows<kKey>;
        Carver carver(base);
        const std::int64_t chunks = a.cu_seqlens ? a.tokens / kTokens + a.sequences
                                                 : (a.tokens + kTokens - 1) / kTokens * a.sequences;
        max_chunks = static_cast<std::int32_t>(chunks);
        first_chunk = carver.take<std::int32_t>(a.sequences + 1);
        order = carver.take<std::int32_t>(a.sequences);
        images = carver.take<ChunkImage<T, kKey>>(chunks * a.value_heads);
        bytes = carver.bytes();
    }
};

template <class T, int kKey>
std::size_t prefill_workspace_bytes(const DeviceArgs& args) {
    return PrefillWorkspace<T, kKey>(args, nullptr).bytes;
}

template <class T, int kKey>
void launch_prefill(const Call& call) {
    const DeviceArgs& a = call.args;
    const PrefillWorkspace<T, kKey> w(a, call.workspace);
    Schedule chunks;
    chunks.chunk_rows = kRows<kKey>;
    chunks.max_chunks = w.max_chunks;
    if (a.cu_seqlens) {
        launch(schedule, 1, kScheduleThreads, 0, call.stream, a, kRows<kKey>, w.first_chunk, w.order);
        chunks.first_chunk = w.first_chunk;
        chunks.order = w.order;
    }
    launch(prepare<T, kKey>, static_cast<std::size_t>(w.max_chunks) * a.value_heads, 2 * kKey, sizeof(PrepareSmem<T, kKey>),
           call.stream, a, chunks, w.images);

    CarryParams p;
    // Two blocks of value rows a head where heads alone leave half of the processors idle.
    const int tiles = (a.value_dim + kWarpRows - 1) / kWarpRows;
    const long long heads = static_cast<long long>(a.sequences) * a.value_heads;
    int warps = tiles < kMaxCarryWarps ? tiles : kMaxCarryWarps;
    while (warps > 4 && heads * ((tiles + warps - 1) / warps) < call.multiprocessors) warps = (warps + 1) / 2;
    p.value_blocks = (tiles + warps - 1) / warps;
    p.stages = 2 * sizeof(CarryStage<T, kKey>) <= call.shared_bytes_limit ? 2 : 1;
    const auto go = [&](auto* kernel) {
        launch(kernel, static_cast<std::size_t>(heads) * p.value_blocks, warps * 32, p.stages * sizeof(CarryStage<T, kKey>),
               call.stream, a, chunks, w.images, p);
    };
    if (a.algorithm.update == Update::kDelta)
        go(carry<T, kKey, true>);
    else
        go(carry<T, kKey, false>);
}

}  // namespace cula::cuda::sm80

#define CULA_INSTANTIATE(type, key)                                                                     \
    template std::size_t cula::cuda::sm80::prefill_workspace_bytes<type, key>(const DeviceArgs&);       \
    template void cula::cuda::sm80::launch_prefill<type, key>(const Call&);
