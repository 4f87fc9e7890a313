// SPDX-License-Identifier: Apache-2.0
// Where segments of the fused prefill start (Strategy FusedSegments, docs/design/fused-segments.md).
//
// A token takes the state S to S diag(d) (I - beta k k^T) + ..., with |k| <= 1 and beta from 0 to 2. There
// are two bounds for what is left of a row of S after some tokens, both for a row of norm 1 before them:
//
//   by norms      a token multiplies the norm by at most max_c d[c] * max(1, |1 - beta|), since no singular
//                 value of the delta rule's factor is above the second number
//   by channels   |row[c]| <= u[c]: u = 1 before the first token, and each takes it to
//                 w + beta |k| (|k| . w) with w = d u
//
// The first is the better one where all channels decay alike; the second where they take turns, since only
// the keys carry values from one channel to another. If one of them comes down to 2^kForgotten over the
// tokens before a segment, its CTAs start that many tokens early from zero, and run a warm-up without
// outputs. If the warm-up reaches the beginning of the sequence, they start from its own state, and nothing
// is left out.
//
// If some segment of a head does not forget, other launches run the whole head. So one does where what was
// left out is large beside what a segment works with, and where it was no number: the state role keeps
// magnitudes, and the last warp of a head compares them (Verdicts).
//
// judge_segments: warm_up, remembers <- gates, keys, beta; initial_copy <- initial states, if in place
//   Grid: one CTA of 512 threads per (segment, value head); a token is read by 16 lanes, and warp 0 goes
//   through the bounds. PDL: wait, then trigger. Budgets: 128 registers, 43 KiB of static shared memory.
#pragma once

#include "cuda/chunked/cursor.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/sm90/fused/config.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/scan.cuh"

namespace cula::cuda::sm90 {

using chunked::Magnitudes;
using chunked::Verdicts;

// The longest warm-up, in chunks of prepare.
inline constexpr int kMostWarmUp = 4;
inline constexpr int kJudgeThreads = 512;

// All kThreads threads of the CTA copy the state of a sequence and head.
template <int kThreads>
__device__ __noinline__ void copy_initial_state(const DeviceArgs& a, int sequence, int value_head) {
    const StateSlots slots = states_of(a, sequence);
    if (slots.skipped || slots.initial < 0) return;
    const std::int64_t slot = a.initial_indices.data ? a.initial_indices.at(sequence) : sequence;
    const std::int64_t from = a.initial.offset(slot, value_head),
                       to = a.initial_copy.offset(sequence, value_head);
    auto* const copy = static_cast<float*>(a.initial_copy.data) + to;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < a.value_dim * a.key_dim; i += kThreads) {
        const int row = i / a.key_dim, channel = i - row * a.key_dim;
        copy[i] =
            load_float(a.initial.data, a.initial.dtype, from + row * a.initial.v + channel * a.initial.k);
    }
}

