// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/chunked/low_rank_rows.cuh"
#include "cuda/chunked/prepare_channel.cuh"
#include "cuda/chunked/schedule.h"
#include "cuda/chunked/target.h"
#include "cuda/limits.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::chunked {

template <class T, int kKey>
void launch_low_rank_rows(const Call& call, const TokenRows& d_o, const LowRankWorkspace<T>& to) {
    DeviceArgs counted = call.args;
    counted.writes = 2;
    launch_count_writes<kAnyKey>(counted, to.timeline, call.stream);
    const std::int64_t count = EraseOperands<T>::rows(call.args);
    launch<low_rank_rows<T, kKey>>(
        {.blocks = EraseOperands<T>::template blocks<kKey>(count), .threads = kEraseThreads}, call.stream,
        call.args, d_o, to.made, count);
}

template <class T, int kKey>
void launch_low_rank_outputs(const Call& call, const TokenRows& to, const TokenRows& rows) {
    const std::int64_t count = EraseOperands<T>::rows(call.args);
    launch<low_rank_outputs<T, kKey>>(
        {.blocks = EraseOperands<T>::template blocks<kKey>(count), .threads = kEraseThreads}, call.stream,
        call.args, to, rows, count);
}

template <class T, int kKey>
void launch_prepare_low_rank(const Call& call, const DeviceArgs& a, const Schedule& schedule,
                             ChannelChunk<T, kKey>* operands, std::int32_t* is_compensated,
                             EarlyStarts& early) {
    const std::size_t chunks = static_cast<std::size_t>(schedule.slab_end - schedule.slab_begin) *
                               static_cast<std::size_t>(a.value_heads);
    float* const fading = nullptr;  // maps skip no chunks: |diag(decay) + a b^T| may exceed 1
    launch<prepare_channel<T, kKey, Update::kDelta, NoGateTiles, Reader::kUndecayed>>(
        early(
            {.blocks = chunks,
             .threads = kPrepareThreads,
             .shared_bytes = sizeof(ChannelSmem<kKey>) + ReaderPieces<T, kKey, Reader::kUndecayed>::kBytes}),
        call.stream, a, NoGateTiles{}, schedule, operands, is_compensated, fading);
}

}  // namespace cula::cuda::chunked

#define CULA_INSTANTIATE(type, key)                                                                      \
    template void cula::cuda::chunked::launch_low_rank_rows<type, key>(const Call&, const TokenRows&,    \
                                                                       const LowRankWorkspace<type>&);   \
    template void cula::cuda::chunked::launch_low_rank_outputs<type, key>(const Call&, const TokenRows&, \
                                                                          const TokenRows&);             \
    template void cula::cuda::chunked::launch_prepare_low_rank<type, key>(                               \
        const Call&, const DeviceArgs&, const Schedule&, ChannelChunk<type, key>*, std::int32_t*,        \
        EarlyStarts&);
