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

template <class T, int kKey, bool kDelta, bool kPerChannel>
struct Stage {
    using ImageType = Image<T, kKey, kPerChannel>;
    static constexpr int kRows = kTokens<kKey>;
    static constexpr int kTileBytes = kRows * kKey * static_cast<int>(sizeof(T));
    // The image from where the algorithm begins to read it; q and k where they are read as they came; the values of
    // every warpgroup.
    static constexpr int kImageBegin = ImageType::begin(kDelta, kDelta);
    static constexpr int kQuery = sizeof(ImageType) - kImageBegin, kKeyRows = kQuery + kTileBytes;
    static constexpr int kValues = kPerChannel ? kQuery : kKeyRows + kTileBytes;
    static constexpr int kBoxBytes = static_cast<int>(sizeof(T)) * kRows * kBoxChannels;  // values of a warpgroup, too

    static __device__ __forceinline__ ImageType& image(unsigned char* stage) {
        return *reinterpret_cast<ImageType*>(stage - kImageBegin);
    }
    static constexpr CULA_HOST_DEVICE int bytes(int groups) { return kValues + groups * kBoxBytes; }
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
