// SPDX-License-Identifier: Apache-2.0
// Launches of a chunked backward call. The chunks of a long call are several slabs. Where sequences may cross
// their borders, the states there are made first, by a sweep over all slabs but the last; then come the
// gradients, from the last slab to the first:
//
//   sweep, per slab   as below, up to the walks, of which the carry alone: the state before the next slab
//   per slab          schedule       chunks and segments from cu_seqlens; only if packed, and not by_warp
//                     prepare_*      chunk operands
//                     walks          only if sequences are cut into segments: the maps of both walks
//                     compose_walks  likewise: the states between segments
//                     walks          carry and return, in one launch
//                     gradient_*     all chunks side by side
//   at the end        sum_parameters, zero_tail
//
// Of a rule with erase strengths erase_operands comes before all of these, and value_gradients before
// zero_tail; in between d_v is the gradient of beta o v. Where tokens write several times count_writes comes
// first (chunked/timeline.h), and tokens are rows of writes. With low-rank keys low_rank_rows comes first,
// and low_rank_outputs, of d_v, before zero_tail.
//
// If nothing but d_v, d_initial and, with erase strengths, d_beta is wanted, there are no sweep and no
// gradients, and the return walks alone.
//
// A prefill with Args::saved is the first half of such a call, of one slab, and the backward that gets what
// it saved is the second:
//
//   prefill   schedule, prepare_*, the maps of the carry, compose_walks, the carry with outputs
//   backward  schedule, the maps of the return, compose_walks, the return, gradient_*, the end
//
// Every kernel waits for the one before it before it touches global memory (ptx/pdl.cuh). So the workspace of
// one slab is not written before the gradients of the slab that was launched before have been made.
#pragma once

#include <memory>
#include <utility>

#include "core/kernel.h"
#include "cuda/backward/launch_gradients.h"
#include "cuda/backward/plan.h"
#include "cuda/backward/sum.h"
#include "cuda/backward/walk_params.cuh"
#include "cuda/backward/workspace.cuh"
#include "cuda/chunked/compose.h"
#include "cuda/chunked/launch.cuh"
#include "cuda/chunked/low_rank.h"
#include "cuda/chunked/prepare.h"
#include "cuda/chunked/schedule.h"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::backward {

using chunked::divisor, chunked::EarlyStarts, chunked::Schedule, chunked::StrategyKind;
using chunked::LowRankForm, chunked::LowRankWorkspace;

// What a target launches its walks with.
template <class T, int kKey, bool kPerChannel>
struct WalkLaunch {
    const Call& call;
    const DeviceArgs& a;
    const Schedule& schedule;
    const ChunkOperands<T, kKey, kPerChannel>* operands;
    chunked::CarryRows rows;
    EarlyStarts& early;
};

template <class Walks>
using WalkLaunchOf = WalkLaunch<typename Walks::Type, Walks::kKey, Walks::kPerChannel>;

// The walks of an architecture, for inputs of one type and at most kKey key channels.
template <class Walks>
concept WalkTarget = requires(const Problem& problem, const WalkLaunchOf<Walks>& of,
                              const WalkParams<typename Walks::Type, Walks::kKey>& params) {
    { Walks::traits(problem) } -> std::same_as<chunked::CarryTraits>;
    // Both walks, or the maps of their segments: launch<update, maps>. Of the parameters the number of row
    // blocks and what depends on the device's shared memory are the target's.
    Walks::template launch<Update::kDelta, false>(of, params);
    Walks::template launch<Update::kDelta, true>(of, params);
    Walks::template launch<Update::kAdditive, false>(of, params);
    Walks::template launch<Update::kAdditive, true>(of, params);
    // The carry with outputs, of a prefill that saves.
    Walks::template launch_saving_prefill<Update::kDelta>(of, params);
    Walks::template launch_saving_prefill<Update::kAdditive>(of, params);
};

