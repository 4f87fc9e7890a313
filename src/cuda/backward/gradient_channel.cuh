// SPDX-License-Identifier: Apache-2.0
// gradient_channel: d_q, d_k, d_g, d_beta <- what the walks saved, q, k, gate, beta, with one decay per
// channel
//
// For a chunk, in the letters of ALGORITHM.md (S before it, Z = d loss / d state after it; additive rules
// have no dL, dK^ and dbeta):
//   dA = tril(dO U^T)          dL = -tril(dV U^T, -1)     dbeta = rowsum((dV / beta) o (U / beta))
//   dQ~ = dO S^T + dA K-       dK^ = -dV S^T + dL K-      dK- = dA^T Q~ + dL^T K^       dK+ = U Z^T
//   dq = scale Gamma dQ~       dk = Gamma dK^ + dK- / Gamma + (Gamma_C / Gamma) dK+
//   dg_t = the sum over all paths that cross the decay of token t: rows i >= t that read S, columns j < t
//   that
//          reach Z, pairs i >= t > j, and Gamma_C rowsum(S o Z)
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
//   operands L2 prefetches for the next value head or CTA. A lane has a channel: decays, and q and k decayed
//   to
//            the borders of their block, rounded |
//   blocks   tensor cores: pairs with other blocks, block by block, and sums of what crosses a block |
//   columns  accumulators turn to a lane per channel: pairs within the block, dg. No barrier: a warp turns
//   its
//            own patch
//   rows     columns turn to rows of eight channels per lane: gate, partial sums of d_A_log and d_dt_bias,
//   d_g;
//            sums over value heads; | the derivative of the norms (with qk_l2norm), d_q, d_k
//   sums     | partial sums of the warps, added in a fixed order, to GradientScratch::parameters
//
// Precision: S, Z, U, dV, dO, dA, dL between blocks and the operands are one word of T each. All sums, all of
// dg but the operands, and pairs within a block are float32.
//
// Budgets: 65.6, 98.1, 86.6 KiB of shared memory (K = 64, 128, 256), of which the ring of slices, whose place
// operands and turned patches take, has 30, 42, 40. At most 128 registers: two CTAs per multiprocessor for
// K = 64, else one. The phases read their place from shared memory anew (ChannelPlace), and columns of q and
// k too: kept, they would spill.
//
// PDL: every CTA triggers, then waits for the kernels before it.
#pragma once

#include "cuda/backward/channel_blocks.cuh"
#include "cuda/backward/channel_rows.cuh"
#include "cuda/backward/gradients.h"
#include "cuda/backward/own_channel.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/scan.cuh"

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
            copy_async(shared_address(to + t * kGroup + piece),
                       data + (in ? at + t * rows.token + channel : 0), in ? 16 : 0);
        }
        return;
    }
#pragma unroll 1
    for (int t = 0; t < kBlock; ++t)
        to[t * kGroup + patch.lane] = t < count && patch.channel < key_dim
                                          ? data[at + t * rows.token + patch.channel * rows.last]
                                          : from_float<T>(0.0f);
}

// Prefetches a row to the second-level cache.
__device__ __forceinline__ void prefetch_row(const TokenRows& rows, std::int64_t offset, int channels) {
    const int element = rows.dtype == Dtype::kFloat32 ? 4 : 2, bytes = channels * element;
    const char* from = static_cast<const char*>(rows.data) + offset * element;
    for (int line = 0; line < bytes; line += 128) prefetch(from + line);
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

// From the gradients of log decays to those of the gate: d_g, and of the lane's rows the sums for dA_log
// (without its factor) and, by channel, ddt_bias.
struct GateSums {
    float rate = 0.0f, bias[8] = {};

    __device__ __forceinline__ GateSums(const DeviceArgs& a, const TokenRows& d_g, RowPair& d_a,
                                        const RowPlace& place, int value_head) {
        // One branch on the kind of gate for all numbers.
        switch (a.gate) {
            case Gate::kSoftplus: differentiate<Gate::kSoftplus>(a, d_a, place, value_head); break;
            case Gate::kBounded: differentiate<Gate::kBounded>(a, d_a, place, value_head); break;
            case Gate::kLogDecay: break;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (place.in[half]) bias[i] += d_a.x[half][i];
        if (d_g.data) d_a.store(d_g, place, value_head, a.key_dim);
    }

private:
    template <Gate kGate>
    __device__ __forceinline__ void differentiate(const DeviceArgs& a, RowPair& d_a, const RowPlace& place,
                                                  int value_head) {
        GateDerivative derivative(a, value_head);
        derivative.kind = kGate;
        RowPair x;
        x.load(a.g, place, value_head, a.key_dim);
        float offset[8] = {};
        const float* from = a.dt_bias.data + value_head * a.dt_bias.head + place.channel * a.dt_bias.channel;
        if (a.dt_bias.pieces) {
            if (place.channel < a.key_dim) load4(offset, from);
            if (place.channel + 4 < a.key_dim) load4(offset + 4, from + 4);
        } else if (a.dt_bias.data) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (place.channel + i < a.key_dim) offset[i] = from[i * a.dt_bias.channel];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const GateGradient gradient = derivative(x.x[half][i] + offset[i], d_a.x[half][i]);
                d_a.x[half][i] = gradient.of_x;
                sum += gradient.of_rate;
            }
            if (place.in[half]) rate += sum;
        }
    }
};

