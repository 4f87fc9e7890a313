// SPDX-License-Identifier: Apache-2.0
// What the launches of a chunked prefill (launch.cuh) need of a target: the kernel that carries states over
// the chunks, and what it does by itself. A new GPU's target is a type that fulfils ChunkedTarget.
#pragma once

#include <concepts>
#include <string>
#include <string_view>

#include "cuda/call.h"
#include "cuda/chunked/cursor.cuh"
#include "cuda/chunked/plan.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::chunked {

// Programmatic dependent launch: decides for one launch after the other whether it may start before the
// kernel before it ends. The first launch of a call never does. goes_on: the launches before are of the same
// call.
class EarlyStarts {
public:
    explicit EarlyStarts(bool available, bool goes_on = false)
        : allowed_(available), available_(available), first_(!goes_on) {}

    void allow(bool allowed) { allowed_ = available_ && allowed; }
    LaunchShape operator()(LaunchShape of) {
        of.early = allowed_ && !first_;
        first_ = first_ && of.blocks == 0;  // an empty launch launches nothing
        return of;
    }

private:
    bool allowed_, available_, first_;
};

// What a target's launches read. operands: of the slab; null if the strategy needs none.
template <class Operands>
struct Slab {
    const Call& call;
    const PrefillPlan& plan;
    const Schedule& schedule;
    const Operands* operands;
    EarlyStarts& early;
    SegmentNotes notes = {};  // of Joined
};

template <class Carry>
using SlabOf = Slab<ChunkOperands<typename Carry::Type, Carry::kKey, Carry::kPerChannel>>;

template <class Carry>
concept ChunkedTarget = requires(const Problem& problem, const Args& args, const DeviceArgs& a,
                                 const SlabOf<Carry>& slab, const CarryParams& params) {
    { Carry::kTarget } -> std::convertible_to<std::string_view>;  // as the registry names it
    typename Carry::Type;                                         // of q, k, v: __nv_bfloat16 or __half
    { Carry::kKey } -> std::convertible_to<int>;                  // most key channels
    { Carry::kPerChannel } -> std::convertible_to<bool>;
    { Carry::kWarpStep } -> std::convertible_to<int>;  // CTAs have a multiple of so many warps
    // Whether it takes its costs from Machine::warpgroups.
    { Carry::kWarpgroups } -> std::convertible_to<bool>;
    // Whether additive algorithms need no operands, because the carry makes their scores itself.
    { Carry::kScoresItself } -> std::convertible_to<bool>;
    // Whether it waits for operands and for composed states by itself (CarryWaits).
    { Carry::kWaitsItself } -> std::convertible_to<bool>;
    // Whether all of its walks are reversed (DeviceArgs), so that chunks are prepared for them.
    { Carry::kReversed } -> std::convertible_to<bool>;
    // Whether first segments may be carried beside the maps of others.
    { Carry::kFirstBesideMaps } -> std::convertible_to<bool>;
    // Of two segments of which the first needs no M, how much longer the first is.
    { Carry::kFirstApart } -> std::convertible_to<double>;
    typename Carry::GateTiles;  // how prepare_channel reads the gates
    { Carry::gate_tiles(a) } -> std::same_as<typename Carry::GateTiles>;
    // Whether there is a fused kernel for these types, whether it takes a problem, why it declines a call all
    // the same (empty: it does not), and its launch.
    { Carry::kFuses } -> std::convertible_to<bool>;
    { Carry::fuses(problem) } -> std::convertible_to<bool>;
    { Carry::declines_fused(args) } -> std::convertible_to<std::string>;
    Carry::launch_fused(slab, params);
    // Launches the carry, or the one that makes maps: launch<update, maps>.
    Carry::template launch<Update::kDelta, false>(slab, params);
    Carry::template launch<Update::kDelta, true>(slab, params);
    Carry::template launch<Update::kAdditive, false>(slab, params);
    Carry::template launch<Update::kAdditive, true>(slab, params);
};

}  // namespace cula::cuda::chunked
