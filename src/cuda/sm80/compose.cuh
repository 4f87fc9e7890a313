// SPDX-License-Identifier: Apache-2.0
// compose: the state before each segment <- the state before the first, maps      ALGORITHM.md: segments
//          or the map of a whole sequence, whose rows are those of a state that starts from zero and of M from one
// compose_given: a state <- maps that the caller has gathered
//
// grid (tiles of 16 rows * value heads * sequences)      2 K threads
//
// S <- M S + B, segment after segment. Products of float on the tensor cores, both factors as two TF32 numbers (22
// bits); sums in float. A CTA has 16 rows of S^T in shared memory, in two parts, and M passes through in groups of 32
// rows, of the next segment too, since M does not depend on the state. A warp makes 16 channels of all rows; a lane has
// four neighbours of them in two rows.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/overlap.cuh"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/solve.cuh"
#include "cuda/sm80/walk.cuh"

namespace cula::cuda::sm80 {

inline constexpr int kComposeRows = 16;

template <int kKey>
inline constexpr int kComposeThreads = 2 * kKey;

template <int kKey>
struct ComposeSmem {
    static constexpr int kGroup = 32;                   // rows of M
    static constexpr int kStages = kKey > 128 ? 2 : 4;  // of a group each: all fit the 99 KiB of 8.6, 8.9 and 12.0
    // Pitches that keep the operands of products free of conflicts.
    alignas(16) float m[kStages][kGroup][kKey + 4];
    alignas(16) Tf32 state[kComposeRows][kKey + 8];  // S^T
    int first[3];
};

// The first segment of a sequence, looked for by the whole CTA.
struct FirstSegment {
    int number, chunk, count;

    __device__ __forceinline__ FirstSegment(const DeviceArgs& a, const Schedule& schedule, int sequence,
                                            int (&found)[3]) {
        if (threadIdx.x < 3) found[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < schedule.max_segments; i += static_cast<int>(blockDim.x)) {
            const Segment segment = segment_of(a, schedule, i);
            if (segment.sequence == sequence && segment.rank == 0)
                found[0] = i, found[1] = segment.chunk, found[2] = segment.count;
        }
        __syncthreads();
        number = found[0], chunk = found[1], count = found[2];
    }
};

// Four neighbouring channels of a row of S^T, zero where they do not exist.
struct FourChannels {
    int row, channel, count;  // count: how many exist

    __device__ __forceinline__ float4 load(const States& from, std::int64_t slot, int value_head) const {
        const Element type = element(from.dtype);
        const std::int64_t bytes = type == Element::kFloat32 ? 4 : 2;
        const auto* at = static_cast<const char*>(from.data) +
                         (from.offset(slot, value_head) + row * from.v + channel * from.k) * bytes;
        RawFloat raw[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) raw[e].load(at + e * from.k * bytes, type, e < count);
        return {raw[0].value(type), raw[1].value(type), raw[2].value(type), raw[3].value(type)};
    }
    __device__ __forceinline__ void store(float4 x, const States& to, std::int64_t slot, int value_head) const {
        const float all[4] = {x.x, x.y, x.z, x.w};
        const std::int64_t at = to.offset(slot, value_head) + row * to.v + channel * to.k;
        auto* const floats = static_cast<float*>(to.data) + at;
        if (count >= 4 && to.k == 1 && to.dtype == Dtype::kFloat32 &&
            reinterpret_cast<std::uintptr_t>(floats) % 16 == 0) {
            *reinterpret_cast<float4*>(floats) = x;
            return;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (e < count) store_float(to.data, to.dtype, at + e * to.k, all[e]);
    }
    // Maps have rows of kKey channels, of which those that do not exist hold anything.
    __device__ __forceinline__ float4 existing(float4 x) const {
        return {count > 0 ? x.x : 0.0f, count > 1 ? x.y : 0.0f, count > 2 ? x.z : 0.0f, count > 3 ? x.w : 0.0f};
    }
};

// Maps that follow one another, of one head.
struct MapChain {
    const float *m, *b;  // m: a matrix or a diagonal
    std::int64_t m_slot, b_slot;
    int m_pitch, b_pitch, count;

    __device__ __forceinline__ void advance() { m += m_slot, b += b_slot, --count; }
};

__device__ __forceinline__ float4 load_four(const float* at) { return __ldg(reinterpret_cast<const float4*>(at)); }

// What a thread of compose turns to: four channels of two rows, 8 apart, of S^T or of M^T.
template <int kKey>
struct ComposedRows {
    using Smem = ComposeSmem<kKey>;

    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, in_tile = lane / 4,
              channel = thread / 32 * 16 + lane % 4 * 4;
    int row;
    FourChannels own[2];

    __device__ __forceinline__ ComposedRows(int tile, int rows, int key_dim)
        : row(tile * kComposeRows + in_tile),
          own{{row, channel, row < rows ? key_dim - channel : 0},
              {row + 8, channel, row + 8 < rows ? key_dim - channel : 0}} {}

