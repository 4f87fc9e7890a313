// SPDX-License-Identifier: Apache-2.0
// The forms of the fused prefill, and everything in which they differ.
//   Unpaired   a CTA has 128 value rows of a head, two state warpgroups, and prepares every chunk.
//   Paired     a CTA has 64 value rows, one state warpgroup, and is one of a cluster of two, which together
//              have 128 value rows of a head. Each of the two prepares every other chunk and sends its
//              operands to its peer.
//   PairedWithMap   as Paired, with a second state warpgroup for 64 rows of the map of the CTA's segment.
// The kernel and its roles take a form as a template parameter. Functions get the CTA's FusedShared.
#pragma once

#include "cuda/chunked/cursor.cuh"
#include "cuda/chunked/solve.cuh"
#include "cuda/pipe/barriers.cuh"
#include "cuda/pipe/tensor_maps.h"
#include "cuda/ptx/wgmma.cuh"

namespace cula::cuda::sm90 {

using chunked::CarryParams, chunked::each_pair, chunked::invert_lower, chunked::kBlock, chunked::lane_anew,
    chunked::load_block, chunked::own_segment, chunked::RowWindow, chunked::Schedule, chunked::Segment,
    chunked::segment_number, chunked::SegmentCursor, chunked::Square;

inline constexpr int kFusedTokens = 32, kSolveWarps = 2;

// Registers of a thread by role (setmaxnreg). Each thread starts with 96.
struct FusedRegisters {
    int state, operand, others;
};

// A square of 16-bit elements in the 64-byte swizzle: scores, the inverse, and their low words. The 16 x 16
// block above the diagonal is zero.
struct alignas(512) SquareTile {
    std::uint32_t word[kFusedTokens * kFusedTokens / 2];

    // Where unit `unit` (16 bytes) of a row stands.
    static constexpr CULA_HOST_DEVICE int unit(int row, int unit) {
        return row * 4 + (unit ^ (row >> 1 & 3));
    }
    // Zeros the block above the diagonal. Each lane of one warp zeros a unit.
    __device__ __forceinline__ void clear_above(int lane) {
        reinterpret_cast<uint4*>(word)[unit(lane / 2, 2 + lane % 2)] = uint4{};
    }
    // Stores a 16 x 16 block, as packed accumulators, at (row, column).
    __device__ __forceinline__ void store_block(const std::uint32_t (&block)[4], int row, int column,
                                                int lane) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            word[unit(row + lane / 4 + pair % 2 * 8, column / 8 + pair / 2) * 4 + lane % 4] = block[pair];
    }
};

// Log2 decays of out-of-range pairs (out_of_range.cuh), both channels: x[slot][token] counts from a common
// origin to each token, and x[slot][kBegin] to the chunk's begin. The origin is the chunk's middle for
// predicted pairs, else its begin; only differences are used. The padding of a row keeps lanes of four slots
// and tokens free of bank conflicts.
struct OutOfRangeDecays {
    static constexpr int kSlots = 16, kBegin = kFusedTokens, kRow = kFusedTokens + 4;
    float2 x[kSlots][kRow];
    std::int32_t pair[kSlots];
};

struct Unpaired {
    static constexpr int kStateWarpgroups = 2, kOperandWarpgroups = 2;
    static constexpr int kRowWarpgroups = kStateWarpgroups;  // those with value rows
    static constexpr int kRowWarps = kRowWarpgroups * kWarpgroupWarps;
    static constexpr int kPeers = 1;  // CTAs that share the preparation of a head's chunks
    static constexpr int kStages = 5, kPeerStages = 0;
    static constexpr int kTiles = kStages;  // of values, which outputs replace
    static constexpr int kTails = kStages;
    // Values and outputs are part of a stage: the store role frees it, and operands_free says that the
    // outputs are there.
    static constexpr bool kTilesInStages = true;
    static constexpr bool kJoins = false;
    // One loop of the operand role for each half of a chunk, as the instruction cache has room for both.
    static constexpr bool kLoopPerHalf = true;
    static constexpr int kNormUnroll = 8, kRowUnroll = 8;
    static constexpr int kFreeArrivals = kStateWarpgroups * kWarpgroupThreads;  // of operands_free
    template <bool kMayLeaveRange>
    static constexpr FusedRegisters kRegisters{168, 48, 48};

    // The place of chunk i's tail is written again by chunk i + kTails. That must belong to the operand
    // warpgroup of chunk i + 1, the one that has read the tail; and a chunk's stage is its place.
    static_assert(kTails == kStages && (kTails - 1) % kOperandWarpgroups == 0);

