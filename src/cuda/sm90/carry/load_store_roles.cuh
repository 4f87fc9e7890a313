// SPDX-License-Identifier: Apache-2.0
// The load/store warpgroup of the Hopper carry.
//   load role    three warps: chunk operands, q, k and v from global memory to the stages
//   store role   one warp: outputs from shared to global memory
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/carry/config.cuh"
#include "cuda/tile/store_row.cuh"

namespace cula::cuda::sm90 {

// Threads of the load role and of the store role. They share a warpgroup, hence a register count, and never
// synchronise with each other.
inline constexpr int kLoadThreads = 96, kStoreThreads = 32;
static_assert(kLoadThreads + kStoreThreads == kWarpgroupThreads);

// Copies rows without TMA: kRows tokens by 8 * kUnits columns of `from`, each unit of 16 bytes to byte offset
// place(token, unit) of `memory`, with zeros beyond `count` tokens and `columns` columns, and, where rows are
// writes, in those that are not a token's last. `wide`: rows can be read in pieces of 16 bytes (cp.async);
// otherwise a thread copies single elements. Called by all load threads.
template <class T, int kRows, int kUnits, class Tokens, class Place>
__device__ __forceinline__ void copy_rows(unsigned char* memory, const T* from, std::int64_t pitch,
                                          const Tokens& tokens, int count, int columns, bool wide,
                                          Place place) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % kWarpgroupThreads; i < kRows * kUnits; i += kLoadThreads) {
        const int token = i / kUnits, unit = i % kUnits;
        T* to = reinterpret_cast<T*>(memory + place(token, unit));
        const bool in = token < count && unit * 8 < columns && tokens.is_last(token);
        const std::int64_t at = tokens.token(token) * pitch + unit * 8;
        if (wide) {
            copy_async(shared_address(to), from + (in ? at : 0), in ? 16 : 0);
        } else {
#pragma unroll 1
            for (int e = 0; e < 8; ++e)
                to[e] = in && unit * 8 + e < columns ? from[at + e] : from_float<T>(0.0f);
        }
    }
}

// The load role. Issuing one copy takes a thread some 60 cycles, so lane 0 of each of the three warps issues
// a third of them:
//            chunk operands (bulk copies)   rows (TMA)
//   warp 0   K^, K+, Q~ and factors         k, with one decay per token
//   warp 1   T (inverse)                    values
//   warp 2   A (scores)                     q, with one decay per token
// kValuesOfTokens: v has rows of tokens, as q has; otherwise of writes, as k has.
template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kMaps, bool kValuesOfTokens = false>
struct LoadRole {
    using Shared = CarryShared<T, kKey, kReadsState, kPerChannel, kMaps>;
    using Stage = typename Shared::Stage;
    using F = typename Shared::F;
    using Operands = ChunkOperands<T, kKey, kPerChannel>;
    using Lower = Triangle<Stage::kRows>;
    using Squares = Panels<Stage::kRows>;
    static constexpr bool kReadsOperands = !kMakesScores<kReadsState, kPerChannel>;
    using Tokens = ChunkTokens<kSeveral<kReadsState, kPerChannel>>;
    using TokensOfValues = ChunkTokens<kValuesOfTokens>;
    static constexpr int kPanels = kKey / kTmaChannels;
    static constexpr int kTriangleBytes = Lower::kElements * static_cast<int>(sizeof(T));

    const DeviceArgs& a;
    const CarryMaps& maps;
    const CarryCursor<kKey, kReadsState, kPerChannel, kMaps>& cursor;
    const Operands* operands;            // of the segment's first chunk
    const std::int32_t* is_compensated;  // of the segment's first chunk
    const Shared& shared;
    int stages;
    bool per_chunk;  // CarryWaits::per_chunk: prepare still runs and publishes a flag per chunk

    // Chunk operands are the same for all CTAs of a cluster. Each CTA issues its share of the copies as
    // multicasts to all of them; operands.ready of each CTA expects the bytes of all shares.
    struct Part {
        const unsigned char* operands;
        std::uint32_t full;
        int cluster, rank = cluster_rank();

