// SPDX-License-Identifier: Apache-2.0
// compose: applies the affine maps S -> S M + B of consecutive segments (ALGORITHM.md: segments)
//
// S and B are [V, K]. M is [K, K], a row per channel read, a column per channel written.
// ALGORITHM.md writes the transpose, M S + B.
//
//   compose<kKey, false>   starts[i] = starts[i-1] M[i-1] + B[i-1], the state before each segment
//   compose<kKey, true>    the map (M, B) of a whole sequence: B from the zero state, M from the identity
//   compose_given          a state from maps that the caller has gathered
//
// Grid: one CTA per (tile of 8 rows, value head, sequence), 2 K threads.
//   Rows are those of S [V, K]; compose<kKey, true> appends tiles for the rows of M.
//
// Everything is float, on the CUDA cores. Per segment:
//   1  each thread copies its part of later rows of M to shared memory (cp.async, 5 stages; 2 if K = 256)
//   2  each thread sums an eighth of the terms of all eight rows, for four channels
//   3  the eight lanes that share four channels exchange partial sums, so that each ends with one row
//   4  the new rows go to shared memory; one CTA barrier, then the next segment
// M does not depend on the state, so its copies run ahead,
// across segments. A thread reads only M words that it copied.
// Diagonal maps (additive algorithms) need none of this: a thread multiplies its own four channels.
//
// Budgets: at most 128 registers; two CTAs per multiprocessor where K <= 128, one where K = 256.
//   Shared memory for K = 64, 128, 256: 44, 88, 80 KiB, below the 99 KiB of 8.6, 8.9 and 12.0.
#pragma once

#include "cuda/chunked/compose.h"
#include "cuda/chunked/cursor.cuh"
#include "cuda/ptx/pdl.cuh"

namespace cula::cuda::chunked {

template <int kKey>
inline constexpr int kComposeThreads = kComposeRows / 4 * kKey;

template <int kKey>
struct ComposeSmem {
    // M comes in groups of 32 rows: four rows for each of the eight parts of a sum.
    // The stages fit the 99 KiB of 8.6, 8.9 and 12.0.
    static constexpr int kStages = kKey > 128 ? 2 : 5;
    float4 m[kStages][4][kComposeThreads<kKey>];
    float state[2][kComposeRows][kKey];  // S before and after a segment, alternating
    int first[3];
};

// The first segment of a sequence in this slab: its number, first
// chunk and the sequence's segments. Searched by the whole CTA.
struct FirstSegment {
    int number, chunk, count;

    __device__ __forceinline__ FirstSegment(const DeviceArgs& a, const Schedule& schedule, int sequence,
                                            int (&found)[3]) {
        if (threadIdx.x < 3) found[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < schedule.max_segments;
             i += static_cast<int>(blockDim.x)) {
            const Segment segment = segment_of(a, schedule, i);
            if (segment.sequence == sequence && segment.rank == 0)
                found[0] = i, found[1] = segment.chunk, found[2] = segment.count;
        }
        __syncthreads();
        number = found[0], chunk = found[1], count = found[2];
    }
};

// Four neighbouring channels of a row of S; zero where they do not exist.
struct FourChannels {
    int row, channel, count;  // count: existing channels, from `channel` on

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
    __device__ __forceinline__ void store(float4 x, const States& to, std::int64_t slot,
                                          int value_head) const {
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
    // Maps have rows of kKey channels, whose contents beyond key_dim are undefined: this zeroes them.
    __device__ __forceinline__ float4 existing(float4 x) const {
        return {count > 0 ? x.x : 0.0f, count > 1 ? x.y : 0.0f, count > 2 ? x.z : 0.0f,
                count > 3 ? x.w : 0.0f};
    }
};

// Adds up sum[row] over the eight lanes that share channels (part
// = lane / 4), and leaves in sum[0] the row with number `part`.
// A butterfly: of two lanes each gives the other half of its rows.
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

// Consecutive maps, as pointers to the thread's part of the first of them.
struct MapChain {
    const float *m, *b;  // m: the thread's rows (or the diagonal) at its channels; b: its row at its channels
    std::int64_t m_slot, b_slot;
    int m_pitch, count;

    __device__ __forceinline__ void advance() { m += m_slot, b += b_slot, --count; }
};

__device__ __forceinline__ float4 load_four(const float* at) {
    return __ldg(reinterpret_cast<const float4*>(at));
}

// The thread's share of a tile: row `part` of S, or of a total M, at four channels.
template <int kKey>
struct ComposedRow {
    const int thread = static_cast<int>(threadIdx.x), part = thread % 32 / 4,
              channel = (thread / 32 * 4 + thread % 4) * 4;
    int row;
    FourChannels own;

