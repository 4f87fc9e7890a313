// SPDX-License-Identifier: Apache-2.0
// Token after token, on any NVIDIA GPU from sm_80 on: decode, verify, and whatever prefill the chunks
// decline.
#pragma once

#include <cstddef>

#include "cula/cula.h"

namespace cula::cuda::recurrent {

Support supports(const Problem& problem);
std::size_t workspace_bytes(const Args& args, const Context& context);
void run(const Args& args, const Context& context);

}  // namespace cula::cuda::recurrent
