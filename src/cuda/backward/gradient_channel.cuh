// SPDX-License-Identifier: Apache-2.0
// gradient_channel: d_q, d_k, d_g, d_beta or d_erase <- what the walks saved, q, k, gate, beta or erase, with
// one decay per channel
//
// For a chunk, in the letters of ALGORITHM.md (S before it, Z = d loss / d state after it; additive rules
// have no dL, dK^ and dbeta):
//   dA = tril(dO U^T)          dL = -tril(dV U^T, -1)     dbeta = rowsum((dV / beta) o (U / beta))
//   dQ~ = dO S^T + dA K-       dK^ = -dV S^T + dL K-      dK- = dA^T Q~ + dL^T K^       dK+ = U Z^T
//   dq = scale Gamma dQ~       dk = Gamma dK^ + dK- / Gamma + (Gamma_C / Gamma) dK+
//   With erase keys e = erase o k (Reader::kErase), K^ are theirs: Gamma dK^ = de, dk has erase o de instead,
//   and derase = k o de. With Reader::kUndecayed a token is two rows: da = -de and db = dk of first rows, dq
//   and dk are those of second ones.
//
//   dg_t is the sum over all paths that cross the decay of token t: rows i >= t that read S, columns j < t
//   that reach Z, pairs i >= t > j, and Gamma_C rowsum(S o Z).
//
// K- is never formed. Pairs of two blocks of 16 tokens are decayed to the border between them, those of the
// two halves of a block likewise, and others are multiplied out, token by token (channel_blocks.cuh,
// own_channel.cuh). So no factor exceeds 1, whatever the decays, and no two paths of dg have to cancel.
//
// Grid: one CTA per (chunk of the slab, head of q and k); it goes through the value heads that share them. A
// warp has a block of 16 tokens and a group of 32 channels: 8, 16, 16 warps for K = 64, 128, 256.
//
// In this order, for each value head; | is a barrier of the CTA:
//   slices   rings of cp.async, a barrier per slice of 16 value channels: dO S^T, -dV S^T and U Z^T in
//            accumulators that stay until `columns`, the squares, rowsum(S o Z) |
//   operands L2 prefetches for the next value head or CTA. A lane has a column, two channels of half a block
//            (channel_columns.cuh): decays, and q and k decayed to the borders of their block, rounded |
//   blocks   tensor cores: pairs with other blocks, block by block, and sums of what crosses a block |
//   columns  tensor cores: pairs of the two halves of a block. Accumulators turn to columns: pairs within a
//            half, dg. No barrier: a warp turns its own patch
//   gate     d_g, partial sums of d_A_log and d_dt_bias
//   keys     sums over value heads; the derivative of the norms (with qk_l2norm), whose dot products are
//            sums over warps |; d_q, d_k
//   sums     | partial sums of the warps, added in a fixed order, to GradientScratch::parameters
//
// Precision: S, Z, U, dV, dO, dA, dL between blocks and halves and the operands are one word of T each. All
// sums, all of dg but the operands, and pairs within a half are float32.
//
// Budgets: 65.6, 98.1, 86.6 KiB of shared memory (K = 64, 128, 256), of which the ring of slices, whose place
// operands and turned patches take, has 30, 42, 40. At most 128 registers: two CTAs per multiprocessor for
// K = 64, else one. The phases read their place from shared memory anew (ChannelPlace), and columns of q and
// k too: kept, they would spill.
//
// PDL: every CTA triggers, then waits for the kernels before it.
#pragma once

#include "cuda/backward/channel_blocks.cuh"
#include "cuda/backward/channel_columns.cuh"
#include "cuda/backward/gradients.h"
#include "cuda/backward/own_channel.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/scan.cuh"
#include "cuda/tile/store_gradient.cuh"

