// SPDX-License-Identifier: Apache-2.0
// prepare_token: chunk operands <- q, k, gate, beta, with one
// decay per token or head, or none (GDN, DeltaNet, Lightning, ...)
//
// With G the running log2 decay of the chunk (ALGORITHM.md: score, solve; docs/design/prepare.md):
//   A[i, j] = scale (q_i . k_j) 2^(G_i - G_j), j <= i              scores
//   L[i, j] = (k_i . k_j) 2^(G_i - G_j), j < i                     overlaps
//   T = (I + diag(beta) L)^-1 diag(beta)                           inverse; rules that solve
//   q_factor = scale 2^G    k_factor = 2^G    k_rest = 2^(G_end - G)    decay = 2^G_end
// With qk_l2norm the norms of q and k are part of the factors.
//
// kReversed: for a walk from the last token to the first (docs/design/three-walks.md), whose decay is the
// same for every token. Its operands are those of q and k in each other's places, for readers that have
// changed places, too: the transposed A, and each factor under the other's name.
//
// kSeveral: for tokens that write several times (tile/tokens_of_rows.cuh). What is above is of rows of
// writes: those that are not their token's last have a zero query, and those that are not its first do not
// decay.
//
// A task is a chunk of the slab and a value head; a pair is a chunk and the q and k of a head. Grid: a CTA of
// four warps has `pairs` pairs, and of each the tasks of `span` value heads that share its q and k: up to
// four.
//
//   load     all warps, pair after pair: q and k to shared memory (cp.async) |
//   norms    a warp per block of 16 tokens |
//   score    products of k with q and k as they are, times norms, to shared memory |
//   then a warp for each task, without a barrier of the CTA (token_task.cuh):
//   factors  running sums of gates; factors of tokens to global memory
//   decay    products times 2^(G_i - G_j): scores to global memory, overlaps times beta; their squares
//   solve    the inverse, times beta, to global memory
//
// Products are of the whole square by wgmma where there is that (sm_90a, chunks of 64 tokens), else of blocks
// by a warp per block of columns and, where K = 256, half of the channels.
//
// No operand is scaled before a product, and 2^(G_i - G_j) is
// at most 1: only inputs and chunk operands are rounded to T.
// Rows are loaded and multiplied once for all value heads of a pair.
//
// Budgets on sm_90: 128 registers; 71 KiB of shared memory with four value heads of a pair, 74 with two pairs
// (TokenMemory).
#pragma once

#include <algorithm>

#include "cuda/chunked/block.cuh"
#include "cuda/chunked/plan.h"
#include "cuda/chunked/tile_reads.cuh"
#include "cuda/chunked/token_products.cuh"
#include "cuda/chunked/token_task.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/rule.h"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::chunked {

static_assert(kMostSpan == kPrepareThreads / 32);  // a warp has a task

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
inline constexpr int kFewestTokenCtas = kTokenCtas;
#else
inline constexpr int kFewestTokenCtas = 3;
#endif

// What chunk operands does an update rule need?
template <Update kUpdate>
struct TokenRule {
    static_assert(kIsKnown<kUpdate>, "prepare_token: which chunk operands does this update rule need?");
};
template <>
struct TokenRule<Update::kAdditive> {
    static constexpr bool kSolves = false;
};
template <>
struct TokenRule<Update::kDelta> {
    static constexpr bool kSolves = true;  // the inverse, and low words of compensated chunks
};

// Shared memory: tiles of q and k of one pair, then, once all products are there, the tasks in their place;
// products of all pairs; numbers per token. Where a pair has one value head, its overlaps replace the
// products of k with k.
template <class T, int kKey>
struct TokenMemory {
    static constexpr std::size_t kTile = sizeof(T) * kTokens<kKey> * kKey;

    static constexpr std::size_t front(const PrepareShare& share) {
        const auto tasks = static_cast<std::size_t>(share.pairs * share.span);
        return std::max(2 * kTile, tasks * (sizeof(TokenTask<kKey>) +
                                            (share.span > 1 ? sizeof(TokenOverlaps<kKey>) : 0)));
    }
    static constexpr std::size_t bytes(const PrepareShare& share) {
        const auto pairs = static_cast<std::size_t>(share.pairs),
                   tasks = pairs * static_cast<std::size_t>(share.span);
        return front(share) + pairs * sizeof(TokenProducts<kKey>) + tasks * sizeof(TokenGates<kKey>);
    }
    // Of any launch.
    static constexpr std::size_t kMost = std::max(bytes({.span = kMostSpan}), bytes({.pairs = kMostPairs}));

    unsigned char* memory;  // aligned to 1 KiB
    TokenProducts<kKey>* products;
    TokenGates<kKey>* gates;

    __device__ __forceinline__ TokenMemory(unsigned char* memory, const PrepareShare& share)
        : memory(memory),
          products(reinterpret_cast<TokenProducts<kKey>*>(memory + front(share))),
          gates(reinterpret_cast<TokenGates<kKey>*>(products + share.pairs)) {}
    // Of q (0) or k (1).
    __device__ __forceinline__ T* tile(int of) const { return reinterpret_cast<T*>(memory + of * kTile); }
    __device__ __forceinline__ TokenTask<kKey>& task(int i) const {
        return reinterpret_cast<TokenTask<kKey>*>(memory)[i];
    }
    __device__ __forceinline__ TokenOverlaps<kKey>& overlaps(const PrepareShare& share, int i) const {
        if (share.span == 1) return products[i].overlaps.left;
        return reinterpret_cast<TokenOverlaps<kKey>*>(&task(share.pairs * share.span))[i];
    }
};