    // What stands in rows of kKey or more floats.
    __device__ __forceinline__ void load(float4 (&x)[2], const float* from, int pitch) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            x[i] = own[i].count > 0 ? own[i].existing(load_four(from + own[i].row * pitch + channel)) : float4{};
    }

    __device__ __forceinline__ void store(const float4 (&x)[2], const States& to, std::int64_t slot,
                                          int value_head) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (own[i].count > 0) own[i].store(x[i], to, slot, value_head);
    }

    // x after every map of the chain in turn, and each(x) after each of them.
    template <class Each>
    __device__ __forceinline__ void pass_diagonals(float4 (&x)[2], MapChain chain, bool adds, Each each) const {
        if (own[0].count <= 0) return;
#pragma unroll 2
        for (; chain.count > 0; chain.advance()) {
            const float4 f = load_four(chain.m + channel);
            float4 added[2] = {};
            if (adds) load(added, chain.b, chain.b_pitch);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                x[i] = own[i].existing({f.x * x[i].x + added[i].x, f.y * x[i].y + added[i].y, f.z * x[i].z + added[i].z,
                                        f.w * x[i].w + added[i].w});
            each(x);
        }
    }
    template <class Each>
    __device__ __forceinline__ void pass_matrices(float4 (&x)[2], MapChain chain, bool adds, int key_dim, Smem& shared,
                                                  Each each) const {
        constexpr int kGroups = kKey / Smem::kGroup, kAhead = Smem::kStages - 1, kUnits = kKey / 4;
        const int unit = thread % kUnits, first_row = thread / kUnits;
        // Copies a group of M: counted from the first of the present map, so that it may be of a later one.
        const auto copy_group = [&](int group, int stage) {
            const int map = group / kGroups, begin = group % kGroups * Smem::kGroup;
            const bool wanted = map < chain.count && unit * 4 < key_dim;
#pragma unroll
            for (int i = first_row; i < first_row + Smem::kGroup; i += kComposeThreads<kKey> / kUnits)
                copy_async(shared_address(&shared.m[stage][i][unit * 4]),
                           chain.m + map * chain.m_slot + (begin + i) * chain.m_pitch + unit * 4,
                           wanted && begin + i < key_dim ? 16 : 0);
            commit_copies();
        };
        const auto put_state = [&] {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Tf32 parts[4] = {Tf32(x[i].x), Tf32(x[i].y), Tf32(x[i].z), Tf32(x[i].w)};
                auto* const to = reinterpret_cast<uint4*>(&shared.state[in_tile + 8 * i][channel]);
                to[0] = {parts[0].rounded, parts[0].rest, parts[1].rounded, parts[1].rest};
                to[1] = {parts[2].rounded, parts[2].rest, parts[3].rounded, parts[3].rest};
            }
        };
        // sum += state m, of eight rows of m from k on. Neighbouring channels of the state serve as k and k + 4, and
        // neighbouring columns of m belong to different tiles.
        const auto multiply = [&](float(&sum)[2][4], const float(&m)[Smem::kGroup][kKey + 4], int group, int k) {
            uint4 rows[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                rows[i] = *reinterpret_cast<const uint4*>(
                    &shared.state[in_tile + 8 * i][group * Smem::kGroup + k + lane % 4 * 2]);
            float2 columns[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                columns[i] = *reinterpret_cast<const float2*>(&m[k + lane % 4 * 2 + i][thread / 32 * 16 + in_tile * 2]);
            const std::uint32_t rounded[4] = {rows[0].x, rows[1].x, rows[0].z, rows[1].z},
                                rest[4] = {rows[0].y, rows[1].y, rows[0].w, rows[1].w};
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const Tf32 b0(tile ? columns[0].y : columns[0].x), b1(tile ? columns[1].y : columns[1].x);
                mma_16x8x8_tf32(sum[tile], rest, b0.rounded, b1.rounded);
                mma_16x8x8_tf32(sum[tile], rounded, b0.rest, b1.rest);
                mma_16x8x8_tf32(sum[tile], rounded, b0.rounded, b1.rounded);
            }
        };
#pragma unroll
        for (int group = 0; group < kAhead; ++group) copy_group(group, group);
        put_state();
        int stage = 0;
        for (; chain.count > 0; chain.advance()) {
            float4 added[2] = {};
            if (adds) load(added, chain.b, chain.b_pitch);
            float sum[2][4] = {};
#pragma unroll 1
            for (int group = 0; group < kGroups; ++group) {
                wait_copies<kAhead - 1>();
                __syncthreads();
                copy_group(group + kAhead, (stage + kAhead) % Smem::kStages);
#pragma unroll
                for (int k = 0; k < Smem::kGroup; k += 8) multiply(sum, shared.m[stage], group, k);
                stage = (stage + 1) % Smem::kStages;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                x[i] = own[i].existing({sum[0][2 * i] + added[i].x, sum[1][2 * i] + added[i].y,
                                        sum[0][2 * i + 1] + added[i].z, sum[1][2 * i + 1] + added[i].w});
            each(x);
            __syncthreads();  // everybody has read the state
            put_state();
        }
    }
};

// kTotal: of the whole sequence, to the call's maps.
template <int kKey, bool kTotal>
__global__ void __launch_bounds__(kComposeThreads<kKey>, kKey > 128 ? 1 : 2)
    compose(const __grid_constant__ DeviceArgs a, const Schedule schedule, const __grid_constant__ CarryParams p,
            bool delta) {
    follow_kernels();
    extern __shared__ __align__(128) unsigned char raw[];
    auto& shared = *reinterpret_cast<ComposeSmem<kKey>*>(raw);
    const int value_tiles = ceil_div(a.value_dim, kComposeRows), rows_of_m = delta ? a.key_dim : 1;
    const int tiles = value_tiles + (kTotal && a.segment_m.data ? ceil_div(rows_of_m, kComposeRows) : 0);
    const int tile = static_cast<int>(blockIdx.x) % tiles,
              value_head = static_cast<int>(blockIdx.x) / tiles % a.value_heads,
              sequence = static_cast<int>(blockIdx.x) / tiles / a.value_heads;
    const FirstSegment first(a, schedule, sequence, shared.first);
    if (!kTotal && first.count <= 1) return;

    const bool of_m = kTotal && tile >= value_tiles;
    const ComposedRows<kKey> rows(of_m ? tile - value_tiles : tile, of_m ? rows_of_m : a.value_dim, a.key_dim);
    MapChain chain{static_cast<const float*>(p.map_m.data) + p.map_m.offset(first.number, value_head),
                   static_cast<const float*>(p.map_b.data) + p.map_b.offset(first.number, value_head),
                   p.map_m.slot,
                   p.map_b.slot,
                   kKey,
                   kKey,
                   first.count};
    float4 x[2] = {};
    float* start = nullptr;
    if constexpr (kTotal) {
        // The first map, of a state that starts from zero or of one that starts from one.
        if (chain.count == 0) {
            const auto one = [&](int i, int e) {
                return of_m && (!delta || rows.own[i].row == rows.channel + e) ? 1.0f : 0.0f;
            };
#pragma unroll
            for (int i = 0; i < 2; ++i) x[i] = rows.own[i].existing({one(i, 0), one(i, 1), one(i, 2), one(i, 3)});
        } else {
            rows.load(x, of_m ? chain.m : chain.b, kKey);
            chain.advance();
        }
    } else {
        const StateSlots slots = states_of(a, sequence);
        if (slots.skipped) return;
        const std::int64_t slot = first.chunk > 0 ? 0 : slots.initial;
        if (slot >= 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                x[i] = rows.own[i].load(first.chunk > 0 ? p.slab_start : a.initial, slot, value_head);
        }
        --chain.count;  // nothing comes behind the last segment
        start = static_cast<float*>(p.starts.data) + p.starts.offset(first.number + 1, value_head) + rows.channel;
    }
    const auto each = [&](const float4(&now)[2]) {
        if constexpr (!kTotal) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (rows.own[i].count > 0) *reinterpret_cast<float4*>(start + rows.own[i].row * kKey) = now[i];
            start += p.starts.slot;
        }
    };
    if (delta)
        rows.pass_matrices(x, chain, !of_m, a.key_dim, shared, each);
    else
        rows.pass_diagonals(x, chain, !of_m, each);
    if constexpr (kTotal) rows.store(x, of_m ? a.segment_m : a.segment_b, sequence, value_head);
}