namespace cula::cuda::backward {

// Starts to load the patch of q or k, zeros where tokens or channels are absent.
template <class T, int kKey>
__device__ __forceinline__ void load_keys(T* to, const TokenRows& rows, const Patch<kKey>& patch,
                                          const ChannelPlace& place, int key_dim) {
    const int count = place.count - patch.first;
    const auto* data = static_cast<const T*>(rows.data);
    const std::int64_t at = rows.offset(place.batch, place.begin + patch.first, place.head);
    if (rows.pieces) {
        const int piece = patch.lane % 4 * 8, channel = patch.group * kGroup + piece;
#pragma unroll
        for (int t = patch.lane / 4; t < kBlock; t += 8) {
            const bool in = t < count && channel < key_dim;
            copy_async(shared_address(to + row_of(t) * kGroup + piece),
                       data + (in ? at + t * rows.token + channel : 0), in ? 16 : 0);
        }
        return;
    }
#pragma unroll 1
    for (int t = 0; t < kBlock; ++t) {
        const int channel = patch.group * kGroup + patch.lane;
        to[row_of(t) * kGroup + patch.lane] = t < count && channel < key_dim
                                                  ? data[at + t * rows.token + channel * rows.last]
                                                  : from_float<T>(0.0f);
    }
}

// The same of q and k of tokens that are two rows (chunked/low_rank_rows.cuh): q and k have second ones, b
// has the first ones in the place of k.
template <class T, int kKey>
__device__ __forceinline__ void load_pairs(T* to, const TokenRows& second, int head, const TokenRows* first,
                                           int value_head, const Patch<kKey>& patch,
                                           const ChannelPlace& place, int key_dim) {
    const int count = place.count - patch.first;
    const std::int64_t token = (place.begin + patch.first) / 2;
    const bool pieces = second.pieces && (!first || first->pieces);
    const bool is_first = RowsOfPairs::is_first(patch.lane / 4);  // of pieces: the parity of the lane's rows
    const TokenRows& own = is_first && first ? *first : second;
    if (pieces) {
        const auto* data = static_cast<const T*>(own.data);
        const std::int64_t at = own.offset(place.batch, token, is_first && first ? value_head : head);
        const int piece = patch.lane % 4 * 8, channel = patch.group * kGroup + piece;
#pragma unroll
        for (int t = patch.lane / 4; t < kBlock; t += 8) {
            const bool in = t < count && channel < key_dim && (first || !is_first);
            copy_async(shared_address(to + row_of(t) * kGroup + piece),
                       data + (in ? at + RowsOfPairs::token(t) * own.token + channel : 0), in ? 16 : 0);
        }
        return;
    }
#pragma unroll 1
    for (int t = 0; t < kBlock; ++t) {
        const int channel = patch.group * kGroup + patch.lane;
        const bool of_first = RowsOfPairs::is_first(t);
        const TokenRows& rows = of_first && first ? *first : second;
        const bool in = t < count && channel < key_dim && (first || !of_first);
        const std::int64_t at =
            rows.offset(place.batch, token + RowsOfPairs::token(t), of_first && first ? value_head : head);
        to[row_of(t) * kGroup + patch.lane] =
            in ? static_cast<const T*>(rows.data)[at + channel * rows.last] : from_float<T>(0.0f);
    }
}

// Prefetches a row to the second-level cache.
__device__ __forceinline__ void prefetch_row(const TokenRows& rows, std::int64_t offset, int channels) {
    const int element = rows.dtype == Dtype::kFloat32 ? 4 : 2, bytes = channels * element;
    const char* from = static_cast<const char*>(rows.data) + offset * element;
    for (int line = 0; line < bytes; line += 128) prefetch(from + line);
}

// sums[token] <- x . x over the channels of a raw patch.
template <class T>
__device__ __forceinline__ void put_squares(const T* patch, float* sums, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = lane / 4 + half * kHalf;
        const uint4 four = *reinterpret_cast<const uint4*>(patch + row_of(t) * kGroup + lane % 4 * 8);
        float sum = 0.0f;
        for (const std::uint32_t word : {four.x, four.y, four.z, four.w}) {
            const float2 pair = unpack2<T>(word);
            sum = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum));
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane % 4 == 0) sums[t] = sum;
    }
}

// The sum of `dots` over the chunk's channels, of token t of q or k.
template <class T, int kKey>
__device__ __forceinline__ float row_dot(const GradientChannelSmem<T, kKey>& s, int which, int t) {
    using P = Patches<kKey>;
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < P::kGroups; ++g) sum += s.dots[t / kBlock * P::kGroups + g][which][t % kBlock];
    return sum;
}

// The phases for one value head. All threads are in each.
template <class T, int kKey, bool kSolves, Reader kReader>
struct ChannelGradient {
    static constexpr bool kErases = erases(kReader), kUndecayed = kReader == Reader::kUndecayed;
    // Which rows gates, and which q, k and their gradients have.
    static constexpr Rows kGates = kUndecayed ? Rows::kFirst : Rows::kAll,
                          kKeys = kUndecayed ? Rows::kSecond : Rows::kAll;
    using P = Patches<kKey>;
    using Smem = GradientChannelSmem<T, kKey>;
    static constexpr int kSlots = Smem::kSlots;