    __device__ __forceinline__ ComposedRow(int tile, int rows, int key_dim)
        : row(tile * kComposeRows + part), own{row, channel, row < rows ? key_dim - channel : 0} {}

    __device__ __forceinline__ bool exists() const { return own.count > 0; }

    // Applies every map of the chain to x in turn, and calls
    // each(x) after every one. Without `adds` B counts as zero.
    template <class Each>
    __device__ __forceinline__ void pass_diagonals(float4& x, MapChain chain, bool adds, Each each) const {
        if (!exists()) return;
#pragma unroll 4
        for (; chain.count > 0; chain.advance()) {
            const float4 f = load_four(chain.m), y = adds ? load_four(chain.b) : float4{};
            x = own.existing({f.x * x.x + y.x, f.y * x.y + y.y, f.z * x.z + y.z, f.w * x.w + y.w});
            each(x);
        }
    }
    template <class Each>
    __device__ __forceinline__ void pass_matrices(float4& x, MapChain chain, bool adds, int key_dim,
                                                  ComposeSmem<kKey>& shared, Each each) const {
        constexpr int kGroups = kKey / 32, kStages = ComposeSmem<kKey>::kStages;
        const int rows =
            channel < key_dim ? key_dim - 4 * part : 0;  // rows of M that exist, from the part's first on
        // Copies a group of M to a stage. Groups are counted from the first one
        // of the current map on, so that a group may belong to a later map.
        const auto copy_group = [&](int group, int stage) {
            const int map = group / kGroups, begin = group % kGroups * 32, end = map < chain.count ? rows : 0;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                copy_async(shared_address(&shared.m[stage][i][thread]),
                           chain.m + map * chain.m_slot + (begin + i) * chain.m_pitch,
                           begin + i < end ? 16 : 0);
            commit_copies();
        };
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) copy_group(stage, stage);

