// SPDX-License-Identifier: Apache-2.0
// gradient_token: squares [tokens x tokens] of a chunk, by blocks of 16 x 16. The pairs q k^T and k k^T, what
// dA and dL contribute to dg, and their products with q and k.
#pragma once

#include "cuda/backward/rows.cuh"
#include "cuda/backward/token_config.cuh"
#include "cuda/chunked/tile_reads.cuh"

namespace cula::cuda::backward {

template <int kCount>
using SquareTiles = float[kCount][2][4];  // [square][tile of eight columns][accumulator]

// Addresses for ldmatrix of an A operand [16 x 16] in a tile: as it stands (load_matrices), and of its
// transpose (load_matrices_transposed).
template <class Place>
using OperandReads = chunked::LaneReads<Place, true>;
template <class Place>
using TransposedReads = chunked::LaneReads<Place, false>;

// The sum over the lane's row of a half block and the rows of that half after it; and over those up to it.
__device__ __forceinline__ float sum_from_row(int lane, float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        const float other = __shfl_down_sync(0xffffffffu, x, step);
        if (lane + step < 32) x += other;
    }
    return x;
}
__device__ __forceinline__ float sum_to_row(int lane, float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

// Sums over the rows of a half block: of four numbers x[tile][e], that with tile = lane / 16, e = lane / 8
// % 2.
__device__ __forceinline__ float sum_over_rows(int lane, const float (&x)[2][2]) {
    const bool tile = lane & 16, e = lane & 8;
    float sums[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        sums[i] = (tile ? x[1][i] : x[0][i]) + __shfl_xor_sync(0xffffffffu, tile ? x[0][i] : x[1][i], 16);
    float sum = (e ? sums[1] : sums[0]) + __shfl_xor_sync(0xffffffffu, e ? sums[0] : sums[1], 8);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 4);
}

// pairs_ij = scale_i norm_j (left_i . k_j) below the diagonal: what the decay between i and j multiplies. For
// the warp's squares; left is q or k. norms: of k, or null. scale: of the lane's two tokens.
template <class T, int kKey, class Role>
__device__ __forceinline__ void make_pairs(LaneTriangle<chunked::kTokens<kKey>>& pairs, const Role& role,
                                           const T* left, const T* k, const float (&scale)[2],
                                           const float* norms) {
    using Pairs = LaneTriangle<chunked::kTokens<kKey>>;
    using Place = chunked::OperandTile<kKey, false>;
    const OperandReads<Place> left_reads;
    const chunked::LaneReads<Place, false> column_reads;
    const int lane = static_cast<int>(threadIdx.x) % 32, begin = Pairs::begin(role.block, lane);
    const std::uint32_t left_at = shared_address(left), k_at = shared_address(k);
#pragma unroll 1
    for (int column = role.column(0); column <= role.block; column += Role::kSharers) {
        const bool diagonal = column == role.block;
        float product[2][4] = {};
#pragma unroll
        for (int step = 0; step < kKey / 16; ++step) {
            std::uint32_t rows[4], columns[4];
            load_matrices(rows, left_reads.at(left_at, role.block, step));
            load_matrices(columns, column_reads.at(k_at, column, step));
            mma_16x8x16<T>(product[0], rows, columns[0], columns[1]);
            mma_16x8x16<T>(product[1], rows, columns[2], columns[3]);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int j = 8 * tile + lane % 4 * 2;  // in the block
            const float2 norm = *reinterpret_cast<const float2*>(norms + column * chunked::kBlock + j);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = lane / 4 + 8 * half;
                float2 x{product[tile][2 * half] * (scale[half] * norm.x),
                         product[tile][2 * half + 1] * (scale[half] * norm.y)};
                if (diagonal && j >= i) x.x = 0.0f;
                if (diagonal && j + 1 >= i) x.y = 0.0f;
                if (Pairs::has(diagonal, tile, half)) pairs.at(begin, column, diagonal, tile, half) = x;
            }
        }
    }
}

// A lane's sums of dg for tokens t of its two rows: over rows of its block from t on.
struct LanePaths {
    float from_earlier[2];  // of each row: paths from the chunk's start and from earlier blocks
    float inside[2];        // from tokens of the block before t, also to the chunk's end
};

