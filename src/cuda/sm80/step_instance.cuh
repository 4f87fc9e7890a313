// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm80/step_launch.cuh"

namespace cula::cuda::sm80 {

template <class State>
bool packed(const States& s, int key_dim, int whole) {
    constexpr int kPack = Pack<State>::kCount;
    return !s.data || (s.dtype == kDtype<State> && s.k == 1 && key_dim == whole && (s.v | s.head | s.slot) % kPack == 0 &&
                       reinterpret_cast<std::uintptr_t>(s.data) % 16 == 0);
}

template <class State, int kKey>
bool launch_step_packed(const Call& call) {
    const DeviceArgs& a = call.args;
    const bool whole = packed<State>(a.initial, a.key_dim, kKey) && packed<State>(a.final, a.key_dim, kKey) &&
                       packed<State>(a.snapshots, a.key_dim, kKey) && a.snapshots_token % Pack<State>::kCount == 0;
    if (!whole || a.parents.data || a.num_checkpoints || a.chunk_states.data) return false;
    // Few rows a CTA where rows are few, so that every multiprocessor has some.
    constexpr int kFullRows = 512 / kKey;  // 64 floats of state a thread
    const long long rows = static_cast<long long>(a.sequences) * a.value_heads * a.value_dim;
    if (rows / (kFullRows * kRowsPerPass) >= 2ll * call.multiprocessors)
        launch_rows(call, step<State, kKey, kFullRows, true, false>, kFullRows);
    else
        launch_rows(call, step<State, kKey, 1, true, false>, 1);
    return true;
}

}  // namespace cula::cuda::sm80

#define CULA_INSTANTIATE(type, key) template bool cula::cuda::sm80::launch_step_packed<type, key>(const Call&);
