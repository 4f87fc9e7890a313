// SPDX-License-Identifier: Apache-2.0
// What entry.cc asks of the instances (instances.txt), which nvcc compiles one to a file.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/call.h"

namespace cula::cuda::recurrent {

inline constexpr int kMaxTreeTokens = 256;

// Token by token, on states of type State in whole 16-byte pieces; false where they are not, and nothing is
// launched.
template <class State, int kKey>
bool launch_step_packed(const Call& call);

// The same on any states, and along trees; or the maps of whole sequences.
template <int kKey>
void launch_step_any(const Call& call);

}  // namespace cula::cuda::recurrent
