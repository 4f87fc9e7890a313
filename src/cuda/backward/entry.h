// SPDX-License-Identifier: Apache-2.0
// What the chunked backward takes on every architecture, and its three walks (three_walks.h) as a call.
#pragma once

#include <array>

#include "core/kernel.h"
#include "cuda/backward/three_walks.h"
#include "cuda/call.h"
#include "cuda/chunked/plan.h"

namespace cula::cuda::backward {

// wanted: kAny, kWhole or kSegments.
Support supports(const Problem& problem, chunked::StrategyKind wanted);

// What the three walks ask of a call, and their prefills.
Support three_walks_supports(const Problem& problem);
// A planned call of three planned walks, in the order of kWalks. Where two need no plan of their own they may
// be the same. reads_any_d_o: their kernels take a d_o without data for zeros; others get a row of zeros.
using PlannedWalks = std::array<PreparedCallPtr, kWalks.size()>;
PreparedPtr join_walks(PlannedWalks walks, bool reads_any_d_o);
// The sum of what its walks are predicted to take. prefill: a target's candidates of a prefill.
Prediction three_walks_predict(const Problem& problem, chunked::Candidates (*prefill)(Problem));

}  // namespace cula::cuda::backward
