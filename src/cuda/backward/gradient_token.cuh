// SPDX-License-Identifier: Apache-2.0
// gradient_token: d_q, d_k, d_g, d_beta <- q, k, gates, beta, and what the walks have saved of each chunk;
// with one decay per token or head, or none.
//
// With G the running log2 decay of the chunk, D_ij = 2^(G_i - G_j), S the state before the chunk, Z the
// gradient of the state after it, and q and k normalised where the call asks for it (ALGORITHM.md,
// "Backward"):
//   squares  dA = tril(dO U^T) o D               dL = -stril(dV U^T) o D        (dL: rules that solve)
//   beta     dbeta_i = (dV_i / beta_i) . (U_i / beta_i)
//   rows     Y_i = 2^G_i (dO S^T)_i              X_i = -2^G_i (dV S^T)_i
//   columns  W_j = 2^(G_end - G_j) (U Z^T)_j
//   keys     dq = scale (Y + dA k)               dk = X + W + scale dA^T q + (dL + dL^T) k
//   decay    dg_t = sum over i >= t of scale q_i . Y_i + k_i . X_i
//                 + sum over j < t of k_j . W_j
//                 + sum over i >= t > j of scale dA_ij (q_i . k_j) + dL_ij (k_i . k_j)
//                 + 2^G_end sum(S o Z)
//
// Grid: a CTA per chunk of the slab and head of q and k, heads fastest. It takes the value heads of that head
// one after another. Y, X and W are accumulators of every value head, since dg needs their dot products; they
// are added to dq and dk in registers. dA and dL are summed over the value heads in float32 and multiplied
// with q and k once, after the last.
//
// 512 threads: a warp per block of 16 tokens and group of 32 channels (16 where K = 64). In this order; | is
// a barrier of the CTA:
//   load     all warps: q and k (cp.async); the first slices (token_config.cuh); one warp: gates of the first
//            value head |
//   norms    four lanes per token |
//   pairs    q k^T and k k^T, if dg is wanted; one warp: log decays of the first value head
//   then per value head:
//   slices   per 16 value channels: products; then another slice may come in its place. Where slices come in
//            pieces | before each; by bulk copies | behind the last
//   ends     Y, X, W times their factors, to dq and dk; dot products
//   squares  decays, sums of pairs
//            | one warp: the gradient of the gate; one: that of beta; one: log decays of the next value head
//   then, if dq or dk is wanted:
//   keys     squares and normalised rows to shared memory | products | norms, stores
// Pairs and sums of squares are in shared memory, but each is private to a lane.
//
// Shared memory: q and k, pairs, sums of squares, and a ring of slices. KiB; the last column with bulk
// copies, for which the number of places is a power of two:
//   K = 64    55.0 + 4 x 10 = 95.0, + 6 x 10 = 115.0, + 16 x 10 = 215.3
//   K = 128   71.0 + 2 x 14 = 99.0, + 6 x 14 = 155.0, + 8 x 14 = 183.1
//   K = 256   44.5 + 2 x 19 = 82.5, + 5 x 19 = 139.5, + 8 x 19 = 196.6
// Registers: at most 128, so one CTA per multiprocessor. Accumulators of a thread: Y, X, W 48 and dq, dk 32
// (half of both where K = 64), squares 16 (8 for additive rules, and where K = 256), S o Z 4. Operands of a
// slice are loaded in two parts, S with dO and dV, then Z with U. What else a lane needs it computes anew for
// every value head (lane_again()).
//
// kSeveral: of tokens that write several times, whose chunks are rows of writes (tile/tokens_of_rows.cuh).
// Rows that are not their token's last have a zero q, and a zero dO from the return, so that their dq is
// zero; rows that are not its first do not decay, and have no dg.
//
// PDL: every CTA first waits for the kernels before it, then triggers.
#pragma once

#include "cuda/backward/rows.cuh"
#include "cuda/backward/token_config.cuh"
#include "cuda/backward/token_gates.cuh"
#include "cuda/backward/token_squares.cuh"
#include "cuda/chunked/tile_reads.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::backward {

