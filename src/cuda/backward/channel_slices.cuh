// SPDX-License-Identifier: Apache-2.0
// gradient_channel, what a warp makes of the saved slices: the ends of its patch,
//
//     dQ~ = dO S^T        dK^ = -dV S^T        dK+ = U Z^T
//
// the squares dA = dO U^T and dL = -dV U^T of its block with one or two blocks up to it, and, in warps of the
// first block, rowsum(S o Z) of their channels.
#pragma once

#include "cuda/backward/channel_config.cuh"

namespace cula::cuda::backward {

// Four words of a lane: fragment `index` of those that begin at `from`.
template <class T>
__device__ __forceinline__ void load_fragment(std::uint32_t (&words)[4], const T* from, int index, int lane) {
    const uint4 x = reinterpret_cast<const uint4*>(from)[index * 32 + lane];
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
}

// Accumulators of a patch, by eight channels: dQ~, dK^ and dK+.
struct Ends {
    float q[4][4] = {}, k[4][4] = {}, columns[4][4] = {};
};

// Starts to copy what is needed of one slice after another.
template <class T, int kKey, bool kSolves>
class SliceCopies {
public:
    // first: the index of the first slice.
    __device__ __forceinline__ SliceCopies(const Saved<T, kKey>& saved, std::int64_t first,
                                           SavedSlice<T, kKey>* slots, int thread, bool ends)
        : saved_(saved),
          slice_(static_cast<std::int32_t>(first)),
          thread_at_(thread * 16),
          to_(shared_address(reinterpret_cast<uint4*>(slots) + thread)),
          mixed_is_carried_(kMixed >= 0 && kMixed * kThreads + thread < kCarried) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int piece = i * kThreads + thread;
            const bool of_writes = piece < kState, of_d_values = piece >= kCarried && piece < kOutputs;
            in_[i] = piece < kAll && (of_writes || (of_d_values ? kSolves : ends));
        }
    }

    __device__ __forceinline__ void next(int slot) {
        const std::uint32_t to = to_ + slot * static_cast<int>(sizeof(Slice));
        const auto* const carried =
            reinterpret_cast<const unsigned char*>(saved_.carried + slice_) + thread_at_;
        const auto* const returned =
            reinterpret_cast<const unsigned char*>(saved_.returned + slice_) + thread_at_;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const bool is_carried = i == kMixed ? mixed_is_carried_ : i * kThreads < kCarried;
            const int place = i * kThreads * 16;
            if (in_[i])
                copy_async(to + place, is_carried ? carried + place : returned + place - kCarried * 16);
        }
        ++slice_;
    }

private:
    using Slice = SavedSlice<T, kKey>;
    // In pieces of 16 bytes.
    static constexpr int kState = offsetof(Slice, state) / 16, kCarried = offsetof(Slice, d_values) / 16,
                         kOutputs = offsetof(Slice, d_outputs) / 16, kAll = sizeof(Slice) / 16;
    // kMixed: the step, if there is one, whose threads copy the last pieces of the carry's part and the first
    // of the return's.
    static constexpr int kThreads = Patches<kKey>::kThreads, kSteps = (kAll + kThreads - 1) / kThreads,
                         kMixed = kCarried % kThreads > 0 ? kCarried / kThreads : -1;
    static_assert(Slice::kCarried == kCarried * 16 && Slice::kCarried + Slice::kReturned == sizeof(Slice));

    const Saved<T, kKey>& saved_;
    std::int32_t slice_, thread_at_;  // the next slice: one register, where two pointers take four
    std::uint32_t to_;
    bool mixed_is_carried_, in_[kSteps];
};

template <class T, int kKey, bool kSolves>
struct SliceSums {
    using P = Patches<kKey>;
    using Slice = SavedSlice<T, kKey>;
    Ends ends;
    float d_scores[P::kSquares][2][4] = {}, d_overlaps[P::kSquares][2][4] = {};
    float passing[4] = {};  // of channels 8 i + l / 4, over the lane's value channels

    // Which block of columns square p has; it exists if this is not after the warp's block. Odd blocks count
    // backwards, so that the four schedulers, each with one group of K = 128, get nearly the same.
    static __device__ __forceinline__ int column(const Patch<kKey>& patch, int p) {
        if (P::kGroups == P::kBlocks && patch.block % 2) return P::kGroups - 1 - patch.group;
        return patch.group + p * P::kGroups;
    }

