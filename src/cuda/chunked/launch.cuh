// SPDX-License-Identifier: Apache-2.0
// Launches of a chunked prefill, or of the maps of a segment
// call (docs/design/planning.md). Per slab, in this order:
//
//   schedule         chunks and segments from cu_seqlens; skipped unless the call is packed and not by_warp
//   prepare_*        chunk operands; skipped where the carry prepares them itself or where they were kept
//                    (of a rule with erase strengths erase_operands comes before the first slab, and of
//                    one with low-rank keys low_rank_rows, whose counterpart low_rank_outputs comes last;
//                    where tokens are several rows, count_writes)
//   then, by strategy (plan.h):
//     Fused          one kernel, instead of prepare
//     Whole          carry: outputs and final states
//     Halves         maps of first halves, carry
//     Segments       carry of first segments (first_beside_maps only), maps, compose, carry
//     Joined         one kernel, for segments that join by themselves
//
// A segment call with Args::keep is the first half of a prefill, up to the maps. If it is
// asked for the map of the sequence, one compose kernel makes that from the segments' maps.
// The prefill that gets its workspace as `kept` is the second half, from compose on.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "core/kernel.h"
#include "cuda/call.h"
#include "cuda/chunked/compose.h"
#include "cuda/chunked/entry.h"
#include "cuda/chunked/low_rank.h"
#include "cuda/chunked/prepare.h"
#include "cuda/chunked/prepare_channel.cuh"
#include "cuda/chunked/prepare_erase.h"
#include "cuda/chunked/prepare_token.cuh"
#include "cuda/chunked/schedule.h"
#include "cuda/chunked/target.h"
#include "cuda/chunked/timeline.h"
#include "cuda/chunked/workspace.cuh"
#include "cuda/pipe/launch.h"
#include "cuda/rule.h"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::chunked {

inline States float_states(float* data, std::int64_t slots, std::int64_t heads, std::int64_t rows,
                           std::int64_t columns) {
    return {data, Dtype::kFloat32, slots, heads * rows * columns, rows * columns, columns, 1};
}

inline Divisor divisor(std::int32_t by) { return Divisor(static_cast<std::uint32_t>(by)); }

// The schedule of a call, of which only the slab is left open. Plan: a PrefillPlan or a BackwardPlan. packed,
// segments: null if the call has no packed sequences or is scheduled by warps.
template <int kKey, class Plan>
Schedule schedule_of(const DeviceArgs& a, int multiprocessors, const Plan& plan, const PackedChunk* packed,
                     const Segment* segments) {
    Schedule schedule;
    schedule.chunk_tokens = kTokens<kKey>;
    schedule.segment_chunks = plan.segment_chunks;
    schedule.by_segment = divisor(plan.segment_chunks);
    schedule.chunks = ceil_div(a.tokens, kTokens<kKey>);
    schedule.by_chunks = divisor(schedule.chunks);
    schedule.max_segments = plan.max_segments;
    schedule.ahead = std::max(1, multiprocessors / a.value_heads);
    schedule.by_warp = plan.by_warp;
    schedule.packed = packed;
    schedule.segments = segments;
    return schedule;
}

// Turns to the chunks of a slab.
template <class Plan>
void turn_to_slab(Schedule& schedule, const Plan& plan, int slab) {
    schedule.slab_begin = slab * plan.slab_chunks;
    schedule.slab_end = static_cast<std::int32_t>(
        std::min<std::int64_t>(plan.shape.chunks, schedule.slab_begin + std::int64_t{plan.slab_chunks}));
    schedule.by_pieces = divisor(
        ceil_div(std::min(schedule.chunks, schedule.slab_end - schedule.slab_begin), plan.segment_chunks));
}

template <bool kPerChannel>
bool solves_chunk(Update update) {
    return answer_for(
        update, []<Update kUpdate>(UpdateConstant<kUpdate>) { return kSolvesChunk<kUpdate, kPerChannel>; });
}

template <ChunkedTarget Carry>
CarryTraits traits_of(const Problem& problem) {
    using Operands = ChunkOperands<typename Carry::Type, Carry::kKey, Carry::kPerChannel>;
    const bool solves = solves_chunk<Carry::kPerChannel>(chunks_of(problem.algorithm.update));
    return {.warp_step = Carry::kWarpStep,
            .operand_bytes = solves || !Carry::kScoresItself ? sizeof(Operands) : 0,
            .warpgroups = Carry::kWarpgroups,
            .family = family(problem.algorithm, problem.gate),
            .first_beside_maps = Carry::kFirstBesideMaps && solves,
            .first_apart = Carry::kFirstApart,
            .chunk_tokens = kTokens<Carry::kKey>};
}