// 1 / norm of each row of q and k: kParts lanes of a warp per row, eight rows per warp.
template <class T, int kKey>
__device__ __forceinline__ void store_norms(typename GradientToken<T, kKey>::Shared& s) {
    constexpr int kRows = GradientToken<T, kKey>::kRows, kParts = 4;
    static_assert(2 * kRows * kParts <= GradientToken<T, kKey>::kThreads);
    const int thread = static_cast<int>(threadIdx.x), part = thread / 8 % kParts,
              of_both = thread / 32 * 8 + thread % 8, row = of_both % kRows;
    if (of_both >= 2 * kRows) return;
    const auto* const units = reinterpret_cast<const uint4*>(of_both < kRows ? s.q : s.k);
    float sum = 0.0f;
#pragma unroll
    for (int unit = 0; unit < kKey / 8; unit += kParts) {
        const uint4 x = units[chunked::OperandTile<kKey, false>::unit(row, unit + part)];
        for (const std::uint32_t word : {x.x, x.y, x.z, x.w}) {
            const float2 pair = unpack2<T>(word);
            sum = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum));
        }
    }
#pragma unroll
    for (int lanes = 8; lanes < 8 * kParts; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (part == 0) s.norms[of_both / kRows][row] = rsqrtf(sum + 1e-6f);
}

// The tokens of a chunk's rows, computed anew wherever it is called.
template <bool kSeveral>
__device__ __forceinline__ TokensOfRows<kSeveral> tokens_of(const DeviceArgs& a,
                                                            const chunked::ChunkPlace& place) {
    return {kSeveral ? a.writes : 1, place.begin};
}

