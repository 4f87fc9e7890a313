// SPDX-License-Identifier: Apache-2.0
// The fused prefill of a delta rule with a decay per channel (KDA): o and states <- q, k, v, g, beta in one
// kernel. Only outputs and states go to global memory. docs/design/fused-sm90.md has the drawing and reasons.
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
// Grid: row blocks * value heads * sequences CTAs of five warpgroups. There are two forms:
//
//     unpaired   a CTA has 128 value rows of a head and prepares every chunk
//     paired     a CTA has 64, in a cluster of two with 128 of one head; it prepares every other chunk and
//                sends it to its peer. Softplus gates always take this form.
//
// Roles: warpgroups x registers of a thread (setmaxnreg):
//
//     role                                          unpaired    paired     paired, softplus gates
//     state     64 value rows of S; products        2 x 168     1 x 208    1 x 176
//     operand   norms, gates, operands, scores      2 x 48      3 x 64     3 x 80
//     load, store: a warp each; solve: two warps    1 x 48      1 x 80     1 x 64
//
//     Each column adds up to what the five warpgroups start with, 5 x 96.
//
// Waits and signals. (u) unpaired form only, (p) paired form only, "peer" a barrier of the other CTA:
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
//     scores_ready     128                      overlaps and scores are in the stage
//     operands_ready   128 + 32                 operands, factors, scores and inverse are in the stage
//       (p) 4 + place  1, bytes of the copy     the same, of the peer's chunk
//     operands_free    (u) 256; (p) 128 + 4     no CTA reads the chunk any more; (u) outputs are in the tile
//     out_ready (p)    128                      outputs are in the tile
//     tail_ready (p)   1, 512 bytes             the tail of the peer's chunk is in `tails`
//     overlaps_free (u)   32                    the solve warp has read the overlaps
//     named 0          all                      __syncthreads
//     named 1 + wg     128                      one operand warpgroup
//     named 3 + wg (u) 256                      hand-over to operand warpgroup wg: the tail of the chunk
//                                               before is in `tails`
//
// Shared memory (K = 128; 227 KiB = 232,448 bytes at most):
//
//     unpaired   5 stages of 42 KiB (values included)                     + 14,464 bytes = 229,504
//     paired     4 + 2 stages of 35 KiB, 3 tiles of values of 4 KiB       +  4,736 bytes = 232,064
#pragma once

#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/fused/operand_role.cuh"
#include "cuda/sm90/fused/solve_role.cuh"
#include "cuda/sm90/fused/state_role.cuh"

namespace cula::cuda::sm90 {

struct FusedMaps {
    CUtensorMap q{}, k{}, g{}, v{}, o{};
};

template <int kStateWarpgroups>
inline constexpr int kFusedThreads =
    (kStateWarpgroups + kOperandWarpgroups<kStateWarpgroups> + 1) * kWarpgroupThreads;
// Registers of a thread by role. Each thread starts with 96.
struct FusedRegisters {
    int multiply, prepare, help;
};
template <int kStateWarpgroups, bool kMayLeaveRange>
inline constexpr FusedRegisters kFusedRegisters = kStateWarpgroups == 2 ? FusedRegisters{168, 48, 48}
                                                  : kMayLeaveRange      ? FusedRegisters{176, 80, 64}
                                                                        : FusedRegisters{208, 64, 80};

// The load role (fetch) and the store role (put): a warp each.
template <class T, int kKey, int kStateWarpgroups>
struct FusedCopyRole {
    using Layout = FusedStageLayout<kKey, kStateWarpgroups>;
    using Memory = FusedMemory<kKey, kStateWarpgroups>;
    using Shared = FusedShared<kKey, kStateWarpgroups>;

    const DeviceArgs& a;
    const FusedMaps& maps;
    const SegmentCursor<kKey, false>& cursor;
    unsigned char* memory;
    Shared& shared;

