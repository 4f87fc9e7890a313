// SPDX-License-Identifier: Apache-2.0
// Interface between entry.cc and the instances of compose (instances.txt).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device_args.h"

namespace cula::cuda::chunked {

// Arguments of compose() of cula.h as its kernel reads them. Rows are multiples of 16 bytes.
struct GivenMaps {
    struct Rows {
        const float* data = nullptr;
        std::int64_t map = 0, sequence = 0, head = 0, row = 0;  // strides
    };
    Rows m, b;
    const bool* joins = nullptr;
    States state;
    std::int32_t count = 0, value_heads = 0, value_dim = 0, key_dim = 0;
    bool matrices = false;  // m holds matrices; otherwise diagonals
};

template <int kKey>
void launch_compose(const GivenMaps& given, std::int64_t sequences, void* stream);

}  // namespace cula::cuda::chunked
