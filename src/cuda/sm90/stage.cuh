// SPDX-License-Identifier: Apache-2.0
// What the warpgroups of one carry share: who they are, the stages of shared memory, and the barriers between them.
//
// Multiplying warpgroups come first, one per 64 value rows; then, where scores are made on the way, the one that makes
// them; last the one that copies.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/sm80/walk.cuh"
#include "cuda/sm90/row_maps.h"

namespace cula::cuda::sm90 {

using namespace sm80;  // images, schedules and walks

inline constexpr int kGroupWarps = 4, kGroupRows = kGroupWarps * kWarpRows, kGroupThreads = kGroupWarps * 32;
static_assert(kGroupRows == kBoxChannels);
inline constexpr int kMaxGroups = 2;  // that multiply
inline constexpr int kMaxStages = 4;

// An additive algorithm with one decay per token needs little of prepare: its carry does that work itself.
template <bool kDelta, bool kPerChannel>
inline constexpr bool kMakesScores = !kDelta && !kPerChannel;

template <bool kScores>
inline constexpr int kHelperGroups = kScores ? 2 : 1;
template <bool kScores>
inline constexpr int kMaxCarryThreads = (kMaxGroups + kHelperGroups<kScores>)*kGroupThreads;

// How many registers a thread of each role has; all start with as many as the largest CTA leaves them.
inline constexpr int kScoreRegisters = 96;
template <bool kScores>
inline constexpr int kCopyRegisters = kScores ? 48 : 56;
template <bool kScores>
inline constexpr int kMultiplyRegisters = kScores ? 184 : 224;

// An image in a stage. Products take whole squares, so that triangles stand in panels of all rows, with zeros above.
struct Staged {
    template <int kSize>
    static constexpr int kTriangle = kSize * kSize;
    static constexpr int kAlignment = 1024;
};
template <int kSize>
struct Panels {
    using Lower = Triangle<kSize>;
    static constexpr int kUnits = Lower::kBlocks * Lower::kBlockUnits;  // of a panel, 16 bytes each

    static constexpr CULA_HOST_DEVICE int unit(int row, int unit) {
        return unit / 2 * kUnits + row / kBlock * Lower::kBlockUnits + Lower::in_block(row % kBlock, unit % 2);
    }
    // Where in a panel the blocks begin that are not above the diagonal.
    static constexpr CULA_HOST_DEVICE int lower_begin(int panel) { return panel * Lower::kBlockUnits; }
};

template <class T, int kKey, bool kDelta, bool kPerChannel>
struct Stage {
    using ImageType = Image<T, kKey, kPerChannel, Staged>;
    static constexpr int kRows = kTokens<kKey>;
    static constexpr int kTileBytes = kRows * kKey * static_cast<int>(sizeof(T));
    // The image from where the algorithm begins to read it; q and k where they are read as they came; the values of
    // every warpgroup.
    static constexpr int kImageBegin = ImageType::begin(kDelta, kDelta) / Staged::kAlignment * Staged::kAlignment;
    static constexpr int kQuery = sizeof(ImageType) - kImageBegin, kKeyRows = kQuery + kTileBytes;
    static constexpr int kValues = kPerChannel ? kQuery : kKeyRows + kTileBytes;
    static constexpr int kBoxBytes = static_cast<int>(sizeof(T)) * kRows * kBoxChannels;  // values of a warpgroup, too

    static __device__ __forceinline__ ImageType& image(unsigned char* stage) {
        return *reinterpret_cast<ImageType*>(stage - kImageBegin);
    }
    static constexpr CULA_HOST_DEVICE int bytes(int groups) { return kValues + groups * kBoxBytes; }

    // What lies above the diagonals of all triangles, which no copy ever writes. By all threads.
    static __device__ __forceinline__ void clear_upper(unsigned char* stage) {
        using P = Panels<kRows>;
        constexpr int kSquares = kDelta ? 4 : 1, kSquareUnits = P::kUnits * kRows / kBlock;
        static_assert(offsetof(ImageType, scores_low) == kSquareUnits * 16 &&
                      offsetof(ImageType, inverse) == 2 * kSquareUnits * 16);
        const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
        for (int i = thread; i < kSquares * kSquareUnits; i += threads) {
            const int square = i / kSquareUnits, x = i % kSquareUnits, panel = x / P::kUnits;
            if (x % P::kUnits >= P::lower_begin(panel)) continue;
            unsigned char* of = square < kSquares - 1 ? stage + square * kSquareUnits * 16
                                                      : reinterpret_cast<unsigned char*>(image(stage).scores);
            *reinterpret_cast<uint4*>(of + x * 16) = uint4{};
        }
    }
};

template <class T, int kKey>
inline constexpr int kOutBytes = kTokens<kKey> * kGroupRows * static_cast<int>(sizeof(T));  // of a warpgroup

// Behind the stages and the outputs on their way out.
struct CarryBarriers {
    std::uint64_t full[kMaxStages];                       // copies to all
    std::uint64_t empty[kMaxStages];                      // products to copies, of every CTA of the cluster
    std::uint64_t made[kMaxStages];                       // scores to products
    std::uint64_t turned[kMaxGroups], taken[kMaxGroups];  // outputs to copies, and back
    std::int32_t exact[kMaxStages];
    float log_decay[kTokens<128>], norms[2][kTokens<128>];  // of the chunk whose scores are made
};

template <class T, int kKey, bool kDelta, bool kPerChannel>
std::size_t carry_shared_bytes(int groups, int stages) {
    return 1024 + static_cast<std::size_t>(stages) * Stage<T, kKey, kDelta, kPerChannel>::bytes(groups) +
           groups * kOutBytes<T, kKey> + sizeof(CarryBarriers);
}

// Whether rows of T move in pieces of 16 bytes.
template <class T>
__device__ __forceinline__ bool aligned(const TokenRows& rows, int width) {
    return (rows.batch | rows.token | rows.head | width) % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.dtype == kDtype<T>;
}

}  // namespace cula::cuda::sm90
