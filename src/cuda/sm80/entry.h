// SPDX-License-Identifier: Apache-2.0
// The portable CUDA backend as rows of the registry: any NVIDIA GPU from sm_80 on.
#pragma once

#include <cstddef>

#include "core/forks.h"
#include "cula/cula.h"

namespace cula::cuda::sm80 {

// Chunks on tensor cores: prefill and segment maps.
Support supports_prefill(const Problem& problem);
std::size_t prefill_workspace_bytes(const Args& args, const Context& context);
std::size_t prefill_kept_bytes(const Args& args, const Context& context);
void prefill(const Args& args, const Context& context);

// Maps that were gathered, applied one after the other.
void compose(const Composition& given, const Context& context);

// core/forks.h.
void settle_forks(const Args& args, const SettledIndices& to, const Context& context);

// Token after token: decode, verify, and whatever prefill the chunks decline.
Support supports_step(const Problem& problem);
std::size_t step_workspace_bytes(const Args& args, const Context& context);
void step(const Args& args, const Context& context);

}  // namespace cula::cuda::sm80
