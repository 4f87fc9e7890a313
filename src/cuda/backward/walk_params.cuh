// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/backward/gradients.h"
#include "cuda/backward/saved.cuh"
#include "cuda/chunked/cursor.cuh"

namespace cula::cuda::backward {

// The parameters of both walks of a backward pass, the carry and the return. Of the CTAs of a launch with
// both, and of every launch that makes maps, every second one walks backwards.
//
// Where sequences are cut into segments, the maps of the carry are (M, B), and that of the return is Z -> Z
// M^T + B'. Maps of the carry's first segments start from the sequence's state, and maps of the return's last
// ones from its Z, so that neither needs an M.
template <class T, int kKey>
struct WalkParams : chunked::CarryParams {
    bool walks_forwards = true, walks_backwards = true;
    Saved<T, kKey> saved;  // no slices: nothing is saved
    Gradients d;
    // Z after the slab of the sequence that goes on in the slab behind it; and before it, for the slab ahead.
    States slab_d_end, slab_d_start;
    States ends;                 // Z after segment i: slot i
    States map_m_turned, map_z;  // M^T where M is a matrix, and B': slot i

    std::size_t directions(bool maps) const { return maps || (walks_forwards && walks_backwards) ? 2 : 1; }
    template <bool kMaps>
    __device__ __forceinline__ bool returns(int block) const {
        if (kMaps) return block % 2 == 0;
        return walks_backwards && (!walks_forwards || block % 2 == 0);
    }
    // Among the CTAs that walk in the same direction.
    template <bool kMaps>
    __device__ __forceinline__ int own_block(int block) const {
        return kMaps || (walks_forwards && walks_backwards) ? block / 2 : block;
    }
};

}  // namespace cula::cuda::backward
