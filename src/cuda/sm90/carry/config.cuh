// SPDX-License-Identifier: Apache-2.0
// What the warpgroups of one carry share: who they are, the stages of shared memory, and the barriers between
// them.
//
// Multiplying warpgroups come first, one per 64 value rows; then, where scores are made on the way, the one
// that makes them; last the one that copies.
#pragma once

#include "cuda/chunked/cursor.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/tensor_maps.h"

namespace cula::cuda::sm90 {

using namespace chunked;  // images, schedules and cursors

inline constexpr int kWarpgroupWarps = 4, kWarpgroupRows = kWarpgroupWarps * kWarpRows,
                     kWarpgroupThreads = kWarpgroupWarps * 32;
static_assert(kWarpgroupRows == kTmaChannels);
inline constexpr int kMaxStateWarpgroups = 2;  // that multiply
inline constexpr int kMaxStages = 4;

// An additive algorithm with one decay per token needs little of prepare: its carry does that work itself.
template <bool kDelta, bool kPerChannel>
inline constexpr bool kMakesScores = !kDelta && !kPerChannel;

template <bool kScores>
inline constexpr int kHelperWarpgroups = kScores ? 2 : 1;
template <bool kScores>
inline constexpr int kMaxCarryThreads = (kMaxStateWarpgroups + kHelperWarpgroups<kScores>)*kWarpgroupThreads;

// How many registers a thread of each role has; all start with as many as the largest CTA leaves them.
inline constexpr int kScoreRegisters = 96;
template <bool kScores>
inline constexpr int kLoadRegisters = kScores ? 64 : 72;
template <bool kScores>
inline constexpr int kStateRegisters = kScores ? 176 : 216;

// A triangle in a stage. Products take whole squares, so that it stands in panels of all rows, with zeros
// above.
template <int kSize>
struct Panels {
    using Lower = Triangle<kSize>;
    static constexpr int kUnits = Lower::kBlocks * Lower::kBlockUnits;  // of a panel, 16 bytes each

    static constexpr CULA_HOST_DEVICE int unit(int row, int unit) {
        return unit / 2 * kUnits + row / kBlock * Lower::kBlockUnits +
               Lower::in_block(row % kBlock, unit % 2);
    }
    // Where in a panel the blocks begin that are not above the diagonal.
    static constexpr CULA_HOST_DEVICE int lower_begin(int panel) { return panel * Lower::kBlockUnits; }
};

// What the products of a chunk read, in bytes from the stage's begin: the inverse and the scores; K^, K+ and
// Q~, or k, which is both, and q; and the values of every warpgroup. Maps read neither scores nor q. A
// coupled chunk takes two stages: the second has what rounding took off the inverse and the scores, in their
// places.
template <class T, int kKey, bool kDelta, bool kPerChannel, bool kMaps>
struct StageLayout {
    static constexpr int kRows = kTokens<kKey>;
    static constexpr int kSquareBytes = kRows * kRows * static_cast<int>(sizeof(T)),
                         kTileBytes = kRows * kKey * static_cast<int>(sizeof(T)),
                         kTmaBytes = kRows * kTmaChannels *
                                     static_cast<int>(sizeof(T));  // values of a warpgroup, too
    static constexpr int kInverse = 0, kScores = kDelta ? kSquareBytes : 0;
    static constexpr int kKeyRead = kScores + (kMaps ? 0 : kSquareBytes),
                         kKeyCarry = kKeyRead + (kDelta && kPerChannel ? kTileBytes : 0),
                         kQuery = kKeyCarry + kTileBytes, kValues = kQuery + (kMaps ? 0 : kTileBytes);

    static constexpr CULA_HOST_DEVICE int bytes(int warpgroups) { return kValues + warpgroups * kTmaBytes; }

    // What lies above the diagonals, which no copy ever writes. By all threads.
    static __device__ __forceinline__ void clear_upper(unsigned char* stage) {
        using P = Panels<kRows>;
        for (int i = static_cast<int>(threadIdx.x); i < kKeyRead / 16; i += static_cast<int>(blockDim.x))
            if (i % P::kUnits < P::lower_begin(i / P::kUnits % P::Lower::kBlocks))
                reinterpret_cast<uint4*>(stage)[i] = uint4{};
    }
};

// What products and the state are multiplied by, of the chunk in a stage.
template <int kKey, bool kPerChannel>
struct alignas(kChunkAlignment) Factors {
    float decay[kKey];
};
template <int kKey>
struct alignas(kChunkAlignment) Factors<kKey, false> {
    float k_factor[kTokens<kKey>], k_rest[kTokens<kKey>], decay[kTokens<kKey>], q_factor[kTokens<kKey>];
};

template <class T, int kKey, bool kMaps>
inline constexpr int kOutBytes =
    kMaps ? 0 : kTokens<kKey> * kWarpgroupRows * static_cast<int>(sizeof(T));  // of a warpgroup

// Behind the stages and the outputs on their way out; then come the factors.
struct alignas(kChunkAlignment) CarryBarriers {
    std::uint64_t operands_ready[kMaxStages];  // copies to all
    std::uint64_t operands_free[kMaxStages];   // products to copies, of every CTA of the cluster
    std::uint64_t scores_ready[kMaxStages];    // scores to products
    std::uint64_t out_ready[kMaxStateWarpgroups],
        out_free[kMaxStateWarpgroups];  // outputs to copies, and back
    std::int32_t compensated[kMaxStages];
    Segment segment;                                        // the CTA's
    float log_decay[kTokens<128>], norms[2][kTokens<128>];  // of the chunk whose scores are made
};

template <class T, int kKey, bool kDelta, bool kPerChannel, bool kMaps>
__device__ __forceinline__ CarryBarriers& carry_barriers(unsigned char* memory, int stages, int warpgroups) {
    return *reinterpret_cast<CarryBarriers*>(
        memory + stages * StageLayout<T, kKey, kDelta, kPerChannel, kMaps>::bytes(warpgroups) +
        warpgroups * kOutBytes<T, kKey, kMaps>);
}

template <class T, int kKey, bool kDelta, bool kPerChannel, bool kMaps>
std::size_t carry_shared_bytes(int warpgroups, int stages) {
    return stages * (StageLayout<T, kKey, kDelta, kPerChannel, kMaps>::bytes(warpgroups) +
                     sizeof(Factors<kKey, kPerChannel>)) +
           warpgroups * kOutBytes<T, kKey, kMaps> + sizeof(CarryBarriers);
}

// Whether rows of T move in pieces of 16 bytes.
template <class T>
__device__ __forceinline__ bool aligned(const TokenRows& rows, int width) {
    return (rows.batch | rows.token | rows.head | width) % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.dtype == kDtype<T>;
}

}  // namespace cula::cuda::sm90
