// SPDX-License-Identifier: Apache-2.0
// The warpgroup that copies: three warps images, q, k and v to the stages, one outputs to memory.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/sm90/carry/config.cuh"

namespace cula::cuda::sm90 {

// Threads of the copying warpgroup that fetch what a chunk needs, and the warp that puts outputs out. Neither waits for
// the other.
inline constexpr int kFetchThreads = 96, kPutThreads = 32;
static_assert(kFetchThreads + kPutThreads == kGroupThreads);

// The tokens of a chunk, kUnits times eight columns of `from`, each 16 bytes to place(token, unit); zero beyond `count`
// tokens and `columns` columns. Called by the threads that fetch.
template <class T, int kRows, int kUnits, class Place>
__device__ __forceinline__ void copy_rows(unsigned char* memory, const T* from, std::int64_t pitch, int count,
                                          int columns, bool wide, Place place) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % kGroupThreads; i < kRows * kUnits; i += kFetchThreads) {
        const int token = i / kUnits, unit = i % kUnits;
        T* to = reinterpret_cast<T*>(memory + place(token, unit));
        const bool in = token < count && unit * 8 < columns;
        if (wide) {
            copy_async(shared_address(to), from + (in ? token * pitch + unit * 8 : 0), in ? 16 : 0);
        } else {
#pragma unroll 1
            for (int e = 0; e < 8; ++e)
                to[e] = in && unit * 8 + e < columns ? from[token * pitch + unit * 8 + e] : from_float<T>(0.0f);
        }
    }
}

// Threads that fetch: images, values, and q and k where they are read as they came. To ask for a copy takes a thread
// some 60 cycles, so that the three warps share them: tiles of the image, and k; the inverse, and values; scores, and
// q.
template <class T, int kKey, bool kDelta, bool kPerChannel, bool kMaps>
struct Fetcher {
    using S = Stage<T, kKey, kDelta, kPerChannel, kMaps>;
    using F = Factors<kKey, kPerChannel>;
    using ImageType = Image<T, kKey, kPerChannel>;
    using Lower = Triangle<S::kRows>;
    using Squares = Panels<S::kRows>;
    static constexpr bool kImages = !kMakesScores<kDelta, kPerChannel>;
    static constexpr int kPanels = kKey / kBoxChannels;
    static constexpr int kTriangleBytes = Lower::kElements * static_cast<int>(sizeof(T));

    const DeviceArgs& a;
    const RowMaps& maps;
    const Walk<kKey, kMaps>& walk;
    const ImageType* images;           // the segment's first
    const std::int32_t* exact_writes;  // the same
    unsigned char* memory;             // of the stages
    F* factors;                        // the same
    CarryBarriers& barriers;
    int groups, stages;
    bool per_chunk;  // Schedule

    // Parts of images go to every CTA of the cluster. Each CTA asks for its share, and the barrier expects all.
    struct Part {
        const unsigned char* image;
        std::uint32_t full;
        int cluster, rank = cluster_rank();

        __device__ __forceinline__ void copy(std::uint32_t to, int from, int bytes) const {
            if (cluster == 1)
                copy_bulk(to, image + from, bytes, full);
            else
                copy_bulk(to, image + from, bytes, full, (1u << cluster) - 1);
        }
        __device__ __forceinline__ void copy_run(std::uint32_t to, int from, int bytes) const {
            const int share = bytes >> (__ffs(cluster) - 1);  // a power of two of CTAs
            copy(to + rank * share, from + rank * share, share);
        }
        __device__ __forceinline__ void copy_triangle(std::uint32_t to, int from, int turn) const {
#pragma unroll
            for (int panel = 0; panel < Lower::kBlocks; ++panel)
                if (((panel + turn) & (cluster - 1)) == rank)
                    copy(to + (panel * Squares::kUnits + Squares::lower_begin(panel)) * 16,
                         from + Lower::block_begin(panel, panel) * 16,
                         (Squares::kUnits - Squares::lower_begin(panel)) * 16);
        }
    };

    static constexpr int kTileBytes = kPerChannel ? (1 + kDelta + !kMaps) * S::kTileBytes : 0;
    static constexpr int kFactorBytes = sizeof(F);
    static constexpr int kLowBytes = (kMaps ? 1 : 2) * kTriangleBytes;  // of a coupled chunk's second stage
    static constexpr int kImageBytes = kTileBytes + kFactorBytes + (kDelta + !kMaps) * kTriangleBytes;

