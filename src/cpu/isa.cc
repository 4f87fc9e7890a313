// SPDX-License-Identifier: Apache-2.0
// Compiled once per instruction set; CULA_CPU_TARGET is its name and namespace.
#include "cpu/backward.h"
#include "cpu/conv.h"
#include "cpu/norm.h"
#include "cpu/scan.h"
#include "cpu/step.h"
#include "cpu/step_back.h"

namespace cula::cpu::CULA_CPU_TARGET {
namespace {

// With fewer channels bf16 products are not used: the keys of a chunk are nearly collinear because they are
// more than the channels, so their writes cancel, and there is no time to save.
[[maybe_unused]] constexpr int kFewChannels = 16;

template <class Body>
auto with_word([[maybe_unused]] const Args& args, Body body) {
#if defined(__AVX512BF16__)
    if (args.q.dtype == Dtype::kBFloat16 && args.q.size[3] >= kFewChannels)
        return body.template operator()<BfPair>();
#endif
    return body.template operator()<float>();
}

std::size_t scan_bytes(const Args& args, int v_count, int heads) {
    return with_word(args, [&]<class Word> { return scan_scratch_bytes<Word>(args, v_count, heads); });
}

void scan(const Args& args, const ScanTask* tasks, int heads, std::byte* scratch) {
    const FlushSubnormals flush;
    with_word(args, [&]<class Word> { scan_heads<Word>(args, tasks, heads, scratch); });
}

std::size_t step_bytes(const Args& args, int v_count, std::int64_t tree_tokens) {
    return Step::scratch_bytes(args, v_count, tree_tokens);
}

void step(const Args& args, const StepTask& task, std::byte* scratch) {
    const FlushSubnormals flush;
    Step(args, task, scratch).run();
}

std::size_t backward_bytes(const Args& args, std::int64_t tokens) {
    if (!in_chunks(args.algorithm.update)) return StepBack::scratch_bytes(args, tokens);
    return with_word(args, [&]<class Word> { return backward_scratch_bytes<Word>(args, tokens); });
}

void backward(const Args& args, const BackwardTask& task, std::byte* scratch) {
    const FlushSubnormals flush;
    if (!in_chunks(args.algorithm.update)) return step_back_heads(args, task, scratch);
    with_word(args, [&]<class Word> { backward_heads<Word>(args, task, scratch); });
}

}  // namespace

extern const Isa kIsa;
const Isa kIsa{scan_bytes, scan, step_bytes, step, backward_bytes, backward};

extern const LayerIsa kLayerIsa;
const LayerIsa kLayerIsa{conv_scratch_bytes, conv, conv_backward, conv_step_scratch_bytes, conv_step,
                         norm_scratch_bytes, norm, norm_backward};

}  // namespace cula::cpu::CULA_CPU_TARGET
