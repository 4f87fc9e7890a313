// SPDX-License-Identifier: Apache-2.0
// The module that Python imports. The operators register themselves (bindings/torch); kernel-builder writes
// registration.h.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
