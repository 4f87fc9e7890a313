// SPDX-License-Identifier: Apache-2.0
// A whole prefill of a delta rule with decays per channel in one kernel: nothing goes to memory but outputs and states
//
// ALGORITHM.md: score, solve, read, output, carry.  grid (row blocks * value heads * sequences), clusters of two where
// a CTA has one warpgroup that multiplies   warpgroups that multiply, 64 value rows each; two or three that prepare;
// one whose warps fetch, put out, and solve
//
// Chunks of 32 tokens go through stages of shared memory: fetched as they came (boxes), prepared in place
// (fused_preparer.cuh; steep channels, fused_steep.cuh), solved (fused_solver.cuh), multiplied (fused_multiplier.cuh),
// each by its own warps. CTAs of a pair prepare every other chunk and send it to each other.
#pragma once

#include "cuda/ptx/overlap.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/sm90/fused/multiplier.cuh"
#include "cuda/sm90/fused/preparer.cuh"
#include "cuda/sm90/fused/solver.cuh"

namespace cula::cuda::sm90 {

struct FusedMaps {
    CUtensorMap q{}, k{}, g{}, v{}, o{};
};

template <int kGroups>
inline constexpr int kFusedThreads = (kGroups + kPreparers<kGroups> + 1) * kGroupThreads;
// A thread's, of the 96 that each starts with.
struct FusedRegisters {
    int multiply, prepare, help;
};
template <int kGroups, bool kMaySteep>
inline constexpr FusedRegisters kFusedRegisters = kGroups == 2 ? FusedRegisters{168, 48, 48}
                                                  : kMaySteep  ? FusedRegisters{176, 80, 64}
                                                               : FusedRegisters{208, 64, 80};

// The warp that fetches, and the one that puts out and fetches values.
template <class T, int kKey, int kGroups>
struct FusedCopier {
    using S = FusedStage<kKey, kGroups>;
    using Memory = FusedMemory<kKey, kGroups>;
    using Shared = FusedShared<kKey, kGroups>;

    const DeviceArgs& a;
    const FusedMaps& maps;
    const Walk<kKey, false>& walk;
    unsigned char* memory;
    Shared& shared;

    __device__ __forceinline__ void fetch() const {
        const int lane = static_cast<int>(threadIdx.x) % 32, head = a.by_group.divide(walk.value_head);
        const FusedWalk<kGroups> fused(walk);
        const Element type = element(a.beta.dtype);
        const int width = type == Element::kFloat32 ? 4 : 2;
        const char* const first_beta = static_cast<const char*>(a.beta.data) +
                                       a.beta.offset(walk.batch, walk.first_token, walk.value_head) * width;
        RawFloat beta;
        const auto ask = [&](int i) {
            const int token = i * kFusedTokens + lane;
            beta.load(first_beta + token * a.beta.token * width, type, token < fused.tokens);
        };
        ask(fused.rank);
        Ring<Shared::kStages> stage{.parity = 1};
#pragma unroll 1
        for (int i = fused.rank; i < fused.chunks; i += kPeers<kGroups>) {
            wait_barrier(shared_address(shared.turned + stage.at), stage.parity);
            unsigned char* const at = memory + Memory::stage(stage.at);
            const std::uint32_t full = shared_address(shared.full + stage.at), to = shared_address(at);
            if (lane == 0) {
                arrive_expecting(full, 3 * S::kPanels * S::kBoxBytes);
                BoxPlace from{0, head, first_token(i), walk.batch};
#pragma unroll 1
                for (int panel = 0; panel < S::kPanels; ++panel) {
                    from.channel = panel * kBoxChannels, from.head = head;
                    const std::uint32_t to_panel = to + panel * S::kPanelBytes;
                    copy_box(to_panel + S::kKeys, maps.k, from, full);
                    copy_box(to_panel + S::kQuery, maps.q, from, full);
                    from.head = walk.value_head;
                    copy_box(to_panel + S::kCarried, maps.g, from, full);
                }
            }
            S::factors(at).beta[lane] = lane < fused.count(i) ? beta_of(a, beta.value(type)) : 0.0f;
            ask(i + kPeers<kGroups>);
            arrive(full);
            stage.next();
        }
    }

