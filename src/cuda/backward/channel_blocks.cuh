// SPDX-License-Identifier: Apache-2.0
// gradient_channel, pairs of tokens in different blocks, by tensor cores. All decays run between the borders
// of blocks, and no factor exceeds 1. QR and KR are q (times scale) and k decayed from the start of their
// block, KC is k decayed to the end of its block, and whole_b is the decay of block b:
//
//     rows of block i        acc = (dO S^T)_i, from the chunk's start; for j = 0 .. i - 1:
//                            crossing_ij = colsum(QR_i o acc);  acc = acc whole_j + dA_ij KC_j
//                            and the same with -dV S^T, KR_i and dL; crossing_ij is the sum of both
//     columns of block j     acc = (U Z^T)_j, from the chunk's end; leaving_j = colsum(KC_j o acc);
//                            for i = last .. j + 1:  acc = acc whole_i + dA_ij^T QR_i + dL_ij^T KR_i
//
// In the end the rows run from the start of their block, and the columns to the end of theirs.
#pragma once

#include "cuda/backward/channel_slices.cuh"

namespace cula::cuda::backward {

template <class T, int kKey, bool kSolves>
struct BlockSums {
    using P = Patches<kKey>;
    GradientChannelSmem<T, kKey>& s;
    const Patch<kKey>& patch;

    __device__ __forceinline__ void rows(Ends& ends, bool wants_decay) const {
#pragma unroll 1
        for (int j = 0; j < patch.block; ++j) {
            const int pair = block_pair(patch.block, j);
            if (wants_decay) {
                float sums[8] = {};
                add_products(sums, s.operands.q_rows[patch.block - 1], ends.q);
                if (kSolves) add_products(sums, s.operands.k_rows[patch.block - 1], ends.k);
                put_sums(sums, s.rows_crossing[pair]);
            }
            const BlockWords<kKey>& columns = s.operands.k_columns[j];
            decay(ends.q, j);
            std::uint32_t square[4];
            load_fragment(square, s.d_scores[pair], 0, patch.lane);
            multiply(ends.q, square, columns);
            if constexpr (kSolves) {
                decay(ends.k, j);
                load_fragment(square, s.d_overlaps[pair], 0, patch.lane);
                multiply(ends.k, square, columns);
            }
        }
    }

    __device__ __forceinline__ void columns(Ends& ends, bool wants_decay) const {
        if (patch.block == P::kBlocks - 1) return;
        if (wants_decay) {
            float sums[8] = {};
            add_products(sums, s.operands.k_columns[patch.block], ends.columns);
            put_sums(sums, s.columns_leaving[patch.block]);
        }
#pragma unroll 1
        for (int i = P::kBlocks - 1; i > patch.block; --i) {
            const int pair = block_pair(i, patch.block);
            decay(ends.columns, i);
            std::uint32_t square[4];
            load_transposed(square, s.d_scores[pair]);
            multiply(ends.columns, square, s.operands.q_rows[i - 1]);
            if constexpr (kSolves) {
                load_transposed(square, s.d_overlaps[pair]);
                multiply(ends.columns, square, s.operands.k_rows[i - 1]);
            }
        }
    }

private:
    __device__ __forceinline__ void load_transposed(std::uint32_t (&square)[4],
                                                    const std::uint32_t* from) const {
        std::uint32_t words[4];
        load_fragment(words, from, 0, patch.lane);
        square[0] = transposed(words[0]), square[1] = transposed(words[2]);
        square[2] = transposed(words[1]), square[3] = transposed(words[3]);
    }

    __device__ __forceinline__ void multiply(float (&sums)[4][4], const std::uint32_t (&square)[4],
                                             const BlockWords<kKey>& operand) const {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int channel = patch.group * kGroup + patch.lane / 4 + 8 * n, pair = patch.lane % 4;
            mma_16x8x16<T>(sums[n], square, operand[pair][channel], operand[pair + 4][channel]);
        }
    }

    __device__ __forceinline__ void decay(float (&x)[4][4], int block) const {
        const float* from = s.whole[block] + patch.group * kGroup + patch.lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 whole = *reinterpret_cast<const float2*>(from + 8 * n);
            x[n][0] *= whole.x, x[n][1] *= whole.y, x[n][2] *= whole.x, x[n][3] *= whole.y;
        }
    }

    // sums[2 n + e] += the lane's part of the sum over tokens of operand o x, at channel 8 n + 2 (l % 4) + e.
    __device__ __forceinline__ void add_products(float (&sums)[8], const BlockWords<kKey>& operand,
                                                 const float (&x)[4][4]) const {
        const bool odd = patch.lane / 4 % 2;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int channel = patch.group * kGroup + patch.lane % 4 * 2 + 8 * n;
                const uint2 words =
                    *reinterpret_cast<const uint2*>(&operand[patch.lane / 8 + 4 * half][channel]);
                const float2 first = unpack2<T>(words.x), second = unpack2<T>(words.y);
                sums[2 * n] = fmaf(odd ? first.y : first.x, x[n][2 * half], sums[2 * n]);
                sums[2 * n + 1] = fmaf(odd ? second.y : second.x, x[n][2 * half + 1], sums[2 * n + 1]);
            }
    }

    // The sums over the lanes that share channels, to `to` [kKey].
    __device__ __forceinline__ void put_sums(float (&sums)[8], float* to) const {
        scatter_sums<4, 4>(sums);
        const int mine = patch.lane / 4;  // 2 n + e
        to[patch.group * kGroup + mine / 2 * 8 + patch.lane % 4 * 2 + mine % 2] = sums[0];
    }
};

}  // namespace cula::cuda::backward
