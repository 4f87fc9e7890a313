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
    bool follows = false;  // kernels may follow each other early (LaunchShape)
    bool fused = false;    // by one kernel, whatever that costs (sm90/fused.cuh)
    bool segment = false;  // for its maps, or for what it keeps
    // A segment leaves its workspace to a prefill, which finds it here (Args::keep).
    bool keeps = false;
    void* kept = nullptr;
    std::size_t kept_bytes = 0;
};

Call make_call(const Args& args, const Context& context);

}  // namespace cula::cuda
