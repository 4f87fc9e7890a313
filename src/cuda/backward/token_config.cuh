// SPDX-License-Identifier: Apache-2.0
// How gradient_token divides a chunk among warps, its shared memory, and the ring of slices there.
//
// A warp has a block of 16 tokens and a group of channels: its rows of dq and dk. It also has 16 x 16 blocks
// of its rows of dA or of dL, which its lanes hold as accumulators of tensor core products (ptx/mma.cuh).
//
// The slices of a CTA, value head after value head, go through a ring of places. BulkRing, where a CTA has
// 227 KiB and bulk copies exist (sm_90, sm_100): a slice comes by two of them, for which one lane asks, and
// has no barrier of the CTA, so that warps may be several slices apart. PieceRing: all threads copy, 16 bytes
// at a time, and synchronise for every slice.
#pragma once

#include "cuda/backward/saved.cuh"
#include "cuda/backward/token_gates.cuh"
#include "cuda/chunked/chunk.cuh"
#include "cuda/pipe/barriers.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/rule.h"

namespace cula::cuda::backward {

// Do the writes of a chunk depend on the state under this update rule? Then they have gradients dL and dbeta.
template <Update kUpdate>
struct GradientTokenRule {
    static_assert(kIsKnown<kUpdate>, "gradient_token: do writes depend on the state under this rule?");
};
template <>
struct GradientTokenRule<Update::kAdditive> {
    static constexpr bool kSolves = false;
};
template <>
struct GradientTokenRule<Update::kDelta> {
    static constexpr bool kSolves = true;
};

// The lower triangle of a square of floats in blocks of 16 x 16, each pair of neighbouring columns where the
// lane reads it that has it in an accumulator. Half rows of diagonal blocks that are all above the diagonal
// are left out.
template <int kSize>
struct LaneTriangle {
    static constexpr int kBlocks = kSize / chunked::kBlock, kPairs = 2 * kBlocks * kBlocks + kBlocks;
    float2 pairs[kPairs * 32];

    // The lane's place in a row of blocks, and its pair of a block there: columns 8 tile to 8 tile + 7, rows
    // 8 half to 8 half + 7.
    static __device__ __forceinline__ int begin(int row, int lane) {
        return (2 * row * row + row) * 32 + lane;
    }
    __device__ __forceinline__ float2& at(int begin, int column, bool diagonal, int tile, int half) {
        return pairs[begin + (4 * column + 2 * tile + half - (diagonal ? tile : 0)) * 32];
    }
    static __device__ __forceinline__ bool has(bool diagonal, int tile, int half) {
        return !diagonal || tile == 0 || half == 1;
    }
};

template <class T, int kKey>
struct GradientToken {
    static constexpr int kRows = chunked::kTokens<kKey>, kBlocks = kRows / chunked::kBlock;
    static constexpr int kWarps = 16, kThreads = 32 * kWarps;
    static constexpr int kGroups = kWarps / kBlocks;  // warps of a block
    static constexpr int kChannels = kKey / kGroups, kTiles = kChannels / 8;
    using Slice = SavedSlice<T, kKey>;
    // Places of the ring of slices: kBulkPlaces where shared memory has room for them, which no GPU before
    // sm_90 has; else of pieces, many if there is room, or few.
    static constexpr int kFewPlaces = kKey == 64 ? 4 : 2, kManyPlaces = kKey == 256 ? 5 : 6,
                         kBulkPlaces = kKey == 64 ? 16 : 8;

    struct Shared {
        alignas(128) T q[kRows * kKey];
        T k[kRows * kKey];
        // dA and dL, summed over the value heads so far; after the last one, tiles of T.
        union {
            LaneTriangle<kRows> sums[2];
            T squares[2][kRows * kRows];
        };
        union {
            DecayPaths<kRows, kGroups> paths;
            float dots[2][kGroups][kRows];  // after the last value head
        };
        float norms[2][kRows];                     // of q and of k
        float log_decay[kRows], strengths[kRows];  // strengths: dV_i . U_i
        // scale (q_i . k_j) and (k_i . k_j). After the last value head normalised rows of q and k, here and
        // in the ring of slices that follows.
        alignas(128) LaneTriangle<kRows> pairs[2];
    };
    static_assert(sizeof(Shared) % alignof(Slice) == 0);

    static_assert(2 * kRows * kKey * sizeof(T) <= sizeof(Shared::pairs) + kFewPlaces * sizeof(Slice));

