// SPDX-License-Identifier: Apache-2.0
// gradient_token on Hopper, the warps beside those that multiply: they ask for slices; load q and k and sum
// S o Z; and turn paths into gradients of gates and write strengths.
#pragma once

#include "cuda/backward/token_gates.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/gradients/load_rows.cuh"

namespace cula::cuda::sm90::gradients {

// One warp: items, and the slices of all their value heads, by bulk copies and, by rows, TMA.
template <class T, bool kShares, class From>
struct SliceRole : OfCall<T, kShares, From> {
    using Base = OfCall<T, kShares, From>;
    using Base::a, Base::s, Base::saved;
    using Memory = Shared<T, kShares, From>;
    using Slice = typename Memory::Slice;
    // Slices that are prefetched behind the one that waits for a place: the ring has fewer places than a
    // value head of 128 channels has slices. With eight there is no gain.
    static constexpr int kPrefetched = 2;

    const int lane = static_cast<int>(threadIdx.x) % 32;
    RingPosition place = RingPosition::of_writer();
    [[maybe_unused]] RingPosition tile = RingPosition::of_writer();
    int items_begun = 0;

    __device__ __forceinline__ explicit SliceRole(const Base& call) : Base(call) {}

    // The first item of the CTA from `item` on, told to the others.
    __device__ __forceinline__ int publish(int item) {
        ChunkPlace at;
        item = this->next(item, at);
        if (lane == 0) {
            s.of_items.free[items_begun % 2].wait(items_begun / 2 % 2 ^ 1);
            const bool exists = item < this->items;
            s.items[items_begun % 2] = {exists, exists ? this->key_head(item) : 0, at};
            s.of_items.ready[items_begun % 2].arrive();
        }
        ++items_begun;
        __syncwarp();
        return item;
    }
    // What the return has saved of a slice: all of it, or Z.
    using Returned = backward::ReturnSlice<T, kKey>;
    static constexpr int kReturnedAt = kByRows<From> ? offsetof(Returned, d_state) : 0,
                         kReturnedBytes = sizeof(Returned) - kReturnedAt,
                         kCarriedBytes = sizeof(backward::CarrySlice<T, kKey>);
    __device__ __forceinline__ const unsigned char* returned(std::int64_t slice) const {
        return reinterpret_cast<const unsigned char*>(saved.returned + slice) + kReturnedAt;
    }
    // Tiles of a value head that begin at a value channel.
    __device__ __forceinline__ void ask_tiles(const ChunkPlace& chunk, int value_head, int channel) {
        if constexpr (kByRows<From>) {
            s.of_tiles.free[tile.at].wait(tile.parity);
            Mbarrier& ready = s.of_tiles.ready[tile.at];
            const TileCoordinates at{channel, value_head, static_cast<int>(chunk.begin), chunk.batch};
            ready.arrive_expecting(sizeof(Tiles));
            tma_load(shared_address(&s.tiles[tile.at].d_outputs), this->from.d_o, at, ready.address());
            tma_load(shared_address(&s.tiles[tile.at].d_values), this->from.d_v, at, ready.address());
            tile.next(Memory::kTilePlaces);
        }
    }
    // first: the first slice of the item, of value head `head`.
    __device__ __forceinline__ void ask(std::int64_t first, int head, int count, const ChunkPlace& chunk) {
        int ahead = 1;    // the first that is neither asked for nor prefetched
        int of_head = 0;  // the number of slice i in its value head
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            if (kByRows<From> && of_head % Tiles::kSlices == 0)
                ask_tiles(chunk, head, of_head * backward::kSliceValues);
            if (++of_head == saved.count) of_head = 0, ++head;
#pragma unroll 1
            for (; ahead < min(count, i + 1 + kPrefetched); ++ahead) {
                prefetch_bulk(saved.carried + first + ahead, kCarriedBytes);
                prefetch_bulk(returned(first + ahead), kReturnedBytes);
            }
            s.slices.free[place.at].wait(place.parity);
            Mbarrier& ready = s.slices.ready[place.at];
            const std::uint32_t to = shared_address(&s.places[place.at]);
            ready.arrive_expecting(sizeof(Slice));
            copy_bulk(to, saved.carried + first + i, kCarriedBytes, ready.address());
            copy_bulk(to + kCarriedBytes, returned(first + i), kReturnedBytes, ready.address());
            place.next(Memory::kPlaces);
        }
    }
    __device__ __forceinline__ void run() {
        for (int item = publish(static_cast<int>(blockIdx.x)); item < this->items;) {
            if (lane == 0) {
                const int head = this->first_head(item);
                ask(saved.index(this->slot(item), head, 0), head, a.group * saved.count,
                    s.items[(items_begun - 1) % 2].place);
            }
            item = publish(item + static_cast<int>(gridDim.x));
        }
    }
};