// Two numbers that are not negative, as bfloat16 that are rounded up; of a NaN or an infinity, NaN.
__device__ __forceinline__ std::uint32_t pack_up(float low, float high) {
    const auto up = [](float x) {
        const std::uint32_t bits = __float_as_uint(x);
        return bits < 0x7f800000u ? bits + 0xffffu : 0x7fc00000u;
    };
    return up(low) >> 16 | (up(high) & 0xffff0000u);
}
__device__ __forceinline__ float2 unpack_bounds(std::uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// What the second bound needs of the chunk before a segment, in the order of its tokens. Four tokens at once
// are u <- whole u + sum_i write_i r_i with r_j = read_j . u + sum_{i < j} again_{ji} r_i: their reads do not
// wait for one another.
template <int kTokens, int kKey>
struct ChannelBounds {
    static constexpr int kGroup = 4, kGroups = kTokens / kGroup, kOwn = kKey / 32;
    static_assert(kOwn == 4);
    struct alignas(16) Group {
        float whole[kKey];
        float again[8];  // 21, 31, 32, 41, 42, 43
    };
    // Of a token: its decay and |k|. combine() replaces them by what reads u before the group and by what is
    // written, as it is behind the group.
    alignas(16) std::uint32_t tokens[kTokens][kKey];
    float betas[kTokens], norms[kTokens];  // magnitudes; one over those of keys
    Group groups[kGroups];

    // Combines the tokens of a group. By one warp.
    __device__ __forceinline__ void combine(int number) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        Group& group = groups[number];
        uint4* const own = reinterpret_cast<uint4*>(&tokens[number * kGroup][lane * kOwn]);
        constexpr int kPitch = kKey / kOwn;
        float read[kGroup][kOwn], write[kGroup][kOwn], whole[kOwn], again[6] = {};
#pragma unroll
        for (float& x : whole) x = 1.0f;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            const uint4 packed = own[j * kPitch];
            const std::uint32_t words[kOwn] = {packed.x, packed.y, packed.z, packed.w};
            const float beta = betas[number * kGroup + j];
#pragma unroll
            for (int e = 0; e < kOwn; ++e) {
                const float2 token = unpack_bounds(words[e]);  // decay, key
                whole[e] *= token.x;
                read[j][e] = token.y * whole[e];
#pragma unroll
                for (int i = 0; i < j; ++i)
                    write[i][e] *= token.x, again[j * (j - 1) / 2 + i] += token.y * write[i][e];
                write[j][e] = token.y * beta;
            }
        }
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
            own[j * kPitch] = {pack_up(read[j][0], write[j][0]), pack_up(read[j][1], write[j][1]),
                               pack_up(read[j][2], write[j][2]), pack_up(read[j][3], write[j][3])};
        *reinterpret_cast<float4*>(group.whole + lane * kOwn) = {whole[0], whole[1], whole[2], whole[3]};
#pragma unroll
        for (float& pair : again) pair = sum_over_warp(pair);
        if (lane == 0)
#pragma unroll
            for (int pair = 0; pair < 6; ++pair) group.again[pair] = again[pair];
    }

    // Whether u comes down to `enough` in every channel before the last token. By one warp.
    __device__ __forceinline__ bool come_down(float enough) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        float u[kOwn];
#pragma unroll
        for (float& x : u) x = 1.0f;
#pragma unroll 2
        for (int number = 0; number < kGroups; ++number) {
            const Group& group = groups[number];
            float whole[kOwn], read[kGroup], write[kGroup][kOwn];
            load4(whole, group.whole + lane * kOwn);
#pragma unroll
            for (int j = 0; j < kGroup; ++j) {
                const uint4 packed =
                    *reinterpret_cast<const uint4*>(&tokens[number * kGroup + j][lane * kOwn]);
                const std::uint32_t words[kOwn] = {packed.x, packed.y, packed.z, packed.w};
                read[j] = 0.0f;
#pragma unroll
                for (int e = 0; e < kOwn; ++e) {
                    const float2 pair = unpack_bounds(words[e]);
                    read[j] = fmaf(pair.x, u[e], read[j]), write[j][e] = pair.y;
                }
                read[j] = sum_over_warp(read[j]);
            }
#pragma unroll
            for (int j = 1; j < kGroup; ++j)
#pragma unroll
                for (int i = 0; i < j; ++i)
                    read[j] = fmaf(group.again[j * (j - 1) / 2 + i], read[i], read[j]);
            float most = 0.0f;
#pragma unroll
            for (int e = 0; e < kOwn; ++e) {
                u[e] *= whole[e];
#pragma unroll
                for (int j = 0; j < kGroup; ++j) u[e] = fmaf(write[j][e], read[j], u[e]);
                most = max_or_nan(most, u[e]);
            }
            if (__all_sync(0xffffffffu, most <= enough)) return true;
            // Far from it: channels that keep what they have.
            if (number == kGroups / 4 && !__all_sync(0xffffffffu, most <= 0.25f)) return false;
        }
        return false;
    }
};

