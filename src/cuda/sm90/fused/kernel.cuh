// SPDX-License-Identifier: Apache-2.0
// The fused prefill of a delta rule with a decay per channel (KDA): o and states <- q, k, v, g, beta in one
// kernel. Only outputs and states go to global memory, and what segments that join leave to one another.
// docs/design/fused-sm90.md has the drawing and reasons.
//
// Equation (ALGORITHM.md: score, solve, read, output, carry), per value head and chunk of 32 tokens, with x_t
// the log2 decay from the chunk's middle (after token 15) to token t, and head and tail the log2 decays of
// its two halves:
//
//     Q~ = q exp2(x)   K^ = k exp2(x)   K+ = k exp2(-x)       q, k normalized; the scale is on q
//     A = tril(Q~ K+^T)   L = tril(K^ K+^T, -1)               score
//     T = (I + diag(beta) L)^-1 diag(beta)                    solve
//     S <- S diag(exp2(tail of the chunk before + head))      S [V, K], now at the chunk's middle
//     U^T = (V^T - S K^^T) T^T                                read
//     O^T = S Q~^T + U^T A^T                                  output
//     S <- S + U^T K+                                         carry
//
// Grid: row blocks * value heads * sequences (or segments) CTAs of five warpgroups. There are three forms
// (forms.cuh):
//
//     unpaired   a CTA has 128 value rows of a head and prepares every chunk
//     paired     a CTA has 64, in a cluster of two with 128 of one head; it prepares every other chunk and
//                sends it to its peer. Softplus gates always take this form, or the next one.
//     with map   as paired, and has 64 rows of the map of its segment besides
//
// Where a call is cut (Joined), a CTA runs one segment, makes the segment's map, too, and then joins it to
// those before: behind its role a warpgroup goes on in join.cuh, with registers, named barriers (kJoin) and
// mbarriers (JoinShared) of that file.
//
// Roles: warpgroups x registers of a thread (setmaxnreg):
//
//                                                              bounded gates           softplus gates
//     role                                          unpaired   paired     with map     paired     with map
//     state     64 rows of S or M; products         2 x 168    1 x 208    2 x 168      1 x 176    2 x 144
//     operand   norms, gates, operands, scores      2 x 48     3 x 64     2 x 48       3 x 80     2 x 72
//     load, store: a warp each; solve: two warps    1 x 48     1 x 80     1 x 48       1 x 64     1 x 48
//
//     Each column adds up to what the five warpgroups start with, 5 x 96.
//
// Waits and signals. (u) unpaired form only, (p) the two forms in pairs only, "peer" a barrier of the other
// CTA. The state warpgroup of M waits for no values, and stores its outputs itself.
//
//     role      waits for                              then signals
//     load      operands_free[stage]                   inputs_ready[stage]
//     store     (u) operands_free[stage]               values_ready[tile]
//               (p) out_ready[tile]
//     operand   inputs_ready[stage]                    scores_ready[stage], operands_ready[stage]
//               (u) named: hand-over from the chunk    (u) named: hand-over to the next chunk
//               before; overlaps_free[solve warp]
//               (p) tail_ready[place]                  (p) peer tail_ready[place]
//     solve     scores_ready[stage]                    operands_ready[stage]
//                                                      (u) overlaps_free[solve warp]
//               (p) operands_free[stage of the         (p) peer operands_ready[4 + place]
//               CTA's chunk two before];
//               operands_ready[stage]
//     state     values_ready[tile],                    operands_free[stage] of the CTA that prepared the
//               operands_ready[stage or 4 + place]     chunk (this one or the peer); (p) out_ready[tile]
//
// Barriers: arrivals of a phase, and what its end says:
//
//     inputs_ready     1 + 32, bytes of TMA     q, k, gates and beta of a chunk are in the stage
//     values_ready     32, bytes of TMA         values are in the tile; the outputs before them were read
//     scores_ready     128                      scores are in the stage, overlaps too or (u) in `own`
//     operands_ready   128 + 32                 operands, factors, scores and inverse are in the stage
//       (p) 4 + place  1, bytes of the copy     the same, of the peer's chunk
//     operands_free    (u) 256; (p) 128 + 4,    no CTA reads the chunk any more; (u) outputs are in the tile
//                      with map 256 + 8
//     out_ready (p)    128                      outputs are in the tile
//     tail_ready (p)   1, 512 bytes             the tail of the peer's chunk is in `tails`
//     overlaps_free (u)   32                    the solve warp has read the overlaps
//     map_known (with map) 1, 64 bytes          largest_of_map is there
//
//     Five of these have no free barrier of their own. operands_free frees inputs, which the operands
//     replace, scores and, in the paired form, tails (Paired::kTails). The state role frees values by storing
//     outputs in their place; the store role frees outputs itself, since it loads the next values only after
//     its stores have read the tile. overlaps_free has no ready barrier of its own: scores_ready says that
//     the overlaps are there.
//
//     Named barriers (Form::NamedBarrier): one for each operand warpgroup, 128 arrivals; one for all of them,
//     which says that the offsets of gates are there; unpaired also one for the hand-over to each, 256
//     arrivals, which says that the tail of the chunk before is in `tails`.
//
// Shared memory (K = 128; 227 KiB = 232,448 bytes at most):
//
//     unpaired   5 stages of 42 KiB (values included)
//     in pairs   4 + 2 stages of 35 KiB, 3 tiles of values of 4 KiB
//
//     and barriers, scales, tails and, unpaired, overlaps. A launch asks for sizeof(FusedShared), in whole
//     KiB: 230,400, and 232,448 in pairs.
#pragma once