        __device__ __forceinline__ void copy(std::uint32_t to, int from, int bytes) const {
            if (cluster == 1)
                copy_bulk(to, operands + from, bytes, full);
            else
                copy_bulk(to, operands + from, bytes, full, (1u << cluster) - 1);
        }
        __device__ __forceinline__ void copy_run(std::uint32_t to, int from, int bytes) const {
            const int share = bytes >> (__ffs(cluster) - 1);  // cluster sizes are powers of two
            copy(to + rank * share, from + rank * share, share);
        }
        __device__ __forceinline__ void copy_triangle(std::uint32_t to, int from, int first) const {
#pragma unroll
            for (int panel = 0; panel < Lower::kBlocks; ++panel)
                if (((panel + first) & (cluster - 1)) == rank)
                    copy(to + (panel * Squares::kUnits + Squares::lower_begin(panel)) * 16,
                         from + Lower::block_begin(panel, panel) * 16,
                         (Squares::kUnits - Squares::lower_begin(panel)) * 16);
        }
    };

    static constexpr int kKeyBytes = sizeof(typename Stage::Rows), kTmaBytes = Shared::kRowTileBytes;
    static constexpr int kTileBytes = kPerChannel ? (1 + kReadsState + !kMaps) * kKeyBytes : 0;
    static constexpr int kFactorBytes = sizeof(F);
    static constexpr int kLowBytes = (kMaps ? 1 : 2) * kTriangleBytes;  // second stage of a compensated chunk
    static constexpr int kOperandBytes = kTileBytes + kFactorBytes + (kReadsState + !kMaps) * kTriangleBytes;

    // The warp's third of the chunk operands.
    __device__ __forceinline__ void copy_operands(int warp, const Part& part, std::uint32_t stage_at,
                                                  std::uint32_t factors_at) const {
        if (warp == 0) {
            if constexpr (kPerChannel) {
                if constexpr (kReadsState)
                    part.copy_run(stage_at + offsetof(Stage, keys.read), offsetof(Operands, k_decayed),
                                  2 * kKeyBytes);
                else
                    part.copy_run(stage_at + offsetof(Stage, keys.carry), offsetof(Operands, k_remaining),
                                  kKeyBytes);
                if constexpr (!kMaps)
                    part.copy_run(stage_at + offsetof(Stage, query), offsetof(Operands, q_decayed),
                                  kKeyBytes);
                part.copy_run(factors_at, offsetof(Operands, decay), kFactorBytes);
            } else {
                part.copy_run(factors_at, offsetof(Operands, k_factor), kFactorBytes);
            }
        } else if (warp == 1) {
            if constexpr (kReadsState)
                part.copy_triangle(stage_at + offsetof(Stage, inverse), offsetof(Operands, inverse), 0);
        } else if constexpr (!kMaps) {
            part.copy_triangle(stage_at + offsetof(Stage, scores), offsetof(Operands, scores), 1);
        }
    }
    __device__ __forceinline__ void copy_low(int warp, const Part& part, std::uint32_t stage_at) const {
        if (warp == 1)
            part.copy_triangle(stage_at + offsetof(Stage, inverse), offsetof(Operands, inverse_low), 0);
        else if (warp == 2 && !kMaps)
            part.copy_triangle(stage_at + offsetof(Stage, scores), offsetof(Operands, scores_low), 1);
    }

    // Rows of q, k and v that have tensor maps: the bytes of their TMA tiles; the warp's third of the loads.
    __device__ __forceinline__ int tma_bytes() const {
        const int tiles = kPerChannel ? 0 : kMaps ? 1 : 2;
        return (cursor.of_m ? 0 : shared.warpgroups * kTmaBytes) + tiles * kPanels * kTmaBytes;
    }
    __device__ __forceinline__ void load_by_tma(int warp, int chunk, std::uint32_t stage_at,
                                                std::uint32_t full) const {
        TileCoordinates at{0, a.by_group.divide(cursor.value_head), static_cast<int>(cursor.token(chunk)),
                           cursor.batch};
        const auto copy_panels = [&](int to, const CUtensorMap& map, auto of_tokens) {
#pragma unroll 1  // unrolled, the role's registers do not suffice
            for (int panel = 0; panel < kPanels; ++panel) {
                at.channel = panel * kTmaChannels;
                tma_load(stage_at + to + panel * kTmaBytes, map,
                         tile_of_tokens<of_tokens>(a, at, a.writes - 1), full);
            }
        };
        if (warp == 1) {
            if (cursor.of_m) return;
            at.head = cursor.value_head;
            for (int warpgroup = 0; warpgroup < shared.warpgroups; ++warpgroup) {
                at.channel = cursor.rows.first + warpgroup * kWarpgroupRows;
                tma_load(stage_at + Shared::kValues + warpgroup * Shared::kRowTileBytes, maps.v,
                         tile_of_tokens<kValuesOfTokens>(a, at, a.writes - 1), full);
            }
        } else if constexpr (!kPerChannel) {
            if (warp == 0)
                copy_panels(offsetof(Stage, keys.read), maps.k, std::false_type{});
            else if constexpr (!kMaps)
                copy_panels(offsetof(Stage, query), maps.q,
                            std::bool_constant<kSeveral<kReadsState, kPerChannel>>{});
        }
    }

