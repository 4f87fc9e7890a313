// SPDX-License-Identifier: Apache-2.0
// The token-by-token kernels (decode.cuh, step.cuh), for compute capability 8.0 and later: decode, verify,
// and the prefills and segments that the chunked kernels decline.
#pragma once

#include <cstddef>

#include "cula/cula.h"

namespace cula::cuda::recurrent {

// All kernels here need no workspace. run() enqueues on the context's stream.
Support supports(const Problem& problem);
std::size_t workspace_bytes(const Args& args, const Context& context);
void run(const Args& args, const Context& context);

}  // namespace cula::cuda::recurrent