    const DeviceArgs& a;
    const chunked::Schedule& schedule;
    const Gradients& d;
    const Saved<T, kKey>& saved;
    const GradientScratch& scratch;
    Smem& s;
    int of_group = 0;  // the value head, among those that share q and k

    __device__ __forceinline__ bool wants_ends() const {
        return d.keys() || d.decay() || (kErases && d.others());
    }
    __device__ __forceinline__ bool wants_sums() const { return d.decay() && scratch.parameters; }
    __device__ __forceinline__ bool is_first() const { return of_group == 0; }
    __device__ __forceinline__ bool is_last() const { return of_group + 1 == a.group; }
    __device__ __forceinline__ int value_head(const ChannelPlace& place) const {
        return place.head * a.group + of_group;
    }

    // Starts to load q and k, unless a value head before has. b is of each.
    __device__ __forceinline__ void load_both(const Patch<kKey>& patch, const ChannelPlace& place) const {
        if constexpr (kUndecayed) {
            const int own = value_head(place);
            load_pairs<T, kKey>(s.q[patch.warp], a.q, place.head, nullptr, own, patch, place, a.key_dim);
            load_pairs<T, kKey>(s.k[patch.warp], a.k, place.head, &a.b_key, own, patch, place, a.key_dim);
        } else if (is_first()) {
            load_keys<T, kKey>(s.q[patch.warp], a.q, patch, place, a.key_dim);
            load_keys<T, kKey>(s.k[patch.warp], a.k, patch, place, a.key_dim);
        }
    }

