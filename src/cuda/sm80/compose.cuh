// SPDX-License-Identifier: Apache-2.0
// compose: the state before each segment <- the state before the first, maps      ALGORITHM.md: segments
//          or the map of a whole sequence, whose rows are those of a state that starts from zero and of M from one
//
// grid (tiles of 8 rows * value heads * sequences)      2 K threads
//
// S <- M S + B, segment after segment, all in float. A thread owns four channels of one row of S^T. For these channels
// it adds up an eighth of the sums of all eight rows, and the eight lanes that share them exchange what they have: one
// barrier a segment. M does not depend on the state, so every thread copies what it multiplies with well ahead.
#pragma once

#include "cuda/ptx/overlap.cuh"
#include "cuda/sm80/walk.cuh"

namespace cula::cuda::sm80 {

inline constexpr int kComposeRows = 8;  // as many as a sum has parts: after the exchange every lane has one row

template <int kKey>
inline constexpr int kComposeThreads = kComposeRows / 4 * kKey;

template <int kKey>
struct ComposeSmem {
    // M comes in groups of 32 rows, four for each part of the sums. All stages fit the 99 KiB of 8.6, 8.9 and 12.0.
    static constexpr int kStages = kKey > 128 ? 2 : 5;
    float4 m[kStages][4][kComposeThreads<kKey>];
    float state[2][kComposeRows][kKey];  // S^T before and after a segment, by turns
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
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (e < count) store_float(to.data, to.dtype, at + e * to.k, all[e]);
    }
    // Maps have rows of kKey channels, of which those that do not exist hold anything.
    __device__ __forceinline__ float4 existing(float4 x) const {
        return {count > 0 ? x.x : 0.0f, count > 1 ? x.y : 0.0f, count > 2 ? x.z : 0.0f, count > 3 ? x.w : 0.0f};
    }
};

// Adds up over the lanes of all parts (lane / 4), and leaves in sum[0] the row that has the number of this lane's part:
// of two lanes each hands over the rows of the other.
template <int kRows>
__device__ __forceinline__ void exchange_rows(float (&sum)[kComposeRows][4], int part) {
    constexpr int kHalf = kRows / 2;
    const bool upper = part & kHalf;
#pragma unroll
    for (int row = 0; row < kHalf; ++row)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float kept = upper ? sum[row + kHalf][e] : sum[row][e];
            const float given = upper ? sum[row][e] : sum[row + kHalf][e];
            sum[row][e] = kept + __shfl_xor_sync(0xffffffffu, given, 4 * kHalf);
        }
    if constexpr (kHalf > 1) exchange_rows<kHalf>(sum, part);
}

