// SPDX-License-Identifier: Apache-2.0
// gradient_left: the chunks that gradient_anchored has left (GradientScratch::left), as gradient_channel
// differentiates them, whose phases and budgets these are.
//
// Grid: one CTA per multiprocessor. Each first looks through its marks, of which calls with ordinary decays
// have none, and then goes through the chunks and heads that are marked.
#pragma once

#include "cuda/backward/gradient_channel.cuh"

namespace cula::cuda::backward {

// Puts dV and dO, which the return has left where the call has them (Saved::by_rows), into the slices of a
// chunk and head. By all threads of a CTA.
template <class T, int kKey, bool kSolves>
__device__ __forceinline__ void add_rows_to_slices(const DeviceArgs& a, const Gradients& d,
                                                   const Saved<T, kKey>& saved, const ChannelPlace& place) {
    constexpr int kMatrix = kSavedMatrix / static_cast<int>(sizeof(T));  // elements
    ReturnSlice<T, kKey>* const slices = saved.returned + saved.index(place.slot, place.head, 0);
    const int values = saved.count * kSliceValues;
    const auto add = [&](const TokenRows& rows, auto tensor_of) {
        const T* const first =
            static_cast<const T*>(rows.data) + rows.offset(place.batch, place.begin, place.head);
        // Eight tokens of a value channel: a row of a matrix.
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < Patches<kKey>::kRows / 8 * values;
             i += Patches<kKey>::kThreads) {
            const int eight = i / values, value = i % values;
            alignas(16) T row[8];
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                const bool in = 8 * eight + t < place.count && value < a.value_dim;
                row[t] = in ? first[(8 * eight + t) * rows.token + value] : from_float<T>(0.0f);
            }
            T* const matrix =
                tensor_of(slices[value / kSliceValues]) + (2 * eight + value % kSliceValues / 8) * kMatrix;
            reinterpret_cast<uint4*>(matrix)[value % 8] = *reinterpret_cast<const uint4*>(row);
        }
    };
    add(d.d_o, [](ReturnSlice<T, kKey>& slice) { return slice.d_outputs; });
    if constexpr (kSolves) add(d.d_v, [](ReturnSlice<T, kKey>& slice) { return slice.d_values; });
}

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
        if (saved.by_rows) {
            __syncthreads();
            add_rows_to_slices<T, kKey, kSolves>(a, d, saved, s.place);
        }
        __syncthreads();
        chunk_of.run();
        __syncthreads();
    }
}

}  // namespace cula::cuda::backward