    // given: beta of token `thread`, as it came, on its way to `strengths`.
    __device__ __forceinline__ void slices(SliceSums<T, kKey, kSolves>& sums, float& given) const {
        const ChannelPlace place = s.place.again();
        const int thread = thread_again();
        const Patch<kKey> patch(thread);
        const bool ends = wants_ends();
        SliceCopies<T, kKey, kSolves> copies(saved, saved.index(place.slot, value_head(place), 0), s.slices,
                                             thread, ends);
#pragma unroll
        for (int i = 0; i < kSlots - 1; ++i) {
            if (i < saved.count) copies.next(i);
            if (i == 0 && ends) load_both(patch, place);
            commit_copies();
        }
        if (is_first() && ends && a.qk_l2norm) {
            wait_copies<kSlots - 2>();
            __syncwarp();
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                put_squares((which ? s.k : s.q)[patch.warp], s.dots[patch.warp][which], patch.lane);
            }
        }
        if (kSolves && !kErases && d.d_beta.data && thread < place.count)
            given = load_float(a.beta.data, a.beta.dtype,
                               a.beta.offset(place.batch, place.begin + thread, value_head(place)));
        int slot = 0, next = kSlots - 1;
#pragma unroll 1
        for (int i = 0; i < saved.count; ++i) {
            wait_copies<kSlots - 2>();
            __syncthreads();
            if (i + kSlots - 1 < saved.count) copies.next(next);
            commit_copies();
            sums.add(patch, s.slices[slot], ends);
            slot = slot + 1 == kSlots ? 0 : slot + 1, next = next + 1 == kSlots ? 0 : next + 1;
        }
        // The dV of a second row reads nothing: it may be large, and its erase key is zero.
        if (kUndecayed && !RowsOfPairs::is_first(patch.lane / 4)) sums.drop_overlaps();
        sums.put(patch, s);
        if (is_first() && ends && thread < 2 * P::kRows) {
            const int which = thread / P::kRows, t = thread % P::kRows;
            const bool has_norm = a.qk_l2norm && !(kUndecayed && which && RowsOfPairs::is_first(t));
            const float r = has_norm ? rsqrtf(row_dot(s, which, t) + 1e-6f) : 1.0f;
            s.inverse_norm[which][t] = r;
            s.factor[which][t] = which ? r : r * a.scale;
        }
        __syncthreads();
    }

    // To the second-level cache: the slices of the next value head, or what the next CTA begins with. The
    // slices of this one have arrived, and the phases that follow would leave the memory idle.
    __device__ __forceinline__ void prefetch_next() const {
        const ChannelPlace place = s.place.again();
        const int thread = thread_again();
        // A whole number of chunks ahead, about as many CTAs as run at once.
        const int ahead = schedule.ahead * a.group * P::kCtas;
        const bool has_next = ahead > 0 && blockIdx.x + std::int64_t{ahead} * a.heads < gridDim.x;
        if (is_last() && !has_next) return;
        const std::int64_t first = is_last() ? saved.index(place.slot + ahead, place.head * a.group, 0)
                                             : saved.index(place.slot, value_head(place) + 1, 0);
        const auto prefetch_slices = [&](const auto* slices) {
            const auto* from = reinterpret_cast<const char*>(slices);
            const int bytes = saved.count * static_cast<int>(sizeof(*slices));
#pragma unroll 1
            for (int line = thread * 128; line < bytes; line += P::kThreads * 128) prefetch(from + line);
        };
        prefetch_slices(saved.carried + first);
        prefetch_slices(saved.returned + first);
        if constexpr (kUndecayed) return;
        const int t = thread % P::kRows;
        const std::int64_t token = place.begin + std::int64_t{ahead} * P::kRows + t;
        if (!is_last() || token >= a.tokens) return;
        if (thread / P::kRows == 0)
            prefetch_row(a.q, a.q.offset(place.batch, token, place.head), a.key_dim);
        else if (thread / P::kRows == 1)
            prefetch_row(a.k, a.k.offset(place.batch, token, place.head), a.key_dim);
        else if (thread / P::kRows == 2)
            prefetch_row(a.g, a.g.offset(place.batch, token, place.head * a.group), a.key_dim);
        if constexpr (kErases) {
            const int head = place.head * a.group;
            if (kReader == Reader::kErase && thread / P::kRows == 2)
                prefetch_row(a.erase, a.erase.offset(place.batch, token, head), a.key_dim);
            else if (thread / P::kRows == 3)
                prefetch_row(a.erase_keys, a.erase_keys.offset(place.batch, token, head), a.key_dim);
        }
    }

    // d_beta, a token per thread.
    __device__ __forceinline__ void strengths(float given) const {
        const ChannelPlace place = s.place.again();
        const int t = thread_again();
        if (t >= place.count) return;
        const std::int64_t token = place.begin + t;
        const float over_beta = 1.0f / solved_beta_of(a, given);
        const float product = -s.own_overlaps[t / kBlock][t % kBlock][t % kBlock];
        store_gradient(d.d_beta.data, d.d_beta.dtype, d.d_beta.offset(place.batch, token, value_head(place)),
                       beta_gradient(a, given, product * over_beta * over_beta));
    }

    __device__ __forceinline__ void operands(Column& decay) const {
        const ChannelPlace place = s.place.again();
        const Patch<kKey> patch;
        load_decays<kGates>(decay, a, column_of(place, patch), value_head(place),
                            ColumnFloats(s.turned[patch.warp], patch));
        if (!by_words(a.g)) __syncthreads();  // operands take the place of columns
        own(patch).put_operands(decay);
        __syncthreads();
    }

    __device__ __forceinline__ ColumnPlace column_of(const ChannelPlace& place,
                                                     const Patch<kKey>& patch) const {
        return {place, patch, a.key_dim, kUndecayed ? 2 : 1};
    }
    // The phases of a lane's column.
    __device__ __forceinline__ OwnChannel<T, kKey, kSolves, kReader> own(const Patch<kKey>& patch) const {
        if constexpr (kErases) {
            const ChannelPlace place = s.place.again();
            return {s, patch, {a, place, patch, value_head(place)}};
        } else {
            return {s, patch, {}};
        }
    }

    __device__ __forceinline__ void pairs(Ends& ends, Column& decay, Column& d_q, Column& d_k,
                                          Column& row_k) const {
        {
            const Patch<kKey> patch;
            const BlockSums<T, kKey, kSolves> blocks{s, patch};
            blocks.rows(ends, d.decay());
            blocks.columns(ends, d.decay());
        }
        __syncthreads();  // columns take the place of the operands
        const Patch<kKey> patch;
        own(patch).gradients(ends, decay, d_q, d_k, row_k);
    }

    // d_g, and what the patch gives to d_A_log and d_dt_bias. d_a: the gradients of the log decays.
    __device__ __forceinline__ void gate(Column& d_a) const {
        const ChannelPlace place = s.place.again();
        const Patch<kKey> patch;
        const ColumnPlace column = column_of(place, patch);
        column.mask(d_a);
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i)
            if (!has_row(kGates, i / 2)) d_a[i] = 0.0f;
        const ColumnFloats floats(s.turned[patch.warp], patch);
        GateSums<kGates> sums(a, d_a, column, value_head(place), floats);
        if (d.d_g.data) store_column<kGates>(d_a, d.d_g, column, value_head(place), floats);
        if (!scratch.parameters) return;
