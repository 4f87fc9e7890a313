// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cula/problem.h"

namespace cula::cuda {

Device device(int index);

}  // namespace cula::cuda