// Launches the kernels of one call.
template <WalkTarget Walks, Update kUpdate>
class BackwardLaunches {
    using T = typename Walks::Type;
    static constexpr int kKey = Walks::kKey;
    static constexpr bool kPerChannel = Walks::kPerChannel;
    using Workspace = BackwardWorkspace<T, kKey, kPerChannel>;
    static constexpr bool kDiagonal = has_diagonal_map(kUpdate),
                          kErasable = chunked::kErasable<kPerChannel, kUpdate>,
                          kTakesLowRank = chunked::kTakesLowRank<kKey, kPerChannel, kUpdate>,
                          kMayReadRows = requires { requires Walks::template kMayReadRows<kUpdate>; };

public:
    BackwardLaunches(const Call& call, const Gradients& gradients, const BackwardPlan& plan)
        : call_(call),
          a_(call.args),
          asked_(gradients),
          d_(gradients),
          plan_(plan),
          workspace_(plan, a_.heads, parameter_count(a_) - 1, kDiagonal, call.workspace, call.saved),
          early_(call.follows) {
        a_.least_beta = kLeastBeta<T>;
        if (plan.shape.several_writes) workspace_.timeline.replace(a_);
        schedule_ = chunked::schedule_of<kKey>(a_, call.multiprocessors, plan, workspace_.packed,
                                               workspace_.segments);
        walks_.is_compensated = workspace_.is_compensated;
        walks_.first_m = false, walks_.first_from_state = true;
        const auto of_segments = [&](float* data, int rows) {
            return chunked::float_states(data, 0, a_.value_heads, rows, kKey);
        };
        const int rows_of_m = kDiagonal ? 1 : a_.key_dim;
        walks_.map_m = of_segments(workspace_.map_m, rows_of_m);
        walks_.map_m_turned = of_segments(workspace_.map_m_turned, rows_of_m);
        std::swap(walks_.map_m_turned.v, walks_.map_m_turned.k);
        walks_.map_b = of_segments(workspace_.map_b, a_.value_dim);
        walks_.map_z = of_segments(workspace_.map_z, a_.value_dim);
        walks_.starts = of_segments(workspace_.starts, a_.value_dim);
        walks_.ends = of_segments(workspace_.ends, a_.value_dim);
        walks_.d = d_;
        early_.allow(true);
        if (!plan.shape.erases) return;
        workspace_.erase.replace(a_);
        if (asked_.d_v.data || asked_.d_beta.data)
            d_.d_v = chunked::EraseOperands<T>::rows_at(workspace_.d_values, a_, a_.value_dim);
        d_.d_beta = {};
        walks_.d = d_;
    }

    // Of a prefill that saves: outputs, final states and Args::saved.
    void run_first_half() {
        begin();
        prepare(0);
        make_states(true, false);
        walks_.saved = saved();
        Walks::template launch_saving_prefill<kUpdate>(of_walks(), walks_);
    }

    void run() {
        const int last = plan_.slabs() - 1;
        const bool of_chunks = d_.of_chunks();
        begin();
        for (int slab = 0; of_chunks && plan_.cuts_sequences && slab < last; ++slab) {
            prepare(slab);
            make_states(true, false);
            walk(true, false);
        }
        if (of_chunks) walks_.saved = saved();
        if constexpr (kMayReadRows)
            walks_.saved.by_rows =
                of_chunks && !plan_.shape.low_rank && !plan_.shape.several_writes &&
                Walks::template find_rows<kUpdate>(rows_, of_walks(), walks_, workspace_.scratch);
        for (int slab = last; slab >= 0; --slab) {
            prepare(slab);
            const bool forwards = of_chunks && plan_.half == Half::kBoth;
            make_states(forwards, true);
            walk(forwards, true);
            if (of_chunks) differentiate();
        }
        if (d_.parameters())
            launch_sum_parameters<kAnyKey>(a_, d_, workspace_.scratch.parameters, plan_.shape.chunks, early_,
                                           call_.stream);
        if constexpr (kErasable)
            if (d_.d_v.data && plan_.shape.erases)
                launch_value_gradients<T, kKey>(call_, d_.d_v, asked_, early_);
        if (a_.cu_seqlens && !plan_.shape.low_rank) zero_tails();
    }

private:
    Saved<T, kKey> saved() const {
        return {workspace_.carried, workspace_.returned, a_.value_heads, Workspace::slices_of(a_.value_dim)};
    }

