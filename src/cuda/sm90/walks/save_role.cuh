// SPDX-License-Identifier: Apache-2.0
// The state role of the walk forwards: the carry of maps (carry/state_role.cuh), which stores S before every
// chunk and U, or, with kMaps, makes the maps of segments.
//
// A chunk, in the order of issue, and what the threads do while the product runs:
//   product                    A operand     meanwhile
//   R = S K^^T                 packed S      store S
//   U = (V - R) T^T            V - R         S times the decay
//   S += U K+                  U             store U
#pragma once

#include "cuda/sm90/walks/config.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kMaps>
struct SaveRole {
    using Carry = StateRole<T, kKey, kReadsState, kPerChannel, true>;
    using Shared = typename Carry::Shared;
    using Stage = typename Carry::Stage;
    using F = typename Carry::F;

    const DeviceArgs& a;
    const WalkParams<T, kKey>& p;
    const CarryCursor<kKey, kReadsState, kPerChannel, kMaps>& cursor;
    const Shared& shared;
    int stages;
    StateBuffer<T, kKey> buffer;  // of the warp

    __device__ __forceinline__ void run() const {
        CarryControl& control = shared.control;
        const int warp = static_cast<int>(threadIdx.x) / 32, warpgroup = warp / kWarpgroupWarps,
                  chunks = cursor.segment.chunks;
        const bool of_m = cursor.of_m;
        typename Carry::State state;
        cursor.first_state(state);
        DecayMap<kMaps && !kReadsState ? kKey : 0, kPerChannel> decay_map(cursor);

        CarrySlice<T, kKey>* slice = nullptr;
        if (!kMaps && p.saved.carried && cursor.rows.first < a.value_dim)
            slice = p.saved.carried +
                    p.saved.index(cursor.segment.slot, cursor.value_head, cursor.rows.first / kWarpRows);
        const std::int64_t of_chunk = std::int64_t{p.saved.value_heads} * p.saved.count;

        Packed packed[kKey / 16];
        pack<T>(packed, state);
        auto stage = RingPosition::of_reader();
        const auto stage_at = [&] { return wgmma::uniform(shared_address(&shared.stage(stage.at))); };
        typename Carry::Product read;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const int own_stage = stage.at;
            const std::uint32_t at = stage_at();
            const F& of = shared.factors(stage.at);
            control.operands.ready[stage.at].wait(stage.parity);
            const bool compensated = kReadsState && control.compensated[stage.at];
            if constexpr (kMaps && !kReadsState) decay_map.pass(of.decay);
            stage.next(stages);

            typename Carry::Rows writes = {};
            if (!of_m) load_value_rows(writes, at + Shared::kValues + warpgroup * Shared::kRowTileBytes);
            if constexpr (kReadsState) {
                wgmma::fence();
                Carry::read_state(read, packed, at + offsetof(Stage, keys.read));
                wgmma::commit();
            }
            if (slice) buffer.store(slice->state, packed);
            if constexpr (kReadsState) {
                wgmma::wait<0>();
                wgmma::hold(read);
                if constexpr (kPerChannel)
                    subtract_read<T>(writes, read);
                else
                    subtract_read<T>(writes, read,
                                     [&](int tile) { return Carry::per_token(of.k_factor, tile); });
                wgmma::fence();
                Carry::multiply_square(read, writes, at + offsetof(Stage, inverse), false);
                wgmma::commit();
            }
            Carry::scale_state(state, of);
            if constexpr (kReadsState) {
                wgmma::wait<0>();
                wgmma::hold(read);
                if (compensated) {
                    control.operands.ready[stage.at].wait(stage.parity);
                    Carry::add_low_words(state, read, read, writes, at, stage_at(), of);
                    control.operands.free[stage.at].arrive();
                    stage.next(stages);
                } else {
                    pack<T>(writes, read);
                }
            }
            typename Carry::Rows carried;
            Carry::pack_carried(carried, writes, read, of);
            wgmma::hold(state);
            wgmma::fence();
            Carry::multiply_carry(state, carried, at + offsetof(Stage, keys.carry));
            wgmma::commit();
            if (slice) {
#pragma unroll
                for (int block = 0; block < Carry::kBlocks; ++block)
                    backward::save_block(slice->writes, block, writes[block]);
                slice += of_chunk;
            }
            wgmma::wait<0>();
            wgmma::hold(state);
            control.operands.free[own_stage].arrive();
            pack<T>(packed, state);
        }
        buffer.wait();
        cursor.store_asked(state, chunks);
        if constexpr (kMaps && !kReadsState)
            if (cursor.rows.first == 0) decay_map.store(cursor);
        if constexpr (kMaps)
            if (of_m)
                chunked::store_state<kKey>(state, p.map_m_turned,
                                           p.map_m_turned.offset(cursor.number, cursor.value_head),
                                           cursor.rows);
    }
};

}  // namespace cula::cuda::sm90
