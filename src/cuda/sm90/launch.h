// SPDX-License-Identifier: Apache-2.0
// What entry.cc asks of the instances (instances.txt), which nvcc compiles one to a file.
#pragma once

#include <cmath>

#include "cuda/sm80/launch.h"

namespace cula::cuda::sm90 {

using sm80::Call;

// Of a fused prefill: what half a chunk of 32 tokens decays at most, in powers of two, so that operands times it are
// floats; and whether gates of such a bound keep to it.
inline constexpr float kMostLog2 = 116.0f;
inline bool bounds_halves(float lower_bound) { return std::fabs(lower_bound) * 1.442696f * 16 <= kMostLog2; }

// As sm80's, for at most 128 key channels.
template <class T, int kKey, bool kPerChannel>
std::size_t prefill_workspace_bytes(const Call& call);
template <class T, int kKey, bool kPerChannel>
std::size_t prefill_kept_bytes(const Call& call);
template <class T, int kKey, bool kPerChannel>
void launch_prefill(const Call& call);

}  // namespace cula::cuda::sm90
