// SPDX-License-Identifier: Apache-2.0
// A whole prefill of a delta rule with decays per channel in one kernel: nothing goes to memory but outputs
// and states
//
// ALGORITHM.md: score, solve, read, output, carry.  grid (row blocks * value heads * sequences), clusters of
// two where a CTA has one warpgroup that multiplies   warpgroups that multiply, 64 value rows each; two or
// three that prepare; one whose warps fetch, put out, and solve
//
// Chunks of 32 tokens go through stages of shared memory: fetched as they came (boxes), prepared in place
// (fused_preparer.cuh; steep channels, fused_steep.cuh), solved (fused_solver.cuh), multiplied
// (fused_multiplier.cuh), each by its own warps. CTAs of a pair prepare every other chunk and send it to each
// other.
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
// A thread's, of the 96 that each starts with.
struct FusedRegisters {
    int multiply, prepare, help;
};
template <int kStateWarpgroups, bool kMayLeaveRange>
inline constexpr FusedRegisters kFusedRegisters = kStateWarpgroups == 2 ? FusedRegisters{168, 48, 48}
                                                  : kMayLeaveRange      ? FusedRegisters{176, 80, 64}
                                                                        : FusedRegisters{208, 64, 80};

// The warp that fetches, and the one that puts out and fetches values.
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

    // Outputs to memory, and other chunks' values in their place.
    __device__ __forceinline__ void put() const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const FusedCursor<kStateWarpgroups> fused(cursor);
        const auto place = [&](int i, int warpgroup) {
            return TileCoordinates{cursor.rows.first + warpgroup * kWarpgroupRows, cursor.value_head,
                                   first_token(i), cursor.batch};
        };
        // What a box would read or write beyond a packed sequence's end is another's.
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
    // Rows of a tile, in pieces of 16 bytes: body(place in the tile, token, row), of which count tokens are
    // there.
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
    const int role = warp / kWarpgroupWarps - kStateWarpgroups;  // negative: multiplies
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
            // Of the peer a thread of each warp.
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
    // The block above the diagonal of every square, which nobody writes zeros to.
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
    // Each role makes its own: no register of one is another's.
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
        sync_cluster();  // the peer may still tell, or be told
    }
}

}  // namespace cula::cuda::sm90