// kThroughWarps warps: sum(S o Z), and q and k, where there are two buffers.
template <class T, bool kShares, bool kSeveral, class From>
struct ThroughRole : OfCall<T, kShares, From> {
    using Base = OfCall<T, kShares, From>;
    using Base::a, Base::s, Base::saved;
    using Memory = Shared<T, kShares, From>;
    using Slice = typename Memory::Slice;
    static constexpr int kSteps = kKey / 16 / kThroughWarps;

    const int warp, lane = static_cast<int>(threadIdx.x) % 32;
    int heads_done = 0;
    Position<Memory::kPlaces> slice;

    __device__ __forceinline__ ThroughRole(const Base& call, int number) : Base(call), warp(number) {}

    // The lane's part of sum(S o Z) over the warp's channels: of S^T Z, 16 channels at a time, the diagonal.
    // Two halves of eight value channels are reduced over as one, the first in the upper rows of `upper`, the
    // second in the lower rows of `lower`.
    __device__ __forceinline__ float add_slices(int count) {
        const bool wants_decay = this->wants_decay();
        const int first = warp * kSteps * kSavedBlock;
        const std::uint32_t columns = shared_address(s.places) + first + SavedLane::columns(lane),
                            rows_of = shared_address(s.places) + first + SavedLane::rows(lane);
        float upper[4] = {}, lower[4] = {};
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            s.slices.ready[slice.at].wait(slice.parity);
            if (wants_decay) {
                const std::uint32_t at = slice.at * static_cast<int>(sizeof(Slice));
                std::uint32_t d_state[kSteps][4], state[kSteps][4];
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    load_matrices_transposed(d_state[step],
                                             columns + at + offsetof(Slice, d_state) + step * kSavedBlock);
                    load_matrices_transposed(state[step],
                                             rows_of + at + offsetof(Slice, state) + step * kSavedBlock);
                }
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    mma_16x8x16<T>(upper, d_state[step], state[step][0], state[step][1]);
                    mma_16x8x16<T>(lower, d_state[step], state[step][2], state[step][3]);
                }
            }
            s.slices.free[slice.at].arrive();
            slice.next();
        }
        const int above = lane / 4 - lane % 4 * 2;
        return above == 0 ? upper[0] + lower[2] : above == 1 ? upper[1] + lower[3] : 0.0f;
    }
    __device__ __forceinline__ void end_head(float sum) {
        const int head = heads_done % 2;
        s.of_paths.free[head].wait(heads_done / 2 % 2 ^ 1);
        sum = sum_over_warp(sum);
        if (lane == 0) s.paths[head].through[warp] = sum;
        s.of_paths.ready[head].arrive();
        ++heads_done;
    }

    __device__ __forceinline__ void run() {
        if constexpr (!kShares) load_rows<kSeveral>(*this, 0, warp * 32 + lane);
        for (int n = 0; this->wait_for_item(n); ++n) {
            s.of_items.free[n % 2].arrive();
#pragma unroll 1
            for (int of = 0; of < a.group; ++of) end_head(add_slices(saved.count));
            if constexpr (!kShares) load_rows<kSeveral>(*this, n + 1, warp * 32 + lane);
        }
    }
};

// One warp: log decays of a value head ahead, gradients of gates and write strengths.
template <class T, bool kShares, bool kSeveral, class From>
struct GateRole : OfCall<T, kShares, From> {
    using Base = OfCall<T, kShares, From>;
    using Base::a, Base::d, Base::s, Base::scratch;
    using Tokens = TokensOfRows<kSeveral>;
    using Numbers = backward::TokenNumbers<kRows>;
    static constexpr int kEach = Numbers::kEach;

    // A value head of an item, in the order of the CTA.
    struct HeadCursor {
        int item, of;
        ChunkPlace chunk;
        Position<2> head;
    };

    __device__ __forceinline__ explicit GateRole(const Base& call) : Base(call) {}

