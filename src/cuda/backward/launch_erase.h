// SPDX-License-Identifier: Apache-2.0
// Interface to the instances of what the backward of calls with erase strengths launches besides what the
// delta rule launches (instances.txt).
#pragma once

#include <cstdint>

#include "cuda/backward/gradients.h"
#include "cuda/call.h"

namespace cula::cuda::chunked {
class EarlyStarts;
struct Schedule;
}  // namespace cula::cuda::chunked

namespace cula::cuda::backward {

template <class T, int kKey>
struct Saved;
struct GradientScratch;

// launch_gradients, with erase keys.
template <class T, int kKey>
void launch_erase_gradients(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                            const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                            chunked::EarlyStarts& early);

// d_v and d_beta, as far as they are wanted, from the gradient of beta o v, [B, T, HV, V] as d_values has it.
template <class T, int kKey>
void launch_value_gradients(const Call& call, const TokenRows& d_values, const Gradients& d,
                            chunked::EarlyStarts& early);

}  // namespace cula::cuda::backward