    // Outputs to memory, and other chunks' values in their place.
    __device__ __forceinline__ void put() const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const FusedWalk<kGroups> fused(walk);
        const auto place = [&](int i, int group) {
            return BoxPlace{walk.rows.first + group * kGroupRows, walk.value_head, first_token(i), walk.batch};
        };
        // What a box would read or write beyond a packed sequence's end is another's.
        const auto by_rows = [&](int i) { return a.cu_seqlens && fused.count(i) < kFusedTokens; };
        const auto fetch_values = [&](int i, int tile) {
            if (i >= fused.chunks) return;
            const std::uint32_t values = shared_address(shared.values + tile);
            if (by_rows(i)) {
#pragma unroll 1
                for (int group = 0; group < kGroups; ++group)
                    take_rows(memory + Memory::tile(tile, group), place(i, group), fused.count(i));
            } else if (lane == 0) {
                expect(values, Memory::kTileBytes);
                for (int group = 0; group < kGroups; ++group)
                    copy_box(shared_address(memory + Memory::tile(tile, group)), maps.v, place(i, group), values);
            }
            arrive(values);
        };
        Ring<Shared::kTiles> tile;
#pragma unroll 1
        for (int i = 0; i < Shared::kTiles; ++i) fetch_values(i, i);
#pragma unroll 1
        for (int i = 0; i < fused.chunks; ++i) {
            if constexpr (kPaired<kGroups>)
                wait_barrier(shared_address(shared.outputs + tile.at), tile.parity);
            else
                wait_barrier(shared_address(shared.turned + tile.at), tile.parity);
#pragma unroll 1
            for (int group = 0; group < kGroups; ++group) {
                const BoxPlace to = place(i, group);
                const unsigned char* const from = memory + Memory::tile(tile.at, group);
                if (by_rows(i))
                    put_rows(from, to, fused.count(i));
                else if (lane == 0)
                    store_box(maps.o, to, shared_address(from));
            }
            if (lane == 0) wait_stores_read();
            __syncwarp();
            fetch_values(i + Shared::kTiles, tile.at);
            tile.next();
        }
    }

private:
    __device__ __forceinline__ int first_token(int i) const {
        return static_cast<int>(walk.first_token) + i * kFusedTokens;
    }
    // Rows of a tile, in pieces of 16 bytes: body(place in the tile, token, row), of which count tokens are there.
    template <class Body>
    static __device__ __forceinline__ void each_piece(const BoxPlace& at, Body body) {
        constexpr int kUnits = kGroupRows / 8;
#pragma unroll 1
        for (int x = static_cast<int>(threadIdx.x) % 32; x < kFusedTokens * kUnits; x += 32) {
            const int token = x / kUnits, unit = x % kUnits;
            body(Tile<kFusedTokens, kGroupRows>::unit(token, unit) * 16, token, at.channel + unit * 8);
        }
    }
    __device__ __forceinline__ void take_rows(unsigned char* tile, const BoxPlace& at, int count) const {
        const T* const from = static_cast<const T*>(a.v.data) + a.v.offset(walk.batch, at.token, walk.value_head);
        each_piece(at, [&](int place, int token, int row) {
            uint4 piece{};
            if (token < count && row < a.value_dim)
                piece = *reinterpret_cast<const uint4*>(from + token * a.v.token + row);
            *reinterpret_cast<uint4*>(tile + place) = piece;
        });
    }
    __device__ __forceinline__ void put_rows(const unsigned char* tile, const BoxPlace& at, int count) const {
        T* const to = static_cast<T*>(a.o.data) + a.o.offset(walk.batch, at.token, walk.value_head);
        each_piece(at, [&](int place, int token, int row) {
            if (token < count && row < a.value_dim)
                *reinterpret_cast<uint4*>(to + token * a.o.token + row) = *reinterpret_cast<const uint4*>(tile + place);
        });
    }
};

