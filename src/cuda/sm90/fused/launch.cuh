// SPDX-License-Identifier: Apache-2.0
// Says whether the fused prefill (kernel.cuh) takes a call, and launches it.
#pragma once

#include "cuda/chunked/launch.cuh"
#include "cuda/pipe/tensor_maps.h"
#include "cuda/sm90/fused/kernel.cuh"
#include "cuda/sm90/fused/rule.h"
#include "cuda/sm90/launch.h"

namespace cula::cuda::sm90 {

using chunked::ceil_div;
using chunked::ChannelChunk;
using chunked::divisor;
using chunked::Slab;

template <class T>
struct FusedPrefill {
    static constexpr int kKey = 128;

    // Whether there is a kernel for the problem, and why it cannot take a call all the same: empty where it
    // can.
    static bool takes(const Problem& problem) {
        return fuses(problem.algorithm.update) &&
               fuses_gate(problem.gate, static_cast<float>(problem.lower_bound));
    }
    static std::string declines(const Args& args) {
        constexpr float kMostScale = 256.0f;
        if (args.segment_b || args.keep || args.kept)
            return "it keeps nothing, and finds nothing that was kept";
        if (!args.qk_l2norm) return "it normalizes q and k (qk_l2norm)";
        if (const auto scale = static_cast<float>(args.scale); !(std::fabs(scale) <= kMostScale))
            return "it takes scale up to 256, got " + std::to_string(scale);
        if (args.beta.ndim == 4 || args.beta.dtype == Dtype::kFloat64)
            return "it takes one beta per token, not of float64";
        for (const TensorRef* ref : {&args.q, &args.k, &args.g, &args.v, &args.o})
            if (!mappable(token_rows(*ref), kDtype<T>, static_cast<int>(ref->size[3])))
                return "q, k, v, g and o must be bfloat16 and lie in whole pieces of 16 bytes";
        return {};
    }

    static void launch(const Slab<ChannelChunk<T, kKey>>& slab, const CarryParams& p) {
        if (std::holds_alternative<chunked::Joined>(slab.plan.strategy))
            return slab.call.args.gate == Gate::kSoftplus ? launch_joined<Gate::kSoftplus>(slab, p)
                                                          : launch_joined<Gate::kBounded>(slab, p);
        const int warpgroups = std::get<chunked::Fused>(slab.plan.strategy).warpgroups;
        if (slab.call.args.gate == Gate::kSoftplus)
            launch_as<Paired, Gate::kSoftplus>(slab, p);
        else if (warpgroups == Paired::kStateWarpgroups)
            launch_as<Paired, Gate::kBounded>(slab, p);
        else
            launch_as<Unpaired, Gate::kBounded>(slab, p);
    }

private:
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
            encode(maps.*map, a, rows, heads, width);
        });
        return maps;
    }
    static void encode(CUtensorMap& map, const DeviceArgs& a, const TokenRows& rows, int heads, int width) {
        if (!encode_map(map, rows, kDtype<T>, a.cu_seqlens ? 1 : a.sequences, a.tokens, heads, width,
                        {kTmaChannels, kFusedTokens, CU_TENSOR_MAP_SWIZZLE_128B}))
            throw std::runtime_error("cula: cuTensorMapEncodeTiled: no map of these rows");
    }
    // Row blocks of a head: in the paired form a whole number of clusters.
    template <class Form>
    static int blocks_of(int rows) {
        return ceil_div(rows, Form::kPeers * Form::kRowWarpgroups * kWarpgroupRows) * Form::kPeers;
    }

    template <Gate kGate>
    static void launch_joined(const Slab<ChannelChunk<T, kKey>>& slab, CarryParams p) {
        const DeviceArgs& a = slab.call.args;
        JoinedMaps maps{make_maps(a), slab.notes};
        p.value_blocks = blocks_of<PairedWithMap>(a.value_dim), p.row_blocks = divisor(p.value_blocks);
        const auto blocks =
            static_cast<std::size_t>(p.value_blocks) * a.value_heads * slab.schedule.max_segments;
        fill_with_zeros(maps.notes.ended, blocks * sizeof(std::int32_t), slab.call.stream);
        cuda::launch<fused_prefill<T, kKey, PairedWithMap, kGate>>(
            {.blocks = blocks,
             .threads = kFusedThreads<PairedWithMap>,
             .shared_bytes = sizeof(FusedShared<kKey, PairedWithMap>),
             .cluster = PairedWithMap::kPeers},
            slab.call.stream, a, slab.schedule, p, maps);
    }

    template <class Form, Gate kGate>
    static void launch_as(const Slab<ChannelChunk<T, kKey>>& slab, CarryParams p) {
        const DeviceArgs& a = slab.call.args;
        const int blocks = blocks_of<Form>(a.value_dim);
        p.value_blocks = blocks, p.row_blocks = divisor(blocks);
        cuda::launch<fused_prefill<T, kKey, Form, kGate>>(
            slab.early(
                {.blocks = static_cast<std::size_t>(blocks) * a.value_heads * slab.schedule.max_segments,
                 .threads = kFusedThreads<Form>,
                 .shared_bytes = sizeof(FusedShared<kKey, Form>),
                 .cluster = Form::kPeers}),
            slab.call.stream, a, slab.schedule, p, make_maps(a));
    }
};

}  // namespace cula::cuda::sm90
