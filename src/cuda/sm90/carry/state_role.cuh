// SPDX-License-Identifier: Apache-2.0
// The state role of the Hopper carry: a warpgroup that holds 64 value rows of S [V, K] in float accumulators
// from the first chunk of its segment to the last, and issues all products of a chunk.
//
// wgmma accumulators, rounded to 16 bits and packed, have the register layout of the A operand. S, V - R and
// U therefore pass from one product to the next without shared memory or shuffles. All B operands are in the
// stage.
//
// A chunk, in the order of issue, and what the threads do while the product runs:
//   product                    A operand     meanwhile
//   R = S K^^T                 packed S
//   O = S Q~^T                 packed S      wait for R; round and pack V - R
//   U = (V - R) T^T            V - R         signal out.ready for the previous chunk; S times the decay
//   S += U K+                  U
//   O += U A^T                 U             wait for S; pack the new S
//   (none)                                   free the stage; write O, transposed, to shared memory
// Maps have no O. Additive algorithms have no R, and their U is V. A Saver stores S while R and O are made of
// it, and U while S and O are.
// This is the order as written: ptxas moves the packing of S, and a part of S times the decay, behind the
// next wait.
//
// ptxas tracks the registers of products in flight only if both sides of every branch have the same products
// in flight and none is in flight at the back edge of a loop. Every branch and every chunk therefore ends
// with wait<0>.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/carry/config.cuh"
#include "cuda/tile/value_rows.cuh"

namespace cula::cuda::sm90 {

// What a carry saves besides outputs and states: nothing.
struct NoSaver {
    using Params = CarryParams;  // of the kernel

    template <class W>
    __device__ __forceinline__ NoSaver(const DeviceArgs&, const Params&, const W&) {}
    template <int kSteps>
    __device__ __forceinline__ void save_state(const Packed (&)[kSteps]) const {}
    template <int kBlocks>
    __device__ __forceinline__ void save_writes(const Packed (&)[kBlocks]) {}
};

template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kMaps, class Saver = NoSaver>
struct StateRole {
    using Shared = CarryShared<T, kKey, kReadsState, kPerChannel, kMaps>;
    using Stage = typename Shared::Stage;
    using F = typename Shared::F;
    using W = CarryCursor<kKey, kReadsState, kPerChannel, kMaps>;
    static constexpr bool kScores = kMakesScores<kReadsState, kPerChannel>;
    static constexpr int kRows = Stage::kRows, kBlocks = kRows / 16;
    using Place = OperandTile<kKey, kPerChannel>;
    using State = float[kKey / 8][4];  // S: [tile of 8 channels][accumulator fragment]
    using Product = float[kRows / 8][4];
    using Rows = Packed[kBlocks];

    const DeviceArgs& a;
    const Schedule& schedule;
    const typename Saver::Params& p;
    const CarryMaps& maps;
    const Shared& shared;
    CarryControl& control = shared.control;
    const int warp = static_cast<int>(threadIdx.x) / 32, warpgroup = warp / kWarpgroupWarps;

    // The segment cursor, built again from shared memory. It is needed on few chunks, so it is not kept in
    // registers over the loop; the asm keeps the compiler from computing the address before the loop.
    __device__ __forceinline__ W cursor_again() const {
        int stages = p.stages;
        asm volatile("" : "+r"(stages));
        return W(a, schedule, p, Shared(shared.stages, stages, shared.warpgroups).control.segment, warp,
                 shared.warpgroups * kWarpgroupWarps);
    }

    // Per-token factors of the lane's two neighbouring tokens in 8-token tile `tile`.
    static __device__ __forceinline__ float2 per_token(const float* factor, int tile) {
        return *reinterpret_cast<const float2*>(factor + tile * 8 + threadIdx.x % 4 * 2);
    }

