// SPDX-License-Identifier: Apache-2.0
// Launches of a chunked backward call. The chunks of a long call are several slabs. Where sequences may cross
// their borders, the states there are made first, by a sweep over all slabs but the last; then come the
// gradients, from the last slab to the first:
//
//   sweep, per slab   schedule, prepare_*; carry alone: the state before the next slab
//   per slab          schedule       chunks and segments from cu_seqlens; only if packed, and not by_warp
//                     prepare_*      chunk operands
//                     carry          both walks, in one launch (carry.cuh, return.cuh)
//                     gradient_*     all chunks side by side
//   at the end        sum_parameters, zero_tail
//
// If nothing but d_v and d_initial is wanted, there are no sweep and no gradients, and the return walks
// alone.
//
// Every kernel waits for the one before it before it touches global memory (ptx/pdl.cuh). So the workspace of
// one slab is not written before the gradients of the slab that was launched before have been made.
#pragma once

#include <memory>

#include "core/carve.h"
#include "core/kernel.h"
#include "cuda/backward/gradient_channel.cuh"
#include "cuda/backward/gradient_token.cuh"
#include "cuda/backward/sum.cuh"
#include "cuda/sm80/backward_plan.h"
#include "cuda/sm80/prefill_launch.cuh"

namespace cula::cuda::sm80 {

template <class T, int kKey, bool kPerChannel>
struct BackwardWorkspace {
    using Operands = ChunkOperands<T, kKey, kPerChannel>;

    std::int32_t* first_chunk = nullptr;  // the schedule's: [N + 1], [chunks of a slab], [segments]
    chunked::PackedChunk* packed = nullptr;
    Segment* segments = nullptr;
    std::int32_t* is_compensated = nullptr;        // of operands: [chunks of a slab, HV]
    Operands* operands = nullptr;                  // [chunks of a slab, HV]
    SavedSlice<T, kKey>* slices = nullptr;         // [chunks of a slab, HV, slices]
    backward::GradientScratch scratch;             // its parameters: those of all chunks of the call
    float *states = nullptr, *d_states = nullptr;  // at slab borders: [borders, HV, V, K], [2, HV, V, K]
    std::size_t bytes = 0;

    static int slices_of(int value_dim) { return ceil_div(value_dim, backward::kSliceValues); }

    static ChunkBytes chunk_bytes(const Problem& problem, const WantedGradients& wanted) {
        const auto slices = static_cast<std::size_t>(slices_of(static_cast<int>(problem.value_dim)));
        return {
            .of_value_head = sizeof(Operands) + (wanted.any ? slices * sizeof(SavedSlice<T, kKey>) : 0),
            .of_head = shares_keys(problem.heads, problem.value_heads, wanted) ? kSums * sizeof(float) : 0};
    }

    // base may be null to count the bytes. channels: parameters of a value head.
    BackwardWorkspace(const BackwardPlan& plan, int heads, int channels, void* base) {
        const chunked::PrefillShape& shape = plan.shape;
        Carver carver(base);
        const std::int64_t chunks = plan.slab_chunks, value_heads = shape.value_heads,
                           of_state = value_heads * shape.value_dim * shape.key_dim;
        if (shape.packed && !plan.by_warp) {
            first_chunk = carver.take<std::int32_t>(shape.sequences + 1);
            packed = carver.take<chunked::PackedChunk>(chunks);
            segments = carver.take<Segment>(plan.max_segments);
        }
        is_compensated = carver.take<std::int32_t>(chunks * value_heads);
        operands = carver.take<Operands>(chunks * value_heads);
        if (plan.wanted.any)
            slices = carver.take<SavedSlice<T, kKey>>(chunks * value_heads * slices_of(shape.value_dim));
        if (shares_keys(heads, value_heads, plan.wanted))
            scratch.keys = carver.take<float>(chunks * heads * kSums);
        if (plan.wanted.parameters)
            scratch.parameters = carver.take<float>(shape.chunks * value_heads * (1 + channels));
        if (plan.cuts_sequences) {
            if (plan.wanted.any) states = carver.take<float>((plan.slabs() - 1) * of_state);
            d_states = carver.take<float>(2 * of_state);
        }
        bytes = carver.bytes();
    }

private:
    // Floats of a chunk and head: GradientScratch::keys.
    static constexpr std::int64_t kSums = 2 * kTokens<kKey> * kKey;

