// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "cuda/sm80/decode.cuh"
#include "cuda/sm80/step_launch.cuh"

namespace cula::cuda::sm80 {

template <class State>
bool packed(const States& s, int key_dim, int whole) {
    return !s.data || (s.dtype == kDtype<State> && s.k == 1 && key_dim == whole && (s.v | s.head | s.slot) % 4 == 0 &&
                       reinterpret_cast<std::uintptr_t>(s.data) % (4 * sizeof(State)) == 0);
}

// passes: of a CTA over kRows * 16 value rows each.
template <class State, int kKey, int kRows>
void launch_decode(const Call& call, int passes) {
    const DeviceArgs& a = call.args;
    const int block_rows = passes * kRows * kRowsPerPass, blocks = (a.value_dim + block_rows - 1) / block_rows;
    launch(decode<State, kKey, kRows>, static_cast<std::size_t>(a.sequences) * a.value_heads * blocks, kStepThreads, 0,
           call.stream, a, passes, blocks);
}

template <class State, int kKey>
bool launch_step_packed(const Call& call) {
    const DeviceArgs& a = call.args;
    const bool whole = packed<State>(a.initial, a.key_dim, kKey) && packed<State>(a.final, a.key_dim, kKey) &&
                       packed<State>(a.snapshots, a.key_dim, kKey) && a.snapshots_token % 4 == 0;
    if (!whole || a.parents.data || a.num_checkpoints || a.chunk_states.data) return false;
    constexpr int kFullRows = 256 / kKey;  // 32 floats of state a thread
    // Few rows a CTA where rows are few, so that every multiprocessor has some.
    const auto enough = [&](int rows) {
        return static_cast<long long>(a.sequences) * a.value_heads * a.value_dim / (rows * kRowsPerPass) >=
               2ll * call.multiprocessors;
    };
    if (a.tokens == 1 && !a.cu_seqlens && !a.state_indices.data && !a.snapshots.data) {
        // All rows of a head in one CTA where there are heads enough: the token is readied once.
        const int passes = (a.value_dim + kFullRows * kRowsPerPass - 1) / (kFullRows * kRowsPerPass);
        if (enough(kFullRows))
            launch_decode<State, kKey, kFullRows>(call, enough(2 * passes * kFullRows) ? passes : 1);
        else
            launch_decode<State, kKey, 1>(call, 1);
        return true;
    }
    if (kFullRows > 1 && enough(kFullRows))
        launch_rows(call, step<State, kKey, kFullRows, true, false>, kFullRows);
    else
        launch_rows(call, step<State, kKey, 1, true, false>, 1);
    return true;
}

}  // namespace cula::cuda::sm80

#define CULA_INSTANTIATE(type, key) template bool cula::cuda::sm80::launch_step_packed<type, key>(const Call&);
