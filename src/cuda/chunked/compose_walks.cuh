// SPDX-License-Identifier: Apache-2.0
// compose_walks: the states between segments of both walks of a backward pass.
//
//   carry, from the first segment on     starts[i+1] = starts[i] M[i] + B[i]
//   return, from the last one back       ends[i-1] = ends[i] M[i]^T + B'[i]
//
// starts[i] is the state before segment i, ends[i] the Z after it. The first map of either direction has
// started from the state or Z of the sequence, so its B is the first result as it is.
//
// Grid: one CTA per (tile of 8 rows, value head, direction, sequence), 2 K threads. A thread composes as in
// compose.cuh, with its shared memory and at most 168 registers.
#pragma once

#include "cuda/chunked/compose.cuh"

namespace cula::cuda::chunked {

template <int kKey>
__global__ void __launch_bounds__(kComposeThreads<kKey>)
    compose_walks(const __grid_constant__ DeviceArgs a, const Schedule schedule,
                  const __grid_constant__ WalkMaps maps) {
    pdl_wait();
    pdl_trigger();
    extern __shared__ __align__(128) unsigned char raw[];
    auto& shared = *reinterpret_cast<ComposeSmem<kKey>*>(raw);
    const int block = static_cast<int>(blockIdx.x), tiles = ceil_div(a.value_dim, kComposeRows),
              column = block / tiles / a.value_heads;
    const int tile = block % tiles, value_head = block / tiles % a.value_heads,
              sequence = column / maps.directions();
    const bool backwards = maps.backwards.states.data && (maps.directions() == 1 || column % 2 == 1);
    const WalkMaps::Direction& of = backwards ? maps.backwards : maps.forwards;
    const FirstSegment first(a, schedule, sequence, shared.first);
    if (first.count <= 1) return;

    const ComposedRow<kKey> row(tile, a.value_dim, a.key_dim);
    const int step = backwards ? -1 : 1, begin = first.number + (backwards ? first.count - 1 : 0);
    const std::int64_t of_row = row.row * kKey + row.channel;
    const auto* const b = static_cast<const float*>(of.b.data) + of_row;
    const MapChain chain{static_cast<const float*>(of.m.data) + of.m.offset(begin + step, value_head) +
                             row.channel + (maps.matrices ? 4 * row.part * kKey : 0),
                         b + of.b.offset(begin + step, value_head),
                         step * of.m.slot,
                         step * of.b.slot,
                         kKey,
                         first.count - 2};
    float* state = static_cast<float*>(of.states.data) + of.states.offset(begin + step, value_head) + of_row;
    const auto each = [&](float4 now) {
        *reinterpret_cast<float4*>(state) = now;
        state += step * of.states.slot;
    };
    float4 x{};
    if (row.exists()) each(x = row.own.existing(load_four(b + of.b.offset(begin, value_head))));
    if (maps.matrices)
        row.pass_matrices(x, chain, true, a.key_dim, shared, each);
    else
        row.pass_diagonals(x, chain, true, each);
}

}  // namespace cula::cuda::chunked