// from_start, to_end: of the lane's two rows and channels. Stores their sums over the block.
template <class Paths, class Role>
__device__ __forceinline__ LanePaths start_paths(Paths& to, const Role& role, const float (&from_start)[2],
                                                 const float (&to_end)[2]) {
    const int lane = lane_again(), row = lane / 4;  // of a half
    const float upper = sum_to_row(lane, to_end[0]), lower = sum_to_row(lane, to_end[1]),
                all_upper = __shfl_sync(0xffffffffu, upper, 28 + lane % 4),
                before_upper = __shfl_up_sync(0xffffffffu, upper, 4),
                before_lower = __shfl_up_sync(0xffffffffu, lower, 4);
    const float start = sum_over_warp(from_start[0] + from_start[1]),
                end = sum_over_channels(all_upper + lower);  // in the lanes of the last row
    if (lane == 31) to.ends[role.block][role.group] = {start, end};
    return {{from_start[0], from_start[1]},
            {row > 0 ? before_upper : 0.0f, row > 0 ? all_upper + before_lower : all_upper}};
}

// From products x = dO U^T or dV U^T to decayed squares, summed over value heads:
//   squares  x <- x o D, plus the sums over the value heads before, which are stored unless this is the last:
//            dA or -dL
//   paths    from x o pairs: those of the lane, and `between`; if dg is wanted
//   dbeta    the diagonal of dV U^T
// first, last: whether the value head is.
template <class T, int kKey, class Role>
__device__ __forceinline__ void decay_squares(SquareTiles<Role::kSquares>& squares, LanePaths& paths,
                                              typename GradientToken<T, kKey>::Shared& s, const Role& role,
                                              bool first, bool last, bool wants_decay) {
    using Of = GradientToken<T, kKey>;
    using Pairs = LaneTriangle<Of::kRows>;
    constexpr int kBlock = chunked::kBlock;
    const int lane = lane_again(), row = lane / 4,  // of a half
        first_column = lane % 4 * 2;                // of a tile
    const int own_pairs = Pairs::begin(role.block, lane);
    const float* const log_decays = s.log_decay + role.block * kBlock + row;
    const float log_decay[2] = {log_decays[0], log_decays[8]};
#pragma unroll
    for (int square = 0; square < Role::kSquares; ++square) {
        const int column = role.column(square);
        if (column > role.block) continue;
        const auto decay = [&](auto is_diagonal) {
            constexpr bool kDiagonal = decltype(is_diagonal)::value;
            float crossing[2][2][2] = {};  // [tile][half][e]
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const float2 column_decay =
                    *reinterpret_cast<const float2*>(s.log_decay + column * kBlock + 8 * tile + first_column);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float* const x = &squares[square][tile][2 * half];
                    if (!Pairs::has(kDiagonal, tile, half)) {
                        x[0] = 0.0f, x[1] = 0.0f;
                        continue;
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int below = row + 8 * half - (8 * tile + first_column + e);
                        if (kDiagonal && role.kind && below == 0)
                            s.strengths[role.block * kBlock + row + 8 * half] = x[e];
                        // Above the diagonal the factor may be infinite.
                        x[e] *= exp2_fast(log_decay[half] - (e ? column_decay.y : column_decay.x));
                        if (kDiagonal && tile == half && below < role.kind) x[e] = 0.0f;
                    }
                    if (wants_decay) {
                        const float2 pair = s.pairs[role.kind].at(own_pairs, column, kDiagonal, tile, half);
                        crossing[tile][half][0] = x[0] * pair.x, crossing[tile][half][1] = x[1] * pair.y;
                    }
                    float2& sum = s.sums[role.kind].at(own_pairs, column, kDiagonal, tile, half);
                    if (!first) x[0] += sum.x, x[1] += sum.y;
                    if (!last) sum = {x[0], x[1]};
                }
            }
            if (!wants_decay) return;
            if constexpr (kDiagonal) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float below = sum_from_row(lane, crossing[0][1][e]),
                                all_below = __shfl_sync(0xffffffffu, below, lane % 4),
                                left = sum_from_row(lane, crossing[0][0][e]) + all_below,
                                right = sum_from_row(lane, crossing[1][1][e]);
                    const bool is_before = first_column + e < row;
                    paths.inside[0] += is_before ? left : 0.0f;
                    paths.inside[1] += below + (is_before ? right : 0.0f);
                }
            } else {
                float columns[2][2];
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        paths.from_earlier[0] += crossing[tile][0][e];
                        paths.from_earlier[1] += crossing[tile][1][e];
                        columns[tile][e] = crossing[tile][0][e] + crossing[tile][1][e];
                    }
                const float sum = sum_over_rows(lane, columns);
                if (lane % 8 < 4)
                    s.paths.between[role.kind][s.paths.between_begin(role.block) + column * kBlock +
                                               lane / 16 * 8 + first_column + lane / 8 % 2] = sum;
            }
        };
        if (column < role.block)
            decay(std::false_type());
        else
            decay(std::true_type());
    }
}

