// SPDX-License-Identifier: Apache-2.0
// The interface between the launches of a backward call and the instances of the gradient kernels
// (instances.txt).
#pragma once

#include "cuda/backward/gradients.h"
#include "cuda/call.h"
#include "cula/problem.h"

namespace cula::cuda::chunked {
class EarlyStarts;
struct Schedule;
}  // namespace cula::cuda::chunked

namespace cula::cuda::backward {

template <class T, int kKey>
struct Saved;
struct GradientScratch;

// Differentiates all chunks of a slab, for which `saved` and the scratch are.
template <class T, int kKey, bool kPerChannel>
void launch_gradients(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                      const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                      chunked::EarlyStarts& early, Update update);

// The same with erase keys (chunked/erase_operands.cuh), of one decay per channel.
template <class T, int kKey>
void launch_erase_gradients(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                            const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                            chunked::EarlyStarts& early);

// The same with low-rank keys, which are two rows of chunks for a token (chunked/low_rank_rows.cuh).
template <class T, int kKey>
void launch_low_rank_gradients(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                               const Gradients& d, const Saved<T, kKey>& saved,
                               const GradientScratch& scratch, chunked::EarlyStarts& early);

// The same of tokens that write several times, by the delta rule with one decay per token or head, or none.
template <class T, int kKey>
void launch_several_gradients(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                              const Gradients& d, const Saved<T, kKey>& saved, const GradientScratch& scratch,
                              chunked::EarlyStarts& early);

// With erase strengths: d_v and d_beta, as far as they are wanted, from d_values, the gradient of beta o v,
// [B, T, HV, V].
template <class T, int kKey>
void launch_value_gradients(const Call& call, const TokenRows& d_values, const Gradients& d,
                            chunked::EarlyStarts& early);

}  // namespace cula::cuda::backward
