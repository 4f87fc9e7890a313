// SPDX-License-Identifier: Apache-2.0
// The walk backwards: its state role and its store role.
//
// State role: a warpgroup that holds 64 value rows of Z [V, K], d loss / d state, in float accumulators from
// the last chunk of its segment to the first. Its equation is that of the portable return
// (docs/design/backward-cuda.md); dU, dV and dO are [V, C]:
//   write    dU = Z K+^T + dO A
//   solve    dV = dU T                              if the rule reads the state; else dV = dU
//   return   Z  = Z diag(decay) + dO Q~ - dV K^     without K^ if the rule does not read the state
// With one decay per token K^, K+ and Q~ are k and q as they came, and factors per token multiply the columns
// of Z k^T, dO and dV instead.
//
// A chunk, in the order of issue, and what the threads do while the product runs:
//   product                    A operand     meanwhile
//   dU = Z K+^T + dO A         packed Z, dO  write Z to shared memory; signal it and the last dV; save dO
//   dV = dU T                  dU
//   Z += dO Q~                 dO            wait for dV; pack it
//   Z -= dV K^                 dV            write dV to shared memory
// Of a compensated chunk A, T, dU and dV have a low word each, which are further products.
//
// Store role: a warp, which takes Z and dV from shared to global memory, by TMA where the layout of dV
// allows it. The state role signals once for a step, which has Z of the chunk that the walk has come to
// and dV of the one that it has left. The last step has dV alone.
#pragma once

#include "cuda/sm90/walks/config.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kMaps>
struct ReturnRole {
    using Carry = StateRole<T, kKey, kReadsState, kPerChannel, false>;
    using Cursor = CarryCursor<kKey, kReadsState, kPerChannel, false>;
    using Shared = typename Carry::Shared;
    using Stage = typename Carry::Stage;
    using F = typename Carry::F;
    using State = typename Carry::State;
    using Product = typename Carry::Product;
    using Rows = typename Carry::Rows;
    static constexpr int kRows = Carry::kRows, kBlocks = Carry::kBlocks;

    const DeviceArgs& a;
    const WalkParams<T, kKey>& p;
    const Cursor& cursor;
    const Shared& shared;
    int stages;
    std::uint32_t buffer;  // ReturnBuffer of the warp

    // product = or += rows square, square [C x C].
    static __device__ __forceinline__ void multiply_rows(Product& product, const Rows& rows,
                                                         std::uint32_t square, int add) {
        const wgmma::Operand b = wgmma::operand<16>(square, Panels<kRows>::kUnits * 16);
#pragma unroll
        for (int step = 0; step < kBlocks; ++step)
            wgmma::multiply<T, kRows / 8, true>(product, rows[step], b + Panels<kRows>::unit(16 * step, 0),
                                                step > 0 || add);
    }

