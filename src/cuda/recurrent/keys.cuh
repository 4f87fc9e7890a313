// SPDX-License-Identifier: Apache-2.0
// The keys that tokens have besides q and k (keys.h), in shared memory and as they were loaded: erase
// and low-rank keys. Other tokens have none here.
#pragma once

#include "cuda/recurrent/keys.h"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::recurrent {

// Of kTokens tokens, in shared memory.
template <Keys kKeys, int kTokens, int kKey>
struct OtherKeys {};
template <int kTokens, int kKey>
struct alignas(16) OtherKeys<Keys::kErase, kTokens, kKey> {
    float e[kTokens][kKey];
};
template <int kTokens, int kKey>
struct alignas(16) OtherKeys<Keys::kLowRank, kTokens, kKey> {
    float a[kTokens][kKey], b[kTokens][kKey];
};

// b . q of kTokens tokens, in kParts partial sums.
template <Keys kKeys, int kTokens, int kParts>
struct OtherSums {};
template <int kTokens, int kParts>
struct alignas(16) OtherSums<Keys::kLowRank, kTokens, kParts> {
    float bq[kTokens][kParts];
};

// A thread's erase strengths, or its channels of a and b, as they were loaded.
template <Keys kKeys, int kCount>
struct RawKeys {};
template <int kCount>
struct RawKeys<Keys::kErase, kCount> {
    RawFloat erase[kCount];
};
template <int kCount>
struct RawKeys<Keys::kLowRank, kCount> {
    RawFloat a_key[kCount], b_key[kCount];
};

// An erase strength for 16-bit inputs: most * sigmoid(x) of a logit, or x itself. For float32 inputs it is
// beta_exact, which many channels of a thread would take much code for.
__device__ __forceinline__ float erase_strength(float x, bool is_logit, float most) {
    return is_logit ? most * sigmoid(x) : x;
}

}  // namespace cula::cuda::recurrent
