// SPDX-License-Identifier: Apache-2.0
// The functions of the template instances that entry.cc calls. nvcc compiles one instance per file
// (instances.txt).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "cuda/call.h"

namespace cula::cuda::sm80 {

// The chunked prefill of inputs of type T with at most kKey key channels: outputs and final states, or, where
// the arguments ask for them, the affine maps of whole sequences.
template <class T, int kKey, bool kPerChannel>
std::size_t prefill_workspace_bytes(const Call& call);
template <class T, int kKey, bool kPerChannel>
std::size_t prefill_kept_bytes(const Call& call);
template <class T, int kKey, bool kPerChannel>
void launch_prefill(const Call& call);

}  // namespace cula::cuda::sm80
