// SPDX-License-Identifier: Apache-2.0
// The state role of the fused prefill: a warpgroup keeps 64 value rows of S [V, K] in accumulators from the
// first chunk to the last, and issues the products of read, output and carry. Where segments join, a second
// one does so with 64 rows of the map M, without values; their outputs are entry queries (join.cuh).
// (carry/state_role.cuh does the same with chunk operands that prepare has written to global memory.)
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fused/config.cuh"
#include "cuda/sm90/fused/join.cuh"
#include "cuda/tile/value_rows.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, class Form, bool kMayLeaveRange>
struct FusedStateRole {
    using Shared = FusedShared<kKey, Form>;
    using Stage = typename Shared::Stage;
    using W = SegmentCursor<kKey, false>;
    using Place = typename Form::Place;
    static constexpr int kBlocks = kFusedTokens / 16;
    static constexpr bool kJoins = Form::kJoins;
    // Chunks of this kernel in the first one of a segment.
    static constexpr int kFirstChunk = chunked::kTokens<kKey> / kFusedTokens;
    static constexpr int kPanelBytes = sizeof(FusedPanel), kRowBytes = TmaTile<kFusedTokens>::kRowBytes;

    using State = float[kKey / 8][4];
    using Product = float[kFusedTokens / 8][4];
    using Rows = Packed[kBlocks];

    const DeviceArgs& a;
    const Schedule& schedule;
    const CarryParams& p;
    const MapsOf<Form>& maps;
    Shared& shared;
    const int warp = static_cast<int>(threadIdx.x) / 32 % Form::kRowWarps, warpgroup = warp / kWarpgroupWarps;
    const bool of_m = kJoins && wgmma::uniform(threadIdx.x / kWarpgroupThreads) > 0;

