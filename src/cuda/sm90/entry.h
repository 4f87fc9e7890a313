// SPDX-License-Identifier: Apache-2.0
// Entry points of the Hopper backend, which the kernel registry lists: compute capability 9.0 only.
#pragma once

#include <cstddef>

#include "cula/cula.h"

namespace cula::cuda::sm90 {

// Prefill, and segment maps, in chunks; KDA by the fused prefill where that costs less.
Support supports(const Problem& problem);
std::size_t workspace_bytes(const Args& args, const Context& context);
std::size_t kept_bytes(const Args& args, const Context& context);
void prefill(const Args& args, const Context& context);

// The fused prefill for every problem that it supports, whatever it costs; prefill() chooses by cost.
Support supports_fused(const Problem& problem);
std::size_t fused_workspace_bytes(const Args& args, const Context& context);
void prefill_fused(const Args& args, const Context& context);

}  // namespace cula::cuda::sm90
