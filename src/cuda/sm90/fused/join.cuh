// SPDX-License-Identifier: Apache-2.0
// Segments of the fused prefill that join by themselves (Strategy Joined, docs/design/joined.md).
//
// All segments of a sequence run at once, from zero; the first one from the sequence's state. What the others
// lack is linear in the state S0 before them. A walk over the same chunks without values, and with the
// identity in the place of S, gives both parts of it:
//
//   outputs     o_t += S0 e_t, where e_t [K], the entry query of token t, has the output of row r as e_t[r]
//   the state   S0 M + B, where M and B are the states at the ends of both walks
//
// So a CTA has a second state warpgroup, for 64 rows of M, beside that for 64 rows of S (PairedWithMap); both
// read the same chunks from shared memory. The first pair of a head makes M, which a first segment does not
// need. A CTA that has walked its segment waits for what earlier segments, and the M of its own, leave, and
// then
//
//   states    S0 <- S0 M + B over the segments before its own, 64 rows of it; the last segment goes on to the
//             final state
//   outputs   o += S0 e
//
// Where M has at most kVanished behind the segment's first chunk, as gates that forget have it, M counts as
// zero, and entry queries as zeros from there on: the walk of M ends there.
//
// No CTA waits for one that comes later in the grid than its own pair, so that it does not matter how many
// run at once (CTAs start in the order of their numbers). Flags (SegmentNotes::ended) are zeros before the
// launch.
//
// A row of S with a NaN or an infinity stays without numbers to the sequence's end, where 0 times it would be
// left out, too: segments note such rows of their B, and later ones store NaN in outputs and final states.
#pragma once

#include "cuda/chunked/cursor.cuh"
#include "cuda/pipe/tensor_maps.h"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fused/config.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/value_rows.cuh"

namespace cula::cuda::sm90 {

using chunked::SegmentNotes;

inline constexpr float kVanished = 0x1p-100f;  // docs/design/joined.md has what is left out
inline constexpr int kMapBlocks = 2;           // CTAs that make M: the first pair of a head

struct FusedMaps {
    CUtensorMap q{}, k{}, g{}, v{}, o{};
};
struct JoinedMaps : FusedMaps {
    SegmentNotes notes;
};
template <class Form>
using MapsOf = std::conditional_t<Form::kJoins, JoinedMaps, FusedMaps>;

// Entry queries of a chunk of 32 tokens as the tensor cores read them, a transposed operand without swizzle:
// blocks of eight channels and eight tokens, first all of eight channels. Channels are rows of M, so that a
// warp stores a block at once, and what a CTA reads of a chunk is one bulk copy.
template <int kKey>
struct EntryImage {
    static constexpr int kWords = kKey * kFusedTokens / 2, kBytes = kWords * 4;
    static constexpr int kBlock = 8 * 16, kRowBlock = kFusedTokens / 8 * kBlock;  // bytes

    // The first word of a lane of the warp that has the rows of M from `row` on.
    static __device__ __forceinline__ int word(int row, int lane) { return row / 8 * (kRowBlock / 4) + lane; }
    // Stores the outputs of M. to: the lane's first word.
    template <class T>
    static __device__ __forceinline__ void store(const float (&out)[kFusedTokens / 8][4], std::uint32_t* to) {
#pragma unroll
        for (int tile = 0; tile < kFusedTokens / 8; ++tile)
#pragma unroll
            for (int eighth = 0; eighth < 2; ++eighth)
                to[(eighth * kRowBlock + tile * kBlock) / 4] =
                    round_row<T>(out[tile][2 * eighth], out[tile][2 * eighth + 1]);
    }
    static __device__ __forceinline__ wgmma::Operand operand(std::uint32_t address) {
        return wgmma::operand_in_blocks(address, kRowBlock, kBlock);
    }
    static constexpr int kStepUnits = 2 * kRowBlock / 16;  // from 16 rows to the next ones
};

// Of a segment and head.
template <int kKey>
struct NotesOf {
    const DeviceArgs& a;
    const SegmentNotes& notes;
    int value_head;

