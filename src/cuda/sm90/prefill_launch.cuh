// SPDX-License-Identifier: Apache-2.0
// The chunked prefill on Hopper: the launches that all carries share (chunked/launch.cuh), with the carry of
// sm90/carry.
#pragma once

#include "cuda/chunked/launch.cuh"
#include "cuda/sm90/carry/launch.cuh"
#include "cuda/sm90/fused/launch.cuh"
#include "cuda/sm90/gate_tiles.cuh"
#include "cuda/sm90/launch.h"

namespace cula::cuda::sm90 {

using chunked::ceil_div;
using chunked::divisor;
using chunked::rows_of;
using chunked::SlabOf;
using chunked::StrategyKind;

template <class T, int kKeyDim, bool kDecayPerChannel>
struct WarpgroupCarry {
    static_assert(kTokens<kKeyDim> % kMostTileWrites == 0);
    using Shared = CarryShared<T, kKeyDim, true, false, false>;  // of rules with several writes
    static_assert((kMostTileWrites - 1) * Shared::RowTile::kRowBytes <= Shared::kBytesBehindOuts);
    using Type = T;
    static constexpr std::string_view kTarget = "sm90";
    // Two CTAs of two warpgroups take 1.11 us for a chunk of a map, two of one warpgroup 0.89 us for a chunk
    // of a first segment's B.
    static constexpr double kFirstApart = 1.25;
    static constexpr int kKey = kKeyDim, kWarpStep = kWarpgroupWarps;
    static constexpr bool kPerChannel = kDecayPerChannel, kScoresItself = !kDecayPerChannel,
                          kReversed = false, kWaitsItself = true, kWarpgroups = true,
                          kFirstBesideMaps = kDecayPerChannel;  // of others it was not measured
    // The fused prefill needs bf16: fp16's range is too small for decay factors over half a chunk. It needs
    // K = 128: with 64 channels half of its threads would have none.
    static constexpr bool kFuses = kDecayPerChannel && kKeyDim == 128 && std::is_same_v<T, __nv_bfloat16>;

    using GateTiles = sm90::GateTiles<T, kKey>;
    static GateTiles gate_tiles(const DeviceArgs& a) { return GateTiles(a); }

    static bool fuses(const Problem& problem) { return kFuses && FusedPrefill<T>::takes(problem); }
    static std::string declines_fused(const Args& args) { return FusedPrefill<T>::declines(args); }
    static void launch_fused(const SlabOf<WarpgroupCarry>& slab, const CarryParams& p) {
        if constexpr (kFuses) FusedPrefill<T>::launch(slab, p);
    }

    using Rows = CarryRowBlocks;
    static Rows rows(const DeviceArgs& a, int warpgroups, bool m) { return Rows(a, warpgroups, m); }

    template <Update kUpdate, bool kMaps>
    static void launch(const SlabOf<WarpgroupCarry>& slab, CarryParams p) {
        constexpr bool kReadsState = CarryRule<kUpdate>::kReadsState;
        const Call& call = slab.call;
        const DeviceArgs& a = call.args;
        const int warpgroups = rows_of(slab.plan.strategy).warps / kWarpgroupWarps;
        const int pieces = static_cast<int>(slab.schedule.by_pieces.value);
        const auto shape = [&](const LaunchShape& of) { return slab.early(of); };
        const std::int64_t firsts = std::int64_t{a.value_heads} * a.sequences;
        std::int64_t columns = std::int64_t{a.value_heads} * (slab.schedule.max_segments - p.first_rank);
        if (p.first_beside_maps && kMaps) columns = firsts * p.ranks.value;
        if (p.first_only) columns = std::int64_t{a.value_heads} * ((a.sequences - 1) * pieces + 1);
        if (!kMaps || !kReadsState || !p.wants_m)
            return launch_rows<kReadsState, kMaps>(slab, p, rows(a, warpgroups, false), columns, shape);
        // Two warpgroups per CTA where CTAs of the carry's size would not all be resident at once.
        const auto fewer_rounds = [&](std::int64_t of, int room) {
            const Rows as_the_carry = rows(a, warpgroups, true);
            return of * as_the_carry.blocks() > room ? rows(a, kMaxStateWarpgroups, true) : as_the_carry;
        };
        const auto beside_others = [&](LaunchShape of) {
            of = slab.early(of);
            of.early |= p.beside_others;
            return of;
        };
        int room = call.multiprocessors;
        if (p.first_beside_maps) {
            room -= static_cast<int>(firsts) * rows(a, warpgroups, false).blocks();
            return launch_rows<kReadsState, kMaps>(slab, p, fewer_rounds(columns, room), columns,
                                                   beside_others);
        }
        if (!slab.plan.shape.kept || a.cu_seqlens)
            return launch_rows<kReadsState, kMaps>(slab, p, fewer_rounds(columns, room), columns, shape);
        // A segment call with `keep` leaves out maps that nobody needs: M of first segments (first_m false),
        // and the maps of last segments (last_map false).
        if (!p.first_m) {
            const Rows others = rows(a, kMaxStateWarpgroups, true);
            Rows first = rows(a, warpgroups, false);
            if (firsts * first.blocks() + firsts * (pieces - 1) * others.blocks() > room)
                first = rows(a, kMaxStateWarpgroups, false);
            p.first_rank = 0, p.ranks = divisor(1);
            launch_rows<kReadsState, kMaps>(slab, p, first, firsts, shape);
            p.first_rank = 1, p.beside_others = call.follows;
            room -= static_cast<int>(firsts * first.blocks());
        }
        const int ranks = pieces - p.first_rank - (p.last_map ? 0 : 1);
        p.ranks = divisor(ranks);
        launch_rows<kReadsState, kMaps>(slab, p, fewer_rounds(firsts * ranks, room), firsts * ranks,
                                        beside_others);
    }

private:
    template <bool kReadsState, bool kMaps, class ShapeOf>
    static void launch_rows(const SlabOf<WarpgroupCarry>& slab, const CarryParams& p, const Rows& rows,
                            std::int64_t columns, const ShapeOf& shape) {
        launch_carry<T, kKey, kReadsState, kPerChannel, kMaps>(slab.call, slab.call.args, slab.schedule,
                                                               slab.operands, p, rows, columns, shape);
    }
};

template <class T, int kKey, bool kPerChannel>
chunked::Candidates prefill_candidates(const Problem& problem) {
    return chunked::prefill_candidates<WarpgroupCarry<T, kKey, kPerChannel>>(problem);
}

template <class T, int kKey, bool kPerChannel>
PreparedCallPtr prepare_prefill(const Problem& problem, const Args& args, StrategyKind wanted) {
    return chunked::prepare_prefill<WarpgroupCarry<T, kKey, kPerChannel>>(problem, args, wanted);
}

}  // namespace cula::cuda::sm90
