// SPDX-License-Identifier: Apache-2.0
// Direct access to the CPU kernels, cula::cpu::<target>::<pass>, without checks and without dispatch. The
// caller makes sure that supports() returns yes and that the arguments are valid (plan() of cula.h does
// both), that no sequence starts from a slot that another one of the call writes (run() of cula.h copies the
// states of such forks first), and provides workspace_bytes() of workspace, aligned to 64 bytes.
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
    void backward(const Args& args, const Context& context);                          \
    }

namespace cula::cpu {
CULA_DECLARE_TARGET(portable)  // any CPU that the compiler targets
#if defined(__x86_64__)
CULA_DECLARE_TARGET(avx2)
CULA_DECLARE_TARGET(avx512)
CULA_DECLARE_TARGET(avx512bf16)
CULA_DECLARE_TARGET(amx)
#endif
}  // namespace cula::cpu

#undef CULA_DECLARE_TARGET