    __device__ __forceinline__ std::int64_t column(int number) const {
        return std::int64_t{number} * a.value_heads + value_head;
    }
    // Of a row block of S (StateImage), and of M (MapImage).
    __device__ __forceinline__ float4* state(int number, int row_block) const {
        const std::int64_t blocks = SegmentNotes::value_slots(a.value_dim) / kWarpgroupWarps;
        return reinterpret_cast<float4*>(notes.states +
                                         (column(number) * blocks + row_block) * (kWarpgroupRows * kKey));
    }
    __device__ __forceinline__ float* map(int number) const {
        return notes.maps + column(number) * (kKey * kKey);
    }
    __device__ __forceinline__ float* largest(int number) const {
        return notes.largest + column(number) * SegmentNotes::kMapSlots;
    }
    __device__ __forceinline__ std::uint64_t* broken(int number) const {
        return notes.broken + column(number) * SegmentNotes::value_slots(a.value_dim);
    }
    // The entry queries of the segment's i-th chunk of 32 tokens, number entry(slot, i). slot: Segment::slot.
    // The number of the next chunk is larger by that of value heads.
    template <class Int>
    __device__ __forceinline__ Int entry(Int slot, int i) const {
        constexpr int kChunks = chunked::kTokens<kKey> / kFusedTokens;
        return (slot * kChunks + i) * a.value_heads + value_head;
    }
    __device__ __forceinline__ std::uint32_t* entries(std::int64_t number) const {
        return static_cast<std::uint32_t*>(notes.entry) + number * EntryImage<kKey>::kWords;
    }
    // One for each CTA.
    __device__ __forceinline__ std::int32_t* ended(int number, int blocks) const {
        return notes.ended + column(number) * blocks;
    }
};

// The rows of a warp of M at the segment's begin: of the identity.
template <int kKey>
__device__ __forceinline__ void identity(float (&state)[kKey / 8][4], const chunked::RowWindow& rows) {
    chunked::each_pair(state, [&](float2& pair, int row, int channel) {
        const int r = rows.row() + row, c = chunked::RowWindow::channel() + channel;
        pair = {r == c && r < rows.end ? 1.0f : 0.0f, r == c + 1 && r < rows.end ? 1.0f : 0.0f};
    });
}

// The state of a warpgroup behind a segment, as its threads have it.
template <int kKey>
struct StateImage {
    template <class Stored>
    static __device__ __forceinline__ void store(float (&state)[kKey / 8][4], float4* image,
                                                 const Stored& stored) {
        image += thread_anew();
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile) {
            const float2 first = stored({state[tile][0], state[tile][1]}, 8 * tile),
                         second = stored({state[tile][2], state[tile][3]}, 8 * tile);
            image[tile * kWarpgroupThreads] = {first.x, first.y, second.x, second.y};
        }
    }
    static __device__ __forceinline__ void load(float (&state)[kKey / 8][4], const float4* image) {
        image += thread_anew();
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile) {
            const float4 x = __ldcg(image + tile * kWarpgroupThreads);
            state[tile][0] = x.x, state[tile][1] = x.y, state[tile][2] = x.z, state[tile][3] = x.w;
        }
    }
};