    void zero_tails() {
        if (plan_.shape.several_writes) {
            Gradients of_tokens, of_writes = asked_;
            of_tokens.d_q = asked_.d_q, of_tokens.d_g = asked_.d_g;
            of_writes.d_q = {}, of_writes.d_g = {};
            launch_zero_tail<kAnyKey>(call_.args, of_tokens, early_, call_.stream);
            launch_zero_tail<kAnyKey>(a_, of_writes, early_, call_.stream);
        } else {
            launch_zero_tail<kAnyKey>(a_, asked_, early_, call_.stream);
        }
    }

    // What comes before all slabs.
    void begin() {
        if (plan_.shape.several_writes)
            early_ = EarlyStarts(call_.follows, chunked::launch_count_writes<kAnyKey>(
                                                    call_.args, workspace_.timeline, call_.stream));
        if constexpr (kErasable)
            if (plan_.shape.erases) {
                chunked::launch_erase_operands<T, kKey>(call_, workspace_.erase);
                early_ = EarlyStarts(call_.follows, chunked::EraseOperands<T>::rows(call_.args) > 0);
            }
    }

    // Turns to the chunks of a slab, and makes their operands, unless a prefill has.
    void prepare(int slab) {
        chunked::turn_to_slab(schedule_, plan_, slab);
        walks_.ranks = schedule_.by_pieces;
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
            chunked::launch_schedule<kAnyKey>(a_, schedule_, workspace_.first_chunk, workspace_.packed,
                                              workspace_.segments, false, early_, call_.stream);
        if (plan_.half == Half::kSecond) return;
        if constexpr (kErasable)
            if (plan_.shape.erases)
                return chunked::launch_prepare_erase<T, kKey>(call_, a_, schedule_, workspace_.operands,
                                                              workspace_.is_compensated, early_);
        if constexpr (kTakesLowRank)
            if (plan_.shape.low_rank)
                return chunked::launch_prepare_low_rank<T, kKey>(call_, a_, schedule_, workspace_.operands,
                                                                 workspace_.is_compensated, early_);
        const chunked::PreparedChunks<chunked::ChunkOperands<T, kKey, kPerChannel>> to = {
            workspace_.operands, workspace_.is_compensated, nullptr};
        if constexpr (kPerChannel) {
            chunked::launch_prepare_channel<T, kKey>(call_, a_, schedule_, to, early_, kUpdate);
        } else {
            const auto chunks = static_cast<std::size_t>(schedule_.slab_end - schedule_.slab_begin) *
                                static_cast<std::size_t>(a_.value_heads);
            const chunked::PrepareShare share =
                chunked::prepare_share(chunks, a_.group, call_.multiprocessors);
            chunked::launch_prepare_token<T, kKey>(call_, a_, schedule_, share, to, early_,
                                                   plan_.shape.several_writes);
        }
    }

    // The states between segments, if there are any.
    void make_states(bool forwards, bool backwards) {
        if (!plan_.makes_maps()) return;
        launch_walks<true>(forwards, backwards);
        const States none{};
        const chunked::WalkMaps maps{
            .forwards = {walks_.map_m, walks_.map_b, forwards ? walks_.starts : none},
            .backwards = {kDiagonal ? walks_.map_m : walks_.map_m_turned, walks_.map_z,
                          backwards ? walks_.ends : none},
            .matrices = !kDiagonal};
        chunked::launch_compose_walks<kKey>(a_, schedule_, maps, early_, call_.stream);
    }

    void walk(bool forwards, bool backwards) { launch_walks<false>(forwards, backwards); }

