// SPDX-License-Identifier: Apache-2.0
// The state role of the fused prefill: a warpgroup keeps 64 value rows of S [V, K] in accumulators from the
// first chunk to the last, and issues the products of read, output and carry. (carry/state_role.cuh does the
// same with chunk operands that prepare has written to global memory.)
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/fused/config.cuh"
#include "cuda/sm90/value_rows.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, int kStateWarpgroups, bool kMayLeaveRange>
struct FusedStateRole {
    using Layout = FusedStageLayout<kKey, kStateWarpgroups>;
    using Memory = FusedMemory<kKey, kStateWarpgroups>;
    using Shared = FusedShared<kKey, kStateWarpgroups>;
    using W = SegmentCursor<kKey, false>;
    static constexpr int kBlocks = kFusedTokens / 16;

    using State = float[kKey / 8][4];
    using Product = float[kFusedTokens / 8][4];
    using Rows = Packed[kBlocks];

    const DeviceArgs& a;
    const Schedule& schedule;
    const CarryParams& p;
    unsigned char* memory;
    Shared& shared;
    const int warp = static_cast<int>(threadIdx.x) / 32, warpgroup = warp / kWarpgroupWarps;

    __device__ __forceinline__ W cursor_again() const {
        return W(a, schedule, p, shared.segment, warp, kStateWarpgroups * kWarpgroupWarps);
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
                                         b + (step / 4 * Layout::kPanelBytes / 16 + step % 4 * 2), step > 0);
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
        const wgmma::Operand b = wgmma::operand<64>(tile, Layout::kPanelBytes);
#pragma unroll
        for (int step = 0; step < kBlocks; ++step)
            wgmma::multiply<T, kKey / 8, true>(state, rows[step], b + step * (16 * Layout::kRowBytes / 16),
                                               1);
    }
    // Multiplies S by factors of channels in the order of FusedFactors::turned().
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
                                                                    int tile) {
        return factors.out_of_range.of[tile / 8] >> (tile * 4 % 32 + static_cast<int>(threadIdx.x) % 4) & 1;
    }
    // Multiplies the out-of-range pairs of S by the decay of the whole chunk.
    static __device__ __forceinline__ void pass(State& state, const FusedFactors<kKey>& factors) {
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile) {
            if (!is_out_of_range(factors, tile)) continue;
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
#pragma unroll
                    for (int tile = 0; tile < kKey / 8; ++tile)
                        out_of_range |= is_out_of_range(*factors, tile) << tile;
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
    static __device__ __forceinline__ void add_low(State& state, Product& out, Product& u, Rows& writes,
                                                   std::uint32_t at) {
        wgmma::fence();
        multiply_square(u, writes, at + Layout::kInverseLow, true);
        wgmma::commit();
        wgmma::wait<0>();
        wgmma::hold(u);
        pack<T>(writes, u);
        Rows rests;
        take_rests<T>(rests, writes, u);
        wgmma::hold(state);
        wgmma::fence();
        multiply_square(out, rests, at + Layout::kScores, true);
        multiply_square(out, writes, at + Layout::kScoresLow, true);
        multiply_carry(state, rests, at + Layout::kCarried);
        wgmma::commit();
        wgmma::wait<0>();
        wgmma::hold(out);
        wgmma::hold(state);
    }

    // Where a chunk stands: its stage and its tile of values, and the parities of their barriers.
    struct Place {
        unsigned chunk = 0, rank = 0;
        int stage = 0, parity = 0;
        bool own = true;  // prepared by this CTA
        Ring<Shared::kTiles> tile;

        __device__ __forceinline__ Place() {
            if constexpr (kPaired<kStateWarpgroups>) rank = cluster_rank(), find();
        }
        __device__ __forceinline__ void next() {
            ++chunk, tile.next();
            find();
        }
        __device__ __forceinline__ void find() {
            if constexpr (kPaired<kStateWarpgroups>) {
                constexpr unsigned kOwn = Shared::kStages, kPeers = kPeerStages<kStateWarpgroups>;
                const unsigned n = chunk / 2;
                own = chunk % 2 == rank;
                stage = own ? n % kOwn : kOwn + n % kPeers;
                parity = (own ? n / kOwn : n / kPeers) % 2;
            } else {
                stage = tile.at, parity = tile.parity;
            }
        }
    };
    // Signals that this warpgroup no longer reads the chunk's stage, to the CTA that prepared the chunk. For
    // a chunk of the peer one thread of each warp arrives.
    __device__ __forceinline__ void turn(const Place& place) const {
        if constexpr (kPaired<kStateWarpgroups>)
            if (!place.own) {
                __syncwarp();
                if (threadIdx.x % 32 == 0)
                    arrive_at(shared_address(shared.operands_free + place.chunk / 2 % Shared::kStages),
                              place.rank ^ 1);
                return;
            }
        arrive(shared_address(shared.operands_free + place.stage));
    }

    __device__ __forceinline__ void run(const W& cursor) const {
        State state;
        cursor.first_state(state);
        const int chunks = FusedCursor<kStateWarpgroups>(cursor).chunks;
        const bool plain = a.num_checkpoints <= 0 && !a.chunk_states.data;
        Place place, next;
        Product read, out;
        int i = 0;
        bool more = false;  // whether another chunk follows before the next state that may be stored
        // Goes to the next chunk. States may be stored every two chunks: SegmentCursor's have 64 tokens.
        const auto advance = [&] {
            next = place, next.next();
            more = ++i < chunks && (plain || i % 2 == 1);
        };
        // Waits for the values and the operands of the next chunk.
        const auto found = [&] {
            if (!more) return Found::kNone;
            wait_barrier(shared_address(shared.values_ready + place.tile.at), place.tile.parity);
            wait_barrier(shared_address(shared.operands_ready + place.stage), place.parity);
            return Layout::factors(memory + Memory::stage(place.stage)).plain() ? Found::kPlain
                                                                                : Found::kOther;
        };
        // Reads, outputs and carries one chunk.
        const auto multiply = [&](auto is_plain) {
            constexpr bool kPlain = decltype(is_plain)::value;
            unsigned char* const stage = memory + Memory::stage(place.stage);
            std::uint32_t at = shared_address(stage);
            if constexpr (kPaired<kStateWarpgroups>)
                asm volatile("" : "+r"(at));  // else the compiler takes it for uniform, and copies it
            at = wgmma::uniform(at);
            const FusedFactors<kKey>& factors = Layout::factors(stage);
            // S to the chunk's middle: in two steps, by one loop, if some channel is apart.
#pragma unroll 1
            for (const float* by = factors.any_apart() ? factors.brings : factors.reads;;
                 by = factors.reads) {
                scale(state, by);
                if (by == factors.reads) break;
            }
            Packed packed[kKey / 16];
            pack<T>(packed, state);
            wgmma::fence();
            read_state(read, packed, at + Layout::kKeys);
            wgmma::commit();
            read_state(out, packed, at + Layout::kQuery);
            wgmma::commit();
            const bool compensated = factors.compensated;
            if constexpr (kPaired<kStateWarpgroups>) advance();
            if (kMayLeaveRange && !kPlain && factors.any_out_of_range) pass(state, factors);
            Rows writes;
            const std::uint32_t own_tile = shared_address(memory + Memory::tile(place.tile.at, warpgroup));
            load_value_rows(writes, own_tile);
            wgmma::wait<1>();
            wgmma::hold(read);
            take_off<T>(writes, read);
            wgmma::fence();
            multiply_square(read, writes, at + Layout::kInverse, false);
            wgmma::commit();
            wgmma::wait<0>();
            wgmma::hold(out);
            wgmma::hold(read);
            if (!kPlain && compensated)
                add_low(state, out, read, writes, at);
            else
                pack<T>(writes, read);
            wgmma::hold(state);
            wgmma::fence();
            multiply_carry(state, writes, at + Layout::kCarried);
            multiply_square(out, writes, at + Layout::kScores, true);
            wgmma::commit();
            wgmma::wait<0>();
            wgmma::hold(state);
            wgmma::hold(out);
            if (kPaired<kStateWarpgroups> && more) turn(place);
            store_value_rows<T>(own_tile, out);  // replaces the values
            fence_async_proxy();
            if constexpr (kPaired<kStateWarpgroups>) {
                arrive(shared_address(shared.out_ready + place.tile.at));
            } else {
                advance();
                if (more || i == chunks) turn(place);
            }
            if (more) place = next;
        };
#pragma unroll 1
        for (;;) {
            const AtEnd at_end(i > 0 ? &Layout::factors(memory + Memory::stage(place.stage)) : nullptr);
            cursor_again().store_asked(state, i == chunks ? cursor_again().segment.chunks : i / 2, at_end);
            if (i == chunks) break;
            if (i > 0) turn(place), place = next;  // AtEnd has read the factors of the last chunk
            more = true;
            each_chunk(found, [&] { multiply(std::true_type{}); }, [&] { multiply(std::false_type{}); });
        }
    }
};

}  // namespace cula::cuda::sm90