// The map of a segment as the tensor cores read it, an operand of TF32: M[r][c] is in row c, and where the
// accumulators of S have channel r of an operand's fragment. Panels of 32 numbers a row, 128-byte swizzle.
template <int kKey>
struct MapImage {
    static constexpr int kPanel = 32, kNumbers = kKey * kKey,
                         kBytes = kNumbers * static_cast<int>(sizeof(float));
    // A lane's accumulators are channels 2 i and 2 i + 1 of eight, those of a fragment i and i + 4.
    static constexpr CULA_HOST_DEVICE int at(int r, int c) {
        const int k = r / 8 * 8 + r % 8 / 2 + r % 2 * 4;
        return k / kPanel * kKey * kPanel + c * kPanel + (k % kPanel / 4 ^ c % 8) * 4 + k % 4;
    }
    template <class Stored>
    static __device__ __forceinline__ void store(float (&state)[kKey / 8][4], float* image,
                                                 const chunked::RowWindow& rows, const Stored& stored) {
        const int lane = lane_anew(), lane_row = rows.first + lane / 4, lane_channel = lane % 4 * 2;
        chunked::each_group(state, [&](auto& group, int first_channel) {
            chunked::each_pair(group, [&](const float2& of_state, int row, int more) {
                const float2 pair = stored(of_state, first_channel + more);
                const int r = lane_row + row, c = lane_channel + first_channel + more;
                image[at(r, c)] = __uint_as_float(wgmma::rounded_tf32(pair.x));
                image[at(r, c + 1)] = __uint_as_float(wgmma::rounded_tf32(pair.y));
            });
        });
    }
};

// --- What a CTA does behind its walk ---

// The warpgroup of S takes S0 through the maps. Then it and those of operands have every third tile of 32
// tokens each, whose entry queries and outputs come and go by bulk copies.
inline constexpr int kJoinWarpgroups = 1 + PairedWithMap::kOperandWarpgroups;

template <int kKey>
struct JoinShared {
    static constexpr int kPlaces = 3;  // of a warpgroup's tiles
    struct EntryTile {
        TmaTile<kFusedTokens> outputs;
        alignas(128) unsigned char queries[EntryImage<kKey>::kBytes];
    };
    EntryTile first[kJoinWarpgroups];
    union {
        alignas(kSwizzleAlignment) float maps[2][MapImage<kKey>::kNumbers];
        EntryTile others[kJoinWarpgroups][kPlaces - 1];  // once no map is needed any more
    };
    uint4 entered[kKey / 16][kWarpgroupThreads];  // S0, as the operand of a thread of any warpgroup
    Mbarrier all_there, map_ready[2], tile_ready[kJoinWarpgroups][kPlaces], entered_ready, maps_done;

    __device__ __forceinline__ EntryTile& tile(int warpgroup, int place) {
        return place == 0 ? first[warpgroup] : others[warpgroup][place - 1];
    }
    __device__ __forceinline__ void init_barriers() {
        all_there.init(32);
        for (Mbarrier& ready : map_ready) ready.init(1);
        for (auto& of_warpgroup : tile_ready)
            for (Mbarrier& ready : of_warpgroup) ready.init(1);
        entered_ready.init(kWarpgroupThreads), maps_done.init(kWarpgroupThreads);
        publish_barriers();
    }
};

// The warpgroups of a CTA: that of S, those of operands, and those of M and of the other roles.
enum class JoinPart : std::uint8_t { kPasses, kAdds, kWaits };

// What a CTA does when it has walked its segment, whose number and row block these are. By all threads.
// shared: memory that no role uses any more. Behind the walk all code is executed once or a few times, so its
// length counts: its instructions come from memory (docs/log/2026-11-29-joined-by-warpgroups.md).
template <class T, int kKey>
struct Join {
    using Smem = JoinShared<kKey>;
    using Image = MapImage<kKey>;
    using State = float[kKey / 8][4];
    const DeviceArgs& a;
    const CarryParams& p;
    const JoinedMaps& maps;
    Smem& shared;
    const Segment segment;
    int number, value_head, row_block;
    const int thread, first_row = row_block * kWarpgroupRows;
    // Of those that add: the state warpgroup, then those of operands, which follow that of M.
    const int warpgroup = thread < kWarpgroupThreads ? 0 : thread / kWarpgroupThreads - 1;