#pragma unroll
        for (float& sum : sums.bias) sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        if (patch.half == 0)
            *reinterpret_cast<float2*>(&s.bias_sums[patch.block][patch.channel]) = {sums.bias[0],
                                                                                    sums.bias[1]};
        const float rate = sum_over_warp(sums.rate);
        if (patch.lane == 0) s.rate_sums[patch.warp] = rate;
    }

    // From the gradients of erase keys, row_k, to those of erase strengths, and to their part of d_k; or to
    // d_a_key, and from first rows of d_k to d_b_key.
    __device__ __forceinline__ void erase(Column& row_k, Column& d_k) const {
        const ChannelPlace place = s.place.again();
        const Patch<kKey> patch;
        const ColumnPlace column = column_of(place, patch);
        const ColumnFloats floats(s.turned[patch.warp], patch);
        if constexpr (kUndecayed) {
#pragma unroll
            for (float& x : row_k) x = -x;
            if (d.d_a_key.data)
                store_column<Rows::kFirst>(row_k, d.d_a_key, column, value_head(place), floats);
            if (d.d_b_key.data) store_column<Rows::kFirst>(d_k, d.d_b_key, column, value_head(place), floats);
            return;
        }
        Column given;
        load_column(given, a.erase, column, value_head(place), floats);
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) {
            const float strength = beta_of(a, given[i]);
            d_k[i] = fmaf(strength, row_k[i], d_k[i]);
            if (a.beta_is_logit) row_k[i] *= strength * sigmoid(-given[i]);
        }
        if (!d.d_erase.data) return;
        Column keys;
        own(patch).load(keys, 1);
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) row_k[i] *= keys[i];
        store_column(row_k, d.d_erase, column, value_head(place), floats);
    }

    // d_q and d_k, of the last value head; of the others, their sums so far.
    __device__ __forceinline__ void keys(Column& d_q, Column& d_k) const {
        const ChannelPlace place = s.place.again();
        const Patch<kKey> patch;
        const ColumnPlace column = column_of(place, patch);
        if (a.group > 1) {
            float* so_far =
                scratch.keys + (std::int64_t{blockIdx.x} * 2 * P::kRows + patch.token) * kKey + patch.channel;
            add_to_sums(d_q, so_far);
            add_to_sums(d_k, so_far + P::kRows * kKey);
            if (!is_last()) return;
        }
        if (a.qk_l2norm) {
            const auto own = this->own(patch);
            column.mask(d_q), column.mask(d_k);
            Column x;
            float dots[2 * kHalf];  // of q, of k
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                own.load_raw(x, which);
#pragma unroll
                for (int t = 0; t < kHalf; ++t) {
                    const Column& d_x = which ? d_k : d_q;
                    dots[which * kHalf + t] = fmaf(d_x[2 * t], x[2 * t], d_x[2 * t + 1] * x[2 * t + 1]);
                }
            }
            scatter_sums<kHalf, 1>(dots);
            const int which_mine = patch.lane % 16 / kHalf, mine = patch.half * kHalf + patch.lane % kHalf;
            s.dots[patch.warp][which_mine][mine] = dots[0];
            __syncthreads();
            const float r = s.inverse_norm[which_mine][patch.first + mine],
                        along = row_dot(s, which_mine, patch.first + mine) * r * r;
            float* alongs = s.turned[patch.warp][0];
            alongs[which_mine * kBlock + mine] = along;
            __syncwarp();
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                Column& d_x = which ? d_k : d_q;
                own.load_raw(x, which);
                float norms[kHalf], back[kHalf];
#pragma unroll
                for (int t = 0; t < kHalf; t += 4) {
                    load4(norms + t, &s.inverse_norm[which][patch.token + t]);
                    load4(back + t, alongs + which * kBlock + patch.half * kHalf + t);
                }
#pragma unroll
                for (int i = 0; i < 2 * kHalf; ++i) d_x[i] = norms[i / 2] * fmaf(-back[i / 2], x[i], d_x[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) d_q[i] *= a.scale;
        const ColumnFloats floats(s.turned[patch.warp], patch);
        if (d.d_q.data) store_column<kKeys>(d_q, d.d_q, column, place.head, floats);
        if (d.d_k.data) store_column<kKeys>(d_k, d.d_k, column, place.head, floats);
    }

    // The chunk's summands of d_A_log and d_dt_bias.
    __device__ __forceinline__ void parameters() const {
        const ChannelPlace place = s.place.again();
        const int thread = thread_again();
        float* sums = scratch.parameters +
                      (std::int64_t{place.slot} * a.value_heads + value_head(place)) * (1 + a.key_dim);
        for (int c = thread; c < a.key_dim; c += P::kThreads) {
            float sum = 0.0f;
#pragma unroll
            for (int b = 0; b < P::kBlocks; ++b) sum += s.bias_sums[b][c];
            sums[1 + c] = sum;
        }
        if (thread != P::kThreads - 1) return;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < P::kWarps; ++w) sum += s.rate_sums[w];
        const float factor = GateDerivative(a, value_head(place)).rate_factor;
        sums[0] = factor == 0.0f ? 0.0f : sum * factor;
    }

    // All value heads of the group.
    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (; of_group < a.group; ++of_group) {
            SliceSums<T, kKey, kSolves> sums;
            float given = 0.0f;
            slices(sums, given);
            if (kSolves && !kErases && d.d_beta.data) strengths(given);
            if (wants_ends()) {
                Column decay, d_q, d_k, row_k;
                prefetch_next();
                operands(decay);
                pairs(sums.ends, decay, d_q, d_k, row_k);
                if constexpr (kErases) erase(row_k, d_k);
                if (d.decay()) gate(decay);
                if (d.keys()) keys(d_q, d_k);
            }
            if (!is_last() || wants_sums()) __syncthreads();
            if (!wants_sums()) continue;
            parameters();
            if (!is_last()) __syncthreads();  // the next slices take the place of the sums
        }
    }