    enum class NamedBarrier : int {
        kCta = 0,           // __syncthreads()
        kOperandRole = 1,   // and 2: one operand warpgroup
        kHandOver = 3,      // and 4: to an operand warpgroup, from the one with the chunk before
        kOperandRoles = 5,  // all operand warpgroups
    };
    static_assert(static_cast<int>(NamedBarrier::kHandOver) ==
                  static_cast<int>(NamedBarrier::kOperandRole) + kOperandWarpgroups);

    // The end of a stage.
    struct Solved {
        SquareTile inverse, inverse_low, scores_low;
        TmaTile<kFusedTokens> values[kStateWarpgroups];
    };
    struct Tiles {};  // of values, besides those in stages
    // Overlaps that each solve warp works on.
    struct Own {
        Mbarrier overlaps_free[kSolveWarps];
        Square<kFusedTokens> overlaps[kSolveWarps];
    };

    template <class Shared>
    static __device__ __forceinline__ void init_barriers(Shared& shared) {
        for (int i = 0; i < kSolveWarps; ++i) shared.own.overlaps_free[i].init(32);
    }
    static __device__ __forceinline__ int rank() { return 0; }
    // Synchronises those whose barriers the CTA uses, at the kernel's start and at its end.
    static __device__ __forceinline__ void sync_start() { __syncthreads(); }
    static __device__ __forceinline__ void sync_end() {}

    template <class Shared>
    static __device__ __forceinline__ TmaTile<kFusedTokens>& tile(Shared& shared, int i, int warpgroup) {
        return shared.stages[i].solved.values[warpgroup];
    }
    template <class Shared>
    static __device__ __forceinline__ void wait_for_outputs(Shared& shared, const RingPosition& tile) {
        shared.operands_free[tile.at].wait(tile.parity);
    }

    // Tails. The next chunk belongs to the CTA's next operand warpgroup, and a named barrier hands over. It
    // says that the tail of chunk i is in shared memory, and that the overlaps of chunk i - 2 are solved. The
    // latter keeps waits for overlaps_free in order, with any number of warpgroups. Otherwise a waiter could
    // mistake phase n - 2 for phase n: an mbarrier has one parity bit.
    // Each receiving warpgroup has a barrier of its own: it may be late, when the warpgroup that handed over
    // to it already takes over its own next chunk.
    static __device__ __forceinline__ NamedBarrier hand_over(int i) {
        return nth(NamedBarrier::kHandOver, i % kOperandWarpgroups);
    }
    template <class Shared>
    static __device__ __forceinline__ void store_tail(Shared& shared, int i, int pair, float2 own, bool) {
        *reinterpret_cast<float2*>(shared.tails[i % kStages] + 2 * pair) = own;
    }
    // Called by all threads of the operand warpgroup, before tail_before().
    static __device__ __forceinline__ void take_over(int i) {
        if (i > 0) named_barrier_sync<2 * kWarpgroupThreads>(hand_over(i));
    }
    template <class Shared>
    static __device__ __forceinline__ float2 tail_before(Shared& shared, int i, int pair) {
        return *reinterpret_cast<const float2*>(shared.tails[(i - 1) % kStages] + 2 * pair);
    }
    // The overlaps of chunk i, once they may be overwritten. Hands over to chunk i + 1.
    template <class Shared>
    static __device__ __forceinline__ Square<kFusedTokens>& free_overlaps(Shared& shared, int, int i,
                                                                          bool last) {
        const int solver = i % kSolveWarps;
        shared.own.overlaps_free[solver].wait(i / kSolveWarps & 1 ^ 1);
        if (!last) named_barrier_arrive<2 * kWarpgroupThreads>(hand_over(i + 1));
        return shared.own.overlaps[solver];
    }
    template <class Shared>
    static __device__ __forceinline__ Square<kFusedTokens>& overlaps(Shared& shared, int, int solver) {
        return shared.own.overlaps[solver];
    }
    template <class Shared>
    static __device__ __forceinline__ void signal_overlaps_free(Shared& shared, int solver) {
        shared.own.overlaps_free[solver].arrive();
    }

