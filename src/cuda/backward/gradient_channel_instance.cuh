// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/backward/launch_gradients.cuh"

#define CULA_INSTANTIATE(type, key) CULA_INSTANTIATE_GRADIENTS(type, key, true)