    static constexpr std::size_t shared_bytes(int places) { return sizeof(Shared) + places * sizeof(Slice); }
    static constexpr std::size_t kBulkBytes = shared_bytes(kBulkPlaces) + sizeof(Ring<kBulkPlaces>);
    // Of a ring of pieces.
    static constexpr int places(std::size_t shared_bytes_limit) {
        return shared_bytes(kManyPlaces) <= shared_bytes_limit ? kManyPlaces : kFewPlaces;
    }
    static_assert(shared_bytes(kFewPlaces) <= 99 * 1024 && kBulkBytes > 163 * 1024 &&
                  kBulkBytes <= 227 * 1024);
};

// What a warp has.
template <class T, int kKey, bool kSolves>
struct TokenRole {
    using Of = GradientToken<T, kKey>;
    // Squares: every kSharers-th block of its rows of dA (kind 0) or dL (kind 1).
    static constexpr int kKinds = kSolves ? 2 : 1, kSharers = Of::kGroups / kKinds,
                         kSquares = Of::kBlocks > kSharers ? Of::kBlocks / kSharers : 1;
    int group, block, kind;

    // Later blocks have more squares than earlier ones, and warps w and w + 4 run on the same scheduler. So
    // every other group counts blocks from the last.
    __device__ __forceinline__ explicit TokenRole(int warp) {
        group = warp / Of::kBlocks, block = warp % Of::kBlocks;
        if (group % 2) block = Of::kBlocks - 1 - block;
        kind = group / kSharers;
    }
    __device__ __forceinline__ int column(int square) const { return square * kSharers + group % kSharers; }
};

// What both rings have: which slices there are, and where they go. Additive rules do without dV, the first
// that the return saves.
template <class T, int kKey, bool kSolves>
struct SlicesOfHeads {
    using Of = GradientToken<T, kKey>;
    using Slice = typename Of::Slice;
    static constexpr int kBytes = sizeof(Slice), kSkipped = kSolves ? 0 : sizeof(Slice::d_values),
                         kCarried = Slice::kCarried;
    static_assert(offsetof(Slice, d_values) == kCarried && kCarried + Slice::kReturned == kBytes);

    const Saved<T, kKey>& saved;
    Slice* places;
    unsigned first, end;  // numbers in the slab of the first slice, and of the one behind the last

    // memory: the CTA's shared memory. first, count: the number of the first slice, and how many there are.
    __device__ __forceinline__ SlicesOfHeads(unsigned char* memory, const Saved<T, kKey>& saved,
                                             std::int64_t first, int count)
        : saved(saved),
          places(reinterpret_cast<Slice*>(memory + sizeof(typename Of::Shared))),
          first(static_cast<unsigned>(first)),
          end(this->first + static_cast<unsigned>(count)) {}
    __device__ __forceinline__ const unsigned char* carried(unsigned slice) const {
        return reinterpret_cast<const unsigned char*>(saved.carried + slice);
    }
    __device__ __forceinline__ const unsigned char* returned(unsigned slice) const {
        return reinterpret_cast<const unsigned char*>(saved.returned + slice);
    }
};

template <class T, int kKey, bool kSolves>
struct BulkRing : SlicesOfHeads<T, kKey, kSolves> {
    static constexpr bool kSynchronises = false;  // the CTA, for every slice
    using Base = SlicesOfHeads<T, kKey, kSolves>;
    using Base::places, Base::first, Base::end;
    using Of = typename Base::Of;
    using Slice = typename Base::Slice;
    static constexpr int kPlaces = Of::kBulkPlaces, kAhead = kPlaces - 1;  // slices that are asked for ahead
    static_assert((kPlaces & (kPlaces - 1)) == 0);

    Ring<kPlaces>& ring;

    __device__ __forceinline__ BulkRing(unsigned char* memory, int, const Saved<T, kKey>& saved,
                                        std::int64_t first, int count)
        : Base(memory, saved, first, count), ring(*reinterpret_cast<Ring<kPlaces>*>(places + kPlaces)) {}

    static __device__ __forceinline__ unsigned place(unsigned i) { return i % kPlaces; }
    static __device__ __forceinline__ int parity(unsigned i) { return static_cast<int>(i / kPlaces % 2); }

    // By one thread: asks for slice i.
    __device__ __forceinline__ void ask(unsigned i) const {
        constexpr int kReturned = Slice::kReturned - Base::kSkipped;
        const std::uint32_t to = shared_address(places + place(i)), ready = ring.ready[place(i)].address();
        ring.ready[place(i)].arrive_expecting(Base::kCarried + kReturned);
        copy_bulk(to, this->carried(first + i), Base::kCarried, ready);
        copy_bulk(to + Base::kCarried + Base::kSkipped, this->returned(first + i) + Base::kSkipped, kReturned,
                  ready);
    }
    // Fills the ring. The CTA synchronises before the first wait().
    __device__ __forceinline__ void start() const {
        if (threadIdx.x > 0) return;
        for (int i = 0; i < kPlaces; ++i) ring.ready[i].init(1), ring.free[i].init(Of::kThreads);
        publish_barriers();
        for (unsigned i = 0; i < kAhead && first + i < end; ++i) ask(i);
    }
    // Waits for what the thread itself has asked for with copy_async().
    __device__ __forceinline__ void wait_for_rows() const { wait_copies<0>(); }

