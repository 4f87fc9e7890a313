// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cula/problem.h"

namespace cula::cuda {

// The CUDA device of this number. Throws Error if there is none.
Device device(int index);

}  // namespace cula::cuda