// The phases for one value head. All threads are in each.
template <class T, int kKey, bool kSolves>
struct ChannelGradient {
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

    __device__ __forceinline__ bool wants_ends() const { return d.keys() || d.decay(); }
    __device__ __forceinline__ bool wants_sums() const { return d.decay() && scratch.parameters; }
    __device__ __forceinline__ bool is_first() const { return of_group == 0; }
    __device__ __forceinline__ bool is_last() const { return of_group + 1 == a.group; }
    __device__ __forceinline__ int value_head(const ChannelPlace& place) const {
        return place.head * a.group + of_group;
    }

    __device__ __forceinline__ void slices(SliceSums<T, kKey, kSolves>& sums) const {
        const ChannelPlace place = s.place.again();
        const int thread = thread_again();
        const Patch<kKey> patch(thread);
        const bool ends = wants_ends();
        const SavedSlice<T, kKey>* from = &saved.at(place.slot, value_head(place), 0);
#pragma unroll
        for (int i = 0; i < kSlots - 1; ++i) {
            if (i < saved.count) copy_slice<kSolves>(s.slices[i], from[i], thread, ends);
            commit_copies();
        }
        if (is_first() && ends && a.qk_l2norm) {
            wait_copies<kSlots - 1>();
            __syncwarp();
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const RowPair x = raw_rows(patch, which);
                x.dots(x, s.dots[patch.warp][which], patch.lane);
            }
        }
        int slot = 0, next = kSlots - 1;
#pragma unroll 1
        for (int i = 0; i < saved.count; ++i) {
            wait_copies<kSlots - 2>();
            __syncthreads();
            if (i + kSlots - 1 < saved.count)
                copy_slice<kSolves>(s.slices[next], from[i + kSlots - 1], thread, ends);
            commit_copies();
            sums.add(patch, s.slices[slot], ends);
            slot = slot + 1 == kSlots ? 0 : slot + 1, next = next + 1 == kSlots ? 0 : next + 1;
        }
        sums.put(patch, s);
        if (is_first() && ends && thread < 2 * P::kRows) {
            const int which = thread / P::kRows, t = thread % P::kRows;
            const float r = a.qk_l2norm ? rsqrtf(row_dot(s, which, t) + 1e-6f) : 1.0f;
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
        const auto* from =
            reinterpret_cast<const char*>(is_last() ? &saved.at(place.slot + ahead, place.head * a.group, 0)
                                                    : &saved.at(place.slot, value_head(place) + 1, 0));
        const int bytes = saved.count * static_cast<int>(sizeof(SavedSlice<T, kKey>));
#pragma unroll 1
        for (int line = thread * 128; line < bytes; line += P::kThreads * 128) prefetch(from + line);
        const int t = thread % P::kRows;
        const std::int64_t token = place.begin + std::int64_t{ahead} * P::kRows + t;
        if (!is_last() || token >= a.tokens) return;
        if (thread / P::kRows == 0)
            prefetch_row(a.q, a.q.offset(place.batch, token, place.head), a.key_dim);
        else if (thread / P::kRows == 1)
            prefetch_row(a.k, a.k.offset(place.batch, token, place.head), a.key_dim);
        else if (thread / P::kRows == 2)
            prefetch_row(a.g, a.g.offset(place.batch, token, place.head * a.group), a.key_dim);
    }

    // d_beta, a token per thread.
    __device__ __forceinline__ void strengths() const {
        const ChannelPlace place = s.place.again();
        const int t = thread_again();
        if (t >= place.count) return;
        const std::int64_t token = place.begin + t;
        const float given = load_float(a.beta.data, a.beta.dtype,
                                       a.beta.offset(place.batch, token, value_head(place))),
                    over_beta = 1.0f / solved_beta_of(a, given);
        const float product = -s.own_overlaps[t / kBlock][t % kBlock][t % kBlock];
        store_float(d.d_beta.data, d.d_beta.dtype, d.d_beta.offset(place.batch, token, value_head(place)),
                    beta_gradient(a, given, product * over_beta * over_beta));
    }

    __device__ __forceinline__ void operands(Column& decay) const {
        const ChannelPlace place = s.place.again();
        const Patch<kKey> patch;
        load_decays(decay, a, value_head(place),
                    a.g.offset(place.batch, place.begin + patch.first, value_head(place)), patch.channel,
                    patch.channel < a.key_dim ? place.count - patch.first : 0);
        OwnChannel<T, kKey, kSolves>{s, patch}.put_operands(decay);
        __syncthreads();
    }

