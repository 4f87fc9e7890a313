// SPDX-License-Identifier: Apache-2.0
// Decides whether the fused prefill (kernel.cuh) takes a call, and launches it.
#pragma once

#include "cuda/chunked/launch.cuh"
#include "cuda/sm90/fused/kernel.cuh"
#include "cuda/sm90/fused/rule.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/tensor_maps.h"

namespace cula::cuda::sm90 {

template <class T, int kKey>
struct FusedPrefill {
    int warpgroups = 0;  // state warpgroups of a CTA: 1 is the paired form, 2 the unpaired one
    bool pays = false;   // whether the call takes this kernel

    FusedPrefill(const Call& call, const PrefillShape& shape) {
        const DeviceArgs& a = call.args;
        if (a.tokens == 0 || a.sequences == 0) return;
        const std::int64_t tokens = a.tokens * static_cast<std::int64_t>(a.cu_seqlens ? 1 : a.sequences);
        warpgroups = fused_groups(shape, tokens, a.batch_invariant, call.multiprocessors, call.fused,
                                  a.gate == Gate::kSoftplus ? kSoftplusCosts : FusedCosts{});
        if (warpgroups == 0) return;
        const std::string no = declines(call);
        if (call.fused && !no.empty())
            throw Error("prefill: backend \"sm90:fused\" does not take this call: " + no);
        pays = no.empty();
    }

    template <class ShapeOf>
    void launch(const Call& call, const Schedule& schedule, const CarryParams& p,
                const ShapeOf& shape) const {
        if (call.args.gate == Gate::kSoftplus)
            launch_as<1, Gate::kSoftplus>(call, schedule, p, shape);
        else if (warpgroups == 1)
            launch_as<1, Gate::kBounded>(call, schedule, p, shape);
        else
            launch_as<2, Gate::kBounded>(call, schedule, p, shape);
    }

private:
    // Why the kernel cannot take the call; empty where it can.
    static std::string declines(const Call& call) {
        constexpr float kMostScale = 256.0f;
        const DeviceArgs& a = call.args;
        if (!fuses(a.algorithm.update) || !fuses_gate(a.gate, a.lower_bound))
            return "it takes the delta rule with gates that it makes itself";
        if (call.segment || call.kept) return "it keeps nothing, and finds nothing that was kept";
        if (!a.qk_l2norm) return "it normalizes q and k (qk_l2norm)";
        if (!(std::fabs(a.scale) <= kMostScale))
            return "it takes scale up to 256, got " + std::to_string(a.scale);
        if (a.beta_per_value || a.beta.dtype == Dtype::kFloat64)
            return "it takes one beta per token, not of float64";
        bool all_mappable = true;
        each_map(a, [&](auto, const TokenRows& rows, int, int width) {
            all_mappable = all_mappable && mappable(rows, kDtype<T>, width);
        });
        if (!all_mappable) return "q, k, v, g and o must be bfloat16 and lie in whole pieces of 16 bytes";
        return {};
    }

    // Calls body(tensor map, rows, heads, channels) for each tensor that TMA moves.
    template <class Body>
    static void each_map(const DeviceArgs& a, Body body) {
        const int heads = a.value_heads / a.group;
        body(&FusedMaps::q, a.q, heads, a.key_dim);
        body(&FusedMaps::k, a.k, heads, a.key_dim);
        body(&FusedMaps::g, a.g, a.value_heads, a.key_dim);
        body(&FusedMaps::v, a.v, a.value_heads, a.value_dim);
        body(&FusedMaps::o, a.o, a.value_heads, a.value_dim);
    }
    static FusedMaps make_maps(const DeviceArgs& a) {
        FusedMaps maps;
        each_map(a, [&](CUtensorMap FusedMaps::* map, const TokenRows& rows, int heads, int width) {
            if (!map_rows(maps.*map, rows, kDtype<T>, a.cu_seqlens ? 1 : a.sequences, a.tokens, heads, width,
                          {kTmaChannels, kFusedTokens, CU_TENSOR_MAP_SWIZZLE_128B}))
                throw std::runtime_error("cula: cuTensorMapEncodeTiled: no map of these rows");
        });
        return maps;
    }

    template <int kStateWarpgroups, Gate kGate, class ShapeOf>
    void launch_as(const Call& call, const Schedule& schedule, CarryParams p, const ShapeOf& shape) const {
        const DeviceArgs& a = call.args;
        // Row blocks of a head: in the paired form a whole number of clusters.
        const int blocks =
            ceil_div(a.value_dim, kPeers<kStateWarpgroups> * kStateWarpgroups * kWarpgroupRows) *
            kPeers<kStateWarpgroups>;
        p.value_blocks = blocks, p.row_blocks = divisor(blocks);
        cuda::launch<fused_prefill<T, kKey, kStateWarpgroups, kGate>>(
            shape({.blocks = static_cast<std::size_t>(blocks) * a.value_heads * schedule.max_segments,
                   .threads = kFusedThreads<kStateWarpgroups>,
                   .shared_bytes = static_cast<std::size_t>(FusedMemory<kKey, kStateWarpgroups>::kBytes),
                   .cluster = kPeers<kStateWarpgroups>}),
            call.stream, a, schedule, p, make_maps(a));
    }
};

}  // namespace cula::cuda::sm90
