// SPDX-License-Identifier: Apache-2.0
// Level 0: the kernels themselves, cula::<target>::<pass>. No checks, no dispatch: the caller has made sure
// that supports() says yes and that the arguments are valid (plan() in cula.h does both), and brings
// workspace_bytes of workspace.
#pragma once

#include <cstddef>

#include "cula/cula.h"

#define CULA_DECLARE_TARGET(target)                                                   \
    namespace target {                                                                \
    Support supports(const Problem& problem);                                         \
    std::size_t workspace_bytes(Pass pass, const Args& args, const Context& context); \
    void prefill(const Args& args, const Context& context);                           \
    void decode(const Args& args, const Context& context);                            \
    void verify(const Args& args, const Context& context);                            \
    void segment(const Args& args, const Context& context);                           \
    }

namespace cula::cpu {
CULA_DECLARE_TARGET(portable)  // any CPU the compiler targets
#if defined(__x86_64__)
CULA_DECLARE_TARGET(avx2)
CULA_DECLARE_TARGET(avx512)
CULA_DECLARE_TARGET(avx512bf16)
CULA_DECLARE_TARGET(amx)
#endif
}  // namespace cula::cpu

#undef CULA_DECLARE_TARGET