    // The number of the warp; where segments join it is read anew each time, so that no register keeps it.
    __device__ __forceinline__ int own_warp() const { return kJoins ? thread_anew() / 32 : warp; }
    __device__ __forceinline__ W cursor_again() const {
        return W(a, schedule, p, shared.segment, own_warp(), Form::kRowWarps);
    }
    // The products: read_state       product = S tile^T          tile: K^ or Q~
    //               multiply_square  product (+)= rows square^T  square: T or A
    //               multiply_carry   S += rows tile              tile: K+
    static __device__ __forceinline__ void read_state(Product& product, const Packed (&state)[kKey / 16],
                                                      std::uint32_t tile) {
        const wgmma::Operand b = wgmma::operand<64>(tile);
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step)
            wgmma::multiply<T, 4, false>(product, state[step],
                                         b + (step / 4 * kPanelBytes / 16 + step % 4 * 2), step > 0);
    }
    // read = S K^^T and out = S Q~^T in steps of 16 channels, each of which is packed just before it: with
    // softplus gates and two state warpgroups no thread has registers for all of S as an operand. Commits the
    // last step of `read` before that of `out`.
    static __device__ __forceinline__ void read_in_steps(Product& read, Product& out, const State& state,
                                                         std::uint32_t at) {
        constexpr int kSteps = kKey / 16;
        const wgmma::Operand keys = wgmma::operand<64>(at + offsetof(FusedPanel, keys)),
                             query = wgmma::operand<64>(at + offsetof(FusedPanel, query));
        Packed packed[2];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step >= 2) wgmma::wait<1>();  // the step that has this place
            Packed& rows = packed[step % 2];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float* const pair = &state[2 * step + w / 2][w % 2 * 2];
                rows[w] = pack2<T>(pair[0], pair[1]);
            }
            wgmma::fence();
            const int channels = step / 4 * kPanelBytes / 16 + step % 4 * 2;
            wgmma::multiply<T, 4, false>(read, rows, keys + channels, step > 0);
            if (step + 1 == kSteps) wgmma::commit();
            wgmma::multiply<T, 4, false>(out, rows, query + channels, step > 0);
            wgmma::commit();
        }
    }
    static __device__ __forceinline__ void multiply_square(Product& product, const Rows& rows,
                                                           std::uint32_t square, bool add) {
        const wgmma::Operand b = wgmma::operand<32>(square);
#pragma unroll
        for (int step = 0; step < kBlocks; ++step)
            wgmma::multiply<T, 4, false>(product, rows[step], b + step * 2, step > 0 || add);
    }
    static __device__ __forceinline__ void multiply_carry(State& state, const Rows& rows,
                                                          std::uint32_t tile) {
        const wgmma::Operand b = wgmma::operand<64>(tile, kPanelBytes);
#pragma unroll
        for (int step = 0; step < kBlocks; ++step)
            wgmma::multiply<T, kKey / 8, true>(state, rows[step], b + step * (16 * kRowBytes / 16), 1);
    }
    // Multiplies S by factors of channels in the order of FusedFactors::state_order().
    static __device__ __forceinline__ void scale(State& state, const float* by) {
#pragma unroll
        for (int tile = 0; tile < kKey / 8; tile += 2) {
            float d[4];
            load4(d, by + tile * 8 + threadIdx.x % 4 * 4);
#pragma unroll
            for (int e = 0; e < 8; ++e) state[tile + e / 4][e % 4] *= d[e / 4 * 2 + e % 2];
        }
    }

    // 1 if the lane's pair of channels of an accumulator tile is out of range.
    static __device__ __forceinline__ std::uint32_t is_out_of_range(const FusedFactors<kKey>& factors,
                                                                    int tile, int lane) {
        return factors.out_of_range.of[tile / 8] >> (tile * 4 % 32 + lane % 4) & 1;
    }
    // Multiplies the out-of-range pairs of S by the decay of the whole chunk.
    static __device__ __forceinline__ void decay_out_of_range(State& state,
                                                              const FusedFactors<kKey>& factors) {
        const int lane = lane_anew();  // so that no register keeps masks throughout the loop over chunks
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile) {
            if (!is_out_of_range(factors, tile, lane)) continue;
            const float2 d = *reinterpret_cast<const float2*>(factors.ends + RowWindow::channel() + 8 * tile);
#pragma unroll
            for (int e = 0; e < 4; ++e) state[tile][e] *= e % 2 ? d.y : d.x;
        }
    }
    // Takes the state from the chunk's middle to its end, for states that are stored. Out-of-range pairs are
    // there already. Before the first chunk (no factors) the state stays as it is.
    struct AtEnd {
        const float* ends = nullptr;     // from the lane's first channel on
        std::uint32_t out_of_range = 0;  // a bit for the lane's pair of each tile

        __device__ __forceinline__ explicit AtEnd(const FusedFactors<kKey>* factors) {
            if (!factors) return;
            ends = factors->ends + RowWindow::channel();
            if constexpr (kMayLeaveRange)
                if (factors->any_out_of_range) {
                    const int lane = lane_anew();
#pragma unroll
                    for (int tile = 0; tile < kKey / 8; ++tile)
                        out_of_range |= is_out_of_range(*factors, tile, lane) << tile;
                }
        }
        __device__ __forceinline__ float2 operator()(float2 pair, int channel) const {
            if (!ends || (kMayLeaveRange && out_of_range >> channel / 8 & 1)) return pair;
            const float2 end = *reinterpret_cast<const float2*>(ends + channel);
            return {pair.x * end.x, pair.y * end.y};
        }
    };

    // A compensated chunk: adds the low word of the inverse to U, packs U to two words, and adds the products
    // of its low word to O and S, and that of the scores' low word to O. In: `writes` is V - S K^, `u` their
    // product with the high word of the inverse. Out: `writes` is the high word of U.
    static __device__ __forceinline__ void add_low_words(State& state, Product& out, Product& u, Rows& writes,
                                                         std::uint32_t at) {
        wgmma::fence();
        multiply_square(u, writes, at + offsetof(Stage, solved.inverse_low), true);
        wgmma::commit();
        wgmma::wait<0>();
        wgmma::hold(u);
        pack<T>(writes, u);
        Rows low;
        take_low_words<T>(low, writes, u);
        wgmma::hold(state);
        wgmma::fence();
        multiply_square(out, low, at + offsetof(Stage, scores), true);
        multiply_square(out, writes, at + offsetof(Stage, solved.scores_low), true);
        multiply_carry(state, low, at + offsetof(FusedPanel, carried));
        wgmma::commit();
        wgmma::wait<0>();
        wgmma::hold(out);
        wgmma::hold(state);
    }

    // The largest magnitude of the warp's state.
    static __device__ __forceinline__ float largest(State& state, const AtEnd& stored) {
        float found = 0.0f;
        chunked::each_pair(state, [&](const float2& of_state, int, int channel) {
            const float2 pair = stored(of_state, channel);
            found = max_or_nan(found, max_or_nan(fabsf(pair.x), fabsf(pair.y)));
        });
#pragma unroll
        for (int other = 1; other < 32; other *= 2)
            found = max_or_nan(found, __shfl_xor_sync(0xffffffffu, found, other));
        return found;
    }

    // The lanes with a NaN or an infinity in their first row, and, in the high word, in their second one.
    static __device__ __forceinline__ std::uint64_t broken(State& state, const AtEnd& stored) {
        bool found[2] = {};
        chunked::each_pair(state, [&](const float2& of_state, int row, int channel) {
            const float2 pair = stored(of_state, channel);
            found[row / 8] |= !(fabsf(pair.x) < INFINITY && fabsf(pair.y) < INFINITY);
        });
        return __ballot_sync(0xffffffffu, found[0]) | std::uint64_t{__ballot_sync(0xffffffffu, found[1])}
                                                          << 32;
    }
    __device__ __forceinline__ NotesOf<kKey> notes_of(const W& cursor) const {
        return {a, maps.notes, cursor.value_head};
    }
    // Stores B at the segment's end, and which of its rows have a NaN or an infinity (Join).
    __device__ __forceinline__ void store_b(State& state, const AtEnd& stored) const {
        const W cursor = cursor_again();
        const NotesOf<kKey> notes = notes_of(cursor);
        const int slot = cursor.rows.first / chunked::kWarpRows;
        const std::uint64_t found = broken(state, stored);
        if (threadIdx.x % 32 == 0) notes.broken(cursor.number)[slot] = found;
        StateImage<kKey>::store(state, notes.state(cursor.number, slot / kWarpgroupWarps), stored);
    }

    // The rows of M that a warp has: of the same numbers as the value rows of S in the head's first pair.
    static __device__ __forceinline__ RowWindow rows_of_m(const W& cursor) {
        return {cursor.rows.first, cursor.a.key_dim, cursor.a.key_dim};
    }
    // Whether the CTA makes rows of M. The first segment needs none.
    static __device__ __forceinline__ bool makes_map(const W& cursor) {
        return cursor.segment.rank > 0 && cursor.rows.first < kKey;
    }
    // Stores the largest magnitude of M after the segment's first chunk, and, if the walk goes on, exchanges
    // it with the pair's other warps of M and returns whether all of M has vanished.
    __device__ __forceinline__ bool vanishes(State& state, const AtEnd& stored, bool goes_on) const {
        const W cursor = cursor_again();
        const float found = largest(state, stored);
        const int slot = cursor.rows.first / chunked::kWarpRows;
        const bool first_lane = threadIdx.x % 32 == 0;
        if (first_lane) notes_of(cursor).largest(cursor.number)[slot] = found;
        if (!goes_on) return false;
        auto& own = shared.own;
        if (first_lane)
            for (int rank = 0; rank < Form::kPeers; ++rank)
                send_to(shared_address(&own.largest_of_map[slot]), {found, found}, own.map_known.address(),
                        rank);
        if (threadIdx.x % kWarpgroupThreads == 0) own.map_known.arrive_expecting(sizeof(own.largest_of_map));
        own.map_known.wait(0);
        __syncwarp();
        float most = 0.0f;
        for (const float2& of : own.largest_of_map) most = max_or_nan(most, of.x);
        return most <= kVanished;
    }
    // Stores the outputs of M for a chunk as EntryImage number `entry`.
    __device__ __forceinline__ void store_entries(const Product& out, int entry) const {
        const NotesOf<kKey> notes{a, maps.notes, 0};  // the number says of which head
        const int row = cluster_rank() * kWarpgroupRows + own_warp() * chunked::kWarpRows;
        EntryImage<kKey>::template store<T>(out,
                                            notes.entries(entry) + EntryImage<kKey>::word(row, lane_anew()));
    }
    __device__ __forceinline__ void store_map(State& state, const AtEnd& stored) const {
        const W cursor = cursor_again();
        MapImage<kKey>::store(state, notes_of(cursor).map(cursor.number), rows_of_m(cursor), stored);
    }
    // Frees the chunks from i on without reading them.
    __device__ __forceinline__ void free_rest(Place place, int i, int chunks) const {
#pragma unroll 1
        for (; i < chunks; ++i) {
            shared.operands_ready[place.stage()].wait(place.parity());
            place.free(shared);
            place.next();
        }
    }

    __device__ __forceinline__ void run(const W& cursor) const {
        if (of_m && !makes_map(cursor)) return free_rest({}, 0, FusedCursor<Form>(cursor).chunks);
        State state;
        cursor.first_state(state);
        if (of_m) identity<kKey>(state, rows_of_m(cursor_again()));
        const int chunks = FusedCursor<Form>(cursor).chunks;
        const bool plain = kJoins || (a.num_checkpoints <= 0 && !a.chunk_states.data);
        Place place, next;
        Product read, out;
        int entry = 0;
        if constexpr (kJoins) entry = notes_of(cursor).entry(cursor.segment.slot, 0);
        int i = 0;
        bool more = false;  // whether another chunk follows before the next state that may be stored
        // Goes to the next chunk. States may be stored every two chunks: SegmentCursor's have 64 tokens.
        const auto advance = [&] {
            next = place, next.next();
            more = ++i < chunks && (plain || i % 2 == 1);
            if constexpr (kJoins) more = more && !(of_m && i == kFirstChunk);
        };
        // Waits for the values and the operands of the next chunk.
        const auto found = [&] {
            if (!more) return Found::kNone;
            if (!of_m) shared.values_ready[place.tile.at].wait(place.tile.parity);
            shared.operands_ready[place.stage()].wait(place.parity());
            return shared.stages[place.stage()].factors.plain() ? Found::kPlain : Found::kOther;
        };
        // Reads, outputs and carries one chunk.
        const auto multiply = [&](auto is_plain) {
            constexpr bool kPlain = decltype(is_plain)::value;
            Stage& stage = shared.stages[place.stage()];
            const std::uint32_t at = wgmma::uniform(Form::stage_address(shared_address(&stage)));
            const FusedFactors<kKey>& factors = stage.factors;
            // S to the chunk's middle: in two steps, by one loop, if some channel is apart.
#pragma unroll 1
            for (const float* by = factors.any_apart() ? factors.brings : factors.reads;;
                 by = factors.reads) {
                scale(state, by);
                if (by == factors.reads) break;
            }
            if constexpr (kJoins && kMayLeaveRange) {
                read_in_steps(read, out, state, at);
            } else {
                Packed packed[kKey / 16];
                pack<T>(packed, state);
                wgmma::fence();
                read_state(read, packed, at + offsetof(FusedPanel, keys));
                wgmma::commit();
                read_state(out, packed, at + offsetof(FusedPanel, query));
                wgmma::commit();
            }
            const bool compensated = factors.compensated;
            if constexpr (!Form::kTilesInStages) advance();
            if (kMayLeaveRange && !kPlain && factors.any_out_of_range) decay_out_of_range(state, factors);
            Rows writes;
            const std::uint32_t own_tile = shared_address(&Form::tile(shared, place.tile.at, warpgroup));
            if (of_m)
#pragma unroll
                for (Packed& block : writes)
#pragma unroll
                    for (std::uint32_t& pair : block) pair = 0;
            else
                load_value_rows(writes, own_tile);
            wgmma::wait<1>();
            wgmma::hold(read);
            subtract_read<T>(writes, read);
            wgmma::fence();
            multiply_square(read, writes, at + offsetof(Stage, solved.inverse), false);
            wgmma::commit();
            wgmma::wait<0>();
            wgmma::hold(out);
            wgmma::hold(read);
            if (!kPlain && compensated)
                add_low_words(state, out, read, writes, at);
            else
                pack<T>(writes, read);
            wgmma::hold(state);
            wgmma::fence();
            multiply_carry(state, writes, at + offsetof(FusedPanel, carried));
            multiply_square(out, writes, at + offsetof(Stage, scores), true);
            wgmma::commit();
            wgmma::wait<0>();
            wgmma::hold(state);
            wgmma::hold(out);
            if (!Form::kTilesInStages && more) place.free(shared);
            if (!of_m) {
                store_value_rows<T>(own_tile, out);  // replaces the values
                fence_async_proxy();
                Form::signal_outputs_ready(shared, place);
            } else if constexpr (kJoins) {
                store_entries(out, entry);
                entry += a.value_heads;
            }
            if constexpr (Form::kTilesInStages) {
                advance();
                if (more || i == chunks) place.free(shared);
            }
            if (more) place = next;
        };
#pragma unroll 1
        for (;;) {
            const AtEnd at_end(i > 0 ? &shared.stages[place.stage()].factors : nullptr);
            if constexpr (!kJoins) {
                cursor_again().store_asked(state, i == chunks ? cursor_again().segment.chunks : i / 2,
                                           at_end);
            } else if (!of_m) {
                if (i == chunks) store_b(state, at_end);
            } else {
                if ((i == kFirstChunk || (i == chunks && i < kFirstChunk)) &&
                    vanishes(state, at_end, i < chunks)) {
                    place.free(shared);
                    return free_rest(next, i, chunks);
                }
                if (i == chunks) store_map(state, at_end);
            }
            if (i == chunks) break;
            if (i > 0) place.free(shared), place = next;  // AtEnd has read the factors of the last chunk
            more = true;
            each_chunk(found, [&] { multiply(std::true_type{}); }, [&] { multiply(std::false_type{}); });
        }
    }
};

}  // namespace cula::cuda::sm90