    // Writes the blocks of the inverse by emit(block, row, column, low words) and emit_low(low words, row,
    // column), from overlaps whose diagonal blocks are inverted.
    template <bool kBoth, class Solved, class Emit, class EmitLow>
    static __device__ __forceinline__ void write_inverse(Solved&, Square<kFusedTokens>& overlaps, int lane,
                                                         const Emit& emit, const EmitLow& emit_low) {
        float x[2][4];
        std::uint32_t low[1][4];
        const auto emit_both = [&](int row, int column) {
            emit(x, row, column, low);
            emit_low(low, row, column);
        };
        load_block(x, overlaps, 0, 0, lane);
        emit_both(0, 0);
        load_block(x, overlaps, 16, 16, lane);
        emit_both(16, 16);
        invert_lower<kBoth>(overlaps, 0, x, lane);
        emit_both(16, 0);
    }

    struct Sender {  // Paired::Sender; there is no peer
        template <class Shared>
        __device__ __forceinline__ void send_early(Shared&, unsigned) {}
        template <class Shared>
        __device__ __forceinline__ void send_rest(Shared&) const {}
    };

    // Where a chunk stands for the state role: its stage and its tile of values, and the parities of their
    // barriers.
    struct Place {
        RingPosition tile;

        __device__ __forceinline__ int stage() const { return tile.at; }
        __device__ __forceinline__ int parity() const { return tile.parity; }
        __device__ __forceinline__ void next() { tile.next(kTiles); }
        // Signals that this warpgroup no longer reads the stage.
        template <class Shared>
        __device__ __forceinline__ void free(Shared& shared) const {
            shared.operands_free[tile.at].arrive();
        }
    };
    template <class Shared>
    static __device__ __forceinline__ void signal_outputs_ready(Shared&, const Place&) {}
    static __device__ __forceinline__ std::uint32_t stage_address(std::uint32_t at) { return at; }
};

struct Paired {
    static constexpr int kStateWarpgroups = 1, kRowWarpgroups = 1;
    static constexpr int kRowWarps = kRowWarpgroups * kWarpgroupWarps;
    static constexpr int kOperandWarpgroups = 3;  // as many as the state role leaves registers for
    static constexpr int kPeers = 2;
    static constexpr int kStages = 4, kPeerStages = 2;  // for own chunks, and for those that the peer sends
    static constexpr int kTiles = 3;
    // kStages + 1 places make it safe to send a tail without asking for a free place. A place is written
    // again kTails of the sender's chunks later. The stage of that later chunk held the sender's chunk that
    // follows the tail's, and it is free only once both CTAs have multiplied that chunk. They take chunks in
    // order, so they have also multiplied the receiver's chunk in between, which is the one that read the
    // tail.
    static constexpr int kTails = kStages + 1;
    static constexpr bool kTilesInStages = false;
    static constexpr bool kJoins = false;  // whether segments join (PairedWithMap)
    static constexpr bool kLoopPerHalf = false;
    static constexpr int kNormUnroll = 2, kRowUnroll = 1;
    // Of the peer one thread of each warp arrives.
    static constexpr int kFreeArrivals = kStateWarpgroups * kWarpgroupThreads + kWarpgroupWarps;
    template <bool kMayLeaveRange>
    static constexpr FusedRegisters kRegisters =
        kMayLeaveRange ? FusedRegisters{176, 80, 64} : FusedRegisters{208, 64, 80};

    enum class NamedBarrier : int {
        kCta = 0,           // __syncthreads()
        kOperandRole = 1,   // to 3: one operand warpgroup
        kOperandRoles = 4,  // all operand warpgroups
        kJoin = 5,          // to 7: the warpgroups that join segments (join.cuh)
    };

    // The end of a stage. Overlaps share the place of the inverse, which replaces them; before them, decays
    // of out-of-range pairs do.
    struct Solved {
        union {
            struct {
                SquareTile inverse, inverse_low;
            };
            Square<kFusedTokens> overlaps;
            OutOfRangeDecays decays;
        };
        SquareTile scores_low;
    };
    static_assert(sizeof(OutOfRangeDecays) <= sizeof(Square<kFusedTokens>));
    struct Tiles {
        TmaTile<kFusedTokens> tile[kTiles];
    };
    struct Own {
        Mbarrier out_ready[kTiles], tail_ready[kTails];  // tail_ready: of a tail that the peer sends
    };

