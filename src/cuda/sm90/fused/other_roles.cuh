// SPDX-License-Identifier: Apache-2.0
// The roles of the fused prefill's last warpgroup: load and store, a warp each, and solve, two.
//   load role    q, k, gates and beta from global memory to the stages
//   store role   outputs to global memory, then values of a later chunk into the tile that they leave
//   solve role   the inverse of a chunk; in pairs it sends the chunk to the peer, too
#pragma once

#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/fused/join.cuh"
#include "cuda/sm90/fused/operand_role.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/store_row.cuh"

namespace cula::cuda::sm90 {

using chunked::invert_diagonals;
using chunked::kMostSquares;

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

// The store role: stores each chunk's outputs from its tile, then loads a later chunk's values into the tile.
template <class T, int kKey, class Form>
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
                for (int warpgroup = 0; warpgroup < Form::kRowWarpgroups; ++warpgroup)
                    load_rows(Form::tile(shared, tile, warpgroup), place(i, warpgroup), fused.count(i));
            } else if (lane == 0) {
                ready.expect(Form::kRowWarpgroups * static_cast<int>(sizeof(TmaTile<kFusedTokens>)));
                for (int warpgroup = 0; warpgroup < Form::kRowWarpgroups; ++warpgroup)
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
            for (int warpgroup = 0; warpgroup < Form::kRowWarpgroups; ++warpgroup) {
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
        // Join::publish_end() says that they are done.
        if (Form::kJoins && lane == 0) tma_wait_stores();
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
            if (token < count && row < cursor.rows.end)
                move_row(to + token * a.o.token + row, *reinterpret_cast<const uint4*>(tile.bytes + place));
        });
    }
};

// The solve role: T = (I + diag(beta) L)^-1 diag(beta). A CTA has kSolveWarps solve warps, and each takes
// every kSolveWarps-th chunk that the CTA prepares. In the paired form the solve warp also sends the chunk to
// the peer.
template <class T, int kKey, class Form>
struct FusedSolveRole {
    using Shared = FusedShared<kKey, Form>;
    using Stage = typename Shared::Stage;

    const SegmentCursor<kKey, false>& cursor;
    Shared& shared;
    int number;  // of the solve warp

    // The first chunks of a sequence are always compensated. In a sequence that has no other chunks, rounding
    // the inverse, U and the scores to one word is a quarter of the error, and most of the time is that of a
    // launch.
    static constexpr int kCompensatedChunks = 2;

    // Whether the chunk must be compensated: the squares of some row of the overlaps sum to more than
    // kMostSquares (chunked/solve.cuh), or to NaN. A lane has a row.
    static __device__ __forceinline__ bool compensated(const Square<kFusedTokens>& m, int row) {
        float squares = 0.0f;
#pragma unroll(Form::kRowUnroll)
        for (int column = 0; column < kFusedTokens; column += 4) {
            float x[4];
            load4(x, m.at(0, 0, row, column));
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (column + e < row) squares += x[e] * x[e];
        }
        return __any_sync(0xffffffffu, !(squares <= kMostSquares));
    }

    // Writes the inverse of a chunk. kBoth: both words of it (a compensated chunk), with products of 22 bits
    // instead of 11.
    template <bool kBoth>
    __device__ __forceinline__ void solve(int stage) const {
        const int lane = lane_anew();
        FusedFactors<kKey>& factors = shared.stages[stage].factors;
        typename Form::Solved& solved = shared.stages[stage].solved;
        Square<kFusedTokens>& m = Form::overlaps(shared, stage, number);
        // Multiplies the columns of a block of the inverse by beta and stores its high word; emit_low()
        // stores the low word.
        const auto emit = [&](float(&x)[2][4], int row, int column, Block& low) {
            const int lane = lane_anew();
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const auto scale =
                    *reinterpret_cast<const float2*>(factors.beta + column + 8 * tile + lane % 4 * 2);
#pragma unroll
                for (int e = 0; e < 4; ++e) x[tile][e] *= e % 2 ? scale.y : scale.x;
            }
            Block rounded;
            pack<T>(rounded, x);
            if (kBoth) take_low_words<T>(low, rounded, x);
            solved.inverse.store_block(rounded[0], row, column, lane);
        };
        const auto emit_low = [&](const Block& low, int row, int column) {
            if (kBoth) solved.inverse_low.store_block(low[0], row, column, lane_anew());
        };
        invert_diagonals(m, lane);
        __syncwarp();
        Form::template write_inverse<kBoth>(solved, m, lane, emit, emit_low);
        if (lane == 0) factors.compensated = kBoth;
        fence_async_proxy();
        Form::signal_overlaps_free(shared, number);
        shared.operands_ready[stage].arrive();
    }

    __device__ __forceinline__ void run() const {
        const int chunks = FusedCursor<Form>(cursor).chunks;
        unsigned n = static_cast<unsigned>(number);
        typename Form::Sender sender{};
        const auto next = [&] {
            const int i = static_cast<int>(n) * Form::kPeers + Form::rank(), stage = n % Shared::kStages;
            if (i >= chunks) return Found::kNone;
            shared.scores_ready[stage].wait(n / Shared::kStages & 1);
            sender.send_early(shared, n);
            return (i < kCompensatedChunks && cursor.starts_sequence) ||
                           compensated(Form::overlaps(shared, stage, number), lane_anew())
                       ? Found::kOther
                       : Found::kPlain;
        };
        const auto take = [&](auto both) {
            solve<decltype(both)::value>(n % Shared::kStages);
            sender.send_rest(shared);
            n += kSolveWarps;
        };
        each_chunk(next, [&] { take(std::false_type{}); }, [&] { take(std::true_type{}); });
    }
};

}  // namespace cula::cuda::sm90
