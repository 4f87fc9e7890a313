// SPDX-License-Identifier: Apache-2.0
// The load role and the store role of the fused prefill, a warp each.
//   load role    q, k, gates and beta from global memory to the stages
//   store role   outputs to global memory, then values of a later chunk into the tile that they leave
#pragma once

#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/fused/config.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/store_row.cuh"

namespace cula::cuda::sm90 {

struct FusedMaps {
    CUtensorMap q{}, k{}, g{}, v{}, o{};
};

// The load role: q, k and gates of the chunks that this CTA prepares by TMA, beta by ordinary loads.
template <class T, int kKey, class Form>
struct FusedLoadRole {
    const DeviceArgs& a;
    const FusedMaps& maps;
    const SegmentCursor<kKey, false>& cursor;
    FusedShared<kKey, Form>& shared;

    __device__ __forceinline__ void run() const {
        const int lane = static_cast<int>(threadIdx.x) % 32, head = a.by_group.divide(cursor.value_head);
        const FusedCursor<Form> fused(cursor);
        const Element type = element(a.beta.dtype);
        const int width = type == Element::kFloat32 ? 4 : 2;
        const char* const first_beta =
            static_cast<const char*>(a.beta.data) +
            a.beta.offset(cursor.batch, cursor.first_token, cursor.value_head) * width;
        RawFloat beta;
        const auto load_beta = [&](int i) {
            const int token = i * kFusedTokens + lane;
            beta.load(first_beta + token * a.beta.token * width, type, token < fused.tokens);
        };
        load_beta(fused.rank);
        auto stage = RingPosition::of_writer();
#pragma unroll 1
        for (int i = fused.rank; i < fused.chunks; i += Form::kPeers) {
            shared.operands_free[stage.at].wait(stage.parity);
            auto& at = shared.stages[stage.at];
            Mbarrier& ready = shared.inputs_ready[stage.at];
            if (lane == 0) {
                ready.arrive_expecting(sizeof(at.panels));
                TileCoordinates from{0, head, static_cast<int>(cursor.first_token) + i * kFusedTokens,
                                     cursor.batch};
#pragma unroll 1
                for (int panel = 0; panel < kKey / kTmaChannels; ++panel) {
                    from.channel = panel * kTmaChannels, from.head = head;
                    FusedPanel& to = at.panels[panel];
                    tma_load(shared_address(&to.keys), maps.k, from, ready.address());
                    tma_load(shared_address(&to.query), maps.q, from, ready.address());
                    from.head = cursor.value_head;
                    tma_load(shared_address(&to.carried), maps.g, from, ready.address());
                }
            }
            at.factors.beta[lane] = lane < fused.count(i) ? beta_of(a, beta.value(type)) : 0.0f;
            load_beta(i + Form::kPeers);
            ready.arrive();
            stage.next(Form::kStages);
        }
    }
};

// The store role: stores each chunk's outputs from its tile, unless the chunk belongs to a warm-up, then
// loads a later chunk's values into the tile.
template <class T, int kKey, class Form, bool kInParts>
struct FusedStoreRole {
    using RowTile = TmaTile<kFusedTokens>;

    const DeviceArgs& a;
    const FusedMaps& maps;
    const SegmentCursor<kKey, false>& cursor;
    FusedShared<kKey, Form>& shared;

    __device__ __forceinline__ void run() const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const FusedCursor<Form> fused(cursor);
        const auto place = [&](int i, int warpgroup) {
            return TileCoordinates{cursor.rows.first + warpgroup * kWarpgroupRows, cursor.value_head,
                                   first_token(i), cursor.batch};
        };
        // TMA would read and write beyond the end of a packed sequence, where the next sequence begins: the
        // last chunk goes row by row.
        const auto by_rows = [&](int i) { return a.cu_seqlens && fused.count(i) < kFusedTokens; };
        const auto load_values = [&](int i, int tile) {
            if (i >= fused.chunks) return;
            Mbarrier& ready = shared.values_ready[tile];
            if (by_rows(i)) {
#pragma unroll 1
                for (int warpgroup = 0; warpgroup < Form::kStateWarpgroups; ++warpgroup)
                    load_rows(Form::tile(shared, tile, warpgroup), place(i, warpgroup), fused.count(i));
            } else if (lane == 0) {
                ready.expect(Form::kStateWarpgroups * static_cast<int>(sizeof(TmaTile<kFusedTokens>)));
                for (int warpgroup = 0; warpgroup < Form::kStateWarpgroups; ++warpgroup)
                    tma_load(shared_address(&Form::tile(shared, tile, warpgroup)), maps.v,
                             place(i, warpgroup), ready.address());
            }
            ready.arrive();
        };
        auto tile = RingPosition::of_reader();
#pragma unroll 1
        for (int i = 0; i < Form::kTiles; ++i) load_values(i, i);
#pragma unroll 1
        for (int i = 0; i < fused.chunks; ++i) {
            Form::wait_for_outputs(shared, tile);
#pragma unroll 1
            for (int warpgroup = kInParts && i < shared.warm_up ? Form::kStateWarpgroups : 0;
                 warpgroup < Form::kStateWarpgroups; ++warpgroup) {
                const TileCoordinates to = place(i, warpgroup);
                const RowTile& from = Form::tile(shared, tile.at, warpgroup);
                if (by_rows(i))
                    store_rows(from, to, fused.count(i));
                else if (lane == 0)
                    tma_store(maps.o, to, shared_address(&from));
            }
            if (lane == 0) tma_wait_stores_read();
            __syncwarp();
            load_values(i + Form::kTiles, tile.at);
            tile.next(Form::kTiles);
        }
        if (kInParts && lane == 0) tma_wait_stores();  // end_segment() says that they are done
    }

private:
    __device__ __forceinline__ int first_token(int i) const {
        return static_cast<int>(cursor.first_token) + i * kFusedTokens;
    }
    // Calls body(place in the tile, token, row) for each piece of 16 bytes of a tile.
    template <class Body>
    static __device__ __forceinline__ void each_piece(const TileCoordinates& at, Body body) {
        constexpr int kUnits = kWarpgroupRows / 8;
#pragma unroll 1
        for (int x = static_cast<int>(threadIdx.x) % 32; x < kFusedTokens * kUnits; x += 32) {
            const int token = x / kUnits, unit = x % kUnits;
            body(Tile<kFusedTokens, kWarpgroupRows>::unit(token, unit) * 16, token, at.channel + unit * 8);
        }
    }
    __device__ __forceinline__ void load_rows(RowTile& tile, const TileCoordinates& at, int count) const {
        const T* const from =
            static_cast<const T*>(a.v.data) + a.v.offset(cursor.batch, at.token, cursor.value_head);
        each_piece(at, [&](int place, int token, int row) {
            uint4 piece{};
            if (token < count && row < a.value_dim)
                piece = *reinterpret_cast<const uint4*>(from + token * a.v.token + row);
            *reinterpret_cast<uint4*>(tile.bytes + place) = piece;
        });
    }
    __device__ __forceinline__ void store_rows(const RowTile& tile, const TileCoordinates& at,
                                               int count) const {
        T* const to = static_cast<T*>(a.o.data) + a.o.offset(cursor.batch, at.token, cursor.value_head);
        each_piece(at, [&](int place, int token, int row) {
            if (token < count && row < a.value_dim)
                move_row(to + token * a.o.token + row, *reinterpret_cast<const uint4*>(tile.bytes + place));
        });
    }
};

}  // namespace cula::cuda::sm90