    // An A operand from accumulators times factor(tile), two neighbouring tokens each.
    template <class Factor>
    static __device__ __forceinline__ void pack_scaled(Rows& rows, const Product& x, const Factor& factor) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int tile = 2 * block + w / 2;
                const float2 f = factor(tile);
                rows[block][w] = pack2_finite<T>(x[tile][w % 2 * 2] * f.x, x[tile][w % 2 * 2 + 1] * f.y);
            }
    }

    __device__ __forceinline__ void first_state(State& state) const {
        const Segment& segment = cursor.segment;
        const bool starts_walk = segment.rank + 1 == segment.count;
        States from{};
        std::int64_t slot = 0;
        if (starts_walk && cursor.ends_sequence)
            from = p.d.d_final, slot = segment.sequence;
        else if (starts_walk)
            from = p.slab_d_end;
        else if (!kMaps)
            from = p.ends, slot = cursor.number;
        if (from.data)
            chunked::load_state<kKey>(state, from, from.offset(slot, cursor.value_head), cursor.rows);
        else
            each_pair(state, [](float2& pair, int, int) { pair = {0.0f, 0.0f}; });
    }

    __device__ __forceinline__ void store_last(State& state) const {
        States to{};
        std::int64_t slot = 0;
        if constexpr (kMaps) {
            to = p.map_z, slot = cursor.number;
        } else if (cursor.segment.rank > 0) {
            return;
        } else if (!cursor.starts_sequence) {
            to = p.slab_d_start;
        } else {
            to = p.d.d_initial, slot = cursor.segment.sequence;
            if (cursor.slots.initial < 0)
                each_pair(state, [](float2& pair, int, int) { pair = {0.0f, 0.0f}; });
        }
        if (to.data) chunked::store_state<kKey>(state, to, to.offset(slot, cursor.value_head), cursor.rows);
    }

    // dV of another dtype than T, stored from registers.
    struct Output {
        const TokenRows& rows;
        int row, value_dim;
        std::int64_t at;  // of the lane's first value row of the chunk's first token

        __device__ __forceinline__ Output(const TokenRows& of, const Cursor& cursor, int dim)
            : rows(of),
              row(cursor.rows.first + static_cast<int>(threadIdx.x) % 32 / 4),
              value_dim(dim),
              at(of.offset(cursor.batch, cursor.token(cursor.segment.chunks - 1), cursor.value_head) + row) {}

        __device__ __forceinline__ void previous_chunk() { at -= kRows * rows.token; }

        // Of a chunk whose first `left` tokens exist.
        __device__ __forceinline__ void store(const Product& d_values, int left) const {
            const int lane_token = RowWindow::channel();
            float* to = static_cast<float*>(rows.data) + at + lane_token * rows.token;
#pragma unroll
            for (int tile = 0; tile < kRows / 8; ++tile, to += 8 * rows.token)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (tile * 8 + lane_token + e % 2 < left && row + e / 2 * 8 < value_dim)
                        to[e % 2 * rows.token + e / 2 * 8] = d_values[tile][e];
        }
    };

    __device__ __forceinline__ void run() const {
        CarryControl& control = shared.control;
        const int warp = static_cast<int>(threadIdx.x) / 32, warpgroup = warp / kWarpgroupWarps,
                  chunks = cursor.segment.chunks;
        State state;
        first_state(state);

        ReturnSlice<T, kKey>* slice = nullptr;
        if (!kMaps && p.saved.returned && cursor.rows.first < a.value_dim)
            slice = p.saved.returned + p.saved.index(cursor.segment.slot + chunks - 1, cursor.value_head,
                                                     cursor.rows.first / kWarpRows);
        const std::int64_t of_chunk = std::int64_t{p.saved.value_heads} * p.saved.count;
        const bool stores = !kMaps && stores_by_role(p), saves_rows = slice && !p.saved.by_rows,
                   stores_floats = !kMaps && p.d.d_v.data && !stores_values<T>(p.d.d_v);
        Output output(p.d.d_v, cursor, a.value_dim);
        const std::uint32_t lane_at = buffer + threadIdx.x % 32 * 16;
        int left = cursor.last_count;

        Packed packed[kKey / 16];
        pack<T>(packed, state);
        auto stage = RingPosition::of_reader();
        const auto stage_at = [&] { return wgmma::uniform(shared_address(&shared.stage(stage.at))); };
        Product d_writes, solved;
#pragma unroll 1
        for (int chunk = chunks - 1; chunk >= 0; --chunk) {
            const int own_stage = stage.at;
            const std::uint32_t at = stage_at();
            const F& of = shared.factors(stage.at);
            control.operands.ready[stage.at].wait(stage.parity);
            const bool compensated = kReadsState && control.compensated[stage.at];
            stage.next(stages);

            // --- write: dU ---
            Rows d_o;
            const std::uint32_t values_at =
                at + Shared::kValues + warpgroup * Shared::kRowTileBytes + own_value_row();
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                load_matrices_transposed(d_o[block], values_at + block * kValueBlockBytes);
            wgmma::fence();
            // With one decay per token Z k^T is multiplied before dO A is added.
            Carry::read_state(kPerChannel ? d_writes : solved, packed, at + offsetof(Stage, keys.carry));
            multiply_rows(d_writes, d_o, at + offsetof(Stage, scores), kPerChannel);
            wgmma::commit();
            if (stores) {
                if (slice) {
#pragma unroll
                    for (int step = 0; step < kKey / 16; ++step)
                        store_matrices(lane_at + offsetof(Buffer, d_state) + step * backward::kSavedBlock,
                                       packed[step]);
                }
                signal_stores();
                if (saves_rows) {
#pragma unroll
                    for (int block = 0; block < kBlocks; ++block)
                        backward::save_block(slice->d_outputs, block, d_o[block]);
                }
            }
            wgmma::wait<0>();  // where branches join, ptxas would wait in any case
            Carry::scale_state(state, of);
            wgmma::hold(d_writes);
            if constexpr (!kPerChannel) {
                wgmma::hold(solved);
#pragma unroll
                for (int tile = 0; tile < kRows / 8; ++tile) {
                    const float2 rest = Carry::per_token(of.k_rest, tile);
                    d_writes[tile][0] += solved[tile][0] * rest.x,
                        d_writes[tile][1] += solved[tile][1] * rest.y;
                    d_writes[tile][2] += solved[tile][2] * rest.x,
                        d_writes[tile][3] += solved[tile][3] * rest.y;
                }
            }
            if constexpr (kReadsState)
                if (compensated) {
                    control.operands.ready[stage.at].wait(stage.parity);
                    const std::uint32_t low_at = stage_at();
                    wgmma::fence();
                    multiply_rows(d_writes, d_o, low_at + offsetof(Stage, scores), true);
                    wgmma::commit();
                    wgmma::wait<0>();
                    wgmma::hold(d_writes);
                    Rows high, low;
                    pack<T>(high, d_writes);
                    take_low_words<T>(low, high, d_writes);
                    wgmma::fence();
                    multiply_rows(solved, low, at + offsetof(Stage, inverse), false);
                    multiply_rows(solved, high, low_at + offsetof(Stage, inverse), true);
                    wgmma::commit();
                    wgmma::wait<0>();
                    wgmma::hold(solved);
                    control.operands.free[stage.at].arrive();
                    stage.next(stages);
                }

            // --- solve: dV. return: Z ---
            Rows values, moved;
            pack<T>(values, d_writes);
            if constexpr (kPerChannel) {
#pragma unroll
                for (int block = 0; block < kBlocks; ++block)
#pragma unroll
                    for (int w = 0; w < 4; ++w) moved[block][w] = d_o[block][w];
            } else {
#pragma unroll
                for (int block = 0; block < kBlocks; ++block)
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        const float2 f = Carry::per_token(of.q_factor, 2 * block + w / 2),
                                     pair = unpack2<T>(d_o[block][w]);
                        moved[block][w] = pack2_finite<T>(pair.x * f.x, pair.y * f.y);
                    }
            }
            wgmma::hold(state);
            wgmma::fence();
            if constexpr (kReadsState) {
                multiply_rows(solved, values, at + offsetof(Stage, inverse), compensated);
                wgmma::commit();
            }
            Carry::multiply_carry(state, moved, at + offsetof(Stage, query));
            wgmma::commit();
            const Product& d_values = kReadsState ? solved : d_writes;
            Rows returned;
            const auto factor = [&](int tile) -> float2 {
                if constexpr (kPerChannel) return {-1.0f, -1.0f};
                const float2 f = kPerChannel ? float2{} : factor_of(of, tile);
                return {-f.x, -f.y};
            };
            if constexpr (kReadsState) {
                wgmma::wait<1>();
                wgmma::hold(solved);
                pack_scaled(returned, solved, factor);
                wgmma::fence();
                Carry::multiply_carry(state, returned, at + offsetof(Stage, keys.read));
                wgmma::commit();
                pack<T>(values, solved);
            }
            if (stores_floats) output.store(d_values, left);
            if (stores) {
                control.out.free[warpgroup].wait(chunks - 1 - chunk & 1);
                const std::uint32_t to =
                    shared_address(shared.outs) + warpgroup * Shared::kRowTileBytes + own_value_row();
#pragma unroll
                for (int block = 0; block < kBlocks; ++block)
                    store_matrices_transposed(to + block * kValueBlockBytes, values[block]);
                if (saves_rows) {
#pragma unroll
                    for (int block = 0; block < kBlocks; ++block)
                        if constexpr (kReadsState)
                            store_matrices(
                                lane_at + offsetof(Buffer, d_values) + block * backward::kSavedBlock,
                                values[block]);
                        else
                            backward::save_block(slice->d_values, block, values[block]);
                }
            }
            wgmma::wait<0>();
            wgmma::hold(state);
            if constexpr (kReadsState)
                if (compensated) {
                    Rows low;
                    take_low_words<T>(low, returned, solved, factor);
                    wgmma::fence();
                    Carry::multiply_carry(state, low, at + offsetof(Stage, keys.read));
                    wgmma::commit();
                    wgmma::wait<0>();
                    wgmma::hold(state);
                }
            control.operands.free[own_stage].arrive();
            pack<T>(packed, state);
            if (slice) slice -= of_chunk;
            output.previous_chunk();
            left = kRows;
        }
        if (stores) signal_stores();
        store_last(state);
    }

