// SPDX-License-Identifier: Apache-2.0
// Where segments of the fused prefill start (Strategy FusedSegments, docs/design/fused-segments.md).
//
// A token takes the state S to S diag(d) (I - beta k k^T) + ..., with |k| <= 1. There are two bounds for what
// is left of a row of S after some tokens, both for a row of norm 1 before them:
//
//   by norms      a token multiplies the norm by at most max_c d[c] * max(1, |1 - beta|), since the factor of
//   the
//                 delta rule has no singular value above the second number
//   by channels   |row[c]| <= u[c] with u = 1 before, and u <- w + |beta| |k| (|k| . w), w = d u, at each
//   token
//
// The first is the better one where all channels decay alike; the second where they take turns, since only
// the keys carry values from one channel to another. If one of them comes down to 2^kForgotten over the
// tokens before a segment, its CTAs start that many tokens early from zero, and run a warm-up without
// outputs. If the warm-up reaches the beginning of the sequence, they start from its own state, and nothing
// is left out.
//
// If some segment of a head does not forget, none of its CTAs has work, and another launch runs the whole
// head. So it does where what was left out is large beside what a segment works with, and where it was no
// number: the state role keeps magnitudes, and the last warp of a head compares them (Verdicts).
//
// judge_segments: warm_up, arrived, settled <- gates, beta; initial_copy <- initial states, if in place
//   Grid: one CTA of 512 threads per (segment, value head); a token is read by 16 lanes, and warp 0 goes
//   through the bounds. PDL: wait, then trigger. Budgets: 128 registers, 34 KiB of static shared memory.
#pragma once

#include "cuda/chunked/cursor.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/sm90/fused/config.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::sm90 {

using chunked::Magnitudes;
using chunked::Verdicts;

// The longest warm-up, in chunks of prepare.
inline constexpr int kMostWarmUp = 4;
inline constexpr int kJudgeThreads = 512;

// All threads of the CTA copy the state of a sequence and head.
__device__ __forceinline__ void copy_initial_state(const DeviceArgs& a, int sequence, int value_head) {
    const StateSlots slots = states_of(a, sequence);
    if (slots.skipped || slots.initial < 0) return;
    const std::int64_t slot = a.initial_indices.data ? a.initial_indices.at(sequence) : sequence;
    const std::int64_t from = a.initial.offset(slot, value_head),
                       to = a.initial_copy.offset(sequence, value_head);
    auto* const copy = static_cast<float*>(a.initial_copy.data) + to;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < a.value_dim * a.key_dim; i += kJudgeThreads) {
        const int row = i / a.key_dim, channel = i - row * a.key_dim;
        copy[i] =
            load_float(a.initial.data, a.initial.dtype, from + row * a.initial.v + channel * a.initial.k);
    }
}

// What the second bound needs of a token and channel, in two bfloat16 that are rounded up.
__device__ __forceinline__ std::uint32_t pack_up(float decay, float key) {
    const auto up = [](float x) {
        const std::uint32_t bits = __float_as_uint(x);
        return bits < 0x7f800000u ? bits + 0xffffu : 0x7fc00000u;  // a NaN, also in place of an infinity
    };
    return up(decay) >> 16 | (up(key) & 0xffff0000u);
}

// The second bound over the chunk of tokens before a segment. Returns whether it comes down far enough, in
// every channel, before the last token; later tokens shrink the norm or, by `growth`, do not.
// Warp-collective.
template <int kTokens, int kKey>
__device__ __forceinline__ bool forgets_by_channels(const std::uint32_t (&factors)[kTokens][kKey],
                                                    const float (&betas)[kTokens], float growth) {
    constexpr int kOwn = kKey / 32;
    // The norm of a row is at most sqrt(K) times its largest number.
    const float enough = exp2f(chunked::kForgotten - growth) * rsqrtf(static_cast<float>(kKey));
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float u[kOwn];
#pragma unroll
    for (float& x : u) x = 1.0f;
#pragma unroll 4
    for (int token = 0; token < kTokens; ++token) {
        const uint4 packed = *reinterpret_cast<const uint4*>(&factors[token][lane * kOwn]);
        const std::uint32_t words[kOwn] = {packed.x, packed.y, packed.z, packed.w};
        float key[kOwn], read = 0.0f, most = 0.0f;
#pragma unroll
        for (int e = 0; e < kOwn; ++e) {
            u[e] *= __uint_as_float(words[e] << 16), key[e] = __uint_as_float(words[e] & 0xffff0000u);
            read = fmaf(key[e], u[e], read);
        }
#pragma unroll
        for (int other = 1; other < 32; other *= 2) read += __shfl_xor_sync(0xffffffffu, read, other);
        read *= betas[token];
#pragma unroll
        for (int e = 0; e < kOwn; ++e) u[e] = fmaf(key[e], read, u[e]), most = max_or_nan(most, u[e]);
        if (__all_sync(0xffffffffu, most <= enough)) return true;
        // Far from what would be needed: channels that keep what they have.
        if (token == kTokens / 4 && !__all_sync(0xffffffffu, most <= 0.25f)) return false;
    }
    return false;
}

