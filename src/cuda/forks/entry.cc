// SPDX-License-Identifier: Apache-2.0
// settle_forks of core/forks.h on a device: a launch on the stream of the call, before its kernels.
#include "cuda/forks/entry.h"

#include "cuda/forks/launch.h"
#include "cuda/limits.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::forks {

void settle(const Args& args, const SettledIndices& to, const Context& context) {
    const DeviceGuard guard(context.device.index);
    launch_settle_forks<kAnyKey>(device_args(args), to.starts, to.ends, context.device.multiprocessors,
                                 context.stream);
}

}  // namespace cula::cuda::forks