    // read_state:       product = S tile^T, tile [C x K]: R or the first part of O
    // multiply_square:  product = or += rows square^T, square [C x C]: U or the second part of O
    // multiply_carry:   S += rows tile, tile [C x K]
    static __device__ __forceinline__ void read_state(Product& product, const Packed (&state)[kKey / 16],
                                                      std::uint32_t tile) {
        const wgmma::Operand b = wgmma::operand<Place::kUnits * 8>(tile);
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step)
            wgmma::multiply<T, kRows / 8, false>(product, state[step], b + Place::unit(0, 2 * step),
                                                 step > 0);
    }
    static __device__ __forceinline__ void multiply_square(Product& product, const Rows& rows,
                                                           std::uint32_t square, bool add) {
        const wgmma::Operand b = wgmma::operand<16>(square);
#pragma unroll
        for (int step = 0; step < kBlocks; ++step)
            wgmma::multiply<T, kRows / 8, false>(product, rows[step], b + step * Panels<kRows>::kUnits,
                                                 step > 0 || add);
    }
    static __device__ __forceinline__ void multiply_carry(State& state, const Rows& rows,
                                                          std::uint32_t tile) {
        const wgmma::Operand b = wgmma::operand<Place::kUnits * 8>(tile, Place::kPanelUnits * 16);
#pragma unroll
        for (int step = 0; step < kBlocks; ++step)
            wgmma::multiply<T, kKey / 8, true>(state, rows[step], b + Place::unit(16 * step, 0), 1);
    }