// Sums the paths of a warp's lanes, and stores them.
template <class Paths, class Role>
__device__ __forceinline__ void store_paths(Paths& to, const Role& role, const LanePaths& of) {
    const int lane = lane_again();
    const float lower = sum_from_row(lane, of.from_earlier[1]),
                upper = sum_from_row(lane, of.from_earlier[0]) + __shfl_sync(0xffffffffu, lower, lane % 4),
                of_upper = sum_over_channels(of.inside[0] + upper),
                of_lower = sum_over_channels(of.inside[1] + lower);
    float* const inside = to.inside[role.group] + role.block * chunked::kBlock + lane / 4;
    if (lane % 4 == 0) inside[0] = of_upper, inside[8] = of_lower;
}

// Stores the warp's dA or dL, rounded, to tiles.
template <class T, int kKey, class Role>
__device__ __forceinline__ void store_squares(typename GradientToken<T, kKey>::Shared& s, const Role& role,
                                              const SquareTiles<Role::kSquares>& squares) {
    using Of = GradientToken<T, kKey>;
    using Place = chunked::Tile<Of::kRows, Of::kRows>;
    const int lane = static_cast<int>(threadIdx.x) % 32, token = role.block * chunked::kBlock + lane / 4;
    auto* const to = reinterpret_cast<std::uint32_t*>(s.squares[role.kind]) + lane % 4;
    const std::uint32_t sign = role.kind ? 0x80008000u : 0;
#pragma unroll
    for (int square = 0; square < Role::kSquares; ++square) {
        const int column = role.column(square);
        if (column > role.block) continue;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                to[Place::unit(token + 8 * half, 2 * column + tile) * 4] =
                    pack2<T>(squares[square][tile][2 * half], squares[square][tile][2 * half + 1]) ^ sign;
    }
}

// The warp's rows and channels of d_q += dA k, d_k += (dL + dL^T) k and of_q += dA^T q.
template <class T, int kKey, bool kSolves, int kTiles>
__device__ __forceinline__ void multiply_squares(RowTiles<kTiles>& d_q, RowTiles<kTiles>& d_k,
                                                 RowTiles<kTiles>& of_q,
                                                 const typename GradientToken<T, kKey>::Shared& s, const T* q,
                                                 const T* k, int block, int first_channel) {
    using Of = GradientToken<T, kKey>;
    using Squares = chunked::Tile<Of::kRows, Of::kRows>;
    const OperandReads<Squares> square_rows;
    const TransposedReads<Squares> square_columns;
    const chunked::LaneReads<chunked::OperandTile<kKey, false>, true> reads;
    const std::uint32_t scores_at = shared_address(s.squares[0]), overlaps_at = shared_address(s.squares[1]),
                        q_at = shared_address(q), k_at = shared_address(k);
    // The block's tokens are rows of the squares with blocks up to it, and columns of those from it on.
#pragma unroll 1
    for (int other = 0; other <= block; ++other) {
        std::uint32_t scores[4], overlaps[4];
        load_matrices(scores, square_rows.at(scores_at, block, other));
        if constexpr (kSolves) load_matrices(overlaps, square_rows.at(overlaps_at, block, other));
#pragma unroll
        for (int step = 0; step < kTiles / 2; ++step) {
            std::uint32_t m[4];
            load_matrices_transposed(m, reads.at(k_at, other, first_channel / 16 + step));
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const int to = 2 * step + tile;
                mma_16x8x16<T>(d_q[to], scores, m[2 * tile], m[2 * tile + 1]);
                if constexpr (kSolves) mma_16x8x16<T>(d_k[to], overlaps, m[2 * tile], m[2 * tile + 1]);
            }
        }
    }
#pragma unroll 1
    for (int other = block; other < Of::kBlocks; ++other) {
        std::uint32_t scores[4], overlaps[4];
        load_matrices_transposed(scores, square_columns.at(scores_at, other, block));
        if constexpr (kSolves)
            load_matrices_transposed(overlaps, square_columns.at(overlaps_at, other, block));
#pragma unroll
        for (int step = 0; step < kTiles / 2; ++step) {
            const int pair = first_channel / 16 + step;
            std::uint32_t m[4];
            load_matrices_transposed(m, reads.at(q_at, other, pair));
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
                mma_16x8x16<T>(of_q[2 * step + tile], scores, m[2 * tile], m[2 * tile + 1]);
            if constexpr (kSolves) {
                load_matrices_transposed(m, reads.at(k_at, other, pair));
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                    mma_16x8x16<T>(d_k[2 * step + tile], overlaps, m[2 * tile], m[2 * tile + 1]);
            }
        }
    }
}

}  // namespace cula::cuda::backward
