// SPDX-License-Identifier: Apache-2.0
// gradient_token on Hopper: shared memory, barriers, and the order in which roles go through chunks.
#pragma once

#include "cuda/backward/gradients.h"
#include "cuda/backward/rows.cuh"
#include "cuda/backward/saved.cuh"
#include "cuda/chunked/tile_reads.cuh"
#include "cuda/pipe/barriers.cuh"
#include "cuda/pipe/tensor_maps.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace cula::cuda::sm90::gradients {

using backward::GradientScratch, backward::Gradients, backward::kSavedBlock, backward::kSavedMatrix,
    backward::lane_again, backward::Saved, backward::SavedLane, backward::SavedSlice;
using chunked::ChunkPlace, chunked::OperandTile, chunked::Schedule;

inline constexpr int kRows = 64, kKey = 128, kBlock = chunked::kBlock;

// The warpgroups: reads (dO S^T, dA), removals (dV S^T, dL), writes (U Z^T), and one whose warps each have
// something else to do.
inline constexpr int kReads = 0, kRemovals = 1, kWrites = 2, kProductWarpgroups = 3,
                     kThreads = (kProductWarpgroups + 1) * kWarpgroupThreads,
                     kProducers = kProductWarpgroups * kWarpgroupThreads;
inline constexpr int kProductRegisters = 152, kOtherRegisters = 56;
static_assert((kProductWarpgroups * kProductRegisters + kOtherRegisters) * kWarpgroupThreads <= 1 << 16);
inline constexpr int kThroughWarps = 2, kThroughThreads = 32 * kThroughWarps;

using Ends = float[kKey / 8][4];      // rows of a warp, all channels
using Squares = float[kRows / 8][4];  // rows of a warp, all tokens

// Numbers of a square's lower triangle, where the lane reads them that has them in accumulators: of warp w
// (16 rows) tiles 0 to 2 w + 1 of eight columns.
struct TriangleTiles {
    static constexpr int kTiles = 2 + 4 + 6 + 8;
    float4 tiles[kTiles][32];

    static __device__ __forceinline__ bool has(int warp, int tile) { return tile < 2 * (warp + 1); }
    // Tiles of the warps before.
    static __device__ __forceinline__ int begin(int warp) { return warp * (warp + 1); }
    __device__ __forceinline__ float4& at(int warp, int tile, int lane) {
        return tiles[begin(warp) + tile][lane];
    }
};

// What dg and dbeta of a value head are made of.
struct Paths {
    // By tokens: from the chunk's start to reads, and to removals; and from writes to its end.
    float ends[kProductWarpgroups][kRows];
    float across[2][8 * TriangleTiles::kTiles];  // across a token to rows of a warp: reads, and removals
    float strengths[kRows];                      // dV_i . U_i
    float through[kThroughWarps];                // S o Z, not yet decayed
};

// A chunk and a head of q and k, which the warp that asks for slices has found for the others.
struct Item {
    bool exists;  // false behind the last one
    int key_head;
    ChunkPlace place;
};

template <class From>
inline constexpr bool kByRows = std::is_same_v<From, backward::FromRows>;

// By rows (backward/saved.cuh) dV and dO are tiles [64 tokens x 64 value channels], and are not in
// slices.
template <class T>
struct alignas(128) SliceWithoutRows {
    T writes[kRows * backward::kSliceValues], state[kKey * backward::kSliceValues],
        d_state[kKey * backward::kSliceValues];
};
struct Tiles {
    TmaTile<kRows> d_outputs, d_values;
    static constexpr int kSlices = kTmaChannels / backward::kSliceValues;
};

// kShares: several value heads share q and k.
template <class T, bool kShares, class From>
struct Shared {
    using Slice = std::conditional_t<kByRows<From>, SliceWithoutRows<T>, SavedSlice<T, kKey>>;
    static constexpr int kBuffers = kShares ? 1 : 2, kPlaces = (kShares ? 6 : 7) - kByRows<From>,
                         kTilePlaces = 2;
    // Threads that load q and k: removals, or the warps of S o Z.
    static constexpr int kRowLoaders = kShares ? kWarpgroupThreads : kThroughThreads;
    struct alignas(1024) Rows {
        T q[kRows * kKey], k[kRows * kKey];
    };
    // Of dA or dL: q k^T or k k^T, with norms and scale; after the last value head the square, rounded.
    union alignas(1024) Square {
        TriangleTiles pairs;
        T tile[kRows * kRows];
    };
    using Sums = float4[kKey / 8][kWarpgroupThreads];  // of a warpgroup, as its threads have accumulators
    struct OverHeads {
        Sums d_q;
        TriangleTiles squares[2];
    };
    struct Nothing {};