    // A warp's share of an image.
    __device__ __forceinline__ void copy_image(int warp, const Part& part, std::uint32_t stage_at,
                                               std::uint32_t factors_at) const {
        if (warp == 0) {
            if constexpr (kPerChannel) {
                if constexpr (kDelta)
                    part.copy_run(stage_at + S::kKeyRead, offsetof(ImageType, k_decayed), 2 * S::kTileBytes);
                else
                    part.copy_run(stage_at + S::kKeyCarry, offsetof(ImageType, k_remaining), S::kTileBytes);
                if constexpr (!kMaps)
                    part.copy_run(stage_at + S::kQuery, offsetof(ImageType, q_decayed), S::kTileBytes);
                part.copy_run(factors_at, offsetof(ImageType, decay), kFactorBytes);
            } else {
                part.copy_run(factors_at, offsetof(ImageType, k_factor), kFactorBytes);
            }
        } else if (warp == 1) {
            if constexpr (kDelta) part.copy_triangle(stage_at + S::kInverse, offsetof(ImageType, inverse), 0);
        } else if constexpr (!kMaps) {
            part.copy_triangle(stage_at + S::kScores, offsetof(ImageType, scores), 1);
        }
    }
    __device__ __forceinline__ void copy_low(int warp, const Part& part, std::uint32_t stage_at) const {
        if (warp == 1)
            part.copy_triangle(stage_at + S::kInverse, offsetof(ImageType, inverse_low), 0);
        else if (warp == 2 && !kMaps)
            part.copy_triangle(stage_at + S::kScores, offsetof(ImageType, scores_low), 1);
    }

    // Rows as boxes, where they have maps: how many bytes, and their copies.
    __device__ __forceinline__ int box_bytes() const {
        const int tiles = kPerChannel ? 0 : kMaps ? 1 : 2;
        return (walk.of_m ? 0 : groups * S::kBoxBytes) + tiles * kPanels * S::kBoxBytes;
    }
    __device__ __forceinline__ void copy_boxes(int warp, int chunk, std::uint32_t stage_at, std::uint32_t full) const {
        BoxPlace at{0, a.by_group.divide(walk.value_head), static_cast<int>(walk.token(chunk)), walk.batch};
        const auto copy_panels = [&](int to, const CUtensorMap& map) {
#pragma unroll 1  // or registers run out
            for (int panel = 0; panel < kPanels; ++panel) {
                at.channel = panel * kBoxChannels;
                copy_box(stage_at + to + panel * S::kBoxBytes, map, at, full);
            }
        };
        if (warp == 1) {
            if (walk.of_m) return;
            at.head = walk.value_head;
            for (int group = 0; group < groups; ++group) {
                at.channel = walk.rows.first + group * kGroupRows;
                copy_box(stage_at + S::kValues + group * S::kBoxBytes, maps.v, at, full);
            }
        } else if constexpr (!kPerChannel) {
            if (warp == 0)
                copy_panels(S::kKeyRead, maps.k);
            else if constexpr (!kMaps)
                copy_panels(S::kQuery, maps.q);
        }
    }

    __device__ __forceinline__ void copy_key_rows(const TokenRows& rows, int chunk, unsigned char* to) const {
        const T* from = static_cast<const T*>(rows.data) +
                        rows.offset(walk.batch, walk.token(chunk), a.by_group.divide(walk.value_head));
        copy_rows<T, S::kRows, kKey / 8>(
            to, from, rows.token, walk.count(chunk), a.key_dim, aligned<T>(rows, a.key_dim),
            [](int token, int unit) { return OperandTile<kKey, false>::unit(token, unit) * 16; });
    }