    __device__ __forceinline__ void add(const Patch<kKey>& patch, const SavedSlice<T, kKey>& slice,
                                        bool wants_ends) {
        std::uint32_t writes[4], d_values[4], d_outputs[4];
        const std::uint32_t begin = shared_address(&slice), at = begin + SavedLane::columns(patch.lane),
                            of_block = begin + patch.block * kSavedBlock + SavedLane::rows(patch.lane);
        load_matrices_transposed(writes, of_block + offsetof(Slice, writes));
        if constexpr (kSolves) {
            load_matrices_transposed(d_values, of_block + offsetof(Slice, d_values));
#pragma unroll
            for (int i = 0; i < 4; ++i) d_values[i] ^= 0x80008000u;  // -dV
        }
        if (wants_ends) {
            load_matrices_transposed(d_outputs, of_block + offsetof(Slice, d_outputs));
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                std::uint32_t state[4], d_state[4];
                const std::uint32_t of_step = at + (2 * patch.group + step) * kSavedBlock;
                load_matrices_transposed(state, of_step + offsetof(Slice, state));
                load_matrices_transposed(d_state, of_step + offsetof(Slice, d_state));
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int i = 2 * step + x;
                    mma_16x8x16<T>(ends.q[i], d_outputs, state[2 * x], state[2 * x + 1]);
                    if (kSolves) mma_16x8x16<T>(ends.k[i], d_values, state[2 * x], state[2 * x + 1]);
                    mma_16x8x16<T>(ends.columns[i], writes, d_state[2 * x], d_state[2 * x + 1]);
                }
                if (patch.block > 0) continue;
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const float2 s = unpack2<T>(state[w]), z = unpack2<T>(d_state[w]);
                    float& sum = passing[2 * step + w / 2];
                    sum = fmaf(s.x, z.x, sum);
                    sum = fmaf(s.y, z.y, sum);
                }
            }
        }
#pragma unroll
        for (int p = 0; p < P::kSquares; ++p) {
            const int j = column(patch, p);
            if (j > patch.block) continue;
            std::uint32_t columns[4];
            load_matrices_transposed(columns, at + j * kSavedBlock + offsetof(Slice, writes));
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                if (wants_ends) mma_16x8x16<T>(d_scores[p][x], d_outputs, columns[2 * x], columns[2 * x + 1]);
                if (kSolves) mma_16x8x16<T>(d_overlaps[p][x], d_values, columns[2 * x], columns[2 * x + 1]);
            }
        }
    }

    // Zeros in the place of the lane's rows of dL.
    __device__ __forceinline__ void drop_overlaps() {
        for (auto& square : d_overlaps)
            for (auto& half : square)
                for (float& x : half) x = 0.0f;
    }

    // Squares and rowsum(S o Z) to shared memory.
    __device__ __forceinline__ void put(const Patch<kKey>& patch, GradientChannelSmem<T, kKey>& s) {
        const int row = patch.lane / 4, pair = patch.lane % 4 * 2;
#pragma unroll
        for (int p = 0; p < P::kSquares; ++p) {
            const int j = column(patch, p);
            if (j > patch.block) continue;
            const auto put_square = [&](const float(&square)[2][4], float(&own)[kBlock][kBlock],
                                        std::uint32_t* fragment) {
                if (j == patch.block) {
#pragma unroll
                    for (int x = 0; x < 2; ++x)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            *reinterpret_cast<float2*>(&own[row + 8 * half][8 * x + pair]) = {
                                square[x][2 * half], square[x][2 * half + 1]};
                } else {
                    reinterpret_cast<uint4*>(fragment)[patch.lane] = {
                        pack2<T>(square[0][0], square[0][1]), pack2<T>(square[0][2], square[0][3]),
                        pack2<T>(square[1][0], square[1][1]), pack2<T>(square[1][2], square[1][3])};
                }
            };
            const int index = j < patch.block ? block_pair(patch.block, j) : 0;
            put_square(d_scores[p], s.own_scores[patch.block], s.d_scores[index]);
            if (kSolves) put_square(d_overlaps[p], s.own_overlaps[patch.block], s.d_overlaps[index]);
        }
        if (patch.block > 0) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            passing[i] += __shfl_xor_sync(0xffffffffu, passing[i], 1);
            passing[i] += __shfl_xor_sync(0xffffffffu, passing[i], 2);
            if (patch.lane % 4 == 0) s.passing[patch.group * kGroup + 8 * i + row] = passing[i];
        }
    }
};

}  // namespace cula::cuda::backward