    __device__ __forceinline__ void pairs(Ends& ends, Column& decay, Column& d_q, Column& d_k) const {
        const Patch<kKey> patch;
        const BlockSums<T, kKey, kSolves> blocks{s, patch};
        blocks.rows(ends, d.decay());
        blocks.columns(ends, d.decay());
        __syncthreads();  // columns take the place of the operands
        OwnChannel<T, kKey, kSolves>{s, patch}.gradients(ends, decay, d_q, d_k);
    }

    // d_g, and what the patch gives to d_A_log and d_dt_bias. of_decay: the gradients of the log decays.
    __device__ __forceinline__ void gate(const Column& of_decay) const {
        const ChannelPlace place = s.place.again();
        const Patch<kKey> patch;
        const RowPlace rows(place, patch, a.key_dim);
        RowPair d_a;
        d_a.turn(of_decay, s.turned[patch.warp], patch.lane);
        d_a.mask(rows, a.key_dim);
        GateSums sums(a, d.d_g, d_a, rows, value_head(place));
        if (!scratch.parameters) return;
        scatter_sums<4, 4>(sums.bias);
        s.bias_sums[patch.block][rows.channel + patch.lane / 4] = sums.bias[0];
        const float rate = sum_over_warp(sums.rate);
        if (patch.lane == 0) s.rate_sums[patch.warp] = rate;
    }

    // d_q and d_k, of the last value head; of the others, their sums so far.
    __device__ __forceinline__ void keys(const Column& d_q, const Column& d_k) const {
        const ChannelPlace place = s.place.again();
        const Patch<kKey> patch;
        const RowPlace rows(place, patch, a.key_dim);
        RowPair d_key[2];
        d_key[0].turn(d_q, s.turned[patch.warp], patch.lane);
        d_key[1].turn(d_k, s.turned[patch.warp], patch.lane);
        if (a.group > 1) {
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                float* so_far =
                    scratch.keys + rows.channel +
                    ((std::int64_t{blockIdx.x} * 2 + which) * P::kRows + patch.first + patch.lane / 4) * kKey;
                if (!is_first()) d_key[which].add(so_far, kKey);
                if (!is_last()) d_key[which].keep(so_far, kKey);
            }
        }
        if (!is_last()) return;
        if (a.qk_l2norm) {
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                d_key[which].mask(rows, a.key_dim);
                d_key[which].dots(raw_rows(patch, which), s.dots[patch.warp][which], patch.lane);
            }
            __syncthreads();
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const RowPair x = raw_rows(patch, which);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int t = patch.first + patch.lane / 4 + 8 * half;
                    const float r = s.inverse_norm[which][t], along = row_dot(s, which, t) * r * r;
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        d_key[which].x[half][i] = r * fmaf(-along, x.x[half][i], d_key[which].x[half][i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) d_key[0].x[i / 8][i % 8] *= a.scale;
        if (d.d_q.data) d_key[0].store(d.d_q, rows, place.head, a.key_dim);
        if (d.d_k.data) d_key[1].store(d.d_k, rows, place.head, a.key_dim);
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

private:
    __device__ __forceinline__ RowPair raw_rows(const Patch<kKey>& patch, int which) const {
        RowPair x;
        x.load(which ? s.k[patch.warp] : s.q[patch.warp], patch.lane);
        return x;
    }
};

template <class T, int kKey, Update kUpdate>
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
    ChannelGradient<T, kKey, kSolves> chunk_of{a, schedule, d, saved, scratch, s};
    if (thread == 0) s.place = place;
    if (chunk_of.wants_ends()) {
        const Patch<kKey> patch(thread);
        load_keys<T, kKey>(s.q[patch.warp], a.q, patch, place, a.key_dim);
        load_keys<T, kKey>(s.k[patch.warp], a.k, patch, place, a.key_dim);
    }
    commit_copies();
    __syncthreads();

#pragma unroll 1
    for (; chunk_of.of_group < a.group; ++chunk_of.of_group) {
        SliceSums<T, kKey, kSolves> sums;
        chunk_of.slices(sums);
        if (kSolves && d.d_beta.data) chunk_of.strengths();
        if (chunk_of.wants_ends()) {
            Column decay, d_q, d_k;
            chunk_of.prefetch_next();
            chunk_of.operands(decay);
            chunk_of.pairs(sums.ends, decay, d_q, d_k);
            if (d.decay()) chunk_of.gate(decay);
            if (d.keys()) chunk_of.keys(d_q, d_k);
        }
        if (!chunk_of.is_last() || chunk_of.wants_sums()) __syncthreads();
        if (!chunk_of.wants_sums()) continue;
        chunk_of.parameters();
        if (!chunk_of.is_last()) __syncthreads();  // the next slices take the place of the sums
    }
}

}  // namespace cula::cuda::backward
