// SPDX-License-Identifier: Apache-2.0
#include "cuda/call.h"

#include <cstdint>

namespace cula::cuda {

Call make_call(const Args& args, const Context& context) {
    Call call;
    call.args = device_args(args);
    call.stream = context.stream;
    call.workspace = context.workspace;
    call.multiprocessors = context.device.multiprocessors;
    call.shared_bytes_limit = context.device.shared_bytes;
    call.follows = context.device.compute_capability >= 90;
    // Indices in the workspace are the library's own. Whatever the launch before was, a kernel that starts
    // early for this reason waits before it reads anything.
    const auto indices = reinterpret_cast<std::uintptr_t>(args.initial_state_indices.data),
               workspace = reinterpret_cast<std::uintptr_t>(context.workspace);
    call.settled = indices != 0 && indices - workspace < context.workspace_bytes;
    call.segment = args.segment_b || args.keep;
    call.kept = args.kept.data;
    call.saved = args.saved.data;
    return call;
}

}  // namespace cula::cuda