    // Rows that there are to copy without TMA. A gradient that a backward call does not get is zero.
    __device__ __forceinline__ int count(const TokenRows& rows, int chunk) const {
        return kReadsOperands || rows.data ? cursor.count(chunk) : 0;
    }
    template <class Of>
    __device__ __forceinline__ void copy_key_rows(const TokenRows& rows, int chunk, unsigned char* to) const {
        const Of tokens(a.writes, cursor.token(chunk));
        const T* from = static_cast<const T*>(rows.data) +
                        rows.offset(cursor.batch, tokens.first_token, a.by_group.divide(cursor.value_head));
        copy_rows<T, Stage::kRows, kKey / 8>(
            to, from, rows.token, tokens, count(rows, chunk), a.key_dim, aligned<T>(rows, a.key_dim),
            [](int token, int unit) { return OperandTile<kKey, false>::unit(token, unit) * 16; });
    }

    // The rows of load_by_tma() without TMA, for any strides and alignment. Called by all load threads.
    __device__ __forceinline__ void copy_all_rows(int chunk, unsigned char* to) const {
        if constexpr (!kPerChannel) {
            if constexpr (!kMaps) copy_key_rows<Tokens>(a.q, chunk, to + offsetof(Stage, query));
            copy_key_rows<RowsAreTokens>(a.k, chunk, to + offsetof(Stage, keys.read));
        }
        if (cursor.of_m) return;
        const TokensOfValues tokens(a.writes, cursor.token(chunk));
        const T* from =
            static_cast<const T*>(a.v.data) + a.v.offset(cursor.batch, tokens.first_token, cursor.value_head);
#pragma unroll 1
        for (int warpgroup = 0; warpgroup < shared.warpgroups; ++warpgroup) {
            const int row = cursor.rows.first + warpgroup * kWarpgroupRows;
            copy_rows<T, Stage::kRows, kWarpgroupRows / 8>(
                to + Shared::kValues + warpgroup * Shared::kRowTileBytes, from + row, a.v.token, tokens,
                count(a.v, chunk), a.value_dim - row, aligned<T>(a.v, a.value_dim), [](int token, int unit) {
                    return Tile<Stage::kRows, kWarpgroupRows>::unit(token, unit) * 16;
                });
        }
    }

    __device__ __forceinline__ void run() const {
        const int warp = static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32;
        const bool issues = threadIdx.x % 32 == 0;
        const int rows_bytes = tma_bytes();
        CarryControl& control = shared.control;
        auto stage = RingPosition::of_writer();
        const auto ready = [&]() -> Mbarrier& { return control.operands.ready[stage.at]; };
#pragma unroll 1
        for (int chunk = 0; chunk < cursor.segment.chunks; ++chunk) {
            const std::int64_t of_chunk = static_cast<std::int64_t>(chunk) * a.value_heads;
            // The flag is loaded before the wait for a free stage, which hides the load's latency unless the
            // flag itself has to be polled below.
            std::int32_t prepared = 0;
            if (kReadsOperands && per_chunk)
                prepared = published(is_compensated + of_chunk);
            else if (kReadsState)
                prepared = written_before(is_compensated + of_chunk);
            control.operands.free[stage.at].wait(stage.parity);
            if (kReadsOperands && per_chunk) {
                while (prepared == kUnprepared) prepared = published(is_compensated + of_chunk);
                fence_async_global();
            }
            const bool compensated = kReadsState && prepared;
            auto* const to = reinterpret_cast<unsigned char*>(&shared.stage(stage.at));
            // A partial last chunk of a packed sequence is not loaded by TMA: the tile would bring the next
            // sequence's tokens instead of zeros.
            const bool by_tma = maps.inputs && (!a.cu_seqlens || cursor.count(chunk) == Stage::kRows);
            if (issues) {
                if (warp == 0) {
                    ready().arrive_expecting((kReadsOperands ? kOperandBytes : 0) +
                                             (by_tma ? rows_bytes : 0));
                    control.compensated[stage.at] = compensated;
                }
                if constexpr (kReadsOperands)
                    copy_operands(warp,
                                  {reinterpret_cast<const unsigned char*>(operands + of_chunk),
                                   ready().address(), cursor.p.cluster},
                                  shared_address(to), shared_address(&shared.factors(stage.at)));
                if (by_tma) load_by_tma(warp, chunk, shared_address(to), ready().address());
            }
            if (!by_tma) {
                copy_all_rows(chunk, to);
                commit_copies();
                wait_copies<0>();
                if constexpr (!kPerChannel) fence_async_proxy();  // wgmma reads q and k
            }
            ready().arrive();
            stage.next(stages);
            if constexpr (kReadsState) {
                if (!compensated) continue;
                control.operands.free[stage.at].wait(stage.parity);
                if (issues) {
                    if (warp == 0) ready().arrive_expecting(kLowBytes);
                    copy_low(warp,
                             {reinterpret_cast<const unsigned char*>(operands + of_chunk), ready().address(),
                              cursor.p.cluster},
                             shared_address(&shared.stage(stage.at)));
                }
                ready().arrive();
                stage.next(stages);
            }
        }
    }
};

