// SPDX-License-Identifier: Apache-2.0
// The token-by-token backward pass (backward_walk.cuh), for compute capability 8.0 and later: calls that the
// chunked backward declines.
#pragma once

#include <cstddef>

#include "cula/cula.h"

namespace cula::cuda::recurrent {

// backward_run() enqueues on the context's stream.
Support backward_supports(const Problem& problem);
std::size_t backward_workspace_bytes(const Args& args, const Context& context);
void backward_run(const Args& args, const Context& context);

}  // namespace cula::cuda::recurrent
