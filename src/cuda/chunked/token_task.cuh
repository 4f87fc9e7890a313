// SPDX-License-Identifier: Apache-2.0
// What a warp of prepare_token does for a task, a chunk and a value head: from products of q and k with k to
// scores and the inverse (prepare_token.cuh).
//
// Products and overlaps are in blocks of 16 x 16, the rows tokens j of the earlier block, the columns tokens
// i of the later one: transposed. A lane reads the accumulators that the same lane of another warp has
// stored, so there are no bank conflicts. As they are, they are the right factor of a TF32 product: its pairs
// along k are neighbouring columns. So only diagonal blocks, and the one that joins the first two, change
// lanes through shared memory on their way to the inverse.
//
// The inverse (ALGORITHM.md: solve), X = (I + M)^-1 with M = diag(beta) L, by blocks:
//   1  diagonal blocks by substitution in float32, two columns per lane
//   2  neighbouring ones joined to squares of 32: X_10 = -X_11 M_10 X_00
//   3  the two squares of 32: Y = X_lower M, -Y X_upper
#pragma once

#include "cuda/chunked/block.cuh"
#include "cuda/chunked/chunk.cuh"
#include "cuda/chunked/solve.cuh"
#include "cuda/chunked/token_products.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/scan.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::chunked {

// A block of 16 x 16 floats that changes lanes, in lines of kPitch floats: of M a line is a row, of X a
// column. The pitch, and four floats behind the block, keep accesses by accumulators and of 16 bytes per lane
// free of bank conflicts, but for pairs of load().
struct TurningBlock {
    static constexpr int kPitch = 20;
    float x[kBlock * kPitch + 4];

    // The transpose of what stands here by lines, as an accumulator; and an accumulator's transpose to here.
    __device__ __forceinline__ void load_turned(Accumulator& to) const {
        const float* const from = x + own_lane() % 4 * 2 * kPitch + own_lane() / 4;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) to[tile][e] = from[(8 * tile + e % 2) * kPitch + e / 2 * 8];
    }
    __device__ __forceinline__ void store_turned(const Accumulator& from, int lane = own_lane()) {
        float* const to = x + lane % 4 * 2 * kPitch + lane / 4;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) to[(8 * tile + e % 2) * kPitch + e / 2 * 8] = from[tile][e];
    }
    // As it stands.
    __device__ __forceinline__ void load(Accumulator& to) const {
        const float* const from = x + own_lane() / 4 * kPitch + own_lane() % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 pair = *reinterpret_cast<const float2*>(from + 8 * half * kPitch + 8 * tile);
                to[tile][2 * half] = pair.x, to[tile][2 * half + 1] = pair.y;
            }
    }
};

template <int kKey>
struct TokenTask {
    uint4 slots[2][32];  // blocks of a triangle on their way to global memory
    TurningBlock turning[Parts<kKey>::kBlocks];
};

// Per token of a task.
template <int kKey>
struct TokenGates {
    float log_decay[kTokens<kKey>];  // log2, running from the chunk's start
    float beta[kTokens<kKey>];
};

// What a task loads of each of its tokens: a lane has two neighbouring ones (one where a chunk has 32).
template <int kKey, bool kSeveral>
struct TokenInputs {
    static constexpr int kEach = kTokens<kKey> / 32;
    using Tokens = TokensOfRows<kSeveral>;
    RawFloat gates[kEach], betas[kEach];
    bool decays[kEach];  // whether the row exists, and is its token's first