    static bool shares_keys(std::int64_t heads, std::int64_t value_heads, const WantedGradients& wanted) {
        return wanted.keys && value_heads > heads;
    }
};

// Launches the kernels of one call.
template <class T, int kKey, bool kPerChannel, Update kUpdate>
class BackwardLaunches {
    using Workspace = BackwardWorkspace<T, kKey, kPerChannel>;

public:
    BackwardLaunches(const Call& call, const Gradients& gradients, const BackwardPlan& plan)
        : call_(call),
          a_(call.args),
          d_(gradients),
          plan_(plan),
          workspace_(plan, a_.heads, backward::parameter_count(a_) - 1, call.workspace),
          early_(call.follows) {
        a_.least_beta = backward::kLeastBeta<T>;
        schedule_.chunk_tokens = kTokens<kKey>;
        schedule_.segment_chunks = plan.segment_chunks;
        schedule_.by_segment = divisor(plan.segment_chunks);
        schedule_.chunks = ceil_div(a_.tokens, kTokens<kKey>);
        schedule_.by_chunks = divisor(schedule_.chunks);
        schedule_.max_segments = plan.max_segments;
        schedule_.ahead = std::max(1, call.multiprocessors / a_.value_heads);
        schedule_.by_warp = plan.by_warp;
        schedule_.packed = workspace_.packed;
        schedule_.segments = workspace_.segments;
        walks_.is_compensated = workspace_.is_compensated;
        walks_.value_blocks = plan.rows.blocks;
        walks_.row_blocks = divisor(plan.rows.blocks);
        walks_.stages = 2 * sizeof(Stage) <= call.shared_bytes_limit ? 2 : 1;
        walks_.d = d_;
        early_.allow(true);
    }

    void run() {
        const int last = plan_.slabs() - 1;
        const bool of_chunks = d_.of_chunks();
        for (int slab = 0; of_chunks && plan_.cuts_sequences && slab < last; ++slab) {
            prepare(slab);
            walk(true, false);
        }
        if (of_chunks) walks_.saved = saved();
        for (int slab = last; slab >= 0; --slab) {
            prepare(slab);
            walk(of_chunks, true);
            if (of_chunks) differentiate();
        }
        if (d_.parameters())
            launch<backward::sum_parameters<backward::kSumThreads>>(
                {static_cast<std::size_t>(backward::sum_parameters_ctas(a_)), backward::kSumThreads}, d_,
                workspace_.scratch.parameters, plan_.shape.chunks);
        if (a_.cu_seqlens)
            launch<backward::zero_tail<backward::kZeroThreads>>(
                {static_cast<std::size_t>(backward::zero_tail_ctas(a_)), backward::kZeroThreads}, d_);
    }

private:
    using Stage = CarryStage<T, kKey, kPerChannel>;

    template <auto kKernel, class... Arguments>
    void launch(const LaunchShape& shape, const Arguments&... arguments) {
        cuda::launch<kKernel>(early_(shape), call_.stream, a_, arguments...);
    }

    std::size_t chunks() const { return static_cast<std::size_t>(schedule_.slab_end - schedule_.slab_begin); }
    Saved<T, kKey> saved() const {
        return {workspace_.slices, a_.value_heads, Workspace::slices_of(a_.value_dim)};
    }

    // Turns to the chunks of a slab, and makes their operands.
    void prepare(int slab) {
        schedule_.slab_begin = slab * plan_.slab_chunks;
        schedule_.slab_end = static_cast<std::int32_t>(std::min<std::int64_t>(
            plan_.shape.chunks, schedule_.slab_begin + std::int64_t{plan_.slab_chunks}));
        schedule_.by_pieces = divisor(ceil_div(
            std::min(schedule_.chunks, schedule_.slab_end - schedule_.slab_begin), plan_.segment_chunks));
        const std::int64_t of_state = std::int64_t{a_.value_heads} * a_.value_dim * a_.key_dim;
        // The one state at a border, which no sequence or one sequence crosses.
        const auto border = [&](float* states, std::int64_t index, bool inside) {
            States of = chunked::float_states(states + (inside ? index * of_state : 0), 1, a_.value_heads,
                                              a_.value_dim, a_.key_dim);
            of.slot = 0;
            return states && inside ? of : States{};
        };
        const bool first = slab == 0, last = slab + 1 == plan_.slabs();
        const bool cuts = plan_.cuts_sequences;
        walks_.slab_start = border(workspace_.states, slab - 1, cuts && !first);
        walks_.slab_end = border(workspace_.states, slab, cuts && !last);
        walks_.slab_d_start = border(workspace_.d_states, slab % 2, cuts && !first);
        walks_.slab_d_end = border(workspace_.d_states, (slab + 1) % 2, cuts && !last);

        if (workspace_.packed)
            launch<chunked::schedule<chunked::kScheduleThreads>>({1, chunked::kScheduleThreads}, schedule_,
                                                                 workspace_.first_chunk, workspace_.packed,
                                                                 workspace_.segments);
        const std::size_t of_heads = chunks() * static_cast<std::size_t>(a_.value_heads);
        float* const fading = nullptr;
        if constexpr (kPerChannel) {
            launch<chunked::prepare_channel<T, kKey, kUpdate, NoGateTiles>>(
                {of_heads, chunked::kPrepareThreads, sizeof(chunked::ChannelSmem<kKey>)}, NoGateTiles{},
                schedule_, workspace_.operands, workspace_.is_compensated, fading);
        } else {
            const int span = chunked::prepare_span(of_heads, a_.group, call_.multiprocessors);
            launch<chunked::prepare_token<T, kKey>>(
                {of_heads / span, chunked::kPrepareThreads, sizeof(chunked::TokenSmem<kKey>)}, schedule_,
                span, workspace_.operands, workspace_.is_compensated, fading);
        }
    }

