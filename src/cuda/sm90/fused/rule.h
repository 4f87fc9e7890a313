// SPDX-License-Identifier: Apache-2.0
// Which algorithms the fused prefill is written for.
#pragma once

#include "cula/algorithm.h"

namespace cula::cuda::sm90 {

constexpr bool fuses(Update update) {
    switch (update) {
        case Update::kAdditive: return false;
        case Update::kDelta: return true;
        case Update::kErase:
        case Update::kProduct:
        case Update::kDplr: return false;
    }
    return false;
}

}  // namespace cula::cuda::sm90
