// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/chunked/erase_operands.cuh"
#include "cuda/chunked/prepare_channel.cuh"
#include "cuda/chunked/prepare_erase.h"
#include "cuda/chunked/target.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::chunked {

template <class T, int kKey>
void launch_erase_operands(const Call& call, const EraseOperands<T>& operands) {
    const std::int64_t runs = EraseOperands<T>::runs(call.args);
    launch<erase_operands<T, kKey>>(
        {.blocks = EraseOperands<T>::template blocks<kKey>(runs), .threads = kEraseThreads}, call.stream,
        call.args, operands.keys, operands.strengths, operands.values, runs);
}

template <class T, int kKey>
void launch_prepare_erase(const Call& call, const DeviceArgs& a, const Schedule& schedule,
                          ChannelChunk<T, kKey>* operands, std::int32_t* is_compensated, EarlyStarts& early) {
    const std::size_t chunks = static_cast<std::size_t>(schedule.slab_end - schedule.slab_begin) *
                               static_cast<std::size_t>(a.value_heads);
    float* const fading = nullptr;  // maps skip no chunks: |I - k e^T| may exceed 1
    using Pieces = ReaderPieces<T, kKey, Reader::kErase>;
    constexpr std::size_t kShared = sizeof(ChannelSmem<kKey>);
    launch<prepare_channel<T, kKey, kKernelsOf<Update::kErase>, NoGateTiles, Reader::kErase>>(
        early({.blocks = chunks,
               .threads = kPrepareThreads,
               .shared_bytes = kShared + Pieces::bytes(a.erase),
               .most_shared_bytes = kShared + 2 * Pieces::kBytes}),
        call.stream, a, NoGateTiles{}, schedule, operands, is_compensated, fading);
}

}  // namespace cula::cuda::chunked

#define CULA_INSTANTIATE(type, key)                                                                  \
    template void cula::cuda::chunked::launch_erase_operands<type, key>(const Call&,                 \
                                                                        const EraseOperands<type>&); \
    template void cula::cuda::chunked::launch_prepare_erase<type, key>(                              \
        const Call&, const DeviceArgs&, const Schedule&, ChannelChunk<type, key>*, std::int32_t*,    \
        EarlyStarts&);
