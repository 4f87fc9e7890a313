// SPDX-License-Identifier: Apache-2.0
// What the walks of a backward pass on Hopper share with each other, and with the carry (sm90/carry).
#pragma once

#include "cuda/backward/walk_params.cuh"
#include "cuda/sm90/carry/config.cuh"
#include "cuda/sm90/carry/load_store_roles.cuh"
#include "cuda/sm90/carry/state_role.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::sm90 {

using backward::CarrySlice;
using backward::ReturnSlice;
using backward::WalkParams;

// What does a chunk hand back? A seam (cuda/rule.h).
template <Update kUpdate>
struct ReturnRule {
    static_assert(kIsKnown<kUpdate>, "walks of sm90: what does a chunk hand back under this update rule?");
};
template <>
struct ReturnRule<Update::kAdditive> {
    static constexpr bool kSolves = false;  // dV = dU
};
template <>
struct ReturnRule<Update::kDelta> {
    static constexpr bool kSolves = true;  // dV = T^T dU
};

// The tensor maps of both walks (`v` of the return is dO), and how many stages each has.
struct WalkTiles {
    CarryMaps forwards, backwards;
    int stages_forwards = kMaxStages, stages_backwards = kMaxStages;
};

// Of a carry beside a return. It reads and writes less than the return does. With more stages it would take
// more of the memory's bandwidth and end long before the return; from then on its multiprocessors have only
// CTAs that had to wait, if there are any.
inline constexpr int kStagesBesideReturn = 2;

// The CTAs of either walk have the stages of a carry: the carry here those of a map, without A and Q~, the
// return all of them.
inline constexpr int kMaxWalkThreads = (kMaxStateWarpgroups + 1) * kWarpgroupThreads;
inline constexpr int kWalkLoadRegisters = kLoadRegisters<false>, kWalkStateRegisters = kStateRegisters<false>;

// Where a warp of the carry's state role puts the state of its slice together, in shared memory, from which a
// bulk store takes it to global memory while the warp goes on.
template <class T, int kKey>
struct StateBuffer {
    static constexpr int kBytes = kKey * backward::kSliceValues * static_cast<int>(sizeof(T));

    std::uint32_t address;

    // Called by the whole warp, with the state as A operands.
    __device__ __forceinline__ void store(T* to, const Packed (&packed)[kKey / 16]) const {
        const std::uint32_t lane = threadIdx.x % 32;
        wait();
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step)
            store_matrices(address + step * backward::kSavedBlock + lane * 16, packed[step]);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
            store_bulk(to, address, kBytes);
            tma_commit_stores();
        }
    }
    // Until the buffer has been read.
    __device__ __forceinline__ void wait() const {
        if (threadIdx.x % 32 == 0) tma_wait_stores_read<0>();
    }
};

// Where a warp of the return's state role puts dV of a chunk and Z of the next together, for the store role.
// Without a solve there is room for Z alone: dV would cost a stage.
template <class T, int kKey, bool kSolves>
struct alignas(kChunkAlignment) ReturnBuffer {
    [[no_unique_address]] OnlyIf<kSolves, T[kTokens<kKey> * backward::kSliceValues], 0> d_values;
    T d_state[kKey * backward::kSliceValues];
};

// Whether the store role of a return stores dV; the state role stores that of another dtype than T.
template <class T>
__device__ __forceinline__ bool stores_values(const TokenRows& d_v) {
    return d_v.data && d_v.dtype == kDtype<T>;
}
// Whether it stores anything: slices, or dV.
template <class T, int kKey>
__device__ __forceinline__ bool stores_by_role(const WalkParams<T, kKey>& p) {
    return p.saved.returned || stores_values<T>(p.d.d_v);
}