    template <bool kMaps>
    void launch_walks(bool forwards, bool backwards) {
        walks_.walks_forwards = forwards, walks_.walks_backwards = backwards;
        Walks::template launch<kUpdate, kMaps>(of_walks(), walks_);
    }
    WalkLaunchOf<Walks> of_walks() {
        return {call_, a_, schedule_, workspace_.operands, plan_.cut.rows, early_};
    }

    void differentiate() {
        GradientScratch scratch = workspace_.scratch;
        if (scratch.parameters)
            scratch.parameters += std::int64_t{schedule_.slab_begin} * a_.value_heads * parameter_count(a_);
        if constexpr (kMayReadRows && kPerChannel)
            if (walks_.saved.by_rows)
                Walks::template launch_anchored<kUpdate>(of_walks(), walks_, scratch, rows_,
                                                         plan_.shape.erases);
        if constexpr (kErasable)
            if (plan_.shape.erases)
                return launch_erase_gradients<T, kKey>(call_, a_, schedule_, d_, walks_.saved, scratch,
                                                       early_);
        if constexpr (kTakesLowRank)
            if (plan_.shape.low_rank)
                return launch_low_rank_gradients<T, kKey>(call_, a_, schedule_, d_, walks_.saved, scratch,
                                                          early_);
        if constexpr (requires { requires Walks::template kDifferentiates<kUpdate>; }) {
            Walks::template launch_gradients<kUpdate>(of_walks(), walks_, scratch, rows_,
                                                      plan_.shape.several_writes);
        } else {
            if constexpr (kMayWriteSeveral<kPerChannel, kUpdate>)
                if (plan_.shape.several_writes)
                    return launch_several_gradients<T, kKey>(call_, a_, schedule_, d_, walks_.saved, scratch,
                                                             early_);
            launch_gradients<T, kKey, kPerChannel>(call_, a_, schedule_, d_, walks_.saved, scratch, early_,
                                                   kUpdate);
        }
    }

    const Call& call_;
    DeviceArgs a_;
    const Gradients asked_;
    Gradients d_;  // as kernels write them
    const BackwardPlan& plan_;
    const Workspace workspace_;
    EarlyStarts early_;
    Schedule schedule_;
    WalkParams<T, kKey> walks_;
    FromRows rows_;  // if the slices have none (Saved::by_rows)
};

template <WalkTarget Walks, Update kUpdate>
class PreparedBackward final : public Prepared {
    using T = typename Walks::Type;
    static constexpr int kKey = Walks::kKey;

public:
    PreparedBackward(const BackwardPlan& plan, std::size_t workspace_bytes)
        : Prepared(workspace_bytes, 0), plan_(plan) {}
    // Of low-rank keys. What is made for them lies behind the workspace of the launches.
    PreparedBackward(const BackwardPlan& plan, std::size_t of_launches, const LowRankForm& form)
        : Prepared(of_launches + LowRankWorkspace<T>(plan.shape, form, nullptr).bytes, 0),
          plan_(plan),
          made_at_(of_launches),
          form_(form) {}

    void run(const Args& args, const Context& context) const override {
        if (const WantedGradients wanted(args); plan_.half != Half::kFirst && wanted != plan_.wanted)
            throw Error("run: args must be those of the plan, got other gradients");
        if (static_cast<bool>(args.saved) != (plan_.half != Half::kBoth))
            throw Error("run: args must be those of the plan, got another saved");
        const DeviceGuard guard(context.device.index);
        const Call call = make_call(args, context);
        if constexpr (chunked::kTakesLowRank<kKey, Walks::kPerChannel, kUpdate>)
            if (plan_.shape.low_rank) return launch_low_rank(args, call);
        BackwardLaunches<Walks, kUpdate> launches(call, gradients(args), plan_);
        if (plan_.half == Half::kFirst)
            launches.run_first_half();
        else
            launches.run();
    }

private:
    void launch_low_rank(const Args& args, const Call& call) const {
        if (form_ != LowRankForm(args))
            throw Error("run: args must be those of the plan, got another dtype or layout");
        const LowRankWorkspace<T> workspace(plan_.shape, form_,
                                            static_cast<std::byte*>(call.workspace) + made_at_);
        const Gradients asked = gradients(args);
        chunked::launch_low_rank_rows<T, kKey>(call, asked.d_o, workspace);
        Call of_rows = call;
        workspace.replace(of_rows.args);
        Gradients d = asked;
        d.d_o = workspace.made.d_o, d.d_v = workspace.made.d_v;
        BackwardLaunches<Walks, kUpdate>(of_rows, d, plan_).run();
        if (asked.d_v.data) chunked::launch_low_rank_outputs<T, kKey>(call, asked.d_v, workspace.made.d_v);
        EarlyStarts none(false);
        if (call.args.cu_seqlens) launch_zero_tail<kAnyKey>(call.args, asked, none, call.stream);
    }