    static __device__ __forceinline__ void scale_state(State& state, const F& of) {
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile) {
            float2 d;
            if constexpr (kPerChannel)
                d = *reinterpret_cast<const float2*>(of.decay + tile * 8 + threadIdx.x % 4 * 2);
            else
                d = {of.decay[0], of.decay[0]};
            state[tile][0] *= d.x, state[tile][1] *= d.y, state[tile][2] *= d.x, state[tile][3] *= d.y;
        }
    }
    static __device__ __forceinline__ void scale_out(Product& out, const F& of) {
        if constexpr (!kPerChannel) {
#pragma unroll
            for (int tile = 0; tile < kRows / 8; ++tile) {
                const float2 f = per_token(of.q_factor, tile);
                out[tile][0] *= f.x, out[tile][1] *= f.y, out[tile][2] *= f.x, out[tile][3] *= f.y;
            }
        }
    }

    __device__ __forceinline__ void load_values(Rows& values, std::uint32_t stage_at) const {
        load_value_rows(values, stage_at + Shared::kValues + warpgroup * Shared::kRowTileBytes);
    }
    // The A operand of S += U K+. With one decay per token it is U times the decay from each token to the
    // chunk's end (k_rest), multiplied before it is rounded: that has 30 % less error than rounding U first.
    static __device__ __forceinline__ void pack_carried(Rows& carried, const Rows& writes, const Product& u,
                                                        const F& of) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                if constexpr (kPerChannel) {
                    carried[block][x] = writes[block][x];
                } else {
                    const int tile = 2 * block + x / 2;
                    float2 pair{u[tile][x % 2 * 2], u[tile][x % 2 * 2 + 1]};
                    if constexpr (!kReadsState) pair = unpack2<T>(writes[block][x]);
                    const float2 factor = per_token(of.k_rest, tile);
                    carried[block][x] = pack2_finite<T>(pair.x * factor.x, pair.y * factor.y);
                }
            }
    }
    // A compensated chunk: T, A and U count as two 16-bit words each.
    //   U += (V - R) T_low^T, then U is split into `writes` (high) and `low` (low)
    //   O += U_low A^T + U_high A_low^T
    //   S += U_low K+
    // The caller adds the products of the high words. At most one batch is in flight, and none at the end.
    static __device__ __forceinline__ void add_low_words(State& state, Product& out, Product& u, Rows& writes,
                                                         std::uint32_t stage_at, std::uint32_t low_at,
                                                         const F& of) {
        wgmma::fence();
        multiply_square(u, writes, low_at + offsetof(Stage, inverse), true);
        wgmma::commit();
        wgmma::wait<0>();
        wgmma::hold(u);
        pack<T>(writes, u);
        Rows low;
        if constexpr (!kMaps) {
            take_low_words<T>(low, writes, u);
            wgmma::fence();
            multiply_square(out, low, stage_at + offsetof(Stage, scores), true);
            multiply_square(out, writes, low_at + offsetof(Stage, scores), true);
            wgmma::commit();
            wgmma::wait<0>();
            wgmma::hold(out);
        }
        Rows carried;
        pack_carried(carried, writes, u, of);
        if constexpr (kPerChannel)
            take_low_words<T>(low, carried, u);
        else
            take_low_words<T>(low, carried, u, [&](int tile) { return per_token(of.k_rest, tile); });
        wgmma::hold(state);
        wgmma::fence();
        multiply_carry(state, low, stage_at + offsetof(Stage, keys.carry));
        wgmma::commit();
        wgmma::wait<0>();
    }

    // Writes O, transposed to [token][value row], to the output tile from which the store role reads it.
    __device__ __forceinline__ void write_out_tile(const Product& out) const {
        store_value_rows<T>(shared_address(shared.outs) + warpgroup * Shared::kRowTileBytes, out);
    }
    __device__ __forceinline__ void signal_out_ready() const {
        fence_async_proxy();
        control.out.ready[warpgroup].arrive();
    }
    // Stores O from registers where it has no tensor map (another dtype, or strides that TMA cannot take). A
    // backward call that wants the gradient of the initial state alone has no O.
    __device__ __forceinline__ void store_out(Product& out, const W& cursor, int chunk) const {
        if (kScores && !a.o.data) return;
        const ChunkTokens<kSeveral<kReadsState, kPerChannel>> tokens(a.writes, cursor.token(chunk));
        const int count = cursor.count(chunk), row = cursor.rows.row(), lane_token = RowWindow::channel();
        const std::int64_t to = a.o.offset(cursor.batch, tokens.first_token, cursor.value_head) + row;
        each_pair(out, [&](float2& pair, int more_rows, int token) {
            if (row + more_rows >= a.value_dim) return;
            token += lane_token;
            const auto place = [&](int of) { return to + tokens.token(of) * a.o.token + more_rows; };
            if (token < count && tokens.is_last(token)) store_row(a.o.data, a.o.dtype, place(token), pair.x);
            if (token + 1 < count && tokens.is_last(token + 1))
                store_row(a.o.data, a.o.dtype, place(token + 1), pair.y);
        });
    }

    // Arrives at operands.free of every CTA of the cluster, since each of them writes a share of this stage.
    // Every thread arrives for its own reads: one arrival per warp would be correct, but compute-sanitizer's
    // racecheck does not follow it.
    __device__ __forceinline__ void free_stage(int stage, int cluster) const {
        Mbarrier& free = control.operands.free[stage];
        free.arrive_at(0);
        if (cluster > 1) free.arrive_at(1);
#pragma unroll 1  // clusters of more than two are rare
        for (int other = 2; other < cluster; ++other) free.arrive_at(other);
    }

    __device__ __forceinline__ void run(const W& cursor) const {
        State state;
        cursor.first_state(state);
        DecayMap<kMaps && !kReadsState ? kKey : 0, kPerChannel> decay_map(cursor);
        const int chunks = cursor.segment.chunks;
        const bool of_m = cursor.of_m, outputs = maps.outputs;
        // No checkpoint and no chunk state has to be stored between the first chunk and the last.
        const bool plain = kMaps || (outputs && a.num_checkpoints <= 0 && !a.chunk_states.data);
        int cluster = p.cluster;
        asm volatile("" : "+r"(cluster));  // kept in a register: reading the constant bank misses its cache

        Saver saver(a, p, cursor);
        Packed packed[kKey / 16];
        auto stage = RingPosition::of_reader();
        const auto stage_at = [&] { return wgmma::uniform(shared_address(&shared.stage(stage.at))); };
        Product read, out;
        const auto multiply = [&](int chunk) {
            const int own_stage = stage.at;
            const std::uint32_t at = stage_at();
            const F& of = shared.factors(stage.at);
            control.operands.ready[stage.at].wait(stage.parity);
            if (kScores) control.scores_ready[stage.at].wait(stage.parity);
            const bool compensated = kReadsState && control.compensated[stage.at];
            if constexpr (kMaps && !kReadsState) decay_map.pass(of.decay);
            stage.next(p.stages);

            Rows writes = {};
            if (!of_m) load_values(writes, at);
            wgmma::fence();
            if constexpr (kReadsState) {
                read_state(read, packed, at + offsetof(Stage, keys.read));
                wgmma::commit();
            }
            if constexpr (!kMaps) {
                read_state(out, packed, at + offsetof(Stage, query));
                wgmma::commit();
            }
            saver.save_state(packed);
            if constexpr (kReadsState) {
                wgmma::wait<kMaps ? 0 : 1>();
                wgmma::hold(read);
                if constexpr (kPerChannel)
                    subtract_read<T>(writes, read);
                else
                    subtract_read<T>(writes, read, [&](int tile) { return per_token(of.k_factor, tile); });
                wgmma::fence();
                multiply_square(read, writes, at + offsetof(Stage, inverse), false);
                wgmma::commit();
            }
            if constexpr (!kMaps)
                if (outputs && chunk > 0) signal_out_ready();
            if constexpr (kReadsState) scale_state(state, of);
            wgmma::wait<0>();
            if constexpr (!kReadsState) scale_state(state, of);
            if constexpr (!kMaps) {
                wgmma::hold(out);
                scale_out(out, of);
            }

            if constexpr (kReadsState) {
                wgmma::hold(read);
                if (compensated) {
                    control.operands.ready[stage.at].wait(stage.parity);
                    add_low_words(state, out, read, writes, at, stage_at(), of);
                    free_stage(stage.at, cluster);
                    stage.next(p.stages);
                } else {
                    pack<T>(writes, read);
                }
            }
            Rows carried;
            pack_carried(carried, writes, read, of);
            wgmma::hold(state);
            wgmma::fence();
            multiply_carry(state, carried, at + offsetof(Stage, keys.carry));
            wgmma::commit();
            if constexpr (!kMaps) {
                multiply_square(out, writes, at + offsetof(Stage, scores), true);
                wgmma::commit();
            }
            saver.save_writes(writes);
            wgmma::wait<kMaps ? 0 : 1>();
            wgmma::hold(state);
            pack<T>(packed, state);
            if constexpr (!kMaps) {
                if (outputs) control.out.free[warpgroup].wait(chunk + 1 & 1);
                wgmma::wait<0>();
                wgmma::hold(out);
            }
            free_stage(own_stage, cluster);
            if constexpr (!kMaps) write_out_tile(out);
        };
        // Rarely executed code is in the outer loop: the inner loop then stays in the instruction cache.
        int chunk = 0;
#pragma unroll 1
        for (;;) {
            cursor_again().store_asked(state, chunk);
            if (chunk == chunks) break;
            pack<T>(packed, state);  // again, so that store_asked can use these registers
#pragma unroll 1
            do multiply(chunk);
            while (++chunk < chunks && plain);
            if constexpr (!kMaps)
                if (!outputs) store_out(out, cursor_again(), chunk - 1);
        }
        if constexpr (!kMaps)
            if (outputs && chunks > 0) signal_out_ready();
        store_decays(decay_map);
    }

    template <class Map>
    __device__ __forceinline__ void store_decays(const Map& decay_map) const {
        if constexpr (kMaps && !kReadsState)
            if (blockIdx.x % p.row_blocks.value == 0 && warp == 0) decay_map.store(cursor_again());
    }
};

}  // namespace cula::cuda::sm90