    __device__ __forceinline__ NotesOf<kKey> notes() const { return {a, maps.notes, value_head}; }
    __device__ __forceinline__ auto own_barrier() const {
        return nth(Paired::NamedBarrier::kJoin, warpgroup);
    }
    __device__ __forceinline__ void sync() const { named_barrier_sync<kWarpgroupThreads>(own_barrier()); }
    // One for each warpgroup.
    __device__ __forceinline__ bool leads() const { return thread % kWarpgroupThreads == 0; }
    // The rows of the warp.
    __device__ __forceinline__ chunked::LaneRows rows() const {
        return {{first_row + thread / 32 % kWarpgroupWarps * chunked::kWarpRows, a.value_dim, a.key_dim},
                thread % 32};
    }

    // By one thread, behind a barrier: says that what the CTA has stored is there.
    __device__ __forceinline__ void publish_end() const {
        publish(notes().ended(number, static_cast<int>(p.row_blocks.value)) + row_block, 1);
    }
    // Waits for the same rows of earlier segments, for their M, and for that of the own one. By a warp.
    __device__ __forceinline__ void wait() const {
        const int blocks = static_cast<int>(p.row_blocks.value), each = 1 + kMapBlocks;
#pragma unroll 1
        for (int i = thread; i < (segment.rank + 1) * each; i += 32) {
            const int rank = i / each, which = i % each;
            if (which == 0 ? rank == segment.rank : rank == 0) continue;
            const std::int32_t* const flag =
                notes().ended(number - segment.rank + rank, blocks) + (which == 0 ? row_block : which - 1);
            while (!published(flag)) __nanosleep(32);
        }
    }

    // What earlier segments have left. Warp-collective.
    struct Found {
        int from;       // S0 is the state behind the segment before that one, through the maps from there on
        bool vanished;  // the own M
        bool lost[2];   // whether the lane's rows have had no number in an earlier segment

        __device__ __forceinline__ bool any_lost() const { return lost[0] || lost[1]; }
        __device__ __forceinline__ void spoil(State& state) const {
            if (!__any_sync(0xffffffffu, any_lost())) return;
            chunked::each_pair(state, [&](float2& pair, int row, int) {
                if (lost[row / 8]) pair = {NAN, NAN};
            });
        }
    };
    __device__ __forceinline__ Found find() const {
        static_assert(chunked::Joined::kMostSegments <= 32);  // a lane has one, from the own one backward
        const int back = thread % 32;
        float4 x[SegmentNotes::kMapSlots / 4] = {};
        unsigned long long broken = 0;
        if (back < segment.rank) {
#pragma unroll
            for (int i = 0; i < SegmentNotes::kMapSlots / 4; ++i)
                x[i] = __ldcg(reinterpret_cast<const float4*>(notes().largest(number - back)) + i);
            broken = __ldcg(reinterpret_cast<const unsigned long long*>(notes().broken(number - back - 1)) +
                            rows().first / chunked::kWarpRows);
        }
        float most = 0.0f;
#pragma unroll
        for (const float4& of : x)
            most = max_or_nan(most, max_or_nan(max_or_nan(of.x, of.y), max_or_nan(of.z, of.w)));
        // Lanes from `rank` on have zeros, so the map of the first segment counts as vanished: S0 starts from
        // the state behind it at the latest. One of them is there, since rank is at most 31.
        const unsigned gone = __ballot_sync(0xffffffffu, most <= kVanished);
        const unsigned row = __reduce_or_sync(0xffffffffu, static_cast<unsigned>(broken)),
                       eighth = __reduce_or_sync(0xffffffffu, static_cast<unsigned>(broken >> 32));
        const int first = thread % 32 / 4 * 4;  // of the four lanes that have a row
        return {segment.rank + 2 - __ffs(static_cast<int>(gone & ~1u)),
                (gone & 1) != 0,
                {(row >> first & 15) != 0, (eighth >> first & 15) != 0}};
    }

