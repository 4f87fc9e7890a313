// SPDX-License-Identifier: Apache-2.0
// What the roles of the Hopper carry share: the warpgroup layout, the shared memory stages and the barriers.
//
// Warpgroups of a CTA, in this order:
//   state         one or two, 64 value rows each
//   score         one, only where the carry computes the scores itself (kMakesScores)
//   load/store    one: three load warps and one store warp
//
// kernel.cuh opens with the table of roles and the budgets.
#pragma once

#include "cuda/chunked/cursor.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/sm90/tensor_maps.h"

namespace cula::cuda::sm90 {

using namespace chunked;  // chunk operands, schedules and segment cursors

inline constexpr int kWarpgroupWarps = 4, kWarpgroupRows = kWarpgroupWarps * kWarpRows,
                     kWarpgroupThreads = kWarpgroupWarps * 32;
static_assert(kWarpgroupRows == kTmaChannels);
inline constexpr int kMaxStateWarpgroups = 2;  // per CTA
inline constexpr int kMaxStages = 4;

// Whether the carry computes the scores itself, in a score warpgroup. Additive algorithms with one decay per
// token have no inverse and no decayed tiles, so there is no prepare kernel for them and no chunk operands.
template <bool kDelta, bool kPerChannel>
inline constexpr bool kMakesScores = !kDelta && !kPerChannel;

template <bool kScores>
inline constexpr int kHelperWarpgroups = kScores ? 2 : 1;
template <bool kScores>
inline constexpr int kMaxCarryThreads = (kMaxStateWarpgroups + kHelperWarpgroups<kScores>)*kWarpgroupThreads;

// Registers per thread of each role, set by setmaxnreg. A kernel starts with what __launch_bounds__ of the
// largest CTA leaves each thread: 168, or 128 with a score warpgroup. The pool of the largest CTA is exactly
// used up: 2 x 216 + 72 = 3 x 168, and 2 x 176 + 96 + 64 = 4 x 128.
inline constexpr int kScoreRegisters = 96;
template <bool kScores>
inline constexpr int kLoadRegisters = kScores ? 64 : 72;
template <bool kScores>
inline constexpr int kStateRegisters = kScores ? 176 : 216;

// A lower triangle (inverse or scores) in a stage. wgmma reads whole squares, so a stage holds full-height
// panels of 16 columns whose part above the diagonal is zero.
template <int kSize>
struct Panels {
    using Lower = Triangle<kSize>;
    static constexpr int kUnits = Lower::kBlocks * Lower::kBlockUnits;  // of a panel, in units of 16 bytes

    static constexpr CULA_HOST_DEVICE int unit(int row, int unit) {
        return unit / 2 * kUnits + row / kBlock * Lower::kBlockUnits +
               Lower::in_block(row % kBlock, unit % 2);
    }
    // The unit of a panel at which its diagonal block begins; all units before it are above the diagonal.
    static constexpr CULA_HOST_DEVICE int lower_begin(int panel) { return panel * Lower::kBlockUnits; }
};

// A stage: the operands of one chunk's products, as byte offsets from the stage's start.
//   kInverse    T [C x C], delta rules only
//   kScores     A [C x C], not for maps
//   kKeyRead    K^ [C x K]; with one decay per token k, which serves as K^ and as K+ (kKeyCarry is the same)
//   kKeyCarry   K+ [C x K]
//   kQuery      Q~ [C x K], or q with one decay per token; not for maps
//   kValues     V, one TMA tile (kTmaBytes) of C tokens x 64 value rows per state warpgroup
// A compensated chunk takes two stages. The second one holds the low words of T and A at kInverse and kScores
// and nothing else, so that chunks that are not compensated pay no shared memory for low words.
template <class T, int kKey, bool kDelta, bool kPerChannel, bool kMaps>
struct StageLayout {
    static constexpr int kRows = kTokens<kKey>;
    static constexpr int kSquareBytes = kRows * kRows * static_cast<int>(sizeof(T)),
                         kTileBytes = kRows * kKey * static_cast<int>(sizeof(T)),
                         kTmaBytes = kRows * kTmaChannels * static_cast<int>(sizeof(T));
    static constexpr int kInverse = 0, kScores = kDelta ? kSquareBytes : 0;
    static constexpr int kKeyRead = kScores + (kMaps ? 0 : kSquareBytes),
                         kKeyCarry = kKeyRead + (kDelta && kPerChannel ? kTileBytes : 0),
                         kQuery = kKeyCarry + kTileBytes, kValues = kQuery + (kMaps ? 0 : kTileBytes);

    static constexpr CULA_HOST_DEVICE int bytes(int warpgroups) { return kValues + warpgroups * kTmaBytes; }

    // Zeros the blocks above the diagonals of T and A, once per kernel: no copy ever writes there. Called by
    // all threads of the CTA.
    static __device__ __forceinline__ void clear_upper(unsigned char* stage) {
        using P = Panels<kRows>;
        for (int i = static_cast<int>(threadIdx.x); i < kKeyRead / 16; i += static_cast<int>(blockDim.x))
            if (i % P::kUnits < P::lower_begin(i / P::kUnits % P::Lower::kBlocks))
                reinterpret_cast<uint4*>(stage)[i] = uint4{};
    }
};

// The float factors of the chunk in a stage.
//   decay per channel   decay[k]: the whole chunk's decay of channel k, which multiplies S
//   decay per token     k_factor[t] multiplies column t of R = S k^T, q_factor[t] column t of S q^T, and
//                       k_rest[t], the decay from token t to the chunk's end, column t of U; decay[0] is the
//                       whole chunk's decay
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

// Dynamic shared memory, in this order: the stages, one output tile per state warpgroup (kOutBytes),
// CarryBarriers, one Factors per stage.
struct alignas(kChunkAlignment) CarryBarriers {
    std::uint64_t operands_ready[kMaxStages];      // load -> state, score
    std::uint64_t operands_free[kMaxStages];       // state, in every CTA of the cluster -> load
    std::uint64_t scores_ready[kMaxStages];        // score -> state
    std::uint64_t out_ready[kMaxStateWarpgroups],  // state -> store
        out_free[kMaxStateWarpgroups];             // store -> state
    std::int32_t compensated[kMaxStages];          // whether the chunk's low words follow in the next stage
    Segment segment;                               // the segment of this CTA
    // Scratch of the score role, for its current chunk: log2 decays from the chunk's start, and the
    // reciprocal norms of q (0) and k (1).
    float log_decay[kTokens<128>], norms[2][kTokens<128>];
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

// Whether `rows` hold elements of type T and can be copied in aligned pieces of 16 bytes.
template <class T>
__device__ __forceinline__ bool aligned(const TokenRows& rows, int width) {
    return (rows.batch | rows.token | rows.head | width) % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.dtype == kDtype<T>;
}

}  // namespace cula::cuda::sm90
