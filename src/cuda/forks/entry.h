// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/forks.h"
#include "cula/cula.h"

namespace cula::cuda::forks {

// core/forks.h, on a device.
void settle(const Args& args, const SettledIndices& to, const Context& context);

}  // namespace cula::cuda::forks