// Every way to run the problem, with its predicted time. Without tensors at
// hand it is assumed that the fused kernel, where there is one, takes them.
template <ChunkedTarget Carry>
Candidates prefill_candidates(const Problem& problem) {
    const CarryTraits traits = traits_of<Carry>(problem);
    PrefillShape shape = shape_of(problem, traits.chunk_tokens);
    shape.joins = Carry::fuses(problem) && !problem.checkpoints && !problem.chunk_states;
    return Planner(shape, traits, problem.device).candidates(Carry::fuses(problem));
}

// Whether the kernels of this rule also run the one with erase strengths, and that with low-rank keys.
template <bool kPerChannel, Update kUpdate>
inline constexpr bool kErasable = kPerChannel && kUpdate == kKernelsOf<Update::kErase>;
template <int kKey, bool kPerChannel, Update kUpdate>
inline constexpr bool kTakesLowRank = kHasLowRank<kKey> && kPerChannel && kUpdate == kChunksOf<Update::kDplr>;

// Launches the kernels of one call.
template <ChunkedTarget Carry, Update kUpdate>
class Launches {
    using T = typename Carry::Type;
    static constexpr int kKey = Carry::kKey;
    static constexpr bool kPerChannel = Carry::kPerChannel;
    static constexpr bool kDiagonal = has_diagonal_map(kUpdate),
                          kPrepares = kSolvesChunk<kUpdate, kPerChannel> || !Carry::kScoresItself;
    static_assert(!Carry::kReversed ||
                  (kDiagonal && !kPerChannel));  // what prepare_token and carries reverse

public:
    Launches(const Call& call, const PrefillPlan& plan)
        : call_(call),
          a_(call.args),
          plan_(plan),
          found_(plan.found),
          workspace_(plan, call.workspace, call.kept, found_),
          early_(call.follows, call.goes_on) {
        p_.is_compensated = workspace_.is_compensated, p_.fading = workspace_.fading;
        p_.starts = float_states(workspace_.starts, 0, a_.value_heads, a_.value_dim, kKey);
        p_.map_b = float_states(workspace_.map_b, 0, a_.value_heads, a_.value_dim, kKey);
        p_.map_m = float_states(workspace_.map_m, 0, a_.value_heads, kDiagonal ? 1 : a_.key_dim, kKey);

        schedule_ = schedule_of<kKey>(a_, call.multiprocessors, plan, workspace_.packed, workspace_.segments);
        schedule_.waits.operands =
            waits_itself() && workspace_.operands && plan.shape.chunks > 0 && !plan.makes_maps() && !found_;
        // Where maps are composed, only a carry that waits for compose itself may start early: waiting CTAs
        // of other kernels would occupy multiprocessors that maps still need.
        early_.allow(!plan.cuts());
    }

    void run() {
        for (int slab = 0; slab < plan_.slabs(); ++slab) {
            begin(slab);
            if constexpr (Carry::kFuses)
                if (plan_.fuses()) return Carry::launch_fused(this->slab(), p_);
            prepare();
            if (call_.segment)
                maps_of_call();
            else
                std::visit([&](const auto& strategy) { carry(strategy); }, plan_.strategy);
        }
    }

private:
    bool waits_itself() const { return call_.follows && Carry::kWaitsItself && !call_.segment; }
    SlabOf<Carry> slab() { return {call_, plan_, schedule_, workspace_.operands, early_, workspace_.notes}; }
    int pieces() const { return static_cast<int>(schedule_.by_pieces.value); }

    template <auto kKernel, class... Arguments>
    void launch(const LaunchShape& shape, const Arguments&... arguments) {
        cuda::launch<kKernel>(early_(shape), call_.stream, a_, arguments...);
    }

    // Turns to the chunks of a slab.
    void begin(int slab) {
        turn_to_slab(schedule_, plan_, slab);
        p_.ranks = schedule_.by_pieces, p_.first_rank = 0;
        const auto unfinished = [&](int which, std::int64_t slots) {
            return float_states(workspace_.unfinished[which % 2], slots, a_.value_heads, a_.value_dim,
                                a_.key_dim);
        };
        p_.slab_start = unfinished(slab, 1), p_.slab_end = unfinished(slab + 1, 1);
        p_.slab_end.slot = 0;  // one slot, since only one sequence can continue into the next slab
        if (workspace_.packed)
            launch_schedule<kAnyKey>(a_, schedule_, workspace_.first_chunk, workspace_.packed,
                                     workspace_.segments, Carry::kReversed, early_, call_.stream);
    }

