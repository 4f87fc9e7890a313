// SPDX-License-Identifier: Apache-2.0
// Interface to the instances of compose (instances.txt), which entry.cc and the launches of prefills and
// backward passes call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device_args.h"

namespace cula::cuda::chunked {

// Rows of a tile. Equal to the parts of a sum, so that after the exchange each lane holds one row.
inline constexpr int kComposeRows = 8;

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
struct CarryParams;
struct Schedule;

// Of a prefill or a segment call: the states before the segments of each sequence, or the map of the whole
// sequence (total). row_tiles: of the rows of S, and of M where that is made.
template <int kKey>
void launch_compose(const DeviceArgs& a, const Schedule& schedule, const CarryParams& p, int row_tiles,
                    bool matrices, bool total, EarlyStarts& early, void* stream);

template <int kKey>
void launch_compose_walks(const DeviceArgs& a, const Schedule& schedule, const WalkMaps& maps,
                          EarlyStarts& early, void* stream);

template <int kKey>
void launch_compose(const GivenMaps& given, std::int64_t sequences, void* stream);

}  // namespace cula::cuda::chunked