// Of the CTA's chunk and head. Slices: its ring, of `places` places where they hold pieces.
template <class T, int kKey, Update kUpdate, bool kSeveral, class Slices>
__device__ __forceinline__ void gradients_of_chunk(const DeviceArgs& a, const chunked::Schedule& schedule,
                                                   const Gradients& d, const Saved<T, kKey>& saved,
                                                   const GradientScratch& scratch, std::int32_t places) {
    pdl_wait();
    pdl_trigger();
    using Of = GradientToken<T, kKey>;
    using Slice = typename Of::Slice;
    constexpr int kRows = Of::kRows, kBlocks = Of::kBlocks, kGroups = Of::kGroups, kTiles = Of::kTiles,
                  kThreads = Of::kThreads, kBlock = chunked::kBlock;
    constexpr bool kSolves = GradientTokenRule<kUpdate>::kSolves;
    using Role = TokenRole<T, kKey, kSolves>;
    extern __shared__ __align__(128) unsigned char raw[];
    auto& s = *reinterpret_cast<typename Of::Shared*>(raw);

    const int slot = static_cast<int>(static_cast<unsigned>(blockIdx.x) / static_cast<unsigned>(a.heads)),
              head = static_cast<int>(blockIdx.x) - slot * a.heads, first_head = head * a.group;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32,
              warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // known to be uniform
    const chunked::ChunkPlace place = chunked::place_of<kRows>(a, schedule, slot);
    const bool wants_decay = a.algorithm.decay == kTokenDecay && d.decay(),
               wants_strength = kSolves && d.d_beta.data;
    // Of value head first_head + `of`.
    const auto parameters_of = [&](int of) -> float* {
        if (!wants_decay || !scratch.parameters) return nullptr;
        return scratch.parameters + (std::int64_t{blockIdx.x} * a.group + of) * 2;
    };
    if (place.count <= 0) {
        float* const parameters = parameters_of(0);
        for (int i = thread; parameters && i < 2 * a.group; i += kThreads) parameters[i] = 0.0f;
        return;
    }

    // --- load ---
    // The warps that have, per token, the gate and the write strength of a value head, and the next one's
    // gate. The first two have no squares.
    constexpr int kGateWarp = 7, kNextWarp = 15, kStrengthWarp = 8;
    TokenNumbers<kRows> first_gates;
    if (warp == kNextWarp) first_gates.ask_gates(a, place, first_head, tokens_of<kSeveral>(a, place));
    Slices ring(raw, places, saved, saved.index(slot, first_head, 0), a.group * saved.count);
    {
        const auto copy_rows = [&](T* tile, const TokenRows& rows) {
            chunked::copy_tokens<T, kRows, kKey>(tile, shared_address(tile), rows,
                                                 rows.offset(place.batch, place.begin, head), place.count,
                                                 a.key_dim, rows.pieces, thread, kThreads);
        };
        if constexpr (kSeveral) {
            const TokensOfWrites tokens(a.writes, place.begin);
            chunked::copy_tokens<T, kRows, kKey>(
                s.q, shared_address(s.q), a.q, a.q.offset(place.batch, tokens.first_token, head), place.count,
                a.key_dim, a.q.pieces, thread, kThreads, tokens);
        } else {
            copy_rows(s.q, a.q);
        }
        copy_rows(s.k, a.k);
        commit_copies();
        ring.start();
    }
    ring.wait_for_rows();
    __syncthreads();

    // --- norms ---
    const Role role(warp);
    if (a.qk_l2norm)
        store_norms<T, kKey>(s);
    else if (thread < 2 * kRows)
        s.norms[thread / kRows][thread % kRows] = 1.0f;
    __syncthreads();

    // --- pairs ---
    if (wants_decay) {
        // Of dL the squares have the negative.
        const float* const norms = s.norms[role.kind] + role.block * kBlock + lane / 4;
        const float factor = role.kind ? -1.0f : a.scale, scale[2] = {factor * norms[0], factor * norms[8]};
        make_pairs<T, kKey>(s.pairs[role.kind], role, role.kind ? s.k : s.q, s.k, scale, s.norms[1]);
    }

    if (warp == kNextWarp)
        store_log_decays<kRows>(a, place, first_head, tokens_of<kSeveral>(a, place), first_gates,
                                s.log_decay);

    constexpr int kHalves = kBlocks > 2 ? kBlocks / 2 : 1;
    const int odd = role.block % 2;
    RowTiles<kTiles> d_q = {}, d_k = {};  // d_q without scale
    SquareTiles<Role::kSquares> squares;  // dA or -dL
#pragma unroll 1
    for (int of = 0; of < a.group; ++of) {
        const int value_head = first_head + of;
        const bool last = of + 1 == a.group;

        // --- slices ---
        RowTiles<kTiles> reads = {}, removals = {}, writes = {};  // dO S^T, dV S^T, U Z^T
        float through[4] = {};                                    // S^T Z of eight channels and values
#pragma unroll
        for (int square = 0; square < Role::kSquares; ++square)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e) squares[square][tile][e] = 0.0f;
        // Of the lane, in a slice: its block of tokens as rows, and from there to columns.
        const int own = role.block * kSavedBlock + SavedLane::rows(lane),
                  to_columns = SavedLane::columns(lane) - own,
                  to_group = to_columns + role.group * (kTiles / 2) * kSavedBlock;
        const unsigned of_head = static_cast<unsigned>(of * saved.count);
#pragma unroll 1
        for (unsigned i = of_head; i < of_head + saved.count; ++i) {
            const std::uint32_t at = ring.wait(i) + own;
            // The warps of a group of channels share S^T Z: 16 channels and eight values each. The same half
            // of both operands is reduced over eight values of two channels.
            const auto shares = [&](int step) { return wants_decay && step % kHalves == role.block / 2; };
            std::uint32_t d_outputs[4], d_values[4] = {}, half[(kTiles / 2 + kHalves - 1) / kHalves][2];
            load_matrices_transposed(d_outputs, at + offsetof(Slice, d_outputs));
            if constexpr (kSolves) load_matrices_transposed(d_values, at + offsetof(Slice, d_values));
#pragma unroll
            for (int step = 0; step < kTiles / 2; ++step) {
                std::uint32_t state[4];
                load_matrices_transposed(state, at + to_group + offsetof(Slice, state) + step * kSavedBlock);
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    const int to = 2 * step + tile;
                    mma_16x8x16<T>(reads[to], d_outputs, state[2 * tile], state[2 * tile + 1]);
                    if constexpr (kSolves)
                        mma_16x8x16<T>(removals[to], d_values, state[2 * tile], state[2 * tile + 1]);
                }
                if (shares(step)) {
#pragma unroll
                    for (int x = 0; x < 2; ++x)
                        half[step / kHalves][x] = odd ? state[2 * x + 1] : state[2 * x];
                }
            }
            const auto multiply_writes = [&](const std::uint32_t(&left)[4]) {
#pragma unroll
                for (int square = 0; square < Role::kSquares; ++square) {
                    const int column = role.column(square);
                    if (column > role.block) continue;
                    std::uint32_t right[4];
                    load_matrices_transposed(
                        right, at + to_columns + column * kSavedBlock + offsetof(Slice, writes));
                    mma_16x8x16<T>(squares[square][0], left, right[0], right[1]);
                    mma_16x8x16<T>(squares[square][1], left, right[2], right[3]);
                }
            };
            if (kSolves && role.kind)
                multiply_writes(d_values);
            else
                multiply_writes(d_outputs);
            std::uint32_t written[4];
            load_matrices_transposed(written, at + offsetof(Slice, writes));
#pragma unroll
            for (int step = 0; step < kTiles / 2; ++step) {
                std::uint32_t d_state[4];
                load_matrices_transposed(d_state,
                                         at + to_group + offsetof(Slice, d_state) + step * kSavedBlock);
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                    mma_16x8x16<T>(writes[2 * step + tile], written, d_state[2 * tile],
                                   d_state[2 * tile + 1]);
                if (shares(step))
                    mma_16x8x16<T>(through, d_state, half[step / kHalves][0], half[step / kHalves][1]);
            }
            ring.release(i, warp);
        }
        if constexpr (!Slices::kSynchronises) __syncthreads();

        // --- ends ---
        const LaneRows<T, kKey> rows(role.block, role.group * Of::kChannels);
        const float end = s.log_decay[kRows - 1];
        if (wants_decay) {
            // The diagonal of S^T Z.
            const int x_lane = lane_again(), above = x_lane / 4 - x_lane % 4 * 2;
            const float x = odd ? through[2] : through[0], y = odd ? through[3] : through[1];
            const float sum = sum_over_warp(above == 0 ? x : above == 1 ? y : 0.0f);
            if (x_lane == 0) s.paths.through[role.block][role.group] = sum * exp2_fast(end);
        }
        float from_start[2] = {}, to_end[2] = {};  // paths of the lane's rows and channels
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = rows.token + 8 * half;
            const float since_start = exp2_fast(s.log_decay[token]),
                        until_end = exp2_fast(end - s.log_decay[token]);
            if (wants_decay) {
                const float q_norm = s.norms[0][token], k_norm = s.norms[1][token];
                float of_reads = 0.0f, of_removals = 0.0f, of_writes = 0.0f;  // dot products with q or k
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    const float2 q = rows.pair(s.q, tile, half), k = rows.pair(s.k, tile, half);
                    const auto add = [&](float& sum, const RowTiles<kTiles>& x, const float2& y) {
                        sum = fmaf(x[tile][2 * half], y.x, fmaf(x[tile][2 * half + 1], y.y, sum));
                    };
                    add(of_reads, reads, q);
                    if constexpr (kSolves) add(of_removals, removals, k);
                    add(of_writes, writes, k);
                }
                from_start[half] = since_start * (a.scale * q_norm * of_reads - k_norm * of_removals);
                to_end[half] = until_end * (k_norm * of_writes);
            }
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (int at = 2 * half; at < 2 * half + 2; ++at) {
                    d_q[tile][at] = fmaf(since_start, reads[tile][at], d_q[tile][at]);
                    d_k[tile][at] = fmaf(until_end, writes[tile][at], d_k[tile][at]);
                    if constexpr (kSolves)
                        d_k[tile][at] = fmaf(-since_start, removals[tile][at], d_k[tile][at]);
                }
        }
        LanePaths paths{};
        if (wants_decay) paths = start_paths(s.paths, role, from_start, to_end);

        // --- squares ---
        decay_squares<T, kKey>(squares, paths, s, role, of == 0, last, wants_decay);
        TokenNumbers<kRows> numbers;
        if (warp == kGateWarp && wants_decay)
            numbers.ask_gates(a, place, value_head, tokens_of<kSeveral>(a, place));
        if (warp == kNextWarp && !last)
            numbers.ask_gates(a, place, value_head + 1, tokens_of<kSeveral>(a, place));
        if (warp == kStrengthWarp && wants_strength)
            numbers.ask(a.beta, place, value_head, RowsAreTokens(1, place.begin));
        if (wants_decay) store_paths(s.paths, role, paths);
        __syncthreads();
        if (warp == kGateWarp && wants_decay) {
            float d_log_decay[kRows / 32];
            s.paths.template sum<Role::kKinds>(d_log_decay);
            store_gate_gradients<kRows>(a, d, place, value_head, tokens_of<kSeveral>(a, place), numbers,
                                        d_log_decay, parameters_of(of));
        }
        if (warp == kNextWarp && !last)
            store_log_decays<kRows>(a, place, value_head + 1, tokens_of<kSeveral>(a, place), numbers,
                                    s.log_decay);
        if (warp == kStrengthWarp && wants_strength)
            store_strength_gradients<kRows>(a, d, place, value_head, numbers, s.strengths);
    }
    if (!d.keys()) return;

    // --- keys ---
    const LaneRows<T, kKey> rows(role.block, role.group * Of::kChannels);
    float q_norm[2], k_norm[2];  // of the lane's two tokens
