// SPDX-License-Identifier: Apache-2.0
// gradient_left: the chunks that gradient_anchored has left (GradientScratch::left), as gradient_channel
// differentiates them, whose phases and budgets these are.
//
// Grid: one CTA per multiprocessor. Each first looks through its marks, of which calls with ordinary decays
// have none, and then goes through the chunks and heads that are marked.
#pragma once

#include "cuda/backward/gradient_channel.cuh"

namespace cula::cuda::backward {

template <class T, int kKey, Update kUpdate, Reader kReader = Reader::kKey>
__global__ void __launch_bounds__(Patches<kKey>::kThreads, Patches<kKey>::kCtas)
    gradient_left(const __grid_constant__ DeviceArgs a, const chunked::Schedule schedule,
                  const __grid_constant__ Gradients d, const Saved<T, kKey> saved,
                  const GradientScratch scratch) {
    using P = Patches<kKey>;
    constexpr bool kSolves = GradientRule<kUpdate>::kSolves;
    extern __shared__ __align__(128) unsigned char raw[];
    auto& s = *reinterpret_cast<GradientChannelSmem<T, kKey>*>(raw);

    pdl_trigger_and_wait();
    const int items = (schedule.slab_end - schedule.slab_begin) * a.heads,
              first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x),
              thread = static_cast<int>(threadIdx.x);
    int any = 0;
    for (int i = first + thread * step; i < items; i += P::kThreads * step) any |= scratch.left[i];
    if (!__syncthreads_or(any)) return;
#pragma unroll 1
    for (int item = first; item < items; item += step) {
        if (!scratch.left[item]) continue;
        const int slot = item / a.heads;
        const chunked::ChunkPlace chunk = chunked::place_of<P::kRows>(a, schedule, slot);
        ChannelGradient<T, kKey, kSolves, kReader> chunk_of{a, schedule, d, saved, scratch, s};
        if (thread == 0) s.place = {chunk.batch, chunk.count, slot, item - slot * a.heads, chunk.begin};
        __syncthreads();
        chunk_of.run();
        __syncthreads();
    }
}

}  // namespace cula::cuda::backward
