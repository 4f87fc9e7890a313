// SPDX-License-Identifier: Apache-2.0
// launch_step_packed (instances.h): decode or verify, and with how many rows a CTA.
#pragma once

#include <algorithm>

#include "cuda/pipe/launch.h"
#include "cuda/recurrent/decode.cuh"
#include "cuda/recurrent/instances.h"
#include "cuda/recurrent/verify.cuh"

namespace cula::cuda::recurrent {

// Whether decode can access these states: of type State, K contiguous, rows in aligned pieces.
template <class State, int kKey>
bool packed(const States& s) {
    constexpr int kBytes = StateTile<State, kKey, 1>::kPieceBytes, kElements = kBytes / sizeof(State);
    return !s.data || (s.dtype == kDtype<State> && s.k == 1 && (s.v | s.head | s.slot) % kElements == 0 &&
                       reinterpret_cast<std::uintptr_t>(s.data) % kBytes == 0);
}

// Prefetch distance, in CTAs per multiprocessor. With 400 CTAs in all (H200) a decode of 32 to 256 sequences
// takes the least time; 132 and 800 take 2 and 8 % more.
inline constexpr int kCtasAhead = 3;

// Fills the arguments of a launch whose CTAs have `rows` rows, and its shape. Returns false if decode_args()
// does.
template <class State>
bool decode_launch(const Call& call, int rows, DecodeArgs& args, LaunchShape& shape) {
    const DeviceArgs& a = call.args;
    const int blocks = (a.value_dim + rows - 1) / rows;
    // Without sequences the CTAs of one are launched: they zero the outputs.
    const std::size_t sequences = a.cu_seqlens ? std::max(a.sequences, 1) : a.sequences;
    shape = {.blocks = sequences * a.value_heads * blocks,
             .threads = kStepThreads,
             .early = call.follows && call.settled};
    return decode_args<State>(a, blocks, args);
}

template <class State, int kKey, Keys kKeys, int kRows, int kTokens, bool kFewCtas = false>
bool launch_decode(const Call& call) {
    DecodeArgs args;
    LaunchShape shape;
    if (!decode_launch<State>(call, kRows * kRowsPerPass, args, shape)) return false;
    args.ahead = kCtasAhead * call.multiprocessors;
    launch<decode<State, kKey, kRows, kTokens, kKeys, kFewCtas>>(shape, call.stream, args);
    return true;
}

template <class State, int kKey, Keys kKeys, int kRows>
bool launch_verify(const Call& call) {
    DecodeArgs args;
    LaunchShape shape;
    if (!decode_launch<State>(call, kRows, args, shape)) return false;
    shape.shared_bytes = verify_bytes<State, kKey, kRows>(args);
    shape.most_shared_bytes = sizeof(VerifyShared<State, kKey, kRows>);
    launch<verify<State, kKey, kKeys, kRows>>(shape, call.stream, args);
    return true;
}

template <class State, int kKey, Keys kKeys>
bool launch_step_packed(const Call& call) {
    const DeviceArgs& a = call.args;
    if (a.key_dim != kKey || a.parents.data || a.num_checkpoints || a.chunk_states.data ||
        a.snapshots_token * sizeof(State) % StateTile<State, kKey, 1>::kPieceBytes != 0 ||
        !packed<State, kKey>(a.initial) || !packed<State, kKey>(a.final) || !packed<State, kKey>(a.snapshots))
        return false;
    // CTAs of `rows` rows for each multiprocessor.
    const auto each = [&](int rows) {
        return static_cast<long long>(a.sequences) * a.value_heads * a.value_dim / rows /
               call.multiprocessors;
    };
    if (a.tokens == 1 && !a.cu_seqlens && !a.state_indices.data && !a.snapshots.data &&
        (kKeys != Keys::kSeveral || a.writes == 2)) {
        constexpr int kTokens = kKeys == Keys::kSeveral ? 2 : 1;
        // 16 KiB of states per CTA (8 of float8); less where smaller CTAs are needed to occupy every
        // multiprocessor and, of float32, to shorten the last wave, and where a head has no more rows.
        constexpr int kFullRows = (sizeof(State) < 4 ? 512 : 256) / kKey, kHalfRows = kFullRows / 2;
        const long long ctas = each(kFullRows * kRowsPerPass);
        // Of two writes small grids have fewer CTAs for each multiprocessor, whose threads have more
        // registers.
        constexpr bool kTwo = kTokens == 2, kTwoOf128 = kTwo && kKey == 128 && sizeof(State) == 2;
        if (ctas < (sizeof(State) < 4 ? 1 : 40)) {
            if (kTwoOf128 || (kTwo && each(kRowsPerPass) < 4))
                return launch_decode<State, kKey, kKeys, 1, kTokens, kTwo>(call);
            if constexpr (!kTwoOf128) return launch_decode<State, kKey, kKeys, 1, kTokens>(call);
        }
        if constexpr (kHalfRows == 4)
            if (a.value_dim <= kHalfRows * kRowsPerPass)
                return launch_decode<State, kKey, kKeys, kHalfRows, kTokens>(call);
        if constexpr (kTwoOf128)
            if (ctas < 24) return launch_decode<State, kKey, kKeys, kFullRows, kTokens, true>(call);
        return launch_decode<State, kKey, kKeys, kFullRows, kTokens>(call);
    }
    // Draft tokens go at once where they are few. What a batch-invariant call takes may not depend on the
    // other sequences.
    const bool few = !a.cu_seqlens          ? a.tokens <= kVerifyTokens
                     : a.state_indices.data ? a.state_indices.columns <= kVerifyTokens
                                            : a.tokens <= kVerifyTokens && !a.batch_invariant;
    const bool drafts = a.state_indices.data || !a.final.data;
    // verify contracts states as they are stored, and those of float8 have scales.
    // Low-rank keys read another state than the decayed one; verify has one key a token.
    if constexpr (!std::is_same_v<State, Float8E4M3> && (kKeys == Keys::kOne || kKeys == Keys::kErase))
        if (few && drafts && a.q.dtype != Dtype::kFloat32) {
            // Two tiles share a CTA's tokens where that leaves enough CTAs. They give the bits of one.
            if constexpr (sizeof(State) == 2 && kKey <= 128)
                if (a.value_dim > kVerifyRows && each(2 * kVerifyRows) >= 4)
                    return launch_verify<State, kKey, kKeys, 2 * kVerifyRows>(call);
            return launch_verify<State, kKey, kKeys, kVerifyRows>(call);
        }
    constexpr int kFullRows = 256 / kKey;
    return each(kFullRows * kRowsPerPass) >= 4 ? launch_decode<State, kKey, kKeys, kFullRows, 4>(call)
                                               : launch_decode<State, kKey, kKeys, 1, 4>(call);
}

}  // namespace cula::cuda::recurrent
