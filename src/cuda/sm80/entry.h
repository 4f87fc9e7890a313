// SPDX-License-Identifier: Apache-2.0
// Entry points of the portable chunked backend, which the kernel registry lists: prefill and segment maps on
// tensor cores by mma.sync, on any NVIDIA GPU from sm_80 on.
#pragma once

#include <cstddef>

#include "cula/cula.h"

namespace cula::cuda::sm80 {

Support supports(const Problem& problem);
std::size_t workspace_bytes(const Args& args, const Context& context);
std::size_t kept_bytes(const Args& args, const Context& context);
void prefill(const Args& args, const Context& context);

}  // namespace cula::cuda::sm80
