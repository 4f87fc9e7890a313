// SPDX-License-Identifier: Apache-2.0
// The launchers that entry.cc calls. instances.txt lists the types and K that they are instantiated for; nvcc
// compiles one instance per file.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/float8.h"
#include "cuda/call.h"
#include "cuda/recurrent/keys.h"

namespace cula::cuda::recurrent {

// Draft tokens per sequence of a tree (step.cuh keeps a path in shared memory).
inline constexpr int kMaxTreeTokens = 256;

// Launches decode or verify on states of type State (float, __nv_bfloat16, __half or Float8E4M3): K
// contiguous, rows aligned to 16 bytes (to 8 of float8 with K = 64). Returns false, and launches nothing, if
// the states are not like that or the call asks for what only step computes.
template <class State, int kKey, Keys kKeys>
bool launch_step_packed(const Call& call);

// What it is instantiated for. Rules with low-rank keys, or with several, have heads of 64 or 128 channels.
template <class State, int kKey, Keys kKeys>
inline constexpr bool kIsPacked =
    kKeys == Keys::kOne || kKeys == Keys::kErase || (kKey <= 128 && !std::is_same_v<State, Float8E4M3>);

// Launches step: on any states, along trees, or for the affine maps of whole sequences (Call::segment).
template <int kKey>
void launch_step_any(const Call& call);

// The same for rules whose tokens write several times, and for those with low-rank keys.
template <int kKey>
void launch_step_several(const Call& call);
template <int kKey>
void launch_step_low_rank(const Call& call);

}  // namespace cula::cuda::recurrent