#pragma unroll
    for (int half = 0; half < 2; ++half)
        q_norm[half] = s.norms[0][rows.token + 8 * half], k_norm[half] = s.norms[1][rows.token + 8 * half];
    store_squares<T, kKey>(s, role, squares);
    T *q = s.q, *k = s.k;
    if (a.qk_l2norm) {
        q = reinterpret_cast<T*>(s.pairs), k = q + kRows * kKey;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 of_q = rows.pair(s.q, tile, half), of_k = rows.pair(s.k, tile, half);
                *rows.word(q, tile, half) = pack2<T>(of_q.x * q_norm[half], of_q.y * q_norm[half]);
                *rows.word(k, tile, half) = pack2<T>(of_k.x * k_norm[half], of_k.y * k_norm[half]);
            }
    }
    __syncthreads();
    RowTiles<kTiles> of_q = {};  // dA^T q
    multiply_squares<T, kKey, kSolves>(d_q, d_k, of_q, s, q, k, role.block, role.group * Of::kChannels);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            d_k[tile][e] = fmaf(a.scale, of_q[tile][e], d_k[tile][e]);
            d_q[tile][e] *= a.scale;
        }
    const int tokens[2] = {rows.token, rows.token + 8};
    if (a.qk_l2norm) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float along_q = rows.dot(d_q, s.q, half) * q_norm[half],
                        along_k = rows.dot(d_k, s.k, half) * k_norm[half];
            if (lane % 4 == 0)
                s.dots[0][role.group][tokens[half]] = along_q, s.dots[1][role.group][tokens[half]] = along_k;
        }
    }
    __syncthreads();
    if (a.qk_l2norm) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float along_q = 0.0f, along_k = 0.0f;
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
                along_q += s.dots[0][g][tokens[half]], along_k += s.dots[1][g][tokens[half]];
            rows.through_norm(d_q, s.q, half, q_norm[half], along_q);
            rows.through_norm(d_k, s.k, half, k_norm[half], along_k);
        }
    }
    const auto store = [&](const TokenRows& to, T* staged, const RowTiles<kTiles>& x) {
        const int head = a.by_group.divide(first_head);
        if (to.data)
            store_rows<T, kKey, kTiles>(to, to.offset(place.batch, place.begin, head), place.count, a.key_dim,
                                        rows, staged, x);
    };
    if constexpr (kSeveral) {
        const TokensOfWrites tokens(a.writes, place.begin);
        if (d.d_q.data)
            store_rows<T, kKey, kTiles>(
                d.d_q, d.d_q.offset(place.batch, tokens.first_token, a.by_group.divide(first_head)),
                place.count, a.key_dim, rows, s.q, d_q, tokens);
    } else {
        store(d.d_q, s.q, d_q);
    }
    store(d.d_k, s.k, d_k);
}

template <class T, int kKey, Update kUpdate, bool kSeveral, bool kBulk>
__global__ void __launch_bounds__(GradientToken<T, kKey>::kThreads, 1)
    gradient_token(const __grid_constant__ DeviceArgs a, const chunked::Schedule schedule,
                   const __grid_constant__ Gradients d, const Saved<T, kKey> saved,
                   const GradientScratch scratch, std::int32_t places) {
    using Slices = SliceRing<T, kKey, GradientTokenRule<kUpdate>::kSolves, kBulk>;
    gradients_of_chunk<T, kKey, kUpdate, kSeveral, Slices>(a, schedule, d, saved, scratch, places);
}

}  // namespace cula::cuda::backward