#include "cuda/ptx/pdl.cuh"
#include "cuda/sm90/fused/operand_role.cuh"
#include "cuda/sm90/fused/other_roles.cuh"
#include "cuda/sm90/fused/state_role.cuh"

namespace cula::cuda::sm90 {

template <class Form>
inline constexpr int kFusedThreads =
    (Form::kStateWarpgroups + Form::kOperandWarpgroups + 1) * kWarpgroupThreads;

template <class T, int kKey, class Form, Gate kGate>
__global__ void __launch_bounds__(kFusedThreads<Form>, 1)
    fused_prefill(const __grid_constant__ DeviceArgs a, const __grid_constant__ Schedule schedule,
                  const __grid_constant__ CarryParams p, const __grid_constant__ MapsOf<Form> maps) {
    using Shared = FusedShared<kKey, Form>;
    using Stage = typename Shared::Stage;
    constexpr bool kMayLeaveRange = kGate != Gate::kBounded;
    constexpr FusedRegisters kRegisters = Form::template kRegisters<kMayLeaveRange>;
    extern __shared__ __align__(1024) unsigned char memory[];

    const int thread = static_cast<int>(threadIdx.x),
              warp = static_cast<int>(wgmma::uniform(threadIdx.x / 32));
    const int role = warp / kWarpgroupWarps - Form::kStateWarpgroups;  // negative: state role
    auto& shared = *reinterpret_cast<Shared*>(memory);
    if (thread == 0) {
        tma_prefetch_map(maps.q);
        tma_prefetch_map(maps.k);
        tma_prefetch_map(maps.g);
        tma_prefetch_map(maps.v);
        tma_prefetch_map(maps.o);
        for (int stage = 0; stage < Shared::kStages; ++stage) {
            shared.inputs_ready[stage].init(1 + 32);
            shared.scores_ready[stage].init(kWarpgroupThreads);
            shared.operands_ready[stage].init(kWarpgroupThreads + 32);
            shared.operands_free[stage].init(Form::kFreeArrivals);
        }
        for (int tile = 0; tile < Form::kTiles; ++tile) shared.values_ready[tile].init(32);
        Form::init_barriers(shared);
        publish_barriers();
    }
    // Zeros in the block above the diagonal of every square: the operand and solve roles write only the other
    // three. (In the paired form the overlaps overwrite that of the inverse; the solve role zeroes it again.)
    for (int i = thread; i < Shared::kStages * 4 * 32; i += static_cast<int>(blockDim.x)) {
        Stage& stage = shared.stages[i / 128];
        SquareTile& high = i / 32 % 2 ? stage.scores : stage.solved.inverse;
        SquareTile& low = i / 32 % 2 ? stage.solved.scores_low : stage.solved.inverse_low;
        (i / 64 % 2 ? high : low).clear_above(i % 32);
    }
    fence_async_proxy();
    pdl_trigger_and_wait();
    if (warp == 0) {
        const Segment segment = own_segment<kKey, false>(a, schedule, p);
        if (thread == 0) shared.segment = segment;
    }
    Form::sync_start();
    // Each role makes its own cursor, so that the roles share no registers.
    const auto make_cursor = [&] {
        return SegmentCursor<kKey, false>(a, schedule, p, shared.segment,
                                          role < 0 ? warp % Form::kRowWarps : 0, Form::kRowWarps);
    };
    {
        const auto cursor = make_cursor();
        if (role < 0 && warp < Form::kRowWarps) cursor.zero_skipped(schedule);
        // Must be uniform in a cluster, whose CTAs meet in Form::sync_end(): they are row blocks of one
        // segment and head.
        if (cursor.nothing()) return;
        if (kMayLeaveRange && thread == 0) {
            const int head = a.by_group.divide(cursor.value_head);
            constexpr std::int64_t kBytes = sizeof(T);
            const auto first = [&](const TokenRows& rows, int of) {
                return static_cast<const char*>(rows.data) +
                       rows.offset(cursor.batch, cursor.first_token, of) * kBytes;
            };
            shared.rows = {{first(a.q, head), first(a.k, head), first(a.g, cursor.value_head)},
                           {a.q.token * kBytes, a.k.token * kBytes, a.g.token * kBytes},
                           FusedCursor<Form>(cursor).tokens};
        }
    }
    if (kMayLeaveRange) __syncthreads();

    if (role < 0) {
        raise_registers<kRegisters.state>();
        FusedStateRole<T, kKey, Form, kMayLeaveRange>{a, schedule, p, maps, shared}.run(make_cursor());
        if constexpr (Form::kJoins) {
            if (warp < kWarpgroupWarps)
                join_segments<JoinPart::kPasses, kRegisters.state, T, kKey>(a, p, maps, shared);
            else
                join_segments<JoinPart::kWaits, kRegisters.state, T, kKey>(a, p, maps, shared);
        }
    } else if (role < Form::kOperandWarpgroups) {
        lower_registers<kRegisters.operand>();
        const auto cursor = make_cursor();
        FusedOperandRole<T, kKey, Form, kGate>{a, cursor, shared, role}.run();
        if constexpr (Form::kJoins)
            join_segments<JoinPart::kAdds, kRegisters.operand, T, kKey>(a, p, maps, shared);
    } else {
        lower_registers<kRegisters.others>();
        const int helper = warp % kWarpgroupWarps;
        const auto cursor = make_cursor();
        if (helper == 0)
            FusedLoadRole<T, kKey, Form>{a, maps, cursor, shared}.run();
        else if (helper == 1)
            FusedStoreRole<T, kKey, Form>{a, maps, cursor, shared}.run();
        else
            FusedSolveRole<T, kKey, Form>{cursor, shared, helper - 2}.run();
        if constexpr (Form::kJoins)
            join_segments<JoinPart::kWaits, kRegisters.others, T, kKey>(a, p, maps, shared);
    }
    if constexpr (!Form::kJoins) Form::sync_end();
}

}  // namespace cula::cuda::sm90
