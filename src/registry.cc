// SPDX-License-Identifier: Apache-2.0
// Every kernel of the library, in order of preference: dispatch takes the first row of a pass whose
// supports() says yes. A target's plain row ("sm90") takes the cheapest of its strategies; each strategy has
// a row of its own ("sm90:whole"), to force it and to explain it.
#include "core/kernel.h"
#include "cula/kernels.h"
#include "reference/entry.h"
#if defined(CULA_WITH_CUDA)
#include "cuda/device.h"
#include "cuda/recurrent/backward_entry.h"
#include "cuda/recurrent/entry.h"
#include "cuda/sm80/entry.h"
#include "cuda/sm90/entry.h"
#endif

namespace cula {
namespace {

// One pass of a target whose functions are `target::pass`.
#define CULA_ROW(name, pass, function, kind, target) \
    {name, pass, kind, target::supports, prepare<&target::workspace_bytes, &target::function>}

// The passes of one CPU instruction set, or of the reference.
#define CULA_ROWS(name, target)                                            \
    CULA_ROW(name, Pass::kPrefill, prefill, DeviceKind::kCpu, target),     \
        CULA_ROW(name, Pass::kDecode, decode, DeviceKind::kCpu, target),   \
        CULA_ROW(name, Pass::kVerify, verify, DeviceKind::kCpu, target),   \
        CULA_ROW(name, Pass::kSegment, segment, DeviceKind::kCpu, target), \
        CULA_ROW(name, Pass::kBackward, backward, DeviceKind::kCpu, target)

// One pass of the token-by-token kernels.
#define CULA_RECURRENT_ROW(name, pass) CULA_ROW(name, pass, run, DeviceKind::kCuda, cuda::recurrent)

// A chunked prefill, or a segment call, by one of its strategies, or by the one that is predicted to take
// least.
#define CULA_CHUNKED_ROW(name, pass, target, strategy)                                              \
    {name,                                                                                          \
     pass,                                                                                          \
     DeviceKind::kCuda,                                                                             \
     cuda::target::supports<strategy>,                                                              \
     cuda::target::prepare<strategy>,                                                               \
     (pass) == Pass::kPrefill ? cuda::target::predict<strategy> : nullptr,                          \
     (pass) == Pass::kPrefill && (strategy) == StrategyKind::kAny ? cuda::target::saving : nullptr, \
     false}

// A chunked backward call, likewise.
#define CULA_BACKWARD_ROW(name, target, strategy) \
    {name,                                        \
     Pass::kBackward,                             \
     DeviceKind::kCuda,                           \
     cuda::target::backward_supports<strategy>,   \
     cuda::target::backward_prepare<strategy>,    \
     nullptr,                                     \
     cuda::target::saving}

#if defined(CULA_WITH_CUDA)
using cuda::chunked::StrategyKind;
#endif

constexpr Kernel kKernels[] = {
#if defined(CULA_WITH_CUDA)
    CULA_CHUNKED_ROW("sm90", Pass::kPrefill, sm90, StrategyKind::kAny),
    CULA_CHUNKED_ROW("sm90:fused", Pass::kPrefill, sm90, StrategyKind::kFused),
    CULA_CHUNKED_ROW("sm90:joined", Pass::kPrefill, sm90, StrategyKind::kJoined),
    CULA_CHUNKED_ROW("sm90:whole", Pass::kPrefill, sm90, StrategyKind::kWhole),
    CULA_CHUNKED_ROW("sm90:segments", Pass::kPrefill, sm90, StrategyKind::kSegments),
    CULA_CHUNKED_ROW("sm90:halves", Pass::kPrefill, sm90, StrategyKind::kHalves),
    CULA_CHUNKED_ROW("sm90", Pass::kSegment, sm90, StrategyKind::kAny),
    CULA_CHUNKED_ROW("sm80", Pass::kPrefill, sm80, StrategyKind::kAny),
    CULA_CHUNKED_ROW("sm80:whole", Pass::kPrefill, sm80, StrategyKind::kWhole),
    CULA_CHUNKED_ROW("sm80:segments", Pass::kPrefill, sm80, StrategyKind::kSegments),
    CULA_RECURRENT_ROW("sm80:step", Pass::kPrefill),
    CULA_RECURRENT_ROW("sm80", Pass::kDecode),
    CULA_RECURRENT_ROW("sm80", Pass::kVerify),
    CULA_CHUNKED_ROW("sm80", Pass::kSegment, sm80, StrategyKind::kAny),
    CULA_RECURRENT_ROW("sm80:step", Pass::kSegment),
    {"sm90:three_walks", Pass::kBackward, DeviceKind::kCuda, cuda::sm90::three_walks_supports,
     cuda::sm90::three_walks_prepare, cuda::sm90::three_walks_predict},
    CULA_BACKWARD_ROW("sm90", sm90, StrategyKind::kAny),
    CULA_BACKWARD_ROW("sm90:whole", sm90, StrategyKind::kWhole),
    CULA_BACKWARD_ROW("sm90:segments", sm90, StrategyKind::kSegments),
    CULA_BACKWARD_ROW("sm80", sm80, StrategyKind::kAny),
    CULA_BACKWARD_ROW("sm80:whole", sm80, StrategyKind::kWhole),
    CULA_BACKWARD_ROW("sm80:segments", sm80, StrategyKind::kSegments),
    {"sm80:three_walks", Pass::kBackward, DeviceKind::kCuda, cuda::sm80::three_walks_supports,
     cuda::sm80::three_walks_prepare, cuda::sm80::three_walks_predict},
    {"sm80:step", Pass::kBackward, DeviceKind::kCuda, cuda::recurrent::backward_supports,
     prepare<&cuda::recurrent::backward_workspace_bytes, &cuda::recurrent::backward_run>},
#endif
#if defined(__x86_64__)
    CULA_ROWS("cpu:amx", cpu::amx),
    CULA_ROWS("cpu:avx512bf16", cpu::avx512bf16),
    CULA_ROWS("cpu:avx512", cpu::avx512),
    CULA_ROWS("cpu:avx2", cpu::avx2),
#endif
    CULA_ROWS("cpu:portable", cpu::portable),
    CULA_ROWS("reference", reference),
    CULA_ROWS("reference:naive", reference::naive),
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