    // The address of slice i, which is the one after that of the last call.
    __device__ __forceinline__ std::uint32_t wait(unsigned i) const {
        ring.ready[place(i)].wait(parity(i));
        return shared_address(places + place(i));
    }
    // The thread has read slice i. The warps take turns in asking for another, in the place of the slice
    // before, which hardly any warp is still reading.
    __device__ __forceinline__ void release(unsigned i, int warp) const {
        ring.free[place(i)].arrive();
        if (warp != static_cast<int>(i % Of::kWarps) || first + i + kAhead >= end) return;
        if (threadIdx.x % 32 > 0) return;
        ring.free[place(i + kAhead)].wait(parity(i + kAhead) ^ 1);
        ask(i + kAhead);
    }
};

// kBulk: there are kBulkPlaces.
template <class T, int kKey, bool kSolves, bool kBulk>
struct PieceRing : SlicesOfHeads<T, kKey, kSolves> {
    static constexpr bool kSynchronises = true;
    using Base = SlicesOfHeads<T, kKey, kSolves>;
    using Base::places, Base::first, Base::end;
    using Of = typename Base::Of;
    using Slice = typename Base::Slice;

    int count, place = 0;  // places, and the one that is read next
    unsigned asked;        // the next slice to ask for

    __device__ __forceinline__ PieceRing(unsigned char* memory, int places, const Saved<T, kKey>& saved,
                                         std::int64_t first, int count)
        : Base(memory, saved, first, count), count(places), asked(this->first) {}

    // Asks for the next slice. One group of cp.async, also where there is no further slice.
    __device__ __forceinline__ void ask(int to_place) {
        int thread = static_cast<int>(threadIdx.x);
        asm volatile("" : "+r"(thread));  // no address is kept for the next slice
        if (asked < end) {
            const std::uint32_t to = shared_address(places + to_place) + thread * 16;
            const unsigned char* const of_carry = this->carried(asked) + thread * 16;
            const unsigned char* const of_return =
                this->returned(asked) + thread * 16 + Base::kSkipped - Base::kCarried;
#pragma unroll
            for (int i = 0; i < Base::kBytes - Base::kSkipped; i += Of::kThreads * 16) {
                const bool is_carried = i + thread * 16 < Base::kCarried;
                if (i + thread * 16 < Base::kBytes - Base::kSkipped)
                    copy_async(to + i + (is_carried ? 0 : Base::kSkipped),
                               (is_carried ? of_carry : of_return) + i);
            }
        }
        commit_copies();
        ++asked;
    }
    __device__ __forceinline__ void start() {
        for (int i = 0; i + 1 < count; ++i) ask(i);
    }
    // Waits until all but the latest `count - kLess` groups of the thread have completed.
    template <int kLess>
    __device__ __forceinline__ void wait_for_copies() const {
        if constexpr (kBulk)
            wait_copies<Of::kBulkPlaces - kLess>();
        else if (count == Of::kManyPlaces)
            wait_copies<Of::kManyPlaces - kLess>();
        else
            wait_copies<Of::kFewPlaces - kLess>();
    }
    __device__ __forceinline__ void wait_for_rows() const { wait_for_copies<1>(); }

    // The address of slice i. All threads have then read the one before it, in whose place another is asked
    // for.
    __device__ __forceinline__ std::uint32_t wait(unsigned) {
        wait_for_copies<2>();
        __syncthreads();
        const std::uint32_t slice = shared_address(places + place);
        ask(place == 0 ? count - 1 : place - 1);
        place = place + 1 == count ? 0 : place + 1;
        return slice;
    }
    __device__ __forceinline__ void release(unsigned, int) const {}
};

// kBulk: a CTA has room for kBulkPlaces. That may hold for code without bulk copies, too: where a later GPU
// compiles the PTX of an earlier one.
#if __CUDA_ARCH__ >= 900
inline constexpr bool kHasBulkCopies = true;
#else
inline constexpr bool kHasBulkCopies = false;
#endif
template <class T, int kKey, bool kSolves, bool kBulk>
using SliceRing = std::conditional_t<kBulk && kHasBulkCopies, BulkRing<T, kKey, kSolves>,
                                     PieceRing<T, kKey, kSolves, kBulk>>;

}  // namespace cula::cuda::backward