    // Load role: q, k and gates of the chunks that this CTA prepares by TMA, beta by ordinary loads.
    __device__ __forceinline__ void fetch() const {
        const int lane = static_cast<int>(threadIdx.x) % 32, head = a.by_group.divide(cursor.value_head);
        const FusedCursor<kStateWarpgroups> fused(cursor);
        const Element type = element(a.beta.dtype);
        const int width = type == Element::kFloat32 ? 4 : 2;
        const char* const first_beta =
            static_cast<const char*>(a.beta.data) +
            a.beta.offset(cursor.batch, cursor.first_token, cursor.value_head) * width;
        RawFloat beta;
        const auto ask = [&](int i) {
            const int token = i * kFusedTokens + lane;
            beta.load(first_beta + token * a.beta.token * width, type, token < fused.tokens);
        };
        ask(fused.rank);
        Ring<Shared::kStages> stage{.parity = 1};
#pragma unroll 1
        for (int i = fused.rank; i < fused.chunks; i += kPeers<kStateWarpgroups>) {
            wait_barrier(shared_address(shared.operands_free + stage.at), stage.parity);
            unsigned char* const at = memory + Memory::stage(stage.at);
            const std::uint32_t full = shared_address(shared.inputs_ready + stage.at),
                                to = shared_address(at);
            if (lane == 0) {
                arrive_expecting(full, 3 * Layout::kPanels * Layout::kTmaBytes);
                TileCoordinates from{0, head, first_token(i), cursor.batch};
#pragma unroll 1
                for (int panel = 0; panel < Layout::kPanels; ++panel) {
                    from.channel = panel * kTmaChannels, from.head = head;
                    const std::uint32_t to_panel = to + panel * Layout::kPanelBytes;
                    tma_load(to_panel + Layout::kKeys, maps.k, from, full);
                    tma_load(to_panel + Layout::kQuery, maps.q, from, full);
                    from.head = cursor.value_head;
                    tma_load(to_panel + Layout::kCarried, maps.g, from, full);
                }
            }
            Layout::factors(at).beta[lane] = lane < fused.count(i) ? beta_of(a, beta.value(type)) : 0.0f;
            ask(i + kPeers<kStateWarpgroups>);
            arrive(full);
            stage.next();
        }
    }