    void prepare() {
        const auto chunks =
            static_cast<std::size_t>(schedule_.slab_end - schedule_.slab_begin) * a_.value_heads;
        constexpr int kCtas = kPerChannel ? kChannelCtas : kTokenCtas;
        const PrepareShare share = kPrepares && !kPerChannel
                                       ? prepare_share(chunks, a_.group, call_.multiprocessors)
                                       : PrepareShare{};
        schedule_.waits.per_chunk =
            schedule_.waits.operands && pays_per_chunk(share.blocks(chunks), kCtas, call_.multiprocessors);
        if (found_) return;
        if constexpr (kErasable<kPerChannel, kUpdate>)
            if (plan_.shape.erases)
                return launch_prepare_erase<T, kKey>(call_, a_, schedule_, workspace_.operands,
                                                     workspace_.is_compensated, early_);
        if constexpr (kTakesLowRank<kKey, kPerChannel, kUpdate>)
            if (plan_.shape.low_rank)
                return launch_prepare_low_rank<T, kKey>(call_, a_, schedule_, workspace_.operands,
                                                        workspace_.is_compensated, early_);
        using GateTiles = typename Carry::GateTiles;
        if constexpr (kPrepares && kPerChannel && std::is_same_v<GateTiles, NoGateTiles>)
            launch_prepare_channel<T, kKey>(call_, a_, schedule_, prepared(), early_, kUpdate);
        else if constexpr (kPrepares && kPerChannel)
            launch<prepare_channel<T, kKey, kUpdate, GateTiles>>(
                {chunks, kPrepareThreads, sizeof(ChannelSmem<kKey>)}, Carry::gate_tiles(a_), schedule_,
                workspace_.operands, workspace_.is_compensated, workspace_.fading);
        else if constexpr (kPrepares && Carry::kReversed)
            launch<prepare_token<T, kKey, true>>(
                {share.blocks(chunks), kPrepareThreads, TokenMemory<T, kKey>::bytes(share),
                 TokenMemory<T, kKey>::kMost},
                schedule_, share, workspace_.operands, workspace_.is_compensated, workspace_.fading);
        else if constexpr (kPrepares)
            launch_prepare_token<T, kKey>(call_, a_, schedule_, share, prepared(), early_,
                                          plan_.shape.several_writes);
    }
    PreparedChunks<ChunkOperands<T, kKey, kPerChannel>> prepared() const {
        return {workspace_.operands, workspace_.is_compensated, workspace_.fading};
    }

    // total: the map of a whole sequence, rather than the states before its segments.
    void compose_maps(int row_tiles, bool total) {
        launch_compose<kKey>(a_, schedule_, p_, row_tiles, !kDiagonal, total, early_, call_.stream);
    }
    int value_tiles() const { return ceil_div(a_.value_dim, kComposeRows); }

    void carry() { Carry::template launch<kUpdate, false>(slab(), p_); }
    void maps() { Carry::template launch<kUpdate, true>(slab(), p_); }

    void carry(const Fused&) {}  // Carry::launch_fused has done everything
    void carry(const Joined&) {}
    void carry(const Whole&) { carry(); }
    void carry(const Halves&) {
        p_.halves = p_.first_from_state = true, p_.wants_m = false;
        maps();
        carry();
    }
    void carry(const Segments& cut) {
        take(cut);
        if (cut.first_beside_maps) {
            const States slab_end = p_.slab_end;
            p_.first_only = true, p_.slab_end = p_.map_b, p_.slab_end.slot *= pieces();
            carry();
            p_.first_only = false, p_.slab_end = slab_end;
            p_.first_rank = 1, p_.ranks = divisor(std::max(1, pieces() - 2)),
            p_.beside_others = call_.follows;
        }
        if (!found_) maps();
        compose_maps(value_tiles(), false);
        // The last launch need not cover first segments again.
        // With several sequences their CTAs return at once.
        p_.first_rank = cut.first_beside_maps && a_.sequences == 1 ? 1 : 0;
        schedule_.waits.states = waits_itself();
        early_.allow(schedule_.waits.states);
        carry();
        schedule_.waits.states = false;
        early_.allow(false);
    }
    void take(const Segments& cut) {
        p_.first_beside_maps = cut.first_beside_maps;
        if (cut.first_apart) p_.map_m.data = workspace_.map_m - p_.map_m.slot, p_.first_m = false;
    }

