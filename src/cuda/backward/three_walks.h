// SPDX-License-Identifier: Apache-2.0
// The gradients of additive rules whose decay is the same for every token, as three walks of a prefill's
// carry (docs/design/three-walks.md). Each is a prefill with the call's tensors in other places:
//
//   walk     from         q     k     v     o     state before      state after
//   kQuery   first token  d_o   v     k     d_q   initial, [K, V]   -
//   kKey     last token   v     d_o   q     d_k   d_final, [K, V]   -
//   kValue   last token   k     q     d_o   d_v   d_final           d_initial
#pragma once

#include <array>
#include <cstdint>

#include "cuda/backward/gradients.h"
#include "cuda/device_args.h"
#include "cula/problem.h"
#include "cula/status.h"

namespace cula::cuda::backward {

enum class Walk : std::uint8_t { kQuery, kKey, kValue };
inline constexpr std::array kWalks{Walk::kQuery, Walk::kKey, Walk::kValue};

inline constexpr int kMostWalkChannels = 128;  // K and V

// Whether the state of a walk is that of the call transposed: values are its keys, and the other way round.
constexpr bool is_transposed(Walk walk) { return walk != Walk::kValue; }

// What the walks ask of a backward call beside what their prefills do.
Support takes_three_walks(const Problem& problem);

// A backward call's walk as a prefill.
Problem walk_problem(const Problem& problem, Walk walk);

// Its arguments, from those of the call.
DeviceArgs walk_args(const DeviceArgs& call, const Gradients& d, Walk walk);

}  // namespace cula::cuda::backward
