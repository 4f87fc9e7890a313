// SPDX-License-Identifier: Apache-2.0
// What entry.cc asks of the instances (instances.txt), which nvcc compiles one to a file.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "cuda/call.h"

namespace cula::cuda::sm80 {

// Chunked prefill of T inputs with at most kKey key channels: o and final states, or where the arguments ask
// for them the maps of whole sequences.
template <class T, int kKey, bool kPerChannel>
std::size_t prefill_workspace_bytes(const Call& call);
template <class T, int kKey, bool kPerChannel>
std::size_t prefill_kept_bytes(const Call& call);
template <class T, int kKey, bool kPerChannel>
void launch_prefill(const Call& call);

}  // namespace cula::cuda::sm80
