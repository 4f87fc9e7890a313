// SPDX-License-Identifier: Apache-2.0
// An instance of launch_step_packed (instances.h).
#pragma once

#include <algorithm>

#include "cuda/pipe/launch.h"
#include "cuda/recurrent/decode.cuh"
#include "cuda/recurrent/instances.h"

namespace cula::cuda::recurrent {

// Whether decode can access these states: of type State, K contiguous, rows in aligned groups of four.
template <class State>
bool packed(const States& s) {
    return !s.data || (s.dtype == kDtype<State> && s.k == 1 && (s.v | s.head | s.slot) % 4 == 0 &&
                       reinterpret_cast<std::uintptr_t>(s.data) % (4 * sizeof(State)) == 0);
}

// Prefetch distance, in CTAs per multiprocessor. With 400 CTAs in all (H200) a decode of 32 to 256 sequences
// takes the least time; 132 and 800 take 2 and 8 % more.
inline constexpr int kCtasAhead = 3;

template <class State, int kKey, int kRows, int kTokens>
bool launch_decode(const Call& call) {
    const DeviceArgs& a = call.args;
    const int blocks = (a.value_dim + kRows * kRowsPerPass - 1) / (kRows * kRowsPerPass);
    DecodeArgs args;
    if (!decode_args<State>(a, blocks, args)) return false;
    args.ahead = kCtasAhead * call.multiprocessors;
    // Without sequences the CTAs of one are launched: they zero the outputs.
    const std::size_t sequences =
        a.cu_seqlens ? static_cast<std::size_t>(std::max(a.sequences, 1)) : a.sequences;
    launch<decode<State, kKey, kRows, kTokens>>(
        {.blocks = sequences * a.value_heads * blocks, .threads = kStepThreads}, call.stream, args);
    return true;
}

template <class State, int kKey>
bool launch_step_packed(const Call& call) {
    const DeviceArgs& a = call.args;
    if (a.key_dim != kKey || a.parents.data || a.num_checkpoints || a.chunk_states.data ||
        a.snapshots_token % 4 != 0 || !packed<State>(a.initial) || !packed<State>(a.final) ||
        !packed<State>(a.snapshots))
        return false;
    constexpr int kFullRows = 256 / kKey;  // 32 floats of the state per thread
    // With fewer than 40 CTAs per multiprocessor a thread has one row: smaller CTAs occupy every
    // multiprocessor and shorten the last wave.
    const bool many =
        static_cast<long long>(a.sequences) * a.value_heads * a.value_dim / (kFullRows * kRowsPerPass) >=
        40ll * call.multiprocessors;
    if (a.tokens == 1 && !a.cu_seqlens && !a.state_indices.data && !a.snapshots.data)
        return many ? launch_decode<State, kKey, kFullRows, 1>(call) : launch_decode<State, kKey, 1, 1>(call);
    return many ? launch_decode<State, kKey, kFullRows, 4>(call) : launch_decode<State, kKey, 1, 4>(call);
}

}  // namespace cula::cuda::recurrent

#define CULA_INSTANTIATE(type, key) \
    template bool cula::cuda::recurrent::launch_step_packed<type, key>(const Call&);
