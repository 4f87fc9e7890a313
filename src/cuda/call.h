// SPDX-License-Identifier: Apache-2.0
// A call as the launches read it.
#pragma once

#include <cstddef>

#include "cuda/device_args.h"
#include "cula/cula.h"

namespace cula::cuda {

struct Call {
    DeviceArgs args;
    void* stream = nullptr;
    int multiprocessors = 0;
    std::size_t shared_bytes_limit = 0;  // of one CTA
    void* workspace = nullptr;
    bool follows = false;  // PDL: kernels may start before the previous one ends (LaunchShape::early); sm_90
    bool fused = false;    // the fused kernel (sm90/fused/kernel.cuh) is asked for, whatever it costs
    bool segment = false;  // a segment call: for its maps, or for the workspace that it keeps
    // keeps: a segment call leaves its workspace to a prefill.
    // kept: a prefill finds such a workspace here (Args::keep).
    bool keeps = false;
    void* kept = nullptr;
    std::size_t kept_bytes = 0;
};

Call make_call(const Args& args, const Context& context);

}  // namespace cula::cuda