    static __device__ __forceinline__ int token(int i) { return own_lane() * kEach + i; }
    static __device__ __forceinline__ std::int64_t gate_at(const DeviceArgs& a, const ChunkPlace& place,
                                                           int value_head, const Tokens& tokens, int i) {
        return a.g.offset(place.batch, tokens.first_token + tokens.token(token(i)), value_head);
    }
    static __device__ __forceinline__ std::int64_t beta_at(const DeviceArgs& a, const ChunkPlace& place,
                                                           int value_head, int i) {
        return a.beta.offset(place.batch, place.begin + token(i), value_head);
    }
    static __device__ __forceinline__ void ask(RawFloat& to, const TokenRows& rows, std::int64_t at,
                                               bool in) {
        const std::int64_t bytes = rows.dtype == Dtype::kFloat64 ? 8 : rows.dtype == Dtype::kFloat32 ? 4 : 2;
        to.load(static_cast<const char*>(rows.data) + at * bytes, element(rows.dtype), in);
    }
    // Requests them; nothing waits for memory here.
    __device__ __forceinline__ void ask(const DeviceArgs& a, const ChunkPlace& place, int value_head,
                                        bool solves) {
        const Tokens tokens(a.writes, place.begin);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const bool in = token(i) < place.count;
            decays[i] = in && tokens.is_first(token(i));
            if (a.algorithm.decay == kTokenDecay)
                ask(gates[i], a.g, gate_at(a, place, value_head, tokens, i), decays[i]);
            if (solves) ask(betas[i], a.beta, beta_at(a, place, value_head, i), in);
        }
    }
    __device__ __forceinline__ void store(const DeviceArgs& a, const ChunkPlace& place, int value_head,
                                          bool solves, TokenGates<kKey>& to) const {
        const HeadGate gate(a, value_head);
        float sums[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const bool in = token(i) < place.count;
            sums[i] = 0.0f;
            if (decays[i]) {
                float of_gate = 0.0f;
                if (a.algorithm.decay == kTokenDecay) {
                    const float given =
                        a.g.dtype == Dtype::kFloat64
                            ? load_float(a.g.data, Dtype::kFloat64,
                                         gate_at(a, place, value_head, Tokens(a.writes, place.begin), i))
                            : gates[i].value(element(a.g.dtype));
                    of_gate = gate.log2_decay(given + gate.bias);
                }
                sums[i] = max_or_nan(of_gate + gate.gamma2, kLeastLog2Decay);
            }
            float beta = 0.0f;
            if (solves && in)
                beta = solved_beta_of(
                    a, a.beta.dtype == Dtype::kFloat64
                           ? load_float(a.beta.data, Dtype::kFloat64, beta_at(a, place, value_head, i))
                           : betas[i].value(element(a.beta.dtype)));
            to.beta[token(i)] = beta;
        }
        running_sums(sums);
#pragma unroll
        for (int i = 0; i < kEach; ++i) to.log_decay[token(i)] = sums[i];
    }
};

// product [16 x 16] += left right in TF32. `right` is the accumulator of its transpose. kExact: two-word
// factors (22 bits) instead of one word (11 bits).
template <bool kExact>
__device__ __forceinline__ void multiply_blocks(Accumulator& product, const Accumulator& left,
                                                const Accumulator& right) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        // Neighbouring columns of `left` serve as k and k + 4, and so do those of the transpose of `right`.
        const Tf32 a0(left[step][0]), a1(left[step][2]), a2(left[step][1]), a3(left[step][3]);
        const std::uint32_t a[4] = {a0.rounded, a1.rounded, a2.rounded, a3.rounded};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const Tf32 b0(right[step][2 * tile]), b1(right[step][2 * tile + 1]);
            if constexpr (kExact) {
                const std::uint32_t rest[4] = {a0.rest, a1.rest, a2.rest, a3.rest};
                mma_16x8x8_tf32(product[tile], rest, b0.rounded, b1.rounded);
                mma_16x8x8_tf32(product[tile], a, b0.rest, b1.rest);
            }
            mma_16x8x8_tf32(product[tile], a, b0.rounded, b1.rounded);
        }
    }
}

template <class T, int kKey>
struct TokenWork {
    static constexpr int kRows = kTokens<kKey>, kBlocks = Parts<kKey>::kBlocks;
    using Lower = Triangle<kRows>;

    const DeviceArgs& a;
    const TokenProducts<kKey>& products;
    const TokenGates<kKey>& gates;
    TokenTask<kKey>& task;
    TokenOverlaps<kKey>& overlaps;
    TokenChunk<T, kKey>& chunk;
    int count;  // tokens
    bool solves;

