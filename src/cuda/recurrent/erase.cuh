// SPDX-License-Identifier: Apache-2.0
// What tokens have besides under rules with erase strengths (takes_erase): the erase key e = erase o k, which
// reads the state in the place of k. Without kErases all of it is empty, and k reads.
#pragma once

#include "cuda/tile/convert.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::recurrent {

// The erase keys of kTokens tokens, in shared memory.
template <bool kErases, int kTokens, int kKey>
struct EraseKeys {};
template <int kTokens, int kKey>
struct alignas(16) EraseKeys<true, kTokens, kKey> {
    float e[kTokens][kKey];
};

// A thread's erase strengths, as they were loaded.
template <bool kErases, int kCount>
struct RawErase {};
template <int kCount>
struct RawErase<true, kCount> {
    RawFloat erase[kCount];
};

// An erase strength for 16-bit inputs: most * sigmoid(x) of a logit, or x itself. For float32 inputs it is
// beta_exact, which many channels of a thread would take much code for.
__device__ __forceinline__ float erase_strength(float x, bool is_logit, float most) {
    return is_logit ? most * sigmoid(x) : x;
}

}  // namespace cula::cuda::recurrent