template <class T, int kKey, Gate kGate>
__global__ void __launch_bounds__(kJudgeThreads)
    judge_segments(const __grid_constant__ DeviceArgs a, const Schedule schedule) {
    constexpr int kRows = chunked::kTokens<kKey>, kTokens = kMostWarmUp * kRows;
    constexpr int kLanes = 16, kOwn = kKey / kLanes, kStep = kJudgeThreads / kLanes,
                  kPasses = kTokens / kStep, kNear = kRows / kStep;
    static_assert(kOwn * sizeof(T) == sizeof(uint4) && kPasses * kStep == kTokens && kNear * kStep == kRows);
    static_assert(kJudgeThreads >= kTokens && kKey == 128);
    __shared__ float bounds[kTokens];  // log2 of the first bound, the token before the segment first
    __shared__ float
        betas[kRows];  // of the chunk before the segment, in the order of its tokens; as `factors`
    __shared__ __align__(16) std::uint32_t factors[kRows][kKey];
    pdl_wait();
    pdl_trigger();
    const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x),
              number = a.by_value_heads.divide(block), value_head = block - number * a.value_heads;
    const Segment segment = chunked::segment_of(a, schedule, number);
    if (segment.sequence < 0) return;
    const Verdicts& verdicts = schedule.verdicts;
    const int most = min(segment.chunk, kMostWarmUp), count = most * kRows;
    const TokenRange tokens = tokens_of(a, segment.sequence);
    const std::int64_t last = tokens.begin + std::int64_t{segment.chunk} * kRows - 1;
    const int lane = thread % kLanes, channel = lane * kOwn;
    const bool has_channels = channel < a.key_dim;

    // All loads first.
    uint4 raw[kPasses], keys[kNear];
    const auto rows_of = [&](const TokenRows& rows, int head) {
        return static_cast<const T*>(rows.data) + rows.offset(tokens.batch, last, head) + channel;
    };
    const T* const gates = rows_of(a.g, value_head);
    const T* const k = rows_of(a.k, a.by_group.divide(value_head));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int token = pass * kStep + thread / kLanes;
        const bool exists = token < count && has_channels;
        if (exists) raw[pass] = *reinterpret_cast<const uint4*>(gates - token * a.g.token);
        if (pass < kNear)
            keys[pass] = exists ? *reinterpret_cast<const uint4*>(k - token * a.k.token) : uint4{};
    }
    float beta = 0.0f;
    if (thread < count)
        beta = load_float(a.beta.data, a.beta.dtype, a.beta.offset(tokens.batch, last - thread, value_head));
    float bias[kOwn];
#pragma unroll
    for (int e = 0; e < kOwn; ++e)
        bias[e] = has_channels && a.dt_bias.data
                      ? a.dt_bias.data[value_head * a.dt_bias.head + (channel + e) * a.dt_bias.channel]
                      : 0.0f;
    const HeadGate gate(a, value_head);
    if (segment.rank == 0 && a.initial_copy.data) copy_initial_state(a, segment.sequence, value_head);

    // A decay grows with its gate whatever the kind of gate: the slowest channel has the least one.
    const auto log2_decay = [&](float x) { return gate.out * gate_shape<kGate, GateBits::k22>(gate.in * x); };
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int token = pass * kStep + thread / kLanes;
        float least = INFINITY, x[kOwn] = {};
        if (token < count && has_channels) {
            const T* const given = reinterpret_cast<const T*>(&raw[pass]);
#pragma unroll
            for (int e = 0; e < kOwn; ++e)
                x[e] = to_float(given[e]) + bias[e], least = min_or_nan(least, x[e]);
        }
#pragma unroll
        for (int other = 1; other < kLanes; other *= 2)
            least = min_or_nan(least, __shfl_xor_sync(0xffffffffu, least, other));
        if (lane == 0) bounds[token] = least;
        if (pass >= kNear) continue;
        const T* const key = reinterpret_cast<const T*>(&keys[pass]);
        float squares = 0.0f;
#pragma unroll
        for (int e = 0; e < kOwn; ++e) squares = fmaf(to_float(key[e]), to_float(key[e]), squares);
#pragma unroll
        for (int other = 1; other < kLanes; other *= 2)
            squares += __shfl_xor_sync(0xffffffffu, squares, other);
        const float norm = rsqrtf(squares + 1e-6f);
