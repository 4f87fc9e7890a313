// SPDX-License-Identifier: Apache-2.0
// Every kernel of the library, in order of preference: dispatch takes the first row of a pass whose
// supports() says yes.
#include "core/kernel.h"
#include "cula/kernels.h"
#include "reference/entry.h"
#if defined(CULA_WITH_CUDA)
#include "cuda/device.h"
#include "cuda/recurrent/entry.h"
#include "cuda/sm80/entry.h"
#include "cuda/sm90/entry.h"
#endif

namespace cula {
namespace {

template <Pass kPass, std::size_t (*kBytes)(Pass, const Args&, const Context&)>
std::size_t bytes(const Args& args, const Context& context) {
    return kBytes(kPass, args, context);
}

// The four passes of one CPU instruction set.
#define CULA_CPU_TARGET_ROWS(name, target)                                  \
    {name,                                                                  \
     Pass::kPrefill,                                                        \
     DeviceKind::kCpu,                                                      \
     target::supports,                                                      \
     bytes<Pass::kPrefill, target::workspace_bytes>,                        \
     target::prefill},                                                      \
        {name,                                                              \
         Pass::kDecode,                                                     \
         DeviceKind::kCpu,                                                  \
         target::supports,                                                  \
         bytes<Pass::kDecode, target::workspace_bytes>,                     \
         target::decode},                                                   \
        {name,                                                              \
         Pass::kVerify,                                                     \
         DeviceKind::kCpu,                                                  \
         target::supports,                                                  \
         bytes<Pass::kVerify, target::workspace_bytes>,                     \
         target::verify},                                                   \
    {                                                                       \
        name, Pass::kSegment, DeviceKind::kCpu, target::supports,           \
            bytes<Pass::kSegment, target::workspace_bytes>, target::segment \
    }

#define CULA_REFERENCE_ROWS(name, target)                                                                   \
    {name, Pass::kPrefill, DeviceKind::kCpu, target::supports, target::workspace_bytes, target::prefill},   \
        {name, Pass::kDecode, DeviceKind::kCpu, target::supports, target::workspace_bytes, target::decode}, \
        {name, Pass::kVerify, DeviceKind::kCpu, target::supports, target::workspace_bytes, target::verify}, \
    {                                                                                                       \
        name, Pass::kSegment, DeviceKind::kCpu, target::supports, target::workspace_bytes, target::segment  \
    }

constexpr Kernel kKernels[] = {
#if defined(CULA_WITH_CUDA)
    {"sm90", Pass::kPrefill, DeviceKind::kCuda, cuda::sm90::supports, cuda::sm90::workspace_bytes,
     cuda::sm90::prefill},
    {"sm90:fused", Pass::kPrefill, DeviceKind::kCuda, cuda::sm90::supports_fused,
     cuda::sm90::fused_workspace_bytes, cuda::sm90::prefill_fused},
    {"sm90", Pass::kSegment, DeviceKind::kCuda, cuda::sm90::supports, cuda::sm90::workspace_bytes,
     cuda::sm90::prefill, cuda::sm90::kept_bytes},
    {"sm80", Pass::kPrefill, DeviceKind::kCuda, cuda::sm80::supports, cuda::sm80::workspace_bytes,
     cuda::sm80::prefill},
    {"sm80:step", Pass::kPrefill, DeviceKind::kCuda, cuda::recurrent::supports,
     cuda::recurrent::workspace_bytes, cuda::recurrent::run},
    {"sm80", Pass::kDecode, DeviceKind::kCuda, cuda::recurrent::supports, cuda::recurrent::workspace_bytes,
     cuda::recurrent::run},
    {"sm80", Pass::kVerify, DeviceKind::kCuda, cuda::recurrent::supports, cuda::recurrent::workspace_bytes,
     cuda::recurrent::run},
    {"sm80", Pass::kSegment, DeviceKind::kCuda, cuda::sm80::supports, cuda::sm80::workspace_bytes,
     cuda::sm80::prefill, cuda::sm80::kept_bytes},
    {"sm80:step", Pass::kSegment, DeviceKind::kCuda, cuda::recurrent::supports,
     cuda::recurrent::workspace_bytes, cuda::recurrent::run},
#endif
#if defined(__x86_64__)
    CULA_CPU_TARGET_ROWS("cpu:amx", cpu::amx),
    CULA_CPU_TARGET_ROWS("cpu:avx512bf16", cpu::avx512bf16),
    CULA_CPU_TARGET_ROWS("cpu:avx512", cpu::avx512),
    CULA_CPU_TARGET_ROWS("cpu:avx2", cpu::avx2),
#endif
    CULA_CPU_TARGET_ROWS("cpu:portable", cpu::portable),
    CULA_REFERENCE_ROWS("reference", reference),
    CULA_REFERENCE_ROWS("reference:naive", reference::naive),
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

Device cuda_device([[maybe_unused]] int index) {
#if defined(CULA_WITH_CUDA)
    return cuda::device(index);
#else
    throw Error("this build of cula has no CUDA kernels (" CULA_WITHOUT_CUDA
                "); to get them, build it where nvcc >= 12.8 is with CULA_CUDA=ON in the environment: `pip "
                "install .`, or "
                "`make cuda`, which brings an nvcc");
#endif
}

}  // namespace cula