    __device__ __forceinline__ void load_state(State& state, int of) const {
        StateImage<kKey>::load(state, notes().state(of, row_block));
    }
    // The map of a segment to one of two places.
    __device__ __forceinline__ void load_map(int of, int place) const {
        Mbarrier& ready = shared.map_ready[place];
        ready.arrive_expecting(Image::kBytes);
        copy_bulk(shared_address(shared.maps[place]), notes().map(of), Image::kBytes, ready.address());
    }
    // state <- state M + B, those of segment `of`, whose map is in this place.
    __device__ __forceinline__ void multiply(State& state, int of, int place, int parity) const {
        std::uint32_t left[kKey / 8][4];
#pragma unroll
        for (int step = 0; step < kKey / 8; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) left[step][i] = wgmma::rounded_tf32(state[step][i % 2 * 2 + i / 2]);
        load_state(state, of);
        shared.map_ready[place].wait(parity);
        constexpr int kSteps = Image::kPanel / 8, kPanelUnits = kKey * Image::kPanel * 4 / 16;
        const wgmma::Operand right = wgmma::operand<64>(wgmma::uniform(shared_address(shared.maps[place])));
        wgmma::hold(state);
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < kKey / 8; ++step)
            wgmma::multiply_tf32(state, left[step],
                                 right + (step / kSteps * kPanelUnits + step % kSteps * 2));
        wgmma::commit();
        wgmma::wait<0>();
        wgmma::hold(state);
    }
    // By the state warpgroup: S0 for all, and the final state.
    __device__ __forceinline__ void pass(const Found& found, std::int64_t slot) const {
        const bool makes_final = slot >= 0 && !found.vanished;
        const int begin = number - segment.rank, end = segment.rank + (makes_final ? 1 : 0);
        if (leads())
#pragma unroll 1
            for (int rank = found.from; rank < min(found.from + 2, end); ++rank)
                load_map(begin + rank, rank - found.from);
        State state;
        load_state(state, begin + found.from - 1);
#pragma unroll 1
        for (int rank = found.from;; ++rank) {
            if (rank == segment.rank) {
                found.spoil(state);
                Packed packed[kKey / 16];
                pack<T>(packed, state);
#pragma unroll
                for (int step = 0; step < kKey / 16; ++step)
                    shared.entered[step][thread] = {packed[step][0], packed[step][1], packed[step][2],
                                                    packed[step][3]};
                shared.entered_ready.arrive();
            }
            if (rank == end) break;
            const int n = rank - found.from;
            multiply(state, begin + rank, n % 2, n / 2 & 1);
            sync();
            if (leads() && rank + 2 < end) load_map(begin + rank + 2, n % 2);
        }
        shared.maps_done.arrive();
        if (slot < 0) return;
        if (!makes_final) {
            load_state(state, number);
            found.spoil(state);
        }
        chunked::store_state<kKey>(state, a.final, a.final.offset(slot, value_head), rows());
    }

    // o += S0 e of the first `count` tokens of the segment: the warpgroup's tiles of them.
    struct Tiles {
        const Join& of;
        const Found& found;
        TokenRange tokens;
        std::int64_t begin;  // first token of the segment
        int count;

        __device__ __forceinline__ bool has(int n) const { return place_of(n) < count; }
        __device__ __forceinline__ int place_of(int n) const {
            return (n * kJoinWarpgroups + of.warpgroup) * kFusedTokens;
        }
        __device__ __forceinline__ TileCoordinates at(int n) const {
            return {of.first_row, of.value_head, static_cast<int>(begin) + place_of(n),
                    static_cast<int>(tokens.batch)};
        }
        // Whether there are entry queries: behind the first chunk of a map that has vanished there are none.
        __device__ __forceinline__ bool reads(int n) const {
            return !found.vanished || place_of(n) < chunked::kTokens<kKey>;
        }
        // By one thread.
        __device__ __forceinline__ void load(int n) const {
            if (!has(n)) return;
            const int place = n % Smem::kPlaces;
            auto& tile = of.shared.tile(of.warpgroup, place);
            Mbarrier& ready = of.shared.tile_ready[of.warpgroup][place];
            ready.arrive_expecting(sizeof(tile.outputs) + (reads(n) ? sizeof(tile.queries) : 0));
            tma_load(shared_address(&tile.outputs), of.maps.o, at(n), ready.address());
            if (reads(n))
                copy_bulk(shared_address(tile.queries),
                          of.notes().entries(
                              of.notes().entry(std::int64_t{of.segment.slot}, place_of(n) / kFusedTokens)),
                          sizeof(tile.queries), ready.address());
        }
        __device__ __forceinline__ void add(int n, const Packed (&entered)[kKey / 16]) const {
            const int place = n % Smem::kPlaces;
            auto& tile = of.shared.tile(of.warpgroup, place);
            of.shared.tile_ready[of.warpgroup][place].wait(n / Smem::kPlaces & 1);
            const wgmma::Operand queries =
                EntryImage<kKey>::operand(wgmma::uniform(shared_address(tile.queries)));
            const std::uint32_t outputs = shared_address(&tile.outputs);
            float sums[kFusedTokens / 8][4];
            Packed was[kFusedTokens / 16];
            if (reads(n)) {
                wgmma::fence();
#pragma unroll
                for (int step = 0; step < kKey / 16; ++step)
                    wgmma::multiply<T, kFusedTokens / 8, true>(
                        sums, entered[step], queries + step * EntryImage<kKey>::kStepUnits, step > 0);
                wgmma::commit();
                wgmma::wait<0>();
                wgmma::hold(sums);
            } else {
                chunked::each_pair(sums, [&](float2& pair, int row, int) {
                    pair.x = pair.y = found.lost[row / 8] ? NAN : 0.0f;
                });
            }
            load_value_rows(was, outputs);
#pragma unroll
            for (int block = 0; block < kFusedTokens / 16; ++block)
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    float* const pair = &sums[2 * block + w / 2][w % 2 * 2];
                    const float2 x = unpack2<T>(was[block][w]);
                    pair[0] += x.x, pair[1] += x.y;
                }
            store_value_rows<T>(outputs, sums);
        }
        // Behind a barrier. TMA would write beyond the end of a packed sequence.
        __device__ __forceinline__ void store(int n) const {
            const auto& tile = of.shared.tile(of.warpgroup, n % Smem::kPlaces);
            const int left = count - place_of(n);
            if (!of.a.cu_seqlens || left >= kFusedTokens) {
                if (of.leads()) tma_store(of.maps.o, at(n), shared_address(&tile.outputs));
                return;
            }
            T* const to = static_cast<T*>(of.a.o.data) +
                          of.a.o.offset(tokens.batch, begin + place_of(n), of.value_head) + of.first_row;
            constexpr int kUnits = kWarpgroupRows / 8;
#pragma unroll 1
            for (int i = of.thread % kWarpgroupThreads; i < left * kUnits; i += kWarpgroupThreads) {
                const int token = i / kUnits, unit = i % kUnits;
                const int from = chunked::Tile<kFusedTokens, kWarpgroupRows>::unit(token, unit) * 16;
                if (of.first_row + unit * 8 < of.a.value_dim)
                    move_row(to + token * of.a.o.token + unit * 8,
                             *reinterpret_cast<const uint4*>(tile.outputs.bytes + from));
            }
        }
    };
    __device__ __forceinline__ void add_entries(const Tiles& tiles) const {
        shared.entered_ready.wait(0);
        Packed entered[kKey / 16];
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step) {
            const uint4 words = shared.entered[step][thread % kWarpgroupThreads];
            entered[step][0] = words.x, entered[step][1] = words.y, entered[step][2] = words.z,
            entered[step][3] = words.w;
        }
        if (leads()) {
            shared.maps_done.wait(0);
            tiles.load(1);
        }