#pragma unroll
        for (int e = 0; e < kOwn; ++e)
            factors[kRows - 1 - token][channel + e] =
                has_channels ? pack_up(exp2_fast(log2_decay(x[e])), fabsf(to_float(key[e])) * norm) : 0u;
    }
    __syncthreads();
    if (thread < count) {
        const float strength = beta_of(a, beta);
        bounds[thread] = log2_decay(bounds[thread]) + chunked::growth(strength);
        if (thread < kRows) betas[kRows - 1 - thread] = fabsf(strength);
    }
    __syncthreads();
    if (thread >= 32) return;
    int chunks = most == segment.chunk ? most : -1;
    float sum = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < most; ++chunk) {
        float of_chunk = bounds[chunk * kRows + thread] + bounds[chunk * kRows + 32 + thread];
#pragma unroll
        for (int other = 1; other < 32; other *= 2) of_chunk += __shfl_xor_sync(0xffffffffu, of_chunk, other);
        sum += of_chunk;
        if (!(sum <= chunked::kForgotten)) continue;
        chunks = chunk + 1;
        break;
    }
    if (most > 0 && chunks != 1) {
        float grows = 0.0f;  // what write strengths above 2 may add after the bound is reached
#pragma unroll
        for (int half = 0; half < 2; ++half) grows += chunked::growth(betas[half * 32 + thread]);
#pragma unroll
        for (int other = 1; other < 32; other *= 2) grows += __shfl_xor_sync(0xffffffffu, grows, other);
        if (forgets_by_channels(factors, betas, grows)) chunks = 1;
    }
    if (thread > 0) return;
    verdicts.warm_up[std::int64_t{number} * a.value_heads + value_head] = chunks;
    if (segment.rank == 0) {
        const std::int64_t head = std::int64_t{segment.sequence} * a.value_heads + value_head;
        verdicts.arrived[head] = verdicts.settled[head] = 0;
    }
}

// Moves the begin of a CTA's segment, number `number`, to that of its warm-up, and returns the warm-up's
// chunks of the fused kernel; -1 where some segment of the head does not forget. Warp-collective.
__device__ __forceinline__ int begin_early(const DeviceArgs& a, const Schedule& schedule, int number,
                                           int value_head, Segment& segment) {
    if (segment.sequence < 0) return 0;
    const std::int32_t* const warm_up = schedule.verdicts.warm_up + value_head;
    const int own = __ldcg(warm_up + std::int64_t{number} * a.value_heads), first = number - segment.rank;
    bool all = true;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 32; i < segment.count; i += 32)
        all &= __ldcg(warm_up + std::int64_t{first + i} * a.value_heads) >= 0;
    if (!__all_sync(0xffffffffu, all)) return -1;
    if (own == segment.chunk) segment.rank = 0;  // it starts from the sequence's state
    segment.chunk -= own, segment.slot -= own, segment.chunks += own;
    return own * (chunked::kTokens<128> / kFusedTokens);
}

// Stores what a warp of value rows has seen of its segment. The last warp of the head decides whether the
// head is settled. Warp-collective.
template <class Form>
__device__ __forceinline__ void store_magnitudes(const DeviceArgs& a, const Schedule& schedule,
                                                 const CarryParams& p, const Segment& segment,
                                                 int first_segment, int warp, const Magnitudes& found) {
    const int blocks = static_cast<int>(p.row_blocks.value), block = static_cast<int>(blockIdx.x),
              column = p.row_blocks.divide(block), number = a.by_value_heads.divide(column),
              value_head = column - number * a.value_heads, lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kWarps = Form::kStateWarpgroups * kWarpgroupWarps;
    const int slots = blocks * kWarps, slot = (block - column * blocks) * kWarps + warp;
    const Verdicts& verdicts = schedule.verdicts;
    const std::int64_t head = std::int64_t{segment.sequence} * a.value_heads + value_head;
    int before = 0;
    if (lane == 0) {
        verdicts.of[std::int64_t{column} * slots + slot] = found;
        __threadfence();
        before = atomicAdd(verdicts.arrived + head, 1);
    }
    if (__shfl_sync(0xffffffffu, before, 0) + 1 < segment.count * slots) return;
    __threadfence();
    // A lane has the same slot in each of its segments.
    float most = 0.0f, least = INFINITY;
#pragma unroll 1
    for (int i = lane; i < segment.count * slots; i += 32) {
        const std::int64_t at = std::int64_t{first_segment + i / slots} * a.value_heads + value_head;
        const float2 one = __ldcg(reinterpret_cast<const float2*>(verdicts.of + at * slots + i % slots));
        most = max_or_nan(most, one.x), least = fminf(least, one.y);
    }
#pragma unroll 1
    for (int other = slots; other < 32; other *= 2) {
        most = max_or_nan(most, __shfl_xor_sync(0xffffffffu, most, other));
        least = fminf(least, __shfl_xor_sync(0xffffffffu, least, other));
    }
    const bool settled = __all_sync(0xffffffffu, most <= chunked::kMostBeforeLeast * least);
    if (lane == 0) verdicts.settled[head] = settled;
}

}  // namespace cula::cuda::sm90