    template <class Shared>
    static __device__ __forceinline__ void init_barriers(Shared& shared) {
        for (int i = 0; i < kPeerStages; ++i) shared.operands_ready[kStages + i].init(1);
        for (int i = 0; i < kTiles; ++i) shared.own.out_ready[i].init(kWarpgroupThreads);
        for (int i = 0; i < kTails; ++i) shared.own.tail_ready[i].init(1);
    }
    static __device__ __forceinline__ int rank() { return cluster_rank(); }
    static __device__ __forceinline__ void sync_start() { sync_cluster(); }
    // A CTA must not end while its peer may still signal its barriers or copy to it. Segments that join go on
    // behind it: what any thread has stored is there for all of the cluster (join.cuh).
    static __device__ __forceinline__ void sync_end() {
        __syncwarp();
        sync_cluster();
    }

    template <class Shared>
    static __device__ __forceinline__ TmaTile<kFusedTokens>& tile(Shared& shared, int i, int warpgroup) {
        return shared.tiles.tile[i + warpgroup];
    }
    template <class Shared>
    static __device__ __forceinline__ void wait_for_outputs(Shared& shared, const RingPosition& tile) {
        shared.own.out_ready[tile.at].wait(tile.parity);
    }

    // Tails. The next chunk belongs to the peer: store_tail() stores the tail of the thread's channels in the
    // peer's shared memory, tail_before() waits for that of the chunk before.
    template <class Shared>
    static __device__ __forceinline__ void store_tail(Shared& shared, int i, int pair, float2 own,
                                                      bool last) {
        if (last) return;
        const int place = i / 2 % kTails;
        send_to(shared_address(shared.tails[place] + 2 * pair), own, shared.own.tail_ready[place].address(),
                cluster_rank() ^ 1);
    }
    static __device__ __forceinline__ void take_over(int) {}
    template <class Shared>
    static __device__ __forceinline__ float2 tail_before(Shared& shared, int i, int pair) {
        const int use = (i - 1) / 2, place = use % kTails;
        if (pair == 0)
            shared.own.tail_ready[place].arrive_expecting(static_cast<int>(sizeof(shared.tails[0])));
        shared.own.tail_ready[place].wait(use / kTails & 1);
        return *reinterpret_cast<const float2*>(shared.tails[place] + 2 * pair);
    }
    template <class Shared>
    static __device__ __forceinline__ Square<kFusedTokens>& free_overlaps(Shared& shared, int stage, int,
                                                                          bool) {
        return shared.stages[stage].solved.overlaps;
    }
    template <class Shared>
    static __device__ __forceinline__ Square<kFusedTokens>& overlaps(Shared& shared, int stage, int) {
        return shared.stages[stage].solved.overlaps;
    }
    template <class Shared>
    static __device__ __forceinline__ void signal_overlaps_free(Shared&, int) {}

    // The inverse overwrites the overlaps that it is computed from. Its first 16 rows and the lower left
    // block are read before anything is written; rows from 16 on of the overlaps lie behind the high words.
    // Low words would overwrite them, so these are written last.
    template <bool kBoth, class Emit, class EmitLow>
    static __device__ __forceinline__ void write_inverse(Solved& to, Square<kFusedTokens>& overlaps, int lane,
                                                         const Emit& emit, const EmitLow& emit_low) {
        float x[2][4], joining[2][4];
        std::uint32_t low[1][4], upper_low[1][4], joining_low[1][4];
        invert_lower<kBoth>(overlaps, 0, joining, lane);
        load_block(x, overlaps, 0, 0, lane);
        __syncwarp();
        emit(joining, 16, 0, joining_low);
        emit(x, 0, 0, upper_low);
        load_block(x, overlaps, 16, 16, lane);
        __syncwarp();
        emit(x, 16, 16, low);
        emit_low(upper_low, 0, 0);
        emit_low(joining_low, 16, 0);
        emit_low(low, 16, 16);
        to.inverse.clear_above(lane_anew());
        if (kBoth) to.inverse_low.clear_above(lane_anew());
    }

    // The copy of the CTA's n-th chunk to the peer's stage place(), by lane 0 of its solve warp. The place is
    // free when both CTAs have multiplied the chunk that it held, the CTA's chunk kPeerStages before;
    // operands_free of that chunk's own stage says so.
    //   send_early   before the chunk is solved: operands and scores (26 KiB), if the place is free by then
    //   send_rest    after it is solved: factors and inverse (4 KiB), what was not sent early, and low words
    //                of a compensated chunk (5 KiB more)
    class Sender {
    public:
        template <class Shared>
        __device__ __forceinline__ void send_early(Shared& shared, unsigned chunk) {
            constexpr int kEarly = offsetof(typename Shared::Stage, factors);
            n = chunk;
            if (lane_anew() != 0) return;
            early = n < kPeerStages || place_free(shared).has_ended(parity());
            if (!early) return;
            shared.operands_ready[place()].expect_at(kEarly, peer);
            copy(shared, 0, kEarly);
        }
        template <class Shared>
        __device__ __forceinline__ void send_rest(Shared& shared) const {
            using Stage = typename Shared::Stage;
            if (lane_anew() != 0) return;
            if (!early) place_free(shared).wait(parity());
            const int begin = early ? offsetof(Stage, factors) : 0,
                      end = shared.stages[stage()].factors.compensated ? sizeof(Stage)
                                                                       : offsetof(Stage, solved.inverse_low);
            shared.operands_ready[stage()].wait(n / kStages & 1);
            shared.operands_ready[place()].arrive_expecting_at(end - begin, peer);
            copy(shared, begin, end - begin);
        }