// The load role of a walk: as that of the carry, in either direction.
template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kReturns>
struct WalkLoadRole
    : LoadRole<T, kKey, kReadsState, kPerChannel, !kReturns, kReturns && kSeveral<kReadsState, kPerChannel>> {
    using Base = LoadRole<T, kKey, kReadsState, kPerChannel, !kReturns,
                          kReturns && kSeveral<kReadsState, kPerChannel>>;
    using Base::a, Base::cursor, Base::maps, Base::operands, Base::shared, Base::stages;
    using typename Base::Shared, typename Base::Stage, typename Base::Tokens;

    // Rows that TMA does not load. dO may be absent, which is zero, or have another dtype.
    __device__ __forceinline__ void copy_rows_of(int chunk, unsigned char* to) const {
        if (!kReturns || (a.v.data && a.v.dtype == kDtype<T>)) return Base::copy_all_rows(chunk, to);
        if constexpr (!kPerChannel) {
            Base::template copy_key_rows<Tokens>(a.q, chunk, to + offsetof(Stage, query));
            Base::template copy_key_rows<RowsAreTokens>(a.k, chunk, to + offsetof(Stage, keys.read));
        }
        const int count = a.v.data ? cursor.count(chunk) : 0, columns = shared.warpgroups * kWarpgroupRows;
        const Tokens tokens(a.writes, cursor.token(chunk));
        const std::int64_t from = a.v.offset(cursor.batch, tokens.first_token, cursor.value_head);
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x) % kWarpgroupThreads; i < Stage::kRows * columns;
             i += kLoadThreads) {
            const int token = i / columns, column = i % columns, row = cursor.rows.first + column,
                      place = Tile<Stage::kRows, kWarpgroupRows>::unit(token, column % kWarpgroupRows / 8);
            T* const rows =
                reinterpret_cast<T*>(to + Shared::kValues + column / kWarpgroupRows * Shared::kRowTileBytes);
            const bool in = token < count && row < a.value_dim && tokens.is_last(token);
            rows[place * 8 + column % 8] = from_float<T>(
                in ? load_float(a.v.data, a.v.dtype, from + tokens.token(token) * a.v.token + row) : 0.0f);
        }
    }

    __device__ __forceinline__ void run() const {
        const int warp = static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32;
        const bool issues = threadIdx.x % 32 == 0;
        const int rows_bytes = Base::tma_bytes(), chunks = cursor.segment.chunks;
        CarryControl& control = shared.control;
        auto stage = RingPosition::of_writer();
        const auto ready = [&]() -> Mbarrier& { return control.operands.ready[stage.at]; };
#pragma unroll 1
        for (int step = 0; step < chunks; ++step) {
            const int chunk = kReturns ? chunks - 1 - step : step;
            const std::int64_t of_chunk = static_cast<std::int64_t>(chunk) * a.value_heads;
            const bool compensated = kReadsState && written_before(Base::is_compensated + of_chunk);
            control.operands.free[stage.at].wait(stage.parity);
            auto* const to = reinterpret_cast<unsigned char*>(&shared.stage(stage.at));
            // A partial last chunk of a packed sequence is not loaded by TMA: the tile would bring the next
            // sequence's tokens instead of zeros.
            const bool by_tma = maps.inputs && (!a.cu_seqlens || cursor.count(chunk) == Stage::kRows);
            if (issues) {
                if (warp == 0) {
                    ready().arrive_expecting(Base::kOperandBytes + (by_tma ? rows_bytes : 0));
                    control.compensated[stage.at] = compensated;
                }
                Base::copy_operands(warp, part(of_chunk, ready()), shared_address(to),
                                    shared_address(&shared.factors(stage.at)));
                if (by_tma) Base::load_by_tma(warp, chunk, shared_address(to), ready().address());
            }
            if (!by_tma) {
                copy_rows_of(chunk, to);
                commit_copies();
                wait_copies<0>();
                fence_async_proxy();
            }
            ready().arrive();
            stage.next(stages);
            if constexpr (kReadsState) {
                if (!compensated) continue;
                control.operands.free[stage.at].wait(stage.parity);
                if (issues) {
                    if (warp == 0) ready().arrive_expecting(Base::kLowBytes);
                    Base::copy_low(warp, part(of_chunk, ready()), shared_address(&shared.stage(stage.at)));
                }
                ready().arrive();
                stage.next(stages);
            }
        }
    }

private:
    __device__ __forceinline__ typename Base::Part part(std::int64_t of_chunk, Mbarrier& ready) const {
        return {reinterpret_cast<const unsigned char*>(operands + of_chunk), ready.address(), 1};
    }
};

}  // namespace cula::cuda::sm90
