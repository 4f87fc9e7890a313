// SPDX-License-Identifier: Apache-2.0
// A whole prefill of a delta rule with decays per channel in one kernel: nothing goes to memory but outputs and states
//
// ALGORITHM.md: score, solve, read, output, carry.  grid (row blocks * value heads * sequences)   warpgroups that
// multiply, 64 value rows each; two or three that prepare; one whose warps fetch, put out, and solve
//
// Chunks of 32 tokens go through five stages of shared memory: fetched as they came (boxes), prepared in place
// (fused_preparer.cuh), solved (fused_solver.cuh), multiplied (fused_multiplier.cuh), each by its own warps.
#pragma once

#include "cuda/ptx/overlap.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/sm90/fused_multiplier.cuh"
#include "cuda/sm90/fused_preparer.cuh"
#include "cuda/sm90/fused_solver.cuh"

namespace cula::cuda::sm90 {

struct FusedMaps {
    CUtensorMap q{}, k{}, g{}, v{}, o{};
};

template <int kGroups>
inline constexpr int kFusedThreads = (kGroups + kPreparers<kGroups> + 1) * kGroupThreads;
// Of the 96 that each starts with.
template <int kGroups>
inline constexpr int kFusedRegisters = kGroups == 1 ? 208 : 168;
template <int kGroups>
inline constexpr int kPrepareRegisters = kGroups == 1 ? 64 : 48;
template <int kGroups>
inline constexpr int kHelpRegisters = kGroups == 1 ? 80 : 48;

// The warp that fetches, and the one that puts out and fetches values.
template <class T, int kKey, int kGroups>
struct FusedCopier {
    using S = FusedStage<kKey, kGroups>;

    const DeviceArgs& a;
    const FusedMaps& maps;
    const Walk<kKey, false>& walk;
    unsigned char* memory;
    FusedShared<kKey, kGroups>& shared;

    __device__ __forceinline__ void fetch() const {
        const int lane = static_cast<int>(threadIdx.x) % 32, head = a.by_group.divide(walk.value_head);
        const FusedWalk fused(walk);
        const Element type = element(a.beta.dtype);
        const int width = type == Element::kFloat32 ? 4 : 2;
        const char* const first_beta = static_cast<const char*>(a.beta.data) +
                                       a.beta.offset(walk.batch, walk.first_token, walk.value_head) * width;
        RawFloat beta;
        const auto ask = [&](int i) {
            const int token = i * kFusedTokens + lane;
            beta.load(first_beta + token * a.beta.token * width, type, token < fused.tokens);
        };
        ask(0);
        int stage = 0, parity = 1;
#pragma unroll 1
        for (int i = 0; i < fused.chunks; ++i) {
            wait_barrier(shared_address(shared.turned + stage), parity);
            const std::uint32_t full = shared_address(shared.full + stage),
                                to = shared_address(memory + stage * S::kBytes);
            if (lane == 0) {
                arrive_expecting(full, 3 * S::kPanels * S::kBoxBytes);
                BoxPlace at{0, head, first_token(i), walk.batch};
#pragma unroll 1
                for (int panel = 0; panel < S::kPanels; ++panel) {
                    at.channel = panel * kBoxChannels, at.head = head;
                    const std::uint32_t to_panel = to + panel * S::kPanelBytes;
                    copy_box(to_panel + S::kKeys, maps.k, at, full);
                    copy_box(to_panel + S::kQuery, maps.q, at, full);
                    at.head = walk.value_head;
                    copy_box(to_panel + S::kCarried, maps.g, at, full);
                }
            }
            shared.beta[stage][lane] = lane < fused.count(i) ? beta_of(a, beta.value(type)) : 0.0f;
            ask(i + 1);
            arrive(full);
            if (++stage == kFusedStages) stage = 0, parity ^= 1;
        }
    }