    // Stores the factors of tokens, and the bound by which maps skip the chunk to `fading`, unless null.
    template <bool kReversed>
    __device__ __forceinline__ void factors(float* fading) const {
        constexpr int kEach = kRows / 32;
        const float whole = gates.log_decay[kRows - 1];
        float grows_by = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int t = own_lane() * kEach + i;
            const bool in = t < count;
            const float q_norm = in ? a.scale * products.norms[0][t] : 0.0f,
                        k_norm = in ? products.norms[1][t] : 0.0f, log_decay = gates.log_decay[t];
            (kReversed ? chunk.k_rest : chunk.q_factor)[t] = q_norm * exp2_fast(log_decay);
            chunk.k_factor[t] = k_norm * exp2_fast(log_decay);
            (kReversed ? chunk.q_factor : chunk.k_rest)[t] = k_norm * exp2_fast(whole - log_decay);
            chunk.decay[t] = exp2_fast(whole);
            grows_by += growth(gates.beta[t]);
        }
        if (!fading) return;
        grows_by = sum_over_warp(grows_by);
        if (own_lane() == 0) *fading = a.qk_l2norm ? whole + grows_by : 0.0f;
    }

    // Scores to global memory; overlaps times beta to `overlaps`, the blocks on the diagonal to `turning`.
    // Returns whether the chunk must be compensated (kMostSquares), and then has stored low words, too.
    __device__ __forceinline__ bool decay() const {
        bool compensated = false;
        float squares[2][2] = {};
        each_block(
            [&](const auto& decays, const Columns& columns, int later, int earlier) {
                emit_scores<false>(decays, later, earlier);
                if (solves) store_overlaps(decays, columns, later, earlier, squares);
            },
            [&](int) {
                compensated |= exceeds(squares);
#pragma unroll
                for (int column = 0; column < 4; ++column) squares[column / 2][column % 2] = 0.0f;
            });
        if (compensated) {
            __syncwarp();  // the last block's slot may be that of the first
            each_block([&](const auto& decays, const Columns&, int later,
                           int earlier) { emit_scores<true>(decays, later, earlier); },
                       [](int) {});
        }
        return compensated;
    }
    // The inverse times beta, to global memory. bf16 has 8 significant bits, so the error of one TF32 product
    // (11 bits) is below that of rounding the result. fp16 has 11 bits, and near-collinear keys magnify the
    // error: both take products of two-word factors (22 bits).
    __device__ __forceinline__ void solve(bool compensated) const {
        if (compensated)
            invert<true, true>();
        else
            invert<std::is_same_v<T, __half>, false>();
    }

private:
    // Of the columns of a later block: log decays, and decays from the block's begin.
    struct Columns {
        float log_decay[2][2], since_begin[2][2], beta[2][2];  // [tile][e]
        float begin = 0.0f;                                    // log decay of the token before the block

        __device__ __forceinline__ Columns(const TokenGates<kKey>& gates, int later, int lane) {
            if (later > 0) begin = gates.log_decay[later * kBlock - 1];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const int token = later * kBlock + 8 * tile + lane % 4 * 2;
                const auto log = *reinterpret_cast<const float2*>(gates.log_decay + token),
                           strength = *reinterpret_cast<const float2*>(gates.beta + token);
                log_decay[tile][0] = log.x, log_decay[tile][1] = log.y;
                beta[tile][0] = strength.x, beta[tile][1] = strength.y;
#pragma unroll
                for (int e = 0; e < 2; ++e) since_begin[tile][e] = exp2_fast(log_decay[tile][e] - begin);
            }
        }
    };
    // 2^(G_i - G_j) of a block. Of one left of the diagonal, as two factors that are at most 1: until the
    // later block's begin, and from there. Zeros above the diagonal, where the factor may be infinite.
    template <bool kDiagonal>
    struct Decays {
        Accumulator x;
        const int lane;

        __device__ __forceinline__ Decays(const TokenGates<kKey>& gates, const Columns& of, int earlier,
                                          int lane)
            : lane(lane) {
            const float* const log_decay = gates.log_decay + earlier * kBlock + lane / 4;
            const float rows[2] = {log_decay[0], log_decay[8]};
            float until_begin[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) until_begin[half] = exp2_fast(of.begin - rows[half]);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if constexpr (!kDiagonal)
                        x[tile][e] = until_begin[e / 2] * of.since_begin[tile][e % 2];
                    else
                        x[tile][e] =
                            is_below(tile, e, 0) ? exp2_fast(of.log_decay[tile][e % 2] - rows[e / 2]) : 0.0f;
                }
        }
        // Whether the column is at least `by` tokens behind the row, in a block on the diagonal. Always in
        // others.
        __device__ __forceinline__ bool is_below(int tile, int e, int by) const {
            return !kDiagonal || 8 * tile + lane % 4 * 2 + e % 2 - lane / 4 - e / 2 * 8 >= by;
        }
    };
    // Calls body(decays, columns, later, earlier) for every block, and at_end(later) behind a row of them.
    template <class Body, class AtEnd>
    __device__ __forceinline__ void each_block(Body body, AtEnd at_end) const {
        const int lane = lane_anew();
#pragma unroll 1
        for (int later = 0; later < kBlocks; ++later) {
            const Columns columns(gates, later, lane);
#pragma unroll 1
            for (int earlier = 0; earlier < later; ++earlier)
                body(Decays<false>(gates, columns, earlier, lane), columns, later, earlier);
            body(Decays<true>(gates, columns, later, lane), columns, later, later);
            at_end(later);
        }
    }

    // Packs an accumulator to a slot in shared memory and from there to block (row, column) of a triangle in
    // global memory. Warp-collective; calls take turns in two slots, since lanes may still read the one
    // before. kTransposed: of the accumulator's transpose. kLow: what rounding to T leaves over.
    template <bool kTransposed, bool kLow>
    __device__ __forceinline__ void emit(T* triangle, const Accumulator& x, int row, int column, int slot,
                                         int lane = own_lane()) const {
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // of tile i / 2, half i % 2
            const float2 pair{x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]};
            words[i] = pack2<T>(pair.x, pair.y);
            if (kLow) words[i] = pack_rest<T>(pair, words[i]);
        }
        store_units<kTransposed>(task.slots[slot], words, lane);
        __syncwarp();
        reinterpret_cast<uint4*>(triangle)[Lower::block_begin(row, column) + lane] = task.slots[slot][lane];
    }
    // Four 8 x 8 matrices, of tiles and halves of an accumulator, to a block of a triangle.
    template <bool kTransposed>
    static __device__ __forceinline__ void store_units(uint4* block, const std::uint32_t (&words)[4],
                                                       int lane) {
#if __CUDA_ARCH__ >= 900
        const int tile = lane / 16, half = lane / 8 % 2, row = lane % 8 + 8 * (kTransposed ? tile : half);
        const std::uint32_t at = shared_address(block + Lower::in_block(row, kTransposed ? half : tile));
        if (kTransposed)
            store_matrices_transposed(at, words);
        else
            store_matrices(at, words);
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int tile = i / 2, half = i % 2, row = lane / 4 + 8 * (kTransposed ? tile : half);
            reinterpret_cast<std::uint32_t*>(block +
                                             Lower::in_block(row, kTransposed ? half : tile))[lane % 4] =
                kTransposed ? transposed(words[i]) : words[i];
        }