template <class T, int kKey, Gate kGate>
__global__ void __launch_bounds__(kJudgeThreads, 1)
    judge_segments(const __grid_constant__ DeviceArgs a, const Schedule schedule) {
    constexpr int kRows = chunked::kTokens<kKey>, kTokens = kMostWarmUp * kRows;
    constexpr int kLanes = 16, kOwn = kKey / kLanes, kStep = kJudgeThreads / kLanes, kPasses = kRows / kStep;
    static_assert(kOwn * sizeof(T) == sizeof(uint4) && kPasses * kStep == kRows);
    static_assert(kJudgeThreads >= kTokens && kJudgeThreads / 32 == ChannelBounds<kRows, kKey>::kGroups);
    __shared__ float bounds[kTokens];  // log2 of the first bound, the token before the segment first
    __shared__ __align__(16) float biases[kKey];
    __shared__ ChannelBounds<kRows, kKey> channels;
    pdl_wait();
    pdl_trigger();
    const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x),
              number = a.by_value_heads.divide(block), value_head = block - number * a.value_heads;
    const Segment segment = chunked::segment_of(a, schedule, number);
    if (segment.sequence < 0) return;
    const int most = min(segment.chunk, kMostWarmUp);
    const TokenRange tokens = tokens_of(a, segment.sequence);
    const std::int64_t last = tokens.begin + std::int64_t{segment.chunk} * kRows - 1;
    const int lane = thread % kLanes, channel = lane * kOwn, first = thread / kLanes;
    const bool has_channels = channel < a.key_dim && most > 0;

    // Loads kStep tokens, from `back` tokens before the segment on.
    const auto load_rows = [&](uint4(&to)[kPasses], const TokenRows& rows, int head, int back) {
        const T* from =
            static_cast<const T*>(rows.data) + rows.offset(tokens.batch, last - back - first, head) + channel;
#pragma unroll
        for (uint4& piece : to) {
            piece = has_channels ? *reinterpret_cast<const uint4*>(from) : uint4{};
            from -= kStep * rows.token;
        }
    };
    const auto load_beta = [&](int back) {
        return load_float(a.beta.data, a.beta.dtype, a.beta.offset(tokens.batch, last - back, value_head));
    };
    uint4 raw[kPasses], keys[kPasses];
    load_rows(raw, a.g, value_head, 0);
    load_rows(keys, a.k, a.by_group.divide(value_head), 0);
    float beta = 0.0f;
    if (thread < kRows && most > 0) beta = load_beta(thread);
    float bias = 0.0f;
    if (thread < a.key_dim && a.dt_bias.data)
        bias = a.dt_bias.data[value_head * a.dt_bias.head + thread * a.dt_bias.channel];
    const HeadGate gate(a, value_head);
    if (segment.rank == 0 && a.initial_copy.data)
        copy_initial_state<kJudgeThreads>(a, segment.sequence, value_head);
    if (thread < kKey) biases[thread] = bias;
    __syncthreads();

    // A decay grows with its gate whatever the kind of gate: the slowest channel has the least one.
    const auto store_slowest = [&](int back) {
        float own_bias[kOwn];
        load4(own_bias, biases + channel);
        load4(own_bias + 4, biases + channel + 4);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const std::uint32_t x[4] = {raw[pass].x, raw[pass].y, raw[pass].z, raw[pass].w};
            float least = INFINITY;
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                const float2 pair = unpack_bounds(x[word]);
                least = min_or_nan(least,
                                   min_or_nan(pair.x + own_bias[2 * word], pair.y + own_bias[2 * word + 1]));
            }
            if (!has_channels) least = INFINITY;