        // The rows of this group and of the next are held in
        // registers, which frees the stage before they are multiplied.
        float4 held[2][4];
        const auto take_group = [&](int group, int stage) {
            wait_copies<kStages - 1>();
            asm volatile("" ::: "memory");
#pragma unroll
            for (int i = 0; i < 4; ++i) held[group % 2][i] = shared.m[stage][i][thread];
        };
        adds = adds && exists();
        *reinterpret_cast<float4*>(&shared.state[0][part][channel]) = x;
        float4 added = adds && chain.count > 0 ? load_four(chain.b) : float4{};
        take_group(0, 0);
        int stage = 0, now = 0;
        while (chain.count > 0) {
            float sum[kComposeRows][4] = {};
            __syncthreads();
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                float of_s[kComposeRows][4];
#pragma unroll
                for (int r = 0; r < kComposeRows; ++r)
                    load4(of_s[r], &shared.state[now][r][32 * group + 4 * part]);
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
            x = own.existing(
                {sum[0][0] + added.x, sum[0][1] + added.y, sum[0][2] + added.z, sum[0][3] + added.w});
            now ^= 1;
            *reinterpret_cast<float4*>(&shared.state[now][part][channel]) = x;
            if (exists()) each(x);
            chain.advance();
            if (adds && chain.count > 0) added = load_four(chain.b);
        }
    }
};

// matrices: M is a matrix; otherwise a diagonal (has_diagonal_map).
// kTotal: the map of the whole sequence, to the call's segment_m and segment_b.
template <int kKey, bool kTotal>
__global__ void __launch_bounds__(kComposeThreads<kKey>)
    compose(const __grid_constant__ DeviceArgs a, const Schedule schedule,
            const __grid_constant__ CarryParams p, bool matrices) {
    pdl_wait();
    pdl_trigger();
    extern __shared__ __align__(128) unsigned char raw[];
    auto& shared = *reinterpret_cast<ComposeSmem<kKey>*>(raw);
    const int value_tiles = ceil_div(a.value_dim, kComposeRows), rows_of_m = matrices ? a.key_dim : 1;
    const int tiles = value_tiles + (kTotal && a.segment_m.data ? ceil_div(rows_of_m, kComposeRows) : 0);
    const int tile = static_cast<int>(blockIdx.x) % tiles,
              value_head = static_cast<int>(blockIdx.x) / tiles % a.value_heads,
              sequence = static_cast<int>(blockIdx.x) / tiles / a.value_heads;
    const FirstSegment first(a, schedule, sequence, shared.first);
    if (!kTotal && first.count <= 1) return;

    const bool of_m = kTotal && tile >= value_tiles;
    const ComposedRow<kKey> row(of_m ? tile - value_tiles : tile, of_m ? rows_of_m : a.value_dim, a.key_dim);
    const FourChannels& own = row.own;
    const auto* m =
        static_cast<const float*>(p.map_m.data) + p.map_m.offset(first.number, value_head) + row.channel;
    MapChain chain{m + (matrices ? 4 * row.part * kKey : 0),
                   static_cast<const float*>(p.map_b.data) + p.map_b.offset(first.number, value_head) +
                       row.row * kKey + row.channel,
                   p.map_m.slot,
                   p.map_b.slot,
                   kKey,
                   first.count};
    float4 x{};
    float* start = nullptr;
    bool from_zero = false;
    if constexpr (kTotal) {
        // The first map, applied to zero (B) or to the identity
        // (M): its own rows. Without any map: zero or the identity.
        if (chain.count == 0) {
            const auto one = [&](int e) {
                return of_m && (!matrices || row.row == row.channel + e) ? 1.0f : 0.0f;
            };
            x = own.existing({one(0), one(1), one(2), one(3)});
        } else {
            if (row.exists()) x = own.existing(load_four(of_m ? m + row.row * kKey : chain.b));
            chain.advance();
        }
    } else {
        const StateSlots slots = states_of(a, sequence);
        if (slots.skipped) return;
        const std::int64_t slot = first.chunk > 0 ? 0 : slots.initial;
        if (slot >= 0) x = own.load(first.chunk > 0 ? p.slab_start : a.initial, slot, value_head);
        --chain.count;  // no segment follows the last one
        start = static_cast<float*>(p.starts.data) + p.starts.offset(first.number + 1, value_head) +
                row.row * kKey + row.channel;
        from_zero = p.first_beside_maps || (first.chunk == 0 && slot < 0);
    }
    const auto each = [&](float4 now) {
        if (kTotal) return;
        *reinterpret_cast<float4*>(start) = now;
        start += p.starts.slot;
    };
    if (from_zero) {
        // The state after the first segment is its B: the state before it
        // is zero, or the carry has already run through it from its state.
        if (row.exists()) each(x = own.existing(load_four(chain.b)));
        chain.advance();
    }
    if (matrices)
        row.pass_matrices(x, chain, !of_m, a.key_dim, shared, each);
    else
        row.pass_diagonals(x, chain, !of_m, each);
    if (kTotal && row.exists()) own.store(x, of_m ? a.segment_m : a.segment_b, sequence, value_head);
}

template <int kKey>
__global__ void __launch_bounds__(kComposeThreads<kKey>, kKey > 128 ? 1 : 2)
    compose_given(const __grid_constant__ GivenMaps given) {
    extern __shared__ __align__(128) unsigned char raw[];
    const int tiles = ceil_div(given.value_dim, kComposeRows);
    const int tile = static_cast<int>(blockIdx.x) % tiles,
              value_head = static_cast<int>(blockIdx.x) / tiles % given.value_heads,
              sequence = static_cast<int>(blockIdx.x) / tiles / given.value_heads;
    // Composition starts after the last map that does not
    // join its successor: the map behind it starts from zero.
    int first = given.count;
    while (first > 0 && (!given.joins || given.joins[first - 1])) --first;

    const ComposedRow<kKey> row(tile, given.value_dim, given.key_dim);
    const auto rows_of = [&](const GivenMaps::Rows& of) {
        return of.data + first * of.map + sequence * of.sequence + value_head * of.head + row.channel;
    };
    MapChain chain{rows_of(given.m) + (given.matrices ? 4 * row.part * given.m.row : 0),
                   rows_of(given.b) + row.row * given.b.row,
                   given.m.map,
                   given.b.map,
                   static_cast<int>(given.m.row),
                   given.count - first};
    float4 x{};
    if (chain.count > 0) {
        if (row.exists()) x = row.own.existing(load_four(chain.b));
        chain.advance();
    }
    const auto each = [](float4) {};
    if (given.matrices)
        row.pass_matrices(x, chain, true, given.key_dim, *reinterpret_cast<ComposeSmem<kKey>*>(raw), each);
    else
        row.pass_diagonals(x, chain, true, each);
    if (row.exists()) row.own.store(x, given.state, sequence, value_head);
}

}  // namespace cula::cuda::chunked