#endif
    }

    template <bool kLow, bool kDiagonal>
    __device__ __forceinline__ void emit_scores(const Decays<kDiagonal>& decays, int later,
                                                int earlier) const {
        Accumulator x;
        products.scores.load(x, later, earlier, decays.lane);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                x[tile][e] = decays.is_below(tile, e, 0) ? x[tile][e] * decays.x[tile][e] : 0.0f;
        emit<true, kLow>(kLow ? chunk.scores_low : chunk.scores, x, later, earlier,
                         (later * (later + 1) / 2 + earlier) % 2, decays.lane);
    }
    // Adds to the sums of squares of the lane's columns.
    template <bool kDiagonal>
    __device__ __forceinline__ void store_overlaps(const Decays<kDiagonal>& decays, const Columns& columns,
                                                   int later, int earlier, float (&squares)[2][2]) const {
        Accumulator x;
        products.overlaps.load(x, later, earlier, decays.lane);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float overlap = x[tile][e] * (decays.x[tile][e] * columns.beta[tile][e % 2]);
                x[tile][e] = decays.is_below(tile, e, 1) ? overlap : 0.0f;
                squares[tile][e % 2] = fmaf(x[tile][e], x[tile][e], squares[tile][e % 2]);
            }
        if constexpr (kDiagonal)
            task.turning[later].store_turned(x, decays.lane);
        else
            overlaps.store(left_block(later, earlier), x, decays.lane);
    }
    // Whether the squares of some column sum to more than kMostSquares, or to NaN. Columns are shared by
    // eight lanes: mostly no lane has an eighth of that.
    static __device__ __forceinline__ bool exceeds(float (&squares)[2][2]) {
        const auto within = [&](float most) {
            return squares[0][0] <= most && squares[0][1] <= most && squares[1][0] <= most &&
                   squares[1][1] <= most;
        };
        if (__all_sync(0xffffffffu, within(kMostSquares / 8))) return false;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2)
                    squares[tile][e] += __shfl_xor_sync(0xffffffffu, squares[tile][e], lanes);
        return !__all_sync(0xffffffffu, within(kMostSquares));
    }

    // Replaces M by the transpose of X, by lines, in all blocks on the diagonal: x_i = [i = j] - sum_{l < i}
    // m_il x_l. Lane 8 b + j has columns j and j + 8 of block b.
    __device__ __forceinline__ void invert_diagonal_blocks() const {
        const int lane = own_lane(), block = lane / 8 % kBlocks, j = lane % 8;
        float* const m = task.turning[block].x;
        constexpr int kHalf = kBlock / 2;
        float first[kBlock], second[kHalf];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            float row[kBlock], x[2] = {i == j ? 1.0f : 0.0f, 0.0f},
                               y[2] = {i == j + kHalf ? 1.0f : 0.0f, 0.0f};
#pragma unroll
            for (int l = 0; l < i; l += 4) load4(row + l, m + i * TurningBlock::kPitch + l);
#pragma unroll
            for (int l = 0; l < i; ++l) {
                x[l % 2] -= row[l] * first[l];
                if (l >= kHalf) y[l % 2] -= row[l] * second[l - kHalf];
            }
            first[i] = x[0] + x[1];
            if (i >= kHalf) second[i - kHalf] = y[0] + y[1];
        }
        __syncwarp();
        if (lane < 8 * kBlocks) {
            float* const columns[2] = {m + j * TurningBlock::kPitch, m + (j + kHalf) * TurningBlock::kPitch};
#pragma unroll
            for (int i = 0; i < kBlock; i += 4) {
                *reinterpret_cast<float4*>(columns[0] + i) = {first[i], first[i + 1], first[i + 2],
                                                              first[i + 3]};
                *reinterpret_cast<float4*>(columns[1] + i) =
                    i < kHalf ? float4{}
                              : float4{second[i % kHalf], second[i % kHalf + 1], second[i % kHalf + 2],
                                       second[i % kHalf + 3]};
            }
        }
        __syncwarp();
    }

    template <bool kExact, bool kLow>
    __device__ __forceinline__ void invert() const {
        int slot = 0;
        const auto emit_inverse = [&](const Accumulator& x, int row, int column) {
            Accumulator scaled;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const auto beta = *reinterpret_cast<const float2*>(gates.beta + column * kBlock + 8 * tile +
                                                                   own_lane() % 4 * 2);
#pragma unroll
                for (int e = 0; e < 4; ++e) scaled[tile][e] = x[tile][e] * (e % 2 ? beta.y : beta.x);
            }
            emit<false, false>(chunk.inverse, scaled, row, column, slot);
            slot ^= 1;
            if constexpr (kLow) {
                emit<false, true>(chunk.inverse_low, scaled, row, column, slot);
                slot ^= 1;
            }
        };
        // x <- a block on the diagonal.
        const auto take_diagonal = [&](Accumulator& x, int block) {
            task.turning[block].load_turned(x);
            emit_inverse(x, block, block);
        };
        // x <- -x M_(row, column) right, the last two transposed.
        const auto join = [&](Accumulator& x, int row, int column, const Accumulator& right) {
            Accumulator m, product = {}, joined = {};
            overlaps.load(m, left_block(row, column));
            multiply_blocks<kExact>(product, x, m);
            multiply_blocks<kExact>(joined, product, right);
            negate(x, joined);
        };
        // x <- the lower left block of the square of two neighbouring blocks on the diagonal.
        const auto join_with_next = [&](Accumulator& x, int upper) {
            Accumulator right;
            task.turning[upper].load(right);
            join(x, upper + 1, upper, right);
            emit_inverse(x, upper + 1, upper);
        };
        invert_diagonal_blocks();
        if constexpr (kBlocks == 2) {
            Accumulator x;
            take_diagonal(x, 0);
            take_diagonal(x, 1);
            join_with_next(x, 0);
        } else {
            static_assert(kBlocks == 4);
            Accumulator x22, x32, x33;
            take_diagonal(x22, 2);
            take_diagonal(x33, 3);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) x32[tile][e] = x33[tile][e];
            join_with_next(x32, 2);
            // Right factors, which are read here as they stand: X_00, X_11, and X_10 in the place of X_22.
            {
                Accumulator x;
                take_diagonal(x, 0);
                take_diagonal(x, 1);
                join_with_next(x, 0);
                __syncwarp();
                task.turning[2].store_turned(x);
                __syncwarp();
            }
#pragma unroll
            for (int row = 2; row < 4; ++row) {
                Accumulator y[2] = {}, factor;
#pragma unroll
                for (int column = 0; column < 2; ++column) {
                    overlaps.load(factor, left_block(2, column));
                    multiply_blocks<kExact>(y[column], row == 2 ? x22 : x32, factor);
                    if (row == 2) continue;
                    overlaps.load(factor, left_block(3, column));
                    multiply_blocks<kExact>(y[column], x33, factor);
                }
                Accumulator x = {};
                task.turning[0].load(factor);
                multiply_blocks<kExact>(x, y[0], factor);
                task.turning[2].load(factor);
                multiply_blocks<kExact>(x, y[1], factor);
                negate(x, x);
                emit_inverse(x, row, 0);
                Accumulator last = {};
                task.turning[1].load(factor);
                multiply_blocks<kExact>(last, y[1], factor);
                negate(last, last);
                emit_inverse(last, row, 1);
            }
        }
    }
    static __device__ __forceinline__ void negate(Accumulator& to, const Accumulator& x) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) to[tile][e] = -x[tile][e];
    }
};

}  // namespace cula::cuda::chunked