// kTotal: of the whole sequence, to the call's maps.
template <int kKey, bool kTotal>
__global__ void __launch_bounds__(kComposeThreads<kKey>)
    compose(const __grid_constant__ DeviceArgs a, const Schedule schedule, const __grid_constant__ CarryParams p,
            bool delta) {
    follow_kernels();
    constexpr int kGroups = kKey / 32, kStages = ComposeSmem<kKey>::kStages;
    extern __shared__ __align__(128) unsigned char raw[];
    auto& shared = *reinterpret_cast<ComposeSmem<kKey>*>(raw);
    const int value_tiles = ceil_div(a.value_dim, kComposeRows), rows_of_m = delta ? a.key_dim : 1;
    const int tiles = value_tiles + (kTotal ? ceil_div(rows_of_m, kComposeRows) : 0);
    const int tile = static_cast<int>(blockIdx.x) % tiles,
              value_head = static_cast<int>(blockIdx.x) / tiles % a.value_heads,
              sequence = static_cast<int>(blockIdx.x) / tiles / a.value_heads;
    const FirstSegment first(a, schedule, sequence, shared.first);
    if (!kTotal && first.count <= 1) return;

    const bool of_m = kTotal && tile >= value_tiles;
    const int thread = static_cast<int>(threadIdx.x), part = thread % 32 / 4,
              row = (of_m ? tile - value_tiles : tile) * kComposeRows + part,
              channel = (thread / 32 * 4 + thread % 4) * 4;
    const FourChannels own{row, channel, row < (of_m ? rows_of_m : a.value_dim) ? a.key_dim - channel : 0};
    const bool exists = own.count > 0;
    const auto* m = static_cast<const float*>(p.map_m.data) + p.map_m.offset(first.number, value_head) + channel +
                    (delta ? 4 * part * kKey : 0);
    const auto* b =
        static_cast<const float*>(p.map_b.data) + p.map_b.offset(first.number, value_head) + row * kKey + channel;
    auto* start =
        static_cast<float*>(p.starts.data) + p.starts.offset(first.number + 1, value_head) + row * kKey + channel;
    const auto four = [](const float* at) { return __ldg(reinterpret_cast<const float4*>(at)); };
    const auto added_by_map = [&] { return of_m ? float4{} : four(b); };

    const int rows = channel < a.key_dim ? a.key_dim - 4 * part : 0;  // of M that are there, from the part's first on
    int left = first.count - (kTotal ? 0 : 1);                        // maps to apply
    // Copies a group of M to a stage: counted from the first of the present map, so that it may be of a later one.
    const auto copy_group = [&](int group, int stage) {
        const int map = group / kGroups, begin = group % kGroups * 32, end = map < left ? rows : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            copy_async(shared_address(&shared.m[stage][i][thread]), m + map * p.map_m.slot + (begin + i) * kKey,
                       begin + i < end ? 16 : 0);
        commit_copies();
    };
    if (delta) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) copy_group(stage, stage);
    }

    float4 x{};
    if constexpr (kTotal) {
        const auto one = [&](int e) { return of_m && (!delta || row == channel + e) ? 1.0f : 0.0f; };
        x = own.existing({one(0), one(1), one(2), one(3)});
    } else {
        const StateSlots slots = states_of(a, sequence);
        if (slots.skipped) return;
        const std::int64_t slot = first.chunk > 0 ? 0 : slots.initial;
        if (slot >= 0) x = own.load(first.chunk > 0 ? p.slab_start : a.initial, slot, value_head);
    }
    const States& whole = of_m ? a.segment_m : a.segment_b;
    if (!delta) {
        if (!exists) return;
#pragma unroll 4
        for (; left > 0; --left) {
            const float4 f = four(m), y = added_by_map();
            x = own.existing({f.x * x.x + y.x, f.y * x.y + y.y, f.z * x.z + y.z, f.w * x.w + y.w});
            if (!kTotal) *reinterpret_cast<float4*>(start) = x;
            m += p.map_m.slot, b += p.map_b.slot, start += p.starts.slot;
        }
        if (kTotal) own.store(x, whole, sequence, value_head);
        return;
    }

    // The rows of a group and of the next are held in registers, which frees the stage while they are multiplied with.
    float4 held[2][4];
    const auto take_group = [&](int group, int stage) {
        wait_copies<kStages - 1>();
        asm volatile("" ::: "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) held[group % 2][i] = shared.m[stage][i][thread];
    };
    *reinterpret_cast<float4*>(&shared.state[0][part][channel]) = x;
    float4 added = exists ? added_by_map() : float4{};
    take_group(0, 0);
    int stage = 0, now = 0;
    for (; left > 0; --left) {
        float sum[kComposeRows][4] = {};
        __syncthreads();
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            float of_s[kComposeRows][4];
#pragma unroll
            for (int r = 0; r < kComposeRows; ++r) load4(of_s[r], &shared.state[now][r][32 * group + 4 * part]);
            copy_group(group + kStages, stage);
            stage = stage + 1 < kStages ? stage + 1 : 0;
            take_group(group + 1, stage);
#pragma unroll
            for (int r = 0; r < kComposeRows; ++r)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float4 column = held[group % 2][i];
                    sum[r][0] += column.x * of_s[r][i], sum[r][1] += column.y * of_s[r][i];
                    sum[r][2] += column.z * of_s[r][i], sum[r][3] += column.w * of_s[r][i];
                }
        }
        exchange_rows<kComposeRows>(sum, part);
        x = own.existing({sum[0][0] + added.x, sum[0][1] + added.y, sum[0][2] + added.z, sum[0][3] + added.w});
        now ^= 1;
        *reinterpret_cast<float4*>(&shared.state[now][part][channel]) = x;
        if (!kTotal && exists) *reinterpret_cast<float4*>(start) = x;
        m += p.map_m.slot, b += p.map_b.slot, start += p.starts.slot;
        if (exists && left > 1) added = added_by_map();
    }
    if (kTotal && exists) own.store(x, whole, sequence, value_head);
}

}  // namespace cula::cuda::sm80