template <class T, int kKey, bool kReversed = false, bool kSeveral = false>
__global__ void __launch_bounds__(kPrepareThreads, kFewestTokenCtas)
    prepare_token(const __grid_constant__ DeviceArgs a, const Schedule schedule, const PrepareShare share,
                  TokenChunk<T, kKey>* chunks, std::int32_t* is_compensated, float* fading) {
    static_assert(!kReversed || !kSeveral);
    follow_kernels_before_carry<kKey>(schedule);
    using P = Parts<kKey>;
    constexpr int kRows = kTokens<kKey>;
    extern __shared__ __align__(1024) unsigned char token_memory[];
    const TokenMemory<T, kKey> memory(token_memory, share);

    const int thread = static_cast<int>(threadIdx.x), warp = role_of_warp();
    const int slab_chunks = schedule.slab_end - schedule.slab_begin;
    // Of a pair of the CTA: the chunk's number in the slab and the first value head.
    struct Pair {
        int number, first_head;
        bool exists;
    };
    const auto pair = [&](int i) -> Pair {
        const int task = (static_cast<int>(blockIdx.x) * share.pairs + i) * share.span,
                  column =
                      static_cast<int>(static_cast<unsigned>(task) / static_cast<unsigned>(a.value_heads));
        // CTAs go through memory upwards, as the prefetches expect.
        return {kReversed ? slab_chunks - 1 - column : column, task - column * a.value_heads,
                column < slab_chunks};
    };

    const bool solves =
        !kReversed && answer_for(a.algorithm.update, []<Update kUpdate>(UpdateConstant<kUpdate>) {
            return TokenRule<kUpdate>::kSolves;
        });
    // The warp's task. Found again where it is needed, so that no register keeps it throughout the products.
    struct Task {
        ChunkPlace place;
        int value_head;
        std::int64_t operands;  // their number
    };
    const auto find_task = [&]() -> Task {
        const int of = warp / share.span;
        const Pair own = of < share.pairs ? pair(of) : Pair{0, 0, false};
        const int value_head = own.first_head + warp % share.span;
        return {own.exists ? place_of<kRows, kReversed>(a, schedule, own.number) : ChunkPlace{}, value_head,
                std::int64_t{own.number} * a.value_heads + value_head};
    };
    TokenInputs<kKey, kSeveral> inputs;
    {
        const Task task = find_task();
        if (task.place.count > 0) inputs.ask(a, task.place, task.value_head, solves);
    }
    if (per_chunk<kKey>(schedule) && threadIdx.x == 0) {
        for (int i = 0; i < share.pairs; ++i)
            if (const Pair of = pair(i); of.exists)
                mark_unprepared(is_compensated + std::int64_t{of.number} * a.value_heads + of.first_head,
                                share.span);
        lead_carry();
    }

    // --- products ---
#pragma unroll 1
    for (int i = 0; i < share.pairs; ++i) {
        const Pair of = pair(i);
        ChunkPlace place;
        if (of.exists) place = place_of<kRows, kReversed>(a, schedule, of.number);
        if (place.count <= 0) continue;  // the same in all threads
        const int head = a.by_group.divide(of.first_head);
        const TokenRows &of_q = kReversed ? a.k : a.q, &of_k = kReversed ? a.q : a.k;
        T *const q = memory.tile(0), *const k = memory.tile(1);
        if constexpr (kSeveral) {
            const TokensOfWrites tokens(a.writes, place.begin);
            copy_chunk<T, kKey>(q, a.q, a.q.offset(place.batch, tokens.first_token, head), place.count,
                                a.key_dim, tokens);
        } else {
            copy_chunk<T, kKey>(q, of_q, of_q.offset(place.batch, place.begin, head), place.count, a.key_dim);
        }
        copy_chunk<T, kKey>(k, of_k, of_k.offset(place.batch, place.begin, head), place.count, a.key_dim);
        commit_copies();
        // Only the first of the value heads that share a head prefetches.
        if (of.first_head == head * a.group)
            if (const int ahead = tokens_ahead<kKey>(a, schedule, place.begin); ahead > 0) {
                static_assert(2 * kRows <= kPrepareThreads);
                const int row = thread % kRows;
                const bool of_keys = thread / kRows > 0;
                const int writes = kSeveral && !of_keys ? a.writes : 1;  // rows of k that a row of q has
                const std::int64_t first = place.begin + ahead;
                if (thread < 2 * kRows && row * writes < kRows && first + row * writes < a.tokens)
                    prefetch_row<T, kKey>(of_keys ? of_k : of_q, place.batch, first / writes + row, head,
                                          a.key_dim);
            }
        wait_copies<0>();
        TokenMultiplier<T, kKey> multiplier{q, k, memory.products[i], warp, solves};
        multiplier.publish_tiles();
        __syncthreads();
        multiplier.start();
        multiplier.store_norms(a.qk_l2norm);
        __syncthreads();
        multiplier.finish(a.scale);
        __syncthreads();
    }

    // --- tasks ---
    const Task task = find_task();
    if (task.place.count <= 0) return;
    inputs.store(a, task.place, task.value_head, solves, memory.gates[warp]);
    __syncwarp();
    const TokenWork<T, kKey> work{a,
                                  memory.products[warp / share.span],
                                  memory.gates[warp],
                                  memory.task(warp),
                                  memory.overlaps(share, warp),
                                  chunks[task.operands],
                                  task.place.count,
                                  solves};
    work.template factors<kReversed>(solves && fading ? fading + task.operands : nullptr);
    const bool compensated = work.decay();
    if (solves) work.solve(compensated);
    __syncwarp();
    if (thread % 32 == 0) hand_over<kKey>(schedule, is_compensated + task.operands, compensated);
}

}  // namespace cula::cuda::chunked