#pragma unroll 1
        for (int n = 0; tiles.has(n); ++n) {
            tiles.add(n, entered);
            fence_async_proxy();
            sync();
            tiles.store(n);
            if (!leads()) continue;
            tma_commit_stores();
            tma_wait_stores_read<1>();  // the place of the tile before is free
            tiles.load(n + 2);
        }
        if (leads()) tma_wait_stores_read<0>();
    }

    template <JoinPart kPart>
    __device__ __forceinline__ void run() const {
        constexpr bool kPasses = kPart == JoinPart::kPasses;
        if (thread == 0) {
            shared.init_barriers();
            publish_end();
        }
        Paired::sync_end();
        const bool last = segment.rank + 1 == segment.count;
        if (segment.rank == 0 && !last) return;
        if constexpr (kPart == JoinPart::kWaits) return;
        if (kPasses && thread < 32) {
            wait();
            shared.all_there.arrive();
        }
        shared.all_there.wait(0);
        const std::int64_t slot = last ? states_of(a, segment.sequence).final : -1;
        if (segment.rank == 0) {
            if (slot < 0 || !kPasses) return;
            State state;
            load_state(state, number);
            return chunked::store_state<kKey>(state, a.final, a.final.offset(slot, value_head), rows());
        }
        const Found found = find();
        const bool any_lost = named_barrier_any<kWarpgroupThreads>(own_barrier(), found.any_lost());
        const TokenRange tokens = tokens_of(a, segment.sequence);
        const std::int64_t before = std::int64_t{segment.chunk} * chunked::kTokens<kKey>;
        const int count = static_cast<int>(
            min(tokens.length - before,
                std::int64_t{found.vanished && !any_lost ? 1 : segment.chunks} * chunked::kTokens<kKey>));
        const Tiles tiles{*this, found, tokens, tokens.begin + before, count};
        if (leads()) {
            fence_async_proxy();   // what was in these places
            fence_async_global();  // maps and entry queries
            tiles.load(0);
        }
        if constexpr (kPasses) pass(found, slot);
        add_entries(tiles);
    }
};