    void walk(bool forwards, bool backwards) {
        walks_.walks_forwards = forwards, walks_.walks_backwards = backwards;
        const std::size_t directions = forwards && backwards ? 2 : 1;
        launch<carry<T, kKey, kUpdate, kPerChannel, CarryMode::kSaves>>(
            {directions * walks_.row_blocks.value * a_.value_heads * schedule_.max_segments,
             plan_.rows.warps * 32, walks_.stages * sizeof(Stage)},
            schedule_, workspace_.operands, walks_);
    }

    void differentiate() {
        backward::GradientScratch scratch = workspace_.scratch;
        if (scratch.parameters)
            scratch.parameters +=
                std::int64_t{schedule_.slab_begin} * a_.value_heads * backward::parameter_count(a_);
        const std::size_t blocks = chunks() * static_cast<std::size_t>(a_.heads);
        if constexpr (kPerChannel) {
            using Of = backward::GradientChannel<T, kKey>;
            launch<backward::gradient_channel<T, kKey, kUpdate>>({blocks, Of::kThreads, Of::kSharedBytes},
                                                                 schedule_, d_, walks_.saved, scratch);
        } else {
            using Of = backward::GradientToken<T, kKey>;
            const std::int32_t stages = Of::stages(call_.shared_bytes_limit);
            launch<backward::gradient_token<T, kKey, kUpdate>>(
                {blocks, Of::kThreads, Of::shared_bytes(stages)}, schedule_, d_, walks_.saved, scratch,
                stages);
        }
    }

    const Call& call_;
    DeviceArgs a_;
    const Gradients d_;
    const BackwardPlan& plan_;
    const Workspace workspace_;
    chunked::EarlyStarts early_;
    Schedule schedule_;
    WalkParams<T, kKey> walks_;
};

template <class T, int kKey, bool kPerChannel, Update kUpdate>
class PreparedBackward final : public Prepared {
public:
    PreparedBackward(const BackwardPlan& plan, std::size_t workspace_bytes)
        : Prepared(workspace_bytes, 0), plan_(plan) {}

    void run(const Args& args, const Context& context) const override {
        if (const WantedGradients wanted(args); wanted != plan_.wanted)
            throw Error("run: args must be those of the plan, got other gradients");
        const DeviceGuard guard(context.device.index);
        const Call call = make_call(args, context);
        BackwardLaunches<T, kKey, kPerChannel, kUpdate>(call, backward::gradients(args), plan_).run();
    }

private:
    BackwardPlan plan_;
};

template <class T, int kKey, bool kPerChannel>
PreparedPtr prepare_backward(const Problem& problem, const Args& args, std::size_t slab_bytes) {
    using Workspace = BackwardWorkspace<T, kKey, kPerChannel>;
    const BackwardPlan plan =
        plan_backward(problem, args, chunked::traits_of<PortableCarry<T, kKey, kPerChannel>>(problem),
                      Workspace::chunk_bytes(problem, WantedGradients(args)), slab_bytes);
    const int channels = kPerChannel ? static_cast<int>(problem.key_dim) : 1;
    const std::size_t bytes = Workspace(plan, static_cast<int>(problem.heads), channels, nullptr).bytes;
    PreparedPtr prepared;
    with_update(problem.algorithm.update, [&]<Update kUpdate>(UpdateConstant<kUpdate>) {
        prepared = std::make_shared<const PreparedBackward<T, kKey, kPerChannel, kUpdate>>(plan, bytes);
    });
    return prepared;
}

}  // namespace cula::cuda::sm80
