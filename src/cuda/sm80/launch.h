// SPDX-License-Identifier: Apache-2.0
// What entry.cc asks of the instances (instances.txt), which nvcc compiles one to a file.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "cuda/device_args.h"
#include "cula/cula.h"

namespace cula::cuda::sm80 {

inline constexpr int kMaxTreeTokens = 256;

struct Call {
    DeviceArgs args;
    void* stream = nullptr;
    int multiprocessors = 0;
    std::size_t shared_bytes_limit = 0;  // of one CTA
    void* workspace = nullptr;
    bool follows = false;  // kernels may follow each other early (LaunchShape)
    bool fused = false;    // by one kernel, whatever that costs (sm90/fused.cuh)
    bool segment = false;  // for its maps, or for what it keeps
    // A segment leaves its workspace to a prefill, which finds it here (Args::keep).
    bool keeps = false;
    void* kept = nullptr;
    std::size_t kept_bytes = 0;
};

Call make_call(const Args& args, const Context& context);

// What compose() of cula.h gets, as its kernel reads it: rows of whole pieces of 16 bytes.
struct GivenMaps {
    struct Rows {
        const float* data = nullptr;
        std::int64_t map = 0, sequence = 0, head = 0, row = 0;  // strides
    };
    Rows m, b;
    const bool* joins = nullptr;
    States state;
    std::int32_t count = 0, value_heads = 0, value_dim = 0, key_dim = 0;
    bool matrices = false;  // m: or diagonals
};

// Chunked prefill of T inputs with at most kKey key channels: o and final states, or where the arguments ask for them
// the maps of whole sequences.
template <class T, int kKey, bool kPerChannel>
std::size_t prefill_workspace_bytes(const Call& call);
template <class T, int kKey, bool kPerChannel>
std::size_t prefill_kept_bytes(const Call& call);
template <class T, int kKey, bool kPerChannel>
void launch_prefill(const Call& call);

template <int kKey>
void launch_compose(const GivenMaps& given, std::int64_t sequences, void* stream);

// core/forks.h, on states of any K. (A template, as whatever instances.txt lists is.)
template <int kKey>
void launch_settle_forks(const DeviceArgs& a, std::int32_t* starts, std::int32_t* ends, void* stream);

// Token by token, on states of type State in whole 16-byte pieces; false where they are not, and nothing is launched.
template <class State, int kKey>
bool launch_step_packed(const Call& call);

// The same on any states, and along trees; or the maps of whole sequences.
template <int kKey>
void launch_step_any(const Call& call);

}  // namespace cula::cuda::sm80