    // What copy_boxes() brings, by all threads that fetch, whatever the rows are.
    __device__ __forceinline__ void copy_all_rows(int chunk, unsigned char* to) const {
        if constexpr (!kPerChannel) {
            if constexpr (!kMaps) copy_key_rows(a.q, chunk, to + S::kQuery);
            copy_key_rows(a.k, chunk, to + S::kKeyRead);
        }
        if (walk.of_m) return;
        const T* from = static_cast<const T*>(a.v.data) + a.v.offset(walk.batch, walk.token(chunk), walk.value_head);
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
            const int row = walk.rows.first + group * kGroupRows;
            copy_rows<T, S::kRows, kGroupRows / 8>(
                to + S::kValues + group * S::kBoxBytes, from + row, a.v.token, walk.count(chunk), a.value_dim - row,
                aligned<T>(a.v, a.value_dim),
                [](int token, int unit) { return Tile<S::kRows, kGroupRows>::unit(token, unit) * 16; });
        }
    }

    __device__ __forceinline__ void run() const {
        const int warp = static_cast<int>(threadIdx.x) % kGroupThreads / 32;
        const bool asks = threadIdx.x % 32 == 0;
        const int rows_bytes = box_bytes();
        int stage = 0, parity = 1;
        const auto full = [&] { return shared_address(barriers.full + stage); };
        const auto next_stage = [&] {
            if (++stage == stages) stage = 0, parity ^= 1;
        };
#pragma unroll 1
        for (int chunk = 0; chunk < walk.segment.chunks; ++chunk) {
            const std::int64_t image = static_cast<std::int64_t>(chunk) * a.value_heads;
            // Asked for before the wait, which hides it where the number is not waited for itself.
            std::int32_t prepared = 0;
            if (kImages && per_chunk)
                prepared = published(exact_writes + image);
            else if (kDelta)
                prepared = written_before(exact_writes + image);
            wait_barrier(shared_address(barriers.empty + stage), parity);
            if (kImages && per_chunk) {
                while (prepared == kUnprepared) prepared = published(exact_writes + image);
                fence_async_global();
            }
            const bool exact = kDelta && prepared;
            unsigned char* to = memory + stage * S::bytes(groups);
            // A box would take what follows a packed sequence for the rest of its last chunk.
            const bool boxes = maps.inputs && (!a.cu_seqlens || walk.count(chunk) == S::kRows);
            if (asks) {
                if (warp == 0) {
                    arrive_expecting(full(), (kImages ? kImageBytes : 0) + (boxes ? rows_bytes : 0));
                    barriers.exact[stage] = exact;
                }
                if constexpr (kImages)
                    copy_image(warp, {reinterpret_cast<const unsigned char*>(images + image), full(), walk.p.cluster},
                               shared_address(to), shared_address(factors + stage));
                if (boxes) copy_boxes(warp, chunk, shared_address(to), full());
            }
            if (!boxes) {
                copy_all_rows(chunk, to);
                commit_copies();
                wait_copies<0>();
                if constexpr (!kPerChannel) fence_async_proxy();  // products read q and k
            }
            arrive(full());
            next_stage();
            if constexpr (kDelta) {
                if (!exact) continue;
                wait_barrier(shared_address(barriers.empty + stage), parity);
                if (asks) {
                    if (warp == 0) arrive_expecting(full(), kLowBytes);
                    copy_low(warp, {reinterpret_cast<const unsigned char*>(images + image), full(), walk.p.cluster},
                             shared_address(memory + stage * S::bytes(groups)));
                }
                arrive(full());
                next_stage();
            }
        }
    }
};

// The warp that puts out what the warpgroups have turned: a Tile of tokens by value rows of each.
template <class T, int kKey>
struct Putter {
    static constexpr int kRows = kTokens<kKey>, kUnits = kGroupRows / 8;

    const DeviceArgs& a;
    const CUtensorMap& map;
    const Walk<kKey, false>& walk;
    const unsigned char* tiles;  // in shared memory
    CarryBarriers& barriers;
    int groups;

    __device__ __forceinline__ void run() const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
        for (int chunk = 0; chunk < walk.segment.chunks; ++chunk) {
            const int count = walk.count(chunk);
#pragma unroll 1
            for (int group = 0; group < groups; ++group) {
                const int row = walk.rows.first + group * kGroupRows;
                const unsigned char* tile = tiles + group * kOutBytes<T, kKey, false>;
                wait_barrier(shared_address(barriers.turned + group), chunk & 1);
                if (!a.cu_seqlens || count == kRows) {
                    if (lane == 0) {
                        store_box(map, {row, walk.value_head, static_cast<int>(walk.token(chunk)), walk.batch},
                                  shared_address(tile));
                        wait_stores_read();
                    }
                    __syncwarp();
                } else {
                    put_rows(tile, chunk, count, row, lane);
                }
                arrive(shared_address(barriers.taken + group));
            }
        }
    }

    // What a box would write beyond a packed sequence's end is left out.
    __device__ __forceinline__ void put_rows(const unsigned char* tile, int chunk, int count, int row, int lane) const {
        T* const to = static_cast<T*>(a.o.data) + a.o.offset(walk.batch, walk.token(chunk), walk.value_head) + row;
#pragma unroll 1
        for (int i = lane; i < count * kUnits; i += kPutThreads) {
            const int token = i / kUnits, unit = i % kUnits;
            if (row + unit * 8 < a.value_dim)
                *reinterpret_cast<uint4*>(to + token * a.o.token + unit * 8) =
                    *reinterpret_cast<const uint4*>(tile + Tile<kRows, kGroupRows>::unit(token, unit) * 16);
        }
    }
};

}  // namespace cula::cuda::sm90
