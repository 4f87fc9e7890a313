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

// The maps of the segments of both walks of a backward pass, and the states between segments that follow from
// them (compose_walks.cuh): slot i is that of segment i. All are floats, in rows of kKey channels.
struct WalkMaps {
    struct Direction {
        States m, b, states;
    };
    Direction forwards, backwards;  // of a direction without states nothing is made
    bool matrices = false;          // m holds matrices; otherwise diagonals

    CULA_HOST_DEVICE int directions() const { return forwards.states.data && backwards.states.data ? 2 : 1; }
};

class EarlyStarts;
struct Schedule;

template <int kKey>
void launch_compose_walks(const DeviceArgs& a, const Schedule& schedule, const WalkMaps& maps,
                          EarlyStarts& early, void* stream);

template <int kKey>
void launch_compose(const GivenMaps& given, std::int64_t sequences, void* stream);

}  // namespace cula::cuda::chunked