private:
    // x += the sums over the value heads before this one; all but the last keep the new sums.
    __device__ __forceinline__ void add_to_sums(Column& x, float* so_far) const {
#pragma unroll
        for (int t = 0; t < kHalf; ++t) {
            float2* at = reinterpret_cast<float2*>(so_far + t * kKey);
            if (!is_first()) x[2 * t] += at->x, x[2 * t + 1] += at->y;
            if (!is_last()) *at = {x[2 * t], x[2 * t + 1]};
        }
    }
};

// kReader: other than k read erase keys, which are in DeviceArgs::erase_keys; values then come with their
// write strengths (chunked/erase_operands.cuh, chunked/low_rank_rows.cuh).
template <class T, int kKey, Update kUpdate, Reader kReader = Reader::kKey>
__global__ void __launch_bounds__(Patches<kKey>::kThreads, Patches<kKey>::kCtas)
    gradient_channel(const __grid_constant__ DeviceArgs a, const chunked::Schedule schedule,
                     const __grid_constant__ Gradients d, const Saved<T, kKey> saved,
                     const GradientScratch scratch) {
    using P = Patches<kKey>;
    constexpr bool kSolves = GradientRule<kUpdate>::kSolves;
    extern __shared__ __align__(128) unsigned char raw[];
    auto& s = *reinterpret_cast<GradientChannelSmem<T, kKey>*>(raw);

    pdl_trigger_and_wait();
    const int slot = static_cast<int>(blockIdx.x / static_cast<unsigned>(a.heads)),
              thread = static_cast<int>(threadIdx.x);
    const chunked::ChunkPlace chunk = chunked::place_of<P::kRows>(a, schedule, slot);
    const ChannelPlace place{chunk.batch, chunk.count, slot, static_cast<int>(blockIdx.x) - slot * a.heads,
                             chunk.begin};
    if (place.count <= 0) {
        if (!scratch.parameters) return;
        float* sums = scratch.parameters +
                      (std::int64_t{slot} * a.value_heads + place.head * a.group) * (1 + a.key_dim);
        for (int i = thread; i < a.group * (1 + a.key_dim); i += P::kThreads) sums[i] = 0.0f;
        return;
    }
    ChannelGradient<T, kKey, kSolves, kReader> chunk_of{a, schedule, d, saved, scratch, s};
    if (thread == 0) s.place = place;
    __syncthreads();
    chunk_of.run();
}

}  // namespace cula::cuda::backward