// The store role: writes the output tile of each state warpgroup, [tokens x 64 value rows] as transposed by
// the state role, from shared memory to global memory.
template <class T, int kKey, bool kReadsState, bool kPerChannel>
struct StoreRole {
    using Shared = CarryShared<T, kKey, kReadsState, kPerChannel, false>;
    using RowTile = typename Shared::RowTile;
    static constexpr int kRows = kTokens<kKey>, kUnits = kWarpgroupRows / 8;
    static constexpr bool kOfTokens = kSeveral<kReadsState, kPerChannel>;

    const DeviceArgs& a;
    const CUtensorMap& map;
    const CarryCursor<kKey, kReadsState, kPerChannel, false>& cursor;
    const Shared& shared;

    __device__ __forceinline__ void run() const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
        for (int chunk = 0; chunk < cursor.segment.chunks; ++chunk) {
            const int count = cursor.count(chunk);
#pragma unroll 1
            for (int warpgroup = 0; warpgroup < shared.warpgroups; ++warpgroup) {
                const int row = cursor.rows.first + warpgroup * kWarpgroupRows;
                const unsigned char* tile = shared.outs[warpgroup].bytes;
                shared.control.out.ready[warpgroup].wait(chunk & 1);
                if (!a.cu_seqlens || count == kRows) {
                    if (lane == 0) {
                        const TileCoordinates at{row, cursor.value_head,
                                                 static_cast<int>(cursor.token(chunk)), cursor.batch};
                        // A store that begins before its tensor is an illegal instruction on an H100. So what
                        // is stored begins n - 1 rows into the tile, with the last row of its first token,
                        // and ends n - 1 rows behind the tile. Of each token the first of these rows is in
                        // the tensor.
                        const int skipped = kOfTokens ? (a.writes - 1) * RowTile::kRowBytes : 0;
                        tma_store(map, tile_of_tokens<kOfTokens>(a, at, 0), shared_address(tile) + skipped);
                        tma_wait_stores_read();
                    }
                    __syncwarp();
                } else {
                    store_rows(tile, chunk, count, row, lane);
                }
                shared.control.out.free[warpgroup].arrive();
            }
        }
    }

    // A partial last chunk of a packed sequence, whose TMA tile would overwrite the next sequence's outputs.
    __device__ __forceinline__ void store_rows(const unsigned char* tile, int chunk, int count, int row,
                                               int lane) const {
        const ChunkTokens<kOfTokens> tokens(a.writes, cursor.token(chunk));
        T* const to =
            static_cast<T*>(a.o.data) + a.o.offset(cursor.batch, tokens.first_token, cursor.value_head) + row;
#pragma unroll 1
        for (int i = lane; i < count * kUnits; i += kStoreThreads) {
            const int token = i / kUnits, unit = i % kUnits;
            if (row + unit * 8 < a.value_dim && tokens.is_last(token))
                move_row(to + tokens.token(token) * a.o.token + unit * 8,
                         *reinterpret_cast<const uint4*>(
                             tile + Tile<kRows, kWarpgroupRows>::unit(token, unit) * 16));
        }
    }
};

}  // namespace cula::cuda::sm90