    private:
        unsigned n;
        int peer = cluster_rank() ^ 1;
        bool early = false;  // whether send_early() has sent its part

        __device__ __forceinline__ unsigned stage() const { return n % kStages; }
        __device__ __forceinline__ unsigned place() const { return kStages + n % kPeerStages; }
        // The barrier and the parity that say that the place is free.
        template <class Shared>
        __device__ __forceinline__ Mbarrier& place_free(Shared& shared) const {
            return shared.operands_free[(n - kPeerStages) % kStages];
        }
        __device__ __forceinline__ int parity() const { return (n - kPeerStages) / kStages & 1; }
        template <class Shared>
        __device__ __forceinline__ void copy(Shared& shared, int begin, int bytes) const {
            copy_bulk_to(shared_address(&shared.stages[place()]) + begin,
                         shared_address(&shared.stages[stage()]) + begin, bytes,
                         shared.operands_ready[place()].address(), peer);
        }
    };

    // Unpaired::Place.
    struct Place {
        unsigned chunk = 0, of_rank = 0;
        int at = 0, phase = 0;
        bool own = true;  // prepared by this CTA
        RingPosition tile;

        __device__ __forceinline__ Place() { of_rank = cluster_rank(), find(); }
        __device__ __forceinline__ int stage() const { return at; }
        __device__ __forceinline__ int parity() const { return phase; }
        __device__ __forceinline__ void next() {
            ++chunk, tile.next(kTiles);
            find();
        }
        // Signals the CTA that prepared the chunk. For a chunk of the peer one thread of each warp arrives.
        template <class Shared>
        __device__ __forceinline__ void free(Shared& shared) const {
            if (own) {
                shared.operands_free[at].arrive();
                return;
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) shared.operands_free[chunk / 2 % kStages].arrive_at(of_rank ^ 1);
        }

    private:
        __device__ __forceinline__ void find() {
            constexpr unsigned kOwn = kStages, kOthers = kPeerStages;
            const unsigned n = chunk / 2;
            own = chunk % 2 == of_rank;
            at = own ? n % kOwn : kOwn + n % kOthers;
            phase = (own ? n / kOwn : n / kOthers) % 2;
        }
    };
    template <class Shared>
    static __device__ __forceinline__ void signal_outputs_ready(Shared& shared, const Place& place) {
        shared.own.out_ready[place.tile.at].arrive();
    }
    // Hides where the address comes from: else the compiler takes it for uniform, and copies it.
    static __device__ __forceinline__ std::uint32_t stage_address(std::uint32_t at) {
        asm volatile("" : "+r"(at));
        return at;
    }
};

// The form of segments that join (join.cuh).
struct PairedWithMap : Paired {
    static constexpr bool kJoins = true;
    static constexpr int kStateWarpgroups = 2;    // of S, and of M
    static constexpr int kOperandWarpgroups = 2;  // as many as both leave registers for
    static constexpr int kFreeArrivals = kStateWarpgroups * (kWarpgroupThreads + kWarpgroupWarps);
    template <bool kMayLeaveRange>
    static constexpr FusedRegisters kRegisters =
        kMayLeaveRange ? FusedRegisters{144, 72, 48} : FusedRegisters{168, 48, 48};

    struct Own : Paired::Own {
        // Of each warp of M in the pair, twice: the largest magnitude behind the segment's first chunk.
        float2 largest_of_map[kPeers * kWarpgroupWarps];
        Mbarrier map_known;  // they are there
    };

    template <class Shared>
    static __device__ __forceinline__ void init_barriers(Shared& shared) {
        Paired::init_barriers(shared);
        shared.own.map_known.init(1);
    }
};

}  // namespace cula::cuda::sm90
