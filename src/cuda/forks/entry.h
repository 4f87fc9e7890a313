// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/forks.h"
#include "cula/cula.h"

namespace cula::cuda::forks {

// settle_forks of core/forks.h, on a device. `to` points to device memory. Enqueues on the context's stream;
// the kernels of the call follow on the same stream.
void settle(const Args& args, const SettledIndices& to, const Context& context);

}  // namespace cula::cuda::forks