#pragma unroll
            for (int other = 1; other < kLanes; other *= 2)
                least = min_or_nan(least, __shfl_xor_sync(0xffffffffu, least, other));
            if (lane == 0) bounds[back + pass * kStep + first] = least;
        }
    };
    const auto log2_decay = [&](float x) { return gate.out * gate_shape<kGate, GateBits::k22>(gate.in * x); };
    store_slowest(0);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int token = kRows - 1 - (pass * kStep + first);
        const std::uint32_t x[4] = {raw[pass].x, raw[pass].y, raw[pass].z, raw[pass].w},
                            y[4] = {keys[pass].x, keys[pass].y, keys[pass].z, keys[pass].w};
        float squares = 0.0f;
        std::uint32_t pairs[kOwn];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            pairs[2 * word] = (x[word] & 0xffffu) | y[word] << 16;
            pairs[2 * word + 1] = x[word] >> 16 | (y[word] & 0xffff0000u);
            const float2 key = unpack_bounds(y[word]);
            squares = fmaf(key.x, key.x, fmaf(key.y, key.y, squares));
        }
        auto* const to = reinterpret_cast<uint4*>(&channels.tokens[token][channel]);
        to[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
        to[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
#pragma unroll
        for (int other = 1; other < kLanes; other *= 2)
            squares += __shfl_xor_sync(0xffffffffu, squares, other);
        if (lane == 0) channels.norms[token] = rsqrtf(squares + 1e-6f);
    }
    __syncthreads();
    if (thread < kRows) {
        const float strength = beta_of(a, beta);
        bounds[thread] = log2_decay(bounds[thread]) + chunked::growth(strength);
        channels.betas[kRows - 1 - thread] = fabsf(strength);
    }
    const int own_channel = thread % kKey;
#pragma unroll 2
    for (int token = thread / kKey; token < kRows; token += kJudgeThreads / kKey) {
        std::uint32_t& pair = channels.tokens[token][own_channel];
        const float2 given = unpack_bounds(pair);  // raw gate, key
        pair = own_channel < a.key_dim ? pack_up(exp2_fast(log2_decay(given.x + biases[own_channel])),
                                                 fabsf(given.y) * channels.norms[token])
                                       : 0u;
    }
    __syncthreads();
    if (most > 0) channels.combine(thread / 32);
    __syncthreads();

    int chunks = most == segment.chunk ? most : -1;
    // The sums of the first bound from chunk `chunk` on. By the first warp, as the next one.
    float sum = 0.0f;
    const auto look_back = [&](int chunk, int end) {
#pragma unroll 1
        for (; chunk < end; ++chunk) {
            sum += sum_over_warp(bounds[chunk * kRows + thread] + bounds[chunk * kRows + 32 + thread]);
            if (!(sum <= chunked::kForgotten)) continue;
            chunks = chunk + 1;
            return;
        }
    };
    const auto store = [&] {
        if (thread > 0) return;
        const Verdicts& verdicts = schedule.verdicts;
        verdicts.warm_up[std::int64_t{number} * a.value_heads + value_head] = chunks;
        if (chunks < 0) verdicts.remembers[segment.sequence * a.value_heads + value_head] = 1;
    };
    bool goes_on = false;
    if (thread < 32 && most > 0) {
        look_back(0, 1);
        if (chunks != 1) {
            // What write strengths next to 2 may add after the bound has come down. The norm of a row is at
            // most sqrt(K) times its largest number.
            const float grows = sum_over_warp(chunked::growth(channels.betas[thread]) +
                                              chunked::growth(channels.betas[32 + thread]));
            const float enough = exp2f(chunked::kForgotten - grows) * rsqrtf(static_cast<float>(kKey));
            if (channels.come_down(enough)) chunks = 1;
        }
        // Chunks further back are looked at only where four like this one would be enough.
        goes_on = chunks != 1 && most > 1 && kMostWarmUp * sum <= chunked::kForgotten;
    }
    if (!__syncthreads_or(goes_on)) return store();
#pragma unroll 1
    for (int back = kRows; back < most * kRows; back += kRows)
        load_rows(raw, a.g, value_head, back), store_slowest(back);
    if (thread >= kRows && thread < most * kRows) beta = load_beta(thread);
    __syncthreads();
    if (thread >= kRows && thread < most * kRows)
        bounds[thread] = log2_decay(bounds[thread]) + chunked::growth(beta_of(a, beta));
    __syncthreads();
    if (thread >= 32) return;
    look_back(1, most);
    store();
}

// Moves the begin of a CTA's segment, number `number`, to that of its warm-up, and returns the warm-up's
// chunks of the fused kernel; -1 where the head remembers.
__device__ __forceinline__ int begin_early(const DeviceArgs& a, const Schedule& schedule, int number,
                                           int value_head, Segment& segment) {
    if (segment.sequence < 0) return 0;
    const Verdicts& verdicts = schedule.verdicts;
    if (__ldcg(verdicts.remembers + (segment.sequence * a.value_heads + value_head))) return -1;
    const int own = __ldcg(verdicts.warm_up + std::int64_t{number} * a.value_heads + value_head);
    if (own == segment.chunk) segment.rank = 0;  // it starts from the sequence's state
    segment.chunk -= own, segment.slot -= own, segment.chunks += own;
    return own * (chunked::kTokens<128> / kFusedTokens);
}

// The end of a CTA of segments: by all of its threads, after all that it stores. The kernels beside segments
// do not wait for them (Part::kRemembering), so the last one of the call does.
__device__ __forceinline__ void end_segment(const Verdicts& verdicts) {
    __syncthreads();
    if (threadIdx.x > 0) return;
    __threadfence();
    if (atomicAdd(verdicts.ended, 1) + 1 < static_cast<int>(gridDim.x)) return;
    __threadfence();
    publish(verdicts.ended + 1, 1);
}
// All CTAs of segments have started before a kernel that calls this can: none waits for its multiprocessor.
__device__ __forceinline__ void wait_for_segments(const Verdicts& verdicts) {
    while (!published(verdicts.ended + 1)) __nanosleep(100);
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
