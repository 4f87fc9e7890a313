// SPDX-License-Identifier: Apache-2.0
// A call as the launches read it.
#pragma once

#include <cstddef>
#include <memory>

#include "core/kernel.h"
#include "cuda/device_args.h"
#include "cula/cula.h"

namespace cula::cuda {

struct Call {
    DeviceArgs args;
    void* stream = nullptr;
    int multiprocessors = 0;
    std::size_t shared_bytes_limit = 0;  // of one CTA
    void* workspace = nullptr;
    bool follows = false;   // PDL: kernels may start before the previous one ends (LaunchShape::early); sm_90
    bool goes_on = false;   // the launches before are of the same call
    bool settled = false;   // the library has written the initial indices: forks::settle_forks, as a rule
    bool segment = false;   // a segment call: for its maps, or for the workspace that it keeps
    void* kept = nullptr;   // the workspace that a segment call has left to this prefill (Args::keep)
    void* saved = nullptr;  // Args::saved
};

Call make_call(const Args& args, const Context& context);

// A planned call that may be a part of another one, whose arguments no caller has given.
class PreparedCall : public Prepared {
public:
    using Prepared::Prepared;

    virtual void launch(const Call& call) const = 0;
};
using PreparedCallPtr = std::shared_ptr<const PreparedCall>;

}  // namespace cula::cuda