private:
    using Buffer = ReturnBuffer<T, kKey, kReadsState>;

    // dV of the chunk before, and Z of this one, are in shared memory.
    __device__ __forceinline__ void signal_stores() const {
        fence_async_proxy();
        shared.control.out.ready[threadIdx.x / kWarpgroupThreads].arrive();
    }
    static __device__ __forceinline__ float2 factor_of(const F& of, int tile) {
        if constexpr (!kPerChannel) return Carry::per_token(of.k_factor, tile);
        return {};
    }
};

template <class T, int kKey, bool kReadsState, bool kPerChannel>
struct ReturnStoreRole {
    using Shared = CarryShared<T, kKey, kReadsState, kPerChannel, false>;
    using Buffer = ReturnBuffer<T, kKey, kReadsState>;
    static constexpr int kRows = kTokens<kKey>, kUnits = kWarpgroupRows / 8,
                         kBufferBytes = static_cast<int>(sizeof(Buffer));

    const DeviceArgs& a;  // a.o: dV
    const WalkParams<T, kKey>& p;
    const CarryMaps& maps;
    const CarryCursor<kKey, kReadsState, kPerChannel, false>& cursor;
    const Shared& shared;
    std::uint32_t buffers;  // of all state warps

    __device__ __forceinline__ void run() const {
        if (!stores_by_role(p)) return;
        const int chunks = cursor.segment.chunks, last = shared.warpgroups - 1;
        Ring<kMaxStateWarpgroups>& out = shared.control.out;
#pragma unroll 1
        for (int step = 0; step <= chunks; ++step) {
            const int behind = chunks - step;  // the chunk that dV is of
            const bool has_values = stores_values<T>(a.o) && step > 0;
#pragma unroll 1
            for (int warpgroup = 0; warpgroup <= last; ++warpgroup) {
                out.ready[warpgroup].wait(step & 1);
                if (threadIdx.x % 32 == 0) {
                    if (p.saved.returned) store_slices(behind, warpgroup);
                    if (has_values && by_tma(behind))
                        tma_store(
                            maps.o,
                            TileCoordinates{cursor.rows.first + warpgroup * kWarpgroupRows, cursor.value_head,
                                            static_cast<int>(cursor.token(behind)), cursor.batch},
                            shared_address(shared.outs[warpgroup].bytes));
                    tma_commit_stores();
                }
                __syncwarp();
                if (has_values && !by_tma(behind)) store_rows(behind, warpgroup);
            }
            // The first of two warpgroups goes on while what the second has written is still read.
            if (last > 0) {
                tma_wait_stores_read<1>();
                __syncwarp();
                out.free[0].arrive();
            }
            tma_wait_stores_read<0>();
            __syncwarp();
            out.free[last].arrive();
        }
    }

private:
    // A tile of a packed sequence's partial last chunk would overwrite the next sequence's dV.
    __device__ __forceinline__ bool by_tma(int chunk) const {
        return maps.outputs && (!a.cu_seqlens || cursor.count(chunk) == kRows);
    }

