// SPDX-License-Identifier: Apache-2.0
// The warpgroup that copies: images, q, k and v to the stages, outputs to memory.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/sm90/stage.cuh"

namespace cula::cuda::sm90 {

// The tokens of a chunk, kUnits times eight columns of `from`, each 16 bytes to place(token, unit); zero beyond `count`
// tokens and `columns` columns. Called by one warpgroup.
template <class T, int kRows, int kUnits, class Place>
__device__ __forceinline__ void copy_rows(unsigned char* memory, const T* from, std::int64_t pitch, int count,
                                          int columns, bool wide, Place place) {
    constexpr int kStep = kGroupThreads / kUnits;  // a multiple of eight tokens: the same swizzle again
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, unit = thread % kUnits;
    if (wide && count == kRows && columns >= kUnits * 8) {
        const std::uint32_t to = shared_address(memory) + place(thread / kUnits, unit);
        from += thread / kUnits * pitch + unit * 8;
#pragma unroll
        for (int token = 0; token < kRows; token += kStep, from += kStep * pitch)
            copy_async(to + place(token, 0), from);
        return;
    }
#pragma unroll 1
    for (int token = thread / kUnits; token < kRows; token += kStep) {
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

template <class T, int kKey, bool kDelta, bool kPerChannel, bool kMaps>
struct Copier {
    using S = Stage<T, kKey, kDelta, kPerChannel>;
    using ImageType = typename S::ImageType;

    const DeviceArgs& a;
    const Walk<kKey, kMaps>& walk;
    const ImageType* images;           // the segment's first
    const std::int32_t* exact_writes;  // the same
    unsigned char* memory;             // of the stages
    CarryBarriers& barriers;
    int groups, stages;
    bool wide_out;

    // This CTA's part of an image, to every CTA of the cluster; the barrier expects all parts.
    __device__ __forceinline__ void copy_image(const ImageType* image, bool exact, std::uint32_t stage_at,
                                               std::uint32_t full) const {
        const int size = cluster_size(), rank = cluster_rank();
        const int begin = ImageType::begin(kDelta, kDelta && exact), bytes = ImageType::end() - begin;
        const std::uint32_t to = stage_at - S::kImageBegin;
        const auto* from = reinterpret_cast<const unsigned char*>(image);
        arrive_expecting(full, bytes);
        if (size == 1) return copy_bulk(to + begin, from + begin, bytes, full);
        const int part = (bytes >> (3 + __ffs(size))) * 16, first = begin + rank * part;  // size is a power of two
        copy_bulk(to + first, from + first, rank + 1 < size ? part : bytes - rank * part, full, (1u << size) - 1);
    }

    __device__ __forceinline__ void copy_key_rows(const TokenRows& rows, int chunk, unsigned char* to) const {
        const T* from =
            static_cast<const T*>(rows.data) + rows.offset(walk.batch, walk.token(chunk), walk.value_head / a.group);
        copy_rows<T, S::kRows, kKey / 8>(
            to, from, rows.token, walk.count(chunk), a.key_dim, aligned<T>(rows, a.key_dim),
            [](int token, int unit) { return Tile<S::kRows, kKey>::unit(token, unit) * 16; });
    }

    // Outputs of a chunk, 16 value rows of a warp after the other as Tile<kRows, 16>, once the warpgroups have turned
    // them.
    __device__ __forceinline__ void put_out(int chunk) const {
        const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, unit = thread % (kGroupRows / 8);
        const int count = walk.count(chunk);
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
            const int row = walk.rows.first + group * kGroupRows + unit * 8;
            const unsigned char* from = memory + stages * S::bytes(groups) + group * kOutBytes<T, kKey> +
                                        unit / 2 * (kOutBytes<T, kKey> / kGroupWarps);
            T* to = static_cast<T*>(a.o.data) + a.o.offset(walk.batch, walk.token(chunk), walk.value_head) + row;
            wait_barrier(shared_address(barriers.turned + group), chunk & 1);
#pragma unroll 2
            for (int i = 0; i < S::kRows; i += kGroupThreads / (kGroupRows / 8)) {
                const int token = i + thread / (kGroupRows / 8);
                const auto* words =
                    reinterpret_cast<const uint4*>(from + Tile<S::kRows, kWarpRows>::unit(token, unit % 2) * 16);
                if (row < a.value_dim && token < count) *reinterpret_cast<uint4*>(to + token * a.o.token) = *words;
            }
            arrive(shared_address(barriers.taken + group));
        }
    }

    __device__ __forceinline__ void run() const {
        const std::uint32_t full = shared_address(barriers.full), empty = shared_address(barriers.empty);
        const bool first_thread = threadIdx.x % kGroupThreads == 0;
        const bool all_wide = (!walk.of_m ? aligned<T>(a.v, a.value_dim) : true) &&
                              (kPerChannel || ((kMaps || aligned<T>(a.q, a.key_dim)) && aligned<T>(a.k, a.key_dim)));
        int stage = 0, parity = 1;
#pragma unroll 1
        for (int chunk = 0; chunk < walk.segment.chunks; ++chunk) {
            // Asked for before the wait, which hides it.
            const std::int32_t exact =
                kDelta && first_thread ? __ldg(exact_writes + static_cast<std::int64_t>(chunk) * a.value_heads) : 0;
            wait_barrier(empty + stage * 8, parity);
            unsigned char* to = memory + stage * S::bytes(groups);
            if (kMakesScores<kDelta, kPerChannel>) {
                if (first_thread) arrive(full + stage * 8);
            } else if (first_thread) {
                barriers.exact[stage] = exact;
                copy_image(images + static_cast<std::int64_t>(chunk) * a.value_heads, exact, shared_address(to),
                           full + stage * 8);
            }
            if constexpr (!kPerChannel) {
                if constexpr (!kMaps) copy_key_rows(a.q, chunk, to + S::kQuery);
                copy_key_rows(a.k, chunk, to + S::kKeyRows);
            }
            if (!walk.of_m) {
                const T* from =
                    static_cast<const T*>(a.v.data) + a.v.offset(walk.batch, walk.token(chunk), walk.value_head);
#pragma unroll 1
                for (int group = 0; group < groups; ++group) {
                    const int row = walk.rows.first + group * kGroupRows;
                    copy_rows<T, S::kRows, kGroupRows / 8>(
                        to + S::kValues + group * S::kValueBytes, from + row, a.v.token, walk.count(chunk),
                        a.value_dim - row, aligned<T>(a.v, a.value_dim),
                        [](int token, int unit) { return token * S::kValuePitch + unit * 16; });
                }
            }
            if (all_wide)
                arrive_after_copies(full + stage * 8);
            else
                arrive_after_all(full + stage * 8);
            if (++stage == stages) stage = 0, parity ^= 1;
            if (wide_out && chunk >= stages) put_out(chunk - stages);
        }
        for (int chunk = max(walk.segment.chunks - stages, 0); wide_out && chunk < walk.segment.chunks; ++chunk)
            put_out(chunk);
    }

    static __device__ __forceinline__ void arrive_after_all(std::uint32_t full) {
        commit_copies();
        wait_copies<0>();
        arrive(full);
    }
};

}  // namespace cula::cuda::sm90
