// SPDX-License-Identifier: Apache-2.0
// What the roles of the Hopper carry share: the warpgroup layout and the shared memory.
//
// Warpgroups of a CTA, in this order:
//   state         one or two, 64 value rows each
//   score         one, only where the carry computes the scores itself (kMakesScores)
//   load/store    one: three load warps and one store warp
//
// kernel.cuh opens with the table of roles and the budgets.
#pragma once

#include "cuda/chunked/cursor.cuh"
#include "cuda/pipe/barriers.cuh"
#include "cuda/pipe/tensor_maps.h"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/rule.h"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::sm90 {

using chunked::CarryParams;
using chunked::ChunkOperands;
using chunked::DecayMap;
using chunked::each_pair;
using chunked::kBlock;
using chunked::kChunkAlignment;
using chunked::kTokens;
using chunked::kUnprepared;
using chunked::kWarpRows;
using chunked::OperandTile;
using chunked::own_segment;
using chunked::RowWindow;
using chunked::Schedule;
using chunked::Segment;
using chunked::segment_number;
using chunked::segment_of;
using chunked::SegmentCursor;
using chunked::Tile;
using chunked::Triangle;

static_assert(kWarpgroupRows == kWarpgroupWarps * kWarpRows && kWarpgroupRows == kTmaChannels);
inline constexpr int kMaxStateWarpgroups = 2;  // per CTA
inline constexpr int kMaxStages = 4;

// What does a chunk write? A seam (cuda/rule.h).
template <Update kUpdate>
struct CarryRule {
    static_assert(kIsKnown<kUpdate>, "carry of sm90: what does a chunk write under this update rule?");
};
template <>
struct CarryRule<Update::kAdditive> {
    static constexpr bool kReadsState = false;  // U = V
};
template <>
struct CarryRule<Update::kDelta> {
    static constexpr bool kReadsState = true;  // U = T (V - R)
};

// Whether the carry computes the scores itself, in a score warpgroup. Additive algorithms with one decay per
// token have no inverse and no decayed tiles, so there is no prepare kernel for them and no chunk operands.
template <bool kReadsState, bool kPerChannel>
inline constexpr bool kMakesScores = !kReadsState && !kPerChannel;

// Whether tokens may write several times. Then q and o have rows of tokens where k, v and all factors have
// rows of writes.
template <bool kReadsState, bool kPerChannel>
inline constexpr bool kSeveral = kReadsState && !kPerChannel;
template <Update kUpdate, bool kPerChannel>
inline constexpr bool kAgrees =
    kSeveral<CarryRule<kUpdate>::kReadsState, kPerChannel> == kMayWriteSeveral<kPerChannel, kUpdate>;
static_assert(kAgrees<Update::kDelta, false> && kAgrees<Update::kDelta, true> &&
              kAgrees<Update::kAdditive, false> && kAgrees<Update::kAdditive, true>);

// As TokensOfWrites, of chunks that are whole tokens: their writes divide a chunk (kMostTileWrites in
// launch.h).
struct WholeTokens {
    int log2_writes;
    std::int64_t first_token;

    __device__ __forceinline__ WholeTokens(std::int32_t writes, std::int64_t first_row) {
        log2_writes = __ffs(writes) - 1, first_token = first_row >> log2_writes;
    }
    __device__ __forceinline__ int token(int row) const { return row >> log2_writes; }
    __device__ __forceinline__ bool is_last(int row) const {
        return token(row + 1) << log2_writes == row + 1;
    }
};
template <bool kOfTokens>
using ChunkTokens = std::conditional_t<kOfTokens, WholeTokens, RowsAreTokens>;

// The tile of the same rows in a tensor of tokens. Where these write several times, its map has one row of a
// token, which is row `own` of the tile's rows of that token. The others lie beyond the tensor: TMA loads
// zeros there, and stores nothing.
template <bool kOfTokens>
__device__ __forceinline__ auto tile_of_tokens(const DeviceArgs& a, const TileCoordinates& rows, int own) {
    if constexpr (kOfTokens)
        return WriteCoordinates{rows.channel, rows.head, -own, WholeTokens(a.writes, 0).token(rows.token),
                                rows.batch};
    else
        return rows;
}