template <int kKey>
__global__ void __launch_bounds__(kComposeThreads<kKey>, kKey > 128 ? 1 : 2)
    compose_given(const __grid_constant__ GivenMaps given) {
    extern __shared__ __align__(128) unsigned char raw[];
    const int tiles = ceil_div(given.value_dim, kComposeRows);
    const int tile = static_cast<int>(blockIdx.x) % tiles,
              value_head = static_cast<int>(blockIdx.x) / tiles % given.value_heads,
              sequence = static_cast<int>(blockIdx.x) / tiles / given.value_heads;
    // What does not join is forgotten, and what was before it; the next map begins from zero.
    int first = given.count;
    while (first > 0 && (!given.joins || given.joins[first - 1])) --first;

    const ComposedRows<kKey> rows(tile, given.value_dim, given.key_dim);
    const auto first_of = [&](const GivenMaps::Rows& of) {
        return of.data + first * of.map + sequence * of.sequence + value_head * of.head;
    };
    MapChain chain{first_of(given.m),
                   first_of(given.b),
                   given.m.map,
                   given.b.map,
                   static_cast<int>(given.m.row),
                   static_cast<int>(given.b.row),
                   given.count - first};
    float4 x[2] = {};
    if (chain.count > 0) {
        rows.load(x, chain.b, chain.b_pitch);
        chain.advance();
    }
    const auto each = [](const float4(&)[2]) {};
    if (given.matrices)
        rows.pass_matrices(x, chain, true, given.key_dim, *reinterpret_cast<ComposeSmem<kKey>*>(raw), each);
    else
        rows.pass_diagonals(x, chain, true, each);
    rows.store(x, given.state, sequence, value_head);
}

}  // namespace cula::cuda::sm80