template <class T, int kKey, int kGroups, Gate kGate>
__global__ void __launch_bounds__(kFusedThreads<kGroups>, 1)
    fused_prefill(const __grid_constant__ DeviceArgs a, const Schedule schedule, const __grid_constant__ CarryParams p,
                  const __grid_constant__ FusedMaps maps) {
    using S = FusedStage<kKey, kGroups>;
    using Memory = FusedMemory<kKey, kGroups>;
    using Shared = FusedShared<kKey, kGroups>;
    constexpr bool kMaySteep = kGate != Gate::kBounded;
    constexpr FusedRegisters kRegisters = kFusedRegisters<kGroups, kMaySteep>;
    extern __shared__ __align__(1024) unsigned char memory[];

    const int thread = static_cast<int>(threadIdx.x), warp = static_cast<int>(wgmma::uniform(threadIdx.x / 32));
    const int role = warp / kGroupWarps - kGroups;  // negative: multiplies
    auto& shared = *reinterpret_cast<Shared*>(memory + Memory::kShared);
    if (thread == 0) {
        prefetch_map(maps.q);
        prefetch_map(maps.k);
        prefetch_map(maps.g);
        prefetch_map(maps.v);
        prefetch_map(maps.o);
        for (int stage = 0; stage < Shared::kStages; ++stage) {
            init_barrier(shared_address(shared.full + stage), 1 + 32);
            init_barrier(shared_address(shared.scored + stage), kGroupThreads);
            init_barrier(shared_address(shared.made + stage), kGroupThreads + 32);
            // Of the peer a thread of each warp.
            init_barrier(shared_address(shared.turned + stage),
                         kGroups * kGroupThreads + (kPaired<kGroups> ? kGroupWarps : 0));
        }
        for (int tile = 0; tile < Shared::kTiles; ++tile) init_barrier(shared_address(shared.values + tile), 32);
        if constexpr (kPaired<kGroups>) {
            for (int i = 0; i < kPeerStages<kGroups>; ++i)
                init_barrier(shared_address(shared.made + Shared::kStages + i), 1);
            for (int i = 0; i < Shared::kTiles; ++i) init_barrier(shared_address(shared.outputs + i), kGroupThreads);
            for (int i = 0; i < Shared::kTails; ++i) init_barrier(shared_address(shared.tailed + i), 1);
        } else {
            for (int i = 0; i < kSolvers; ++i) init_barrier(shared_address(shared.solved + i), 32);
        }
        publish_barriers();
    }
    // The block above the diagonal of every square, which nobody writes zeros to.
    for (int i = thread; i < Shared::kStages * 4 * 32; i += static_cast<int>(blockDim.x)) {
        const int scores = i / 64 % 2 ? S::kScores : S::kScoresLow, inverse = i / 64 % 2 ? S::kInverse : S::kInverseLow;
        S::clear_above(memory + Memory::stage(i / 128) + (i / 32 % 2 ? scores : inverse), i % 32);
    }
    fence_async_proxy();
    follow_kernels();
    if (warp == 0) {
        const Segment segment = own_segment<kKey, false>(a, schedule, p);
        if (thread == 0) shared.segment = segment;
    }
    if constexpr (kPaired<kGroups>)
        sync_cluster();
    else
        __syncthreads();
    // Each role makes its own: no register of one is another's.
    const auto make_walk = [&] {
        return Walk<kKey, false>(a, schedule, p, shared.segment, role < 0 ? warp : 0, kGroups * kGroupWarps);
    };
    {
        const auto walk = make_walk();
        if (role < 0) walk.zero_skipped(schedule);
        if (walk.nothing()) return;
        if (kMaySteep && thread == 0) {
            const int head = a.by_group.divide(walk.value_head);
            constexpr std::int64_t kBytes = sizeof(T);
            const auto first = [&](const TokenRows& rows, int of) {
                return static_cast<const char*>(rows.data) + rows.offset(walk.batch, walk.first_token, of) * kBytes;
            };
            shared.rows = {{first(a.q, head), first(a.k, head), first(a.g, walk.value_head)},
                           {a.q.token * kBytes, a.k.token * kBytes, a.g.token * kBytes},
                           FusedWalk<kGroups>(walk).tokens};
        }
    }
    if (kMaySteep) __syncthreads();

    if (role < 0) {
        raise_registers<kRegisters.multiply>();
        FusedMultiplier<T, kKey, kGroups, kMaySteep>{a, schedule, p, memory, shared}.run(make_walk());
    } else if (role < kPreparers<kGroups>) {
        lower_registers<kRegisters.prepare>();
        const auto walk = make_walk();
        FusedPreparer<T, kKey, kGroups, kGate>{a, walk, memory, shared, role}.run();
    } else {
        lower_registers<kRegisters.help>();
        const int helper = warp % kGroupWarps;
        const auto walk = make_walk();
        const FusedCopier<T, kKey, kGroups> copier{a, maps, walk, memory, shared};
        if (helper == 0)
            copier.fetch();
        else if (helper == 1)
            copier.put();
        else
            FusedSolver<T, kKey, kGroups>{walk, memory, shared, helper - 2}.run();
    }
    if constexpr (kPaired<kGroups>) {
        __syncwarp();
        sync_cluster();  // the peer may still tell, or be told
    }
}

}  // namespace cula::cuda::sm90