// The three walks of backward calls, which may be reversed, are of this form alone.
template <int kKey, bool kReadsState, bool kPerChannel, bool kMaps>
using CarryCursor = SegmentCursor<kKey, kMaps, kMakesScores<kReadsState, kPerChannel>>;

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
// panels of 16 columns whose part above the diagonal is zero. Scores of a reversed walk are an upper
// triangle, in the same panels.
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

// A member that some kernels do not have. Members with a tag of their own take no room there.
template <int kTag>
struct Absent {};
template <bool kPresent, class Member, int kTag>
using OnlyIf = std::conditional_t<kPresent, Member, Absent<kTag>>;

// K^ and K+ of a stage [C x K]. With one decay per token k serves as both; without a read, K^ is not used.
template <class Tile, bool kApart>
struct StageKeys {
    Tile read, carry;
};
template <class Tile>
struct StageKeys<Tile, false> {
    union {
        Tile read, carry;
    };
};

// A stage: the operands of one chunk's products. Behind it follows V, one TmaTile of C tokens x 64 value rows
// per state warpgroup (CarryShared).
// A compensated chunk takes two stages. The second one holds the low words of T and A at their places and
// nothing else, so that chunks that are not compensated pay no shared memory for low words.
template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kMaps>
struct CarryStage {
    static constexpr int kRows = kTokens<kKey>;
    // wgmma and TMA find swizzled rows by the address, so every operand begins at a multiple of the longest
    // pattern's 1024 bytes.
    template <int kColumns>
    struct alignas(kSwizzleAlignment) Operand {
        T element[kRows * kColumns];
    };
    using Square = Operand<kRows>;
    using Rows = Operand<kKey>;

    [[no_unique_address]] OnlyIf<kReadsState, Square, 0> inverse;  // T
    [[no_unique_address]] OnlyIf<!kMaps, Square, 1> scores;        // A
    StageKeys<Rows, kReadsState && kPerChannel> keys;
    [[no_unique_address]] OnlyIf<!kMaps, Rows, 2> query;  // Q~, or q with one decay per token

    // Zeros the blocks above the diagonals of T and A, once per kernel: no copy ever writes there. Where the
    // carry makes the scores, those below it as well: a reversed walk writes none of them. Called by all
    // threads of the CTA.
    __device__ __forceinline__ void clear_squares() {
        using P = Panels<kRows>;
        constexpr int kUnits = (kReadsState + !kMaps) * static_cast<int>(sizeof(Square) / 16);
        auto* const units = reinterpret_cast<uint4*>(this);
        for (int i = static_cast<int>(threadIdx.x); i < kUnits; i += static_cast<int>(blockDim.x))
            if (kMakesScores<kReadsState, kPerChannel> ||
                i % P::kUnits < P::lower_begin(i / P::kUnits % P::Lower::kBlocks))
                units[i] = uint4{};
    }
};

// The float factors of the chunk in a stage.
//   decay per channel   decay[k]: the whole chunk's decay of channel k, which multiplies S
//   decay per token     k_factor[t] multiplies column t of R = S k^T, q_factor[t] column t of S q^T, and
//                       k_rest[t], the decay from token t to the chunk's end, column t of U; decay[0] is the
//                       whole chunk's decay. In a reversed walk q_factor is the decay from token t to the
//                       chunk's end, and k_rest the scale times the decay from the chunk's start to token t
template <int kKey, bool kPerChannel>
struct alignas(kChunkAlignment) Factors {
    float decay[kKey];
};
template <int kKey>
struct alignas(kChunkAlignment) Factors<kKey, false> {
    float k_factor[kTokens<kKey>], k_rest[kTokens<kKey>], decay[kTokens<kKey>], q_factor[kTokens<kKey>];
};