    // Without segments: one map per sequence and slab, directly into
    // the call's own m and b; the next slab continues from there.
    void maps_of_call() {
        p_.last_map = a_.segment_b.data;
        const auto* const cut = std::get_if<Segments>(&plan_.strategy);
        if (cut)
            take(*cut);
        else
            p_.map_m = a_.segment_m, p_.map_b = a_.segment_b, p_.wants_m = a_.segment_m.data;
        if (cut || p_.last_map) maps();
        const int map_tiles = !a_.segment_m.data ? 0 : kDiagonal ? 1 : ceil_div(a_.key_dim, kComposeRows);
        if (cut && p_.last_map) compose_maps(value_tiles() + map_tiles, true);
    }

    const Call& call_;
    const DeviceArgs& a_;
    const PrefillPlan& plan_;
    const bool found_;
    const Workspace<T, kKey, kPerChannel, kUpdate> workspace_;
    EarlyStarts early_;
    Schedule schedule_;
    CarryParams p_;
};

// A planned prefill or segment call.
template <ChunkedTarget Carry, Update kUpdate>
class PreparedPrefill final : public PreparedCall {
    using T = typename Carry::Type;
    using Layout = Workspace<T, Carry::kKey, Carry::kPerChannel, kUpdate>;

public:
    PreparedPrefill(const PrefillPlan& plan, std::size_t workspace_bytes, std::size_t kept_bytes)
        : PreparedCall(workspace_bytes, kept_bytes), plan_(plan) {}
    // Of low-rank keys.
    PreparedPrefill(const PrefillPlan& plan, std::size_t workspace_bytes, const LowRankForm& form)
        : PreparedCall(workspace_bytes, 0), plan_(plan), form_(form) {}

    void run(const Args& args, const Context& context) const override {
        const DeviceGuard guard(context.device.index);
        const Call call = make_call(args, context);
        if (plan_.shape.low_rank && form_ != LowRankForm(args))
            throw Error(
                "run: args must be those of the plan, got another dtype or layout of a_key, b_key or o");
        if (plan_.found && !call.kept) throw Error("run: args must be those of the plan, got no kept");
        launch(call);
    }

    void launch(const Call& call) const override {
        if constexpr (kErasable<Carry::kPerChannel, kUpdate>)
            if (plan_.shape.erases) return launch_erasing(call);
        if constexpr (kTakesLowRank<Carry::kKey, Carry::kPerChannel, kUpdate>)
            if (plan_.shape.low_rank) return launch_low_rank(call);
        if constexpr (kMayWriteSeveral<Carry::kPerChannel, kUpdate>)
            if (plan_.shape.several_writes) return launch_on_timeline(call);
        Launches<Carry, kUpdate>(call, plan_).run();
    }

private:
    // With the values of a rule with erase strengths, in a kernel before the others. What a segment call has
    // kept has them.
    void launch_erasing(const Call& call) const {
        const Layout workspace(plan_, call.workspace, call.kept, plan_.found);
        if (!plan_.found) launch_erase_operands<T, Carry::kKey>(call, workspace.erase);
        Call erasing = call;
        workspace.erase.replace(erasing.args);
        Launches<Carry, kUpdate>(erasing, plan_).run();
    }

    // Of low-rank keys. The rows lie behind the workspace of their call.
    void launch_low_rank(const Call& call) const {
        constexpr int kKey = Carry::kKey;
        const LowRankWorkspace<T> workspace(
            plan_.shape, form_,
            static_cast<std::byte*>(call.workspace) + Layout(plan_, nullptr, nullptr, false).bytes);
        launch_low_rank_rows<T, kKey>(call, {}, workspace);
        Call of_rows = call;
        workspace.replace(of_rows.args);
        Launches<Carry, kUpdate>(of_rows, plan_).run();
        if (call.args.o.data) launch_low_rank_outputs<T, kKey>(call, call.args.o, workspace.made.o);
    }

    // Of tokens that write several times.
    void launch_on_timeline(const Call& call) const {
        const Layout workspace(plan_, call.workspace, call.kept, plan_.found);
        Call of_writes = call;
        workspace.timeline.replace(of_writes.args);
        if (launch_count_writes<kAnyKey>(call.args, workspace.timeline, call.stream))
            of_writes.goes_on = true;
        Launches<Carry, kUpdate>(of_writes, plan_).run();
    }

    PrefillPlan plan_;
    LowRankForm form_;
};