    // Store role: stores each chunk's outputs from its tile, then loads a later chunk's values into the tile.
    __device__ __forceinline__ void put() const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const FusedCursor<kStateWarpgroups> fused(cursor);
        const auto place = [&](int i, int warpgroup) {
            return TileCoordinates{cursor.rows.first + warpgroup * kWarpgroupRows, cursor.value_head,
                                   first_token(i), cursor.batch};
        };
        // TMA would read and write beyond the end of a packed sequence, where the next sequence begins: the
        // last chunk goes row by row.
        const auto by_rows = [&](int i) { return a.cu_seqlens && fused.count(i) < kFusedTokens; };
        const auto fetch_values = [&](int i, int tile) {
            if (i >= fused.chunks) return;
            const std::uint32_t values = shared_address(shared.values_ready + tile);
            if (by_rows(i)) {
#pragma unroll 1
                for (int warpgroup = 0; warpgroup < kStateWarpgroups; ++warpgroup)
                    take_rows(memory + Memory::tile(tile, warpgroup), place(i, warpgroup), fused.count(i));
            } else if (lane == 0) {
                expect(values, Memory::kTileBytes);
                for (int warpgroup = 0; warpgroup < kStateWarpgroups; ++warpgroup)
                    tma_load(shared_address(memory + Memory::tile(tile, warpgroup)), maps.v,
                             place(i, warpgroup), values);
            }
            arrive(values);
        };
        Ring<Shared::kTiles> tile;
#pragma unroll 1
        for (int i = 0; i < Shared::kTiles; ++i) fetch_values(i, i);
#pragma unroll 1
        for (int i = 0; i < fused.chunks; ++i) {
            if constexpr (kPaired<kStateWarpgroups>)
                wait_barrier(shared_address(shared.out_ready + tile.at), tile.parity);
            else
                wait_barrier(shared_address(shared.operands_free + tile.at), tile.parity);
#pragma unroll 1
            for (int warpgroup = 0; warpgroup < kStateWarpgroups; ++warpgroup) {
                const TileCoordinates to = place(i, warpgroup);
                const unsigned char* const from = memory + Memory::tile(tile.at, warpgroup);
                if (by_rows(i))
                    put_rows(from, to, fused.count(i));
                else if (lane == 0)
                    tma_store(maps.o, to, shared_address(from));
            }
            if (lane == 0) tma_wait_stores_read();
            __syncwarp();
            fetch_values(i + Shared::kTiles, tile.at);
            tile.next();
        }
    }

private:
    __device__ __forceinline__ int first_token(int i) const {
        return static_cast<int>(cursor.first_token) + i * kFusedTokens;
    }
    // Calls body(place in the tile, token, row) for each piece of 16 bytes of a tile.
    template <class Body>
    static __device__ __forceinline__ void each_piece(const TileCoordinates& at, Body body) {
        constexpr int kUnits = kWarpgroupRows / 8;
#pragma unroll 1
        for (int x = static_cast<int>(threadIdx.x) % 32; x < kFusedTokens * kUnits; x += 32) {
            const int token = x / kUnits, unit = x % kUnits;
            body(Tile<kFusedTokens, kWarpgroupRows>::unit(token, unit) * 16, token, at.channel + unit * 8);
        }
    }
    __device__ __forceinline__ void take_rows(unsigned char* tile, const TileCoordinates& at,
                                              int count) const {
        const T* const from =
            static_cast<const T*>(a.v.data) + a.v.offset(cursor.batch, at.token, cursor.value_head);
        each_piece(at, [&](int place, int token, int row) {
            uint4 piece{};
            if (token < count && row < a.value_dim)
                piece = *reinterpret_cast<const uint4*>(from + token * a.v.token + row);
            *reinterpret_cast<uint4*>(tile + place) = piece;
        });
    }
    __device__ __forceinline__ void put_rows(const unsigned char* tile, const TileCoordinates& at,
                                             int count) const {
        T* const to = static_cast<T*>(a.o.data) + a.o.offset(cursor.batch, at.token, cursor.value_head);
        each_piece(at, [&](int place, int token, int row) {
            if (token < count && row < a.value_dim)
                *reinterpret_cast<uint4*>(to + token * a.o.token + row) =
                    *reinterpret_cast<const uint4*>(tile + place);
        });
    }
};