    // Of a warpgroup: dV of chunk `behind`, and Z of the chunk before that one in the sequence.
    __device__ __forceinline__ void store_slices(int behind, int warpgroup) const {
        const std::int64_t of_chunk = std::int64_t{p.saved.value_heads} * p.saved.count;
        const int first = cursor.rows.first + warpgroup * kWarpgroupRows,
                  warps = min(kWarpgroupWarps, (a.value_dim - first + kWarpRows - 1) / kWarpRows);
        const std::int64_t slice =
            p.saved.index(cursor.segment.slot + behind, cursor.value_head, first / kWarpRows);
        std::uint32_t from = buffers + warpgroup * (kWarpgroupWarps * kBufferBytes);
#pragma unroll 1
        for (int warp = 0; warp < warps; ++warp, from += kBufferBytes) {
            if (behind > 0)
                store_bulk(p.saved.returned[slice - of_chunk + warp].d_state,
                           from + offsetof(Buffer, d_state), sizeof(Buffer::d_state));
            if constexpr (kReadsState)
                if (behind < cursor.segment.chunks && !p.saved.by_rows)
                    store_bulk(p.saved.returned[slice + warp].d_values, from + offsetof(Buffer, d_values),
                               sizeof(Buffer::d_values));
        }
    }

    template <class Word>
    static __device__ __forceinline__ void copy_words(T* to, const T* from, int count) {
        constexpr int kEach = sizeof(Word) / sizeof(T);
#pragma unroll 1
        for (int e = 0; e < count; e += kEach)
            *reinterpret_cast<Word*>(to + e) = *reinterpret_cast<const Word*>(from + e);
    }
    // dV of a warpgroup, for any strides and alignment.
    __device__ __forceinline__ void store_rows(int chunk, int warpgroup) const {
        const int row = cursor.rows.first + warpgroup * kWarpgroupRows;
        const bool in_pieces = aligned<T>(a.o, a.value_dim),
                   in_pairs = (a.o.batch | a.o.token | a.o.head | a.value_dim) % 2 == 0 &&
                              reinterpret_cast<std::uintptr_t>(a.o.data) % 4 == 0;
        const unsigned char* const tile = shared.outs[warpgroup].bytes;
        T* const first = static_cast<T*>(a.o.data) +
                         a.o.offset(cursor.batch, cursor.token(chunk), cursor.value_head) + row;
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x) % 32; i < cursor.count(chunk) * kUnits; i += 32) {
            const int token = i / kUnits, unit = i % kUnits, count = min(a.value_dim - row - unit * 8, 8);
            const auto* const from =
                reinterpret_cast<const T*>(tile + Tile<kRows, kWarpgroupRows>::unit(token, unit) * 16);
            T* const to = first + token * a.o.token + unit * 8;
            if (in_pieces)
                copy_words<uint4>(to, from, count);
            else if (in_pairs)
                copy_words<std::uint32_t>(to, from, count);
            else
                copy_words<T>(to, from, count);
        }
    }
};

}  // namespace cula::cuda::sm90