    Rows rows[kBuffers];
    Square squares[2];
    [[no_unique_address]] std::conditional_t<kByRows<From>, Tiles[kTilePlaces], Nothing> tiles;
    alignas(128) Slice places[kPlaces];
    Sums d_k;  // of all value heads so far; at the end what the removals add to it
    [[no_unique_address]] std::conditional_t<kShares, OverHeads, Nothing> over_heads;
    Paths paths[2];
    Item items[2];
    float decays[2][kRows];           // log2, running sums
    float norms[kBuffers][2][kRows];  // 1 / |q|, 1 / |k|

    Ring<kPlaces> slices;
    Ring<kTilePlaces> of_tiles;
    Ring<kBuffers> of_rows;
    Mbarrier copied[kBuffers];  // rows, of which norms are still to be made
    Ring<2> of_items, of_decays, of_paths;
    // A phase for each item. mbarriers, not named ones of a part of the CTA, which compute-sanitizer does not
    // follow.
    Mbarrier pairs;            // pairs are in shared memory, by writes
    Mbarrier pairs_read[2];    // reads have read theirs, removals theirs
    Mbarrier before_products;  // reads and removals have stored their squares, writes have loaded sums of dk
    // All three have read pairs, squares and each other's q and k; removals have stored their part of dk.
    Mbarrier item_read;
    // A phase for each value head, where these share q and k. The first of an item needs no wait: item_read
    // and of_rows.free have ordered it.
    Mbarrier removed, written;  // removals, and then writes, have been added to d_k

    __device__ __forceinline__ void init_barriers() {
        for (int i = 0; i < kPlaces; ++i)
            slices.ready[i].init(1), slices.free[i].init(kProducers / 32 + kThroughThreads);
        for (int i = 0; i < kTilePlaces; ++i)
            of_tiles.ready[i].init(1), of_tiles.free[i].init(2 * kWarpgroupWarps);  // reads and removals
        for (int i = 0; i < kBuffers; ++i)
            of_rows.ready[i].init(kWarpgroupThreads), copied[i].init(kRowLoaders),
                // Where removals load, the order of their program and `item_read` have put their reads
                // before that.
                of_rows.free[i].init(kShares ? kProducers - kRowLoaders : kProducers);
        for (int i = 0; i < 2; ++i) {
            of_items.ready[i].init(1), of_items.free[i].init(kProducers + kThroughThreads);
            of_decays.ready[i].init(32), of_decays.free[i].init(kProducers);
            of_paths.ready[i].init(kProducers + kThroughThreads), of_paths.free[i].init(32);
        }
        pairs.init(kWarpgroupThreads), before_products.init(kProducers), item_read.init(kProducers);
        for (Mbarrier* each : {&pairs_read[0], &pairs_read[1], &removed, &written})
            each->init(kWarpgroupThreads);
        publish_barriers();
    }
};
template <class From>
inline constexpr bool kFits = sizeof(Shared<__nv_bfloat16, false, From>) <= 227 * 1024 &&
                              sizeof(Shared<__nv_bfloat16, true, From>) <= 227 * 1024;
static_assert(kFits<backward::FromSlices> && kFits<backward::FromRows>);

// A position in a ring whose places all roles pass in the same order.
template <int kPlaces>
struct Position : RingPosition {
    __device__ __forceinline__ void next() { RingPosition::next(kPlaces); }
};

// What all roles know of a call.
template <class T, bool kShares, class From>
struct OfCall {
    const DeviceArgs& a;
    const Schedule& schedule;
    const Gradients& d;
    const Saved<T, kKey>& saved;
    const GradientScratch& scratch;
    const From& from;
    Shared<T, kShares, From>& s;
    int items;  // chunks of the slab times heads of q and k

    __device__ __forceinline__ int slot(int item) const {
        return static_cast<int>(static_cast<unsigned>(item) / static_cast<unsigned>(a.heads));
    }
    __device__ __forceinline__ int key_head(int item) const { return item - slot(item) * a.heads; }
    __device__ __forceinline__ int first_head(int item) const { return key_head(item) * a.group; }
    __device__ __forceinline__ bool wants_decay() const {
        return a.algorithm.decay == kTokenDecay && d.decay();
    }
    // Waits for item number n of the CTA; whether it exists.
    __device__ __forceinline__ bool wait_for_item(int n) const {
        s.of_items.ready[n % 2].wait(n / 2 % 2);
        return s.items[n % 2].exists;
    }
    __device__ __forceinline__ ChunkPlace place(int item) const {
        return chunked::place_of<kRows>(a, schedule, slot(item));
    }
    // The next item of the CTA from `item` on whose chunk exists; items if there is none.
    __device__ __forceinline__ int next(int item, ChunkPlace& at) const {
        for (; item < items; item += static_cast<int>(gridDim.x)) {
            at = place(item);
            if (at.count > 0) return item;
        }
        return items;
    }
};

}  // namespace cula::cuda::sm90::gradients