template <class T, int kKey, int kStateWarpgroups, Gate kGate>
__global__ void __launch_bounds__(kFusedThreads<kStateWarpgroups>, 1)
    fused_prefill(const __grid_constant__ DeviceArgs a, const Schedule schedule,
                  const __grid_constant__ CarryParams p, const __grid_constant__ FusedMaps maps) {
    using Layout = FusedStageLayout<kKey, kStateWarpgroups>;
    using Memory = FusedMemory<kKey, kStateWarpgroups>;
    using Shared = FusedShared<kKey, kStateWarpgroups>;
    constexpr bool kMayLeaveRange = kGate != Gate::kBounded;
    constexpr FusedRegisters kRegisters = kFusedRegisters<kStateWarpgroups, kMayLeaveRange>;
    extern __shared__ __align__(1024) unsigned char memory[];

    const int thread = static_cast<int>(threadIdx.x),
              warp = static_cast<int>(wgmma::uniform(threadIdx.x / 32));
    const int role = warp / kWarpgroupWarps - kStateWarpgroups;  // negative: state role
    auto& shared = *reinterpret_cast<Shared*>(memory + Memory::kShared);
    if (thread == 0) {
        tma_prefetch_map(maps.q);
        tma_prefetch_map(maps.k);
        tma_prefetch_map(maps.g);
        tma_prefetch_map(maps.v);
        tma_prefetch_map(maps.o);
        for (int stage = 0; stage < Shared::kStages; ++stage) {
            init_barrier(shared_address(shared.inputs_ready + stage), 1 + 32);
            init_barrier(shared_address(shared.scores_ready + stage), kWarpgroupThreads);
            init_barrier(shared_address(shared.operands_ready + stage), kWarpgroupThreads + 32);
            // Of the peer one thread of each warp arrives.
            init_barrier(
                shared_address(shared.operands_free + stage),
                kStateWarpgroups * kWarpgroupThreads + (kPaired<kStateWarpgroups> ? kWarpgroupWarps : 0));
        }
        for (int tile = 0; tile < Shared::kTiles; ++tile)
            init_barrier(shared_address(shared.values_ready + tile), 32);
        if constexpr (kPaired<kStateWarpgroups>) {
            for (int i = 0; i < kPeerStages<kStateWarpgroups>; ++i)
                init_barrier(shared_address(shared.operands_ready + Shared::kStages + i), 1);
            for (int i = 0; i < Shared::kTiles; ++i)
                init_barrier(shared_address(shared.out_ready + i), kWarpgroupThreads);
            for (int i = 0; i < Shared::kTails; ++i) init_barrier(shared_address(shared.tail_ready + i), 1);
        } else {
            for (int i = 0; i < kSolveWarps; ++i) init_barrier(shared_address(shared.overlaps_free + i), 32);
        }
        publish_barriers();
    }
    // Zeros in the block above the diagonal of every square: the operand and solve roles write only the other
    // three. (In the paired form the overlaps overwrite that of the inverse; the solve role zeroes it again.)
    for (int i = thread; i < Shared::kStages * 4 * 32; i += static_cast<int>(blockDim.x)) {
        const int scores = i / 64 % 2 ? Layout::kScores : Layout::kScoresLow,
                  inverse = i / 64 % 2 ? Layout::kInverse : Layout::kInverseLow;
        Layout::clear_above(memory + Memory::stage(i / 128) + (i / 32 % 2 ? scores : inverse), i % 32);
    }
    fence_async_proxy();
    pdl_trigger_and_wait();
    if (warp == 0) {
        const Segment segment = own_segment<kKey, false>(a, schedule, p);
        if (thread == 0) shared.segment = segment;
    }
    if constexpr (kPaired<kStateWarpgroups>)
        sync_cluster();
    else
        __syncthreads();
    // Each role makes its own cursor, so that the roles share no registers.
    const auto make_cursor = [&] {
        return SegmentCursor<kKey, false>(a, schedule, p, shared.segment, role < 0 ? warp : 0,
                                          kStateWarpgroups * kWarpgroupWarps);
    };
    {
        const auto cursor = make_cursor();
        if (role < 0) cursor.zero_skipped(schedule);
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
                           FusedCursor<kStateWarpgroups>(cursor).tokens};
        }
    }
    if (kMayLeaveRange) __syncthreads();

    if (role < 0) {
        raise_registers<kRegisters.multiply>();
        FusedStateRole<T, kKey, kStateWarpgroups, kMayLeaveRange>{a, schedule, p, memory, shared}.run(
            make_cursor());
    } else if (role < kOperandWarpgroups<kStateWarpgroups>) {
        lower_registers<kRegisters.prepare>();
        const auto cursor = make_cursor();
        FusedOperandRole<T, kKey, kStateWarpgroups, kGate>{a, cursor, memory, shared, role}.run();
    } else {
        lower_registers<kRegisters.help>();
        const int helper = warp % kWarpgroupWarps;
        const auto cursor = make_cursor();
        const FusedCopyRole<T, kKey, kStateWarpgroups> copier{a, maps, cursor, memory, shared};
        if (helper == 0)
            copier.fetch();
        else if (helper == 1)
            copier.put();
        else
            FusedSolveRole<T, kKey, kStateWarpgroups>{cursor, memory, shared, helper - 2}.run();
    }
    if constexpr (kPaired<kStateWarpgroups>) {
        __syncwarp();
        sync_cluster();  // a CTA must not end while its peer may still signal its barriers or copy to it
    }
}

}  // namespace cula::cuda::sm90