template <ChunkedTarget Carry, Update kUpdate>
PreparedCallPtr prepare_as(const Problem& problem, const Args& args, StrategyKind wanted) {
    using Layout = Workspace<typename Carry::Type, Carry::kKey, Carry::kPerChannel, kUpdate>;
    const CarryTraits traits = traits_of<Carry>(problem);
    const auto refuse = [&](const std::string& reason) {
        throw Error("prefill: backend \"" + std::string(Carry::kTarget) + ":" + std::string(name(wanted)) +
                    "\" does not take this call: " + reason);
    };
    // Why the fused kernel does not take the call; empty where it does.
    const std::string declines =
        Carry::fuses(problem) ? Carry::declines_fused(args) : "there is no fused kernel";
    const bool joins = wanted == StrategyKind::kJoined;
    if ((wanted == StrategyKind::kFused || joins) && !declines.empty()) refuse(declines);
    // From 0 to 2, as logits are: others make the maps of segments grow.
    if (joins && !args.beta_is_logit) refuse("its segments take write strengths as logits");

    PrefillShape shape = shape_of(problem, traits.chunk_tokens);
    shape.joins = declines.empty() && args.beta_is_logit && !args.checkpoint_plan && !args.chunk_states;
    shape.kept =
        (args.keep || args.kept.data) && !shape.low_rank &&
        static_cast<std::size_t>(shape.chunks) * shape.value_heads * traits.operand_bytes <= kKeptBytes;
    // What is kept is laid out alike however erase strengths come.
    shape.converts_erase =
        shape.erases && (shape.kept || EraseOperands<typename Carry::Type>::converts(token_rows(args.erase)));
    // What does not fit was not kept either.
    const bool found = shape.kept && args.kept.data;
    if ((shape.several_writes || shape.low_rank) && args.checkpoint_plan)
        shape.checkpoints = args.checkpoint_plan.size[0];
    // b_alone: of a segment call that makes B alone, whose first segments need no M. With packed sequences
    // the host does not know which segments come first.
    const auto planned = [&](bool b_alone) {
        PrefillShape of = shape;
        of.from_zero = b_alone && shape.kept && kSolvesChunk<kUpdate, Carry::kPerChannel> && !shape.packed;
        return plan_prefill(of, traits, problem.device, wanted, declines.empty());
    };
    const auto bytes = [&](const PrefillPlan& plan) { return Layout(plan, nullptr, nullptr, found).bytes; };

    std::optional<PrefillPlan> plan = planned(args.segment_b && !args.segment_m);
    if (!plan) refuse(found ? "it goes on from no kept" : std::string(refuses(wanted).reason()));
    if (found) {
        const std::size_t given = static_cast<std::size_t>(args.kept.size[0]) * sizeof(std::int32_t);
        const std::size_t needed = bytes(*plan);
        // A segment call that made B alone lacks what depends on a state before its tokens.
        const std::optional<PrefillPlan> from_zero = needed == given ? std::nullopt : planned(true);
        const bool of_b_alone = from_zero && bytes(*from_zero) == given;
        if (of_b_alone && !args.initial_state)
            plan = from_zero;
        else if (needed != given)
            throw Error("prefill: kept must be what a segment of the same inputs has kept, " +
                        std::to_string(needed) + " bytes, got " + std::to_string(given) +
                        (of_b_alone ? ", of one that made b alone, which has no initial_state" : ""));
    }
    plan->found = found;
    const Layout layout(*plan, nullptr, nullptr, found);
    if (shape.low_rank) {
        const LowRankForm form(args);
        const LowRankWorkspace<typename Carry::Type> made(shape, form, nullptr);
        return std::make_shared<const PreparedPrefill<Carry, kUpdate>>(*plan, layout.bytes + made.bytes,
                                                                       form);
    }
    return std::make_shared<const PreparedPrefill<Carry, kUpdate>>(
        *plan, found ? layout.own_bytes : layout.bytes, shape.kept ? layout.bytes : 0);
}

template <ChunkedTarget Carry>
PreparedCallPtr prepare_prefill(const Problem& problem, const Args& args, StrategyKind wanted) {
    if constexpr (kTakesLowRank<Carry::kKey, Carry::kPerChannel, kChunksOf<Update::kDplr>>)
        if (takes_low_rank(problem.algorithm.update))
            return prepare_as<Carry, kChunksOf<Update::kDplr>>(problem, args, wanted);
    PreparedCallPtr prepared;
    with_update(problem.algorithm.update, [&]<Update kUpdate>(UpdateConstant<kUpdate>) {
        prepared = prepare_as<Carry, kUpdate>(problem, args, wanted);
    });
    return prepared;
}

}  // namespace cula::cuda::chunked
