// SPDX-License-Identifier: Apache-2.0
// What entry.cc asks of the instances (instances.txt), which nvcc compiles one to a file.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "cuda/call.h"

namespace cula::cuda::sm90 {

// Which gates a fused prefill makes. Bounded ones may decay by what operands have room for in half a chunk of
// 32 tokens, in powers of two; of softplus gates it looks for channels that decay by more.
inline bool fuses_gate(Gate gate, float lower_bound) {
    constexpr float kMostLog2 = 116.0f;
    return gate == Gate::kSoftplus ||
           (gate == Gate::kBounded && std::fabs(lower_bound) * 1.442696f * 16 <= kMostLog2);
}

// As sm80's, for at most 128 key channels.
template <class T, int kKey, bool kPerChannel>
std::size_t prefill_workspace_bytes(const Call& call);
template <class T, int kKey, bool kPerChannel>
std::size_t prefill_kept_bytes(const Call& call);
template <class T, int kKey, bool kPerChannel>
void launch_prefill(const Call& call);

}  // namespace cula::cuda::sm90