    __device__ __forceinline__ Tokens tokens(const HeadCursor& at) const {
        return {kSeveral ? a.writes : 1, at.chunk.begin};
    }
    __device__ __forceinline__ void advance(HeadCursor& at) const {
        at.head.next();
        if (++at.of < a.group) return;
        at.of = 0;
        at.item = this->next(at.item + static_cast<int>(gridDim.x), at.chunk);
    }
    __device__ __forceinline__ void store_decays(const HeadCursor& at) const {
        const int value_head = this->first_head(at.item) + at.of;
        Numbers gates;
        gates.ask_gates(a, at.chunk, value_head, tokens(at));
        s.of_decays.free[at.head.at].wait(at.head.parity ^ 1);
        backward::store_log_decays<kRows>(a, at.chunk, value_head, tokens(at), gates, s.decays[at.head.at]);
        s.of_decays.ready[at.head.at].arrive();
    }

    // dg of the lane's neighbouring tokens.
    __device__ __forceinline__ void sum_paths(float (&sums)[kEach], const Paths& paths, float end) const {
        const int lane = static_cast<int>(threadIdx.x) % 32, first = lane * kEach;
        float from[kEach], to[kEach], all_from = 0.0f, all_to = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            from[i] = paths.ends[kReads][first + i] + paths.ends[kRemovals][first + i];
            to[i] = paths.ends[kWrites][first + i];
            all_from += from[i], all_to += to[i];
        }
        // Of later lanes, and of earlier ones.
        float later = __shfl_down_sync(0xffffffffu, all_from, 1),
              earlier = __shfl_up_sync(0xffffffffu, all_to, 1);
        if (lane == 31) later = 0.0f;
        if (lane == 0) earlier = 0.0f;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float after = __shfl_down_sync(0xffffffffu, later, step),
                        before = __shfl_up_sync(0xffffffffu, earlier, step);
            if (lane + step < 32) later += after;
            if (lane >= step) earlier += before;
        }
        float through = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kThroughWarps; ++warp) through += paths.through[warp];
        through *= exp2_fast(end);
#pragma unroll
        for (int i = kEach - 1; i >= 0; --i) later += from[i], sums[i] = later;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            sums[i] += earlier + through;
            earlier += to[i];
        }
#pragma unroll
        for (int warp = 0; warp < kRows / kBlock; ++warp) {
            if (!TriangleTiles::has(warp, first / 8)) continue;
            const int at = TriangleTiles::begin(warp) * 8 + first;
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                sums[i] += paths.across[kReads][at + i] + paths.across[kRemovals][at + i];
        }
    }

    __device__ __forceinline__ float* parameters(int item, int of) const {
        if (!this->wants_decay() || !scratch.parameters) return nullptr;
        return scratch.parameters + (std::int64_t{item} * a.group + of) * 2;
    }
    __device__ __forceinline__ void store_gradients(const HeadCursor& at) const {
        const int value_head = this->first_head(at.item) + at.of;
        const bool wants_decay = this->wants_decay();
        Numbers gates, strengths;
        if (wants_decay) gates.ask_gates(a, at.chunk, value_head, tokens(at));
        if (d.d_beta.data) strengths.ask(a.beta, at.chunk, value_head, RowsAreTokens(1, at.chunk.begin));
        s.of_paths.ready[at.head.at].wait(at.head.parity);
        const Paths& paths = s.paths[at.head.at];
        float sums[kEach];
        if (wants_decay) sum_paths(sums, paths, s.decays[at.head.at][kRows - 1]);
        if (d.d_beta.data)
            backward::store_strength_gradients<kRows>(a, d, at.chunk, value_head, strengths, paths.strengths);
        s.of_paths.free[at.head.at].arrive();
        if (wants_decay)
            backward::store_gate_gradients<kRows>(a, d, at.chunk, value_head, tokens(at), gates, sums,
                                                  parameters(at.item, at.of));
    }

    __device__ __forceinline__ void run() const {
        // Chunks that do not exist add nothing to the gradients of parameters.
        const int lane = static_cast<int>(threadIdx.x) % 32;
        if (float* const first = parameters(0, 0))
            for (int item = static_cast<int>(blockIdx.x); item < this->items;
                 item += static_cast<int>(gridDim.x))
                if (this->place(item).count <= 0)
                    for (int i = lane; i < 2 * a.group; i += 32)
                        first[std::int64_t{item} * a.group * 2 + i] = 0.0f;
        HeadCursor at{0, 0, {}, {}};
        at.item = this->next(static_cast<int>(blockIdx.x), at.chunk);
        if (at.item >= this->items) return;
        store_decays(at);
        for (HeadCursor ahead = at; at.item < this->items; at = ahead) {
            advance(ahead);
            if (ahead.item < this->items) store_decays(ahead);
            store_gradients(at);
        }
    }
};

}  // namespace cula::cuda::sm90::gradients
