// SPDX-License-Identifier: Apache-2.0
// For which algorithms the gradients are three walks of a prefill's carry (three_walks.h).
#pragma once

#include "cula/algorithm.h"

namespace cula::cuda::backward {

constexpr bool has_three_walks(Algorithm algorithm) {
    switch (algorithm.update) {
        case Update::kAdditive:
            return !varies_by_token(algorithm.decay) && !varies_by_channel(algorithm.decay);
        case Update::kDelta:
        case Update::kErase:
        case Update::kProduct:
        case Update::kDplr: return false;
    }
    return false;
}

}  // namespace cula::cuda::backward