    BackwardPlan plan_;
    std::size_t made_at_ = 0;
    LowRankForm form_;
};

template <WalkTarget Walks>
using WorkspaceOf = BackwardWorkspace<typename Walks::Type, Walks::kKey, Walks::kPerChannel>;

// Of a backward with all gradients in one slab, so that each half of it is one, too.
template <WalkTarget Walks>
Saving saving(const Problem& problem) {
    using Workspace = WorkspaceOf<Walks>;
    const ChunkBytes bytes = Workspace::chunk_bytes(problem, WantedGradients::all());
    return {.chunk_tokens = kTokens<Walks::kKey>,
            .words = SavedOfCall<typename Walks::Type, Walks::kKey, Walks::kPerChannel>::words(
                Workspace::slices_of(static_cast<int>(problem.value_dim))),
            .most_chunks = static_cast<std::int64_t>(kBackwardSlabBytes / bytes.of_chunk(problem))};
}

// A backward call, or a prefill that saves.
template <WalkTarget Walks, Update kUpdate>
PreparedPtr prepare_backward_as(const Problem& problem, const Args& args, const BackwardLimits& limits,
                                StrategyKind wanted) {
    constexpr bool kPerChannel = Walks::kPerChannel;
    using Workspace = WorkspaceOf<Walks>;
    BackwardPlan plan = plan_backward(problem, args, Walks::traits(problem),
                                      Workspace::chunk_bytes(problem, WantedGradients(args)), limits, wanted);
    plan.shape.converts_erase =
        plan.shape.erases && chunked::EraseOperands<typename Walks::Type>::converts(token_rows(args.erase));
    if ((plan.shape.several_writes || plan.shape.low_rank) && args.checkpoint_plan)
        plan.shape.checkpoints = args.checkpoint_plan.size[0];
    const int channels = kPerChannel ? static_cast<int>(problem.key_dim) : 1;
    constexpr bool kDiagonal = has_diagonal_map(kUpdate);
    if (args.saved) check_saved(problem, args.saved, saving<Walks>(problem), plan);
    const std::size_t bytes =
        Workspace(plan, static_cast<int>(problem.heads), channels, kDiagonal, nullptr, nullptr).bytes;
    if (plan.shape.low_rank)
        return std::make_shared<const PreparedBackward<Walks, kUpdate>>(plan, bytes, LowRankForm(args));
    return std::make_shared<const PreparedBackward<Walks, kUpdate>>(plan, bytes);
}

template <WalkTarget Walks>
PreparedPtr prepare_backward(const Problem& problem, const Args& args, const BackwardLimits& limits,
                             StrategyKind wanted) {
    constexpr Update kLowRank = kChunksOf<Update::kDplr>;
    if constexpr (chunked::kTakesLowRank<Walks::kKey, Walks::kPerChannel, kLowRank>)
        if (takes_low_rank(problem.algorithm.update))
            return prepare_backward_as<Walks, kLowRank>(problem, args, limits, wanted);
    PreparedPtr prepared;
    with_update(problem.algorithm.update, [&]<Update kUpdate>(UpdateConstant<kUpdate>) {
        prepared = prepare_backward_as<Walks, kUpdate>(problem, args, limits, wanted);
    });
    return prepared;
}

}  // namespace cula::cuda::backward
