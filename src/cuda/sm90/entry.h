// SPDX-License-Identifier: Apache-2.0
// The Hopper backend as rows of the registry: compute capability 9.0 alone.
#pragma once

#include <cstddef>

#include "cula/cula.h"

namespace cula::cuda::sm90 {

// Prefill and segment maps.
Support supports(const Problem& problem);
std::size_t workspace_bytes(const Args& args, const Context& context);
std::size_t kept_bytes(const Args& args, const Context& context);
void prefill(const Args& args, const Context& context);

// Prefill by one kernel where it can, whatever that costs; prefill() chooses by cost.
Support supports_fused(const Problem& problem);
std::size_t fused_workspace_bytes(const Args& args, const Context& context);
void prefill_fused(const Args& args, const Context& context);

}  // namespace cula::cuda::sm90