// Registers of a thread behind the walk (setmaxnreg); the roles have had others, as many in all.
inline constexpr FusedRegisters kJoinRegisters{192, 96, 48};
template <int kWas, int kCount>
__device__ __forceinline__ void set_registers() {
    if constexpr (kCount < kWas)
        lower_registers<kCount>();
    else if constexpr (kCount > kWas)
        raise_registers<kCount>();
}
constexpr int join_registers(JoinPart part) {
    return part == JoinPart::kPasses ? kJoinRegisters.state
           : part == JoinPart::kAdds ? kJoinRegisters.operand
                                     : kJoinRegisters.others;
}

// Behind a role, whose threads have kWas registers. A barrier is one of the cluster, of a warpgroup, or an
// mbarrier: __syncthreads() in several places is none for synccheck.
template <JoinPart kPart, int kWas, class T, int kKey>
__device__ __forceinline__ void join_segments(const DeviceArgs& a, const CarryParams& p,
                                              const JoinedMaps& maps,
                                              FusedShared<kKey, PairedWithMap>& shared) {
    Paired::sync_end();
    set_registers<kWas, join_registers(kPart)>();
    // Read anew, so that no register keeps it throughout the role.
    unsigned thread;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
    const Segment segment = shared.segment;
    const int block = static_cast<int>(blockIdx.x), column = p.row_blocks.divide(block),
              number = a.by_value_heads.divide(column);
    static_assert(sizeof(JoinShared<kKey>) <= sizeof(shared.stages));
    const Join<T, kKey> join{a,
                             p,
                             maps,
                             *reinterpret_cast<JoinShared<kKey>*>(&shared.stages),
                             segment,
                             number,
                             column - number * a.value_heads,
                             block - column * static_cast<int>(p.row_blocks.value),
                             static_cast<int>(thread)};
    join.template run<kPart>();
}

}  // namespace cula::cuda::sm90