    // Outputs to memory, and other chunks' values in their place.
    __device__ __forceinline__ void put() const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const FusedWalk fused(walk);
        const auto tile = [&](int stage, int group) {
            return memory + stage * S::kBytes + S::kValues + group * S::kBoxBytes;
        };
        const auto place = [&](int i, int group) {
            return BoxPlace{walk.rows.first + group * kGroupRows, walk.value_head, first_token(i), walk.batch};
        };
        const auto fetch_values = [&](int i, int stage) {
            if (i >= fused.chunks) return;
            const std::uint32_t values = shared_address(shared.values + stage);
            arrive_expecting(values, kGroups * S::kBoxBytes);
            for (int group = 0; group < kGroups; ++group)
                copy_box(shared_address(tile(stage, group)), maps.v, place(i, group), values);
        };
        int stage = 0, parity = 0;
        if (lane == 0)
            for (int i = 0; i < kFusedStages; ++i) fetch_values(i, i);
#pragma unroll 1
        for (int i = 0; i < fused.chunks; ++i) {
            const int count = fused.count(i);
            wait_barrier(shared_address(shared.turned + stage), parity);
#pragma unroll 1
            for (int group = 0; group < kGroups; ++group) {
                const BoxPlace at = place(i, group);
                if (a.cu_seqlens && count < kFusedTokens)
                    put_rows(tile(stage, group), at.token, count, at.channel, lane);
                else if (lane == 0)
                    store_box(maps.o, at, shared_address(tile(stage, group)));
            }
            if (lane == 0) {
                wait_stores_read();
                fetch_values(i + kFusedStages, stage);
            }
            if (++stage == kFusedStages) stage = 0, parity ^= 1;
        }
    }

private:
    __device__ __forceinline__ int first_token(int i) const {
        return static_cast<int>(walk.first_token) + i * kFusedTokens;
    }
    // What a box would write beyond a packed sequence's end is left out.
    __device__ __forceinline__ void put_rows(const unsigned char* tile, int first, int count, int row, int lane) const {
        constexpr int kUnits = kGroupRows / 8;
        T* const to = static_cast<T*>(a.o.data) + a.o.offset(walk.batch, first, walk.value_head) + row;
#pragma unroll 1
        for (int x = lane; x < count * kUnits; x += 32) {
            const int token = x / kUnits, unit = x % kUnits;
            if (row + unit * 8 < a.value_dim)
                *reinterpret_cast<uint4*>(to + token * a.o.token + unit * 8) =
                    *reinterpret_cast<const uint4*>(tile + Tile<kFusedTokens, kGroupRows>::unit(token, unit) * 16);
        }
    }
};

template <class T, int kKey, int kGroups>
__global__ void __launch_bounds__(kFusedThreads<kGroups>, 1)
    fused_prefill(const __grid_constant__ DeviceArgs a, const Schedule schedule, const __grid_constant__ CarryParams p,
                  const __grid_constant__ FusedMaps maps) {
    using S = FusedStage<kKey, kGroups>;
    using Memory = FusedMemory<kKey, kGroups>;
    extern __shared__ __align__(1024) unsigned char memory[];

    const int thread = static_cast<int>(threadIdx.x), warp = static_cast<int>(wgmma::uniform(threadIdx.x / 32));
    const int role = warp / kGroupWarps - kGroups;  // negative: multiplies
    auto& shared = *reinterpret_cast<FusedShared<kKey, kGroups>*>(memory + Memory::kShared);
    if (thread == 0) {
        prefetch_map(maps.q);
        prefetch_map(maps.k);
        prefetch_map(maps.g);
        prefetch_map(maps.v);
        prefetch_map(maps.o);
        for (int stage = 0; stage < kFusedStages; ++stage) {
            init_barrier(shared_address(shared.full + stage), 1 + 32);
            init_barrier(shared_address(shared.values + stage), 1);
            init_barrier(shared_address(shared.made + stage), kGroupThreads + 32);
            init_barrier(shared_address(shared.turned + stage), kGroups * kGroupThreads);
        }
        for (int i = 0; i < kSolvers; ++i) {
            init_barrier(shared_address(shared.scored + i), kGroupThreads);
            init_barrier(shared_address(shared.solved + i), 32);
        }
        publish_barriers();
    }
    // The block above the diagonal of every square, which nobody ever writes: 32 units of 16 bytes.
    for (int i = thread; i < kFusedStages * 4 * 32; i += static_cast<int>(blockDim.x)) {
        unsigned char* const square = memory + i / 128 * S::kBytes + S::kInverse + i / 32 % 4 * S::kSquareBytes;
        reinterpret_cast<uint4*>(square)[S::square_unit(i % 32 / 2, 2 + i % 2)] = uint4{};
    }
    fence_async_proxy();
    follow_kernels();
    if (warp == 0) {
        const Segment segment = own_segment<kKey, false>(a, schedule, p);
        if (thread == 0) shared.segment = segment;
    }
    __syncthreads();
    // Each role makes its own: no register of one is another's.
    const auto make_walk = [&] {
        return Walk<kKey, false>(a, schedule, p, shared.segment, role < 0 ? warp : 0, kGroups * kGroupWarps);
    };
    {
        const auto walk = make_walk();
        if (role < 0) walk.zero_skipped(schedule);
        if (walk.nothing()) return;
    }

    if (role < 0) {
        raise_registers<kFusedRegisters<kGroups>>();
        FusedMultiplier<T, kKey, kGroups>{a, schedule, p, memory, shared}.run(make_walk());
    } else if (role < kPreparers<kGroups>) {
        lower_registers<kPrepareRegisters<kGroups>>();
        const auto walk = make_walk();
        FusedPreparer<T, kKey, kGroups>{a, walk, memory, shared, role}.run();
    } else {
        lower_registers<kHelpRegisters<kGroups>>();
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
}

}  // namespace cula::cuda::sm90