// Barriers and flags, of which a CTA has one. Pairs are named after what may be read (ready) or overwritten
// (free); kernel.cuh lists who waits and who arrives.
struct alignas(kChunkAlignment) CarryControl {
    Ring<kMaxStages> operands;             // load -> state, score; state, in every CTA of the cluster -> load
    Mbarrier scores_ready[kMaxStages];     // score -> state; they become free with the operands
    Ring<kMaxStateWarpgroups> out;         // state -> store; store -> state
    std::int32_t compensated[kMaxStages];  // whether the chunk's low words follow in the next stage
    Segment segment;                       // the segment of this CTA
    // Scratch of the score role, for its current chunk: log2 decays from the chunk's start, and the
    // reciprocal norms of q (0) and k (1).
    float log_decay[kTokens<128>], norms[2][kTokens<128>];
};

enum class CarryNamedBarrier : int {
    kCta = 0,        // __syncthreads()
    kScoreRole = 1,  // the score warpgroup
};

// Dynamic shared memory of a CTA. How many state warpgroups it has, and how many stages fit, is known at
// launch, so this is a view of it and not one struct:
//   stages x (CarryStage, a TmaTile of values per state warpgroup)
//   a TmaTile of outputs per state warpgroup, not for maps
//   CarryControl. (Stores of tokens that write several times read what follows their tile: StoreRole)
//   stages x Factors
template <class T, int kKey, bool kReadsState, bool kPerChannel, bool kMaps>
struct CarryShared {
    using Stage = CarryStage<T, kKey, kReadsState, kPerChannel, kMaps>;
    using F = Factors<kKey, kPerChannel>;
    using RowTile = TmaTile<Stage::kRows>;
    static constexpr int kRowTileBytes = sizeof(RowTile);
    static constexpr int kValues = sizeof(Stage);  // where values begin in a stage
    // Behind the last output tile, with the fewest stages.
    static constexpr std::size_t kBytesBehindOuts = sizeof(CarryControl) + sizeof(F);
    // Nothing but operands takes room in a stage, and every tile and Factors begin where copies need it.
    static_assert(sizeof(Stage) ==
                  (kReadsState + !kMaps) * sizeof(typename Stage::Square) +
                      (1 + (kReadsState && kPerChannel) + !kMaps) * sizeof(typename Stage::Rows));
    static_assert(sizeof(Stage) % kSwizzleAlignment == 0 && sizeof(F) % kChunkAlignment == 0);

    unsigned char* const stages;
    RowTile* const outs;
    CarryControl& control;
    const int warpgroups;

    static constexpr CULA_HOST_DEVICE int stage_bytes(int warpgroups) {
        return static_cast<int>(sizeof(Stage)) + warpgroups * kRowTileBytes;
    }
    static constexpr CULA_HOST_DEVICE int outs_bytes(int warpgroups) {
        return kMaps ? 0 : warpgroups * kRowTileBytes;
    }
    // What a launch asks for.
    static constexpr std::size_t bytes(int warpgroups, int stages) {
        return stages * (stage_bytes(warpgroups) + sizeof(F)) + outs_bytes(warpgroups) + sizeof(CarryControl);
    }

    __device__ __forceinline__ CarryShared(unsigned char* memory, int stages, int of_warpgroups)
        : stages(memory),
          outs(reinterpret_cast<RowTile*>(memory + stages * stage_bytes(of_warpgroups))),
          control(*reinterpret_cast<CarryControl*>(memory + stages * stage_bytes(of_warpgroups) +
                                                   outs_bytes(of_warpgroups))),
          warpgroups(of_warpgroups) {}

    __device__ __forceinline__ Stage& stage(int i) const {
        return *reinterpret_cast<Stage*>(stages + i * stage_bytes(warpgroups));
    }
    __device__ __forceinline__ F& factors(int stage) const {
        return reinterpret_cast<F*>(&control + 1)[stage];
    }
};

// Whether `rows` hold elements of type T and can be copied in aligned pieces of 16 bytes.
template <class T>
__device__ __forceinline__ bool aligned(const TokenRows& rows, int width) {
    return (rows.batch | rows.token | rows.head | width) % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.dtype == kDtype<T>;
}

}  // namespace cula::cuda::sm90
