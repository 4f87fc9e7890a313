// SPDX-License-Identifier: Apache-2.0
// What backward_walk and backward_advance do with the tokens of a block (backward_walk.cuh): their inputs in
// shared memory, and a state that goes forwards over them.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/recurrent/backward_plan.h"
#include "cuda/recurrent/keys.cuh"
#include "cuda/recurrent/lanes.cuh"
#include "cuda/rule.h"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::recurrent {

static_assert(kWalkRows == kRowsPerPass);

// How does a token's write depend on the state and on what it brings?
template <Update kUpdate>
struct BackwardRule {
    static_assert(kIsKnown<kUpdate>, "backward: what does the gradient of a token's write reach?");
};
template <>
struct BackwardRule<Update::kAdditive> {
    static constexpr bool kCorrects = false;  // u = v
};
template <>
struct BackwardRule<Update::kDelta> {
    static constexpr bool kCorrects = true;  // u = beta (v - S' k): reaches v, beta, k and S'
};

__device__ __forceinline__ bool corrects_writes(const DeviceArgs& a) {
    return answer_for(a.algorithm.update, []<Update kUpdate>(UpdateConstant<kUpdate>) {
        return BackwardRule<kUpdate>::kCorrects;
    });
}

// What a slice needs of the tokens of a block. Forward walks need no q and d_o.
template <int kKey, Keys kKeys>
struct alignas(16) BlockInputs : OtherKeys<kKeys, kBlockTokens<kKey, kKeys>, kKey> {
    static constexpr int kTokens = kBlockTokens<kKey, kKeys>;
    float k[kTokens][kKey], decay[kTokens][kKey], q[kTokens][kKey];
    float value[kTokens][kWalkRows], beta[kTokens][kWalkRows], d_o[kTokens][kWalkRows];

    // What reads the state.
    __device__ __forceinline__ const float* reading_key(int i) const {
        if constexpr (kKeys == Keys::kErase)
            return this->e[i];
        else if constexpr (kKeys == Keys::kLowRank)
            return this->a[i];
        else
            return k[i];
    }
};

template <int kKey, Keys kKeys>
struct alignas(16) WalkShared {
    static constexpr int kTokens = kBlockTokens<kKey, kKeys>, kPieces = kKey / kLanesPerRow / 4,
                         kSums = kKeys == Keys::kLowRank ? 5
                                 : kKeys == Keys::kErase ? 4
                                                         : 3;
    BlockInputs<kKey, kKeys> inputs[2];
    float4 kept[kTokens - 1][kPieces][kStepThreads];  // S' or S; that of the last token stays in registers
    float sums[2][kSums][kStepWarps][kKey];           // dq, dk, da, and de, or those of a and b
    float scalars[2][2][kStepWarps];                  // da, dbeta
    float corrections[kTokens][kWalkRows];            // w; with erase keys u, with low-rank keys r
};

// The place of a CTA: a slice of one value head.
struct WalkHead {
    int value_head, head, slice;
    std::int64_t states;  // slices of all value heads

    __device__ __forceinline__ WalkHead(const DeviceArgs& a, const BackwardPlan& plan, int index)
        : value_head(index / plan.slices),
          head(value_head / a.group),
          slice(index % plan.slices),
          states(std::int64_t{a.value_heads} * plan.slices) {}

    // The element of [.., HV, slices] that is the CTA's.
    __device__ __forceinline__ std::int64_t at(const BackwardPlan& plan, std::int64_t outer) const {
        return outer * states + value_head * plan.slices + slice;
    }
    __device__ __forceinline__ int row() const {
        return slice * kWalkRows + static_cast<int>(threadIdx.x) / kLanesPerRow;
    }
};

// The CTA's slice of a state in the workspace: whole lines, each thread its own elements.
template <int kPerLane>
__device__ __forceinline__ void load_slice(float (&x)[kPerLane], const float4* states, std::int64_t slice) {
    const float4* const from = states + slice * (kPerLane / 4) * kStepThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kPerLane / 4; ++i) {
        const float4 piece = from[i * kStepThreads];
        x[4 * i] = piece.x, x[4 * i + 1] = piece.y, x[4 * i + 2] = piece.z, x[4 * i + 3] = piece.w;
    }
}
template <int kPerLane>
__device__ __forceinline__ void store_slice(const float (&x)[kPerLane], float4* states, std::int64_t slice) {
    float4* const to = states + slice * (kPerLane / 4) * kStepThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kPerLane / 4; ++i)
        to[i * kStepThreads] = float4{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
}

// Issues the copies of `count` tokens from the window's token `first` on; whole: with q and d_o.
template <int kKey, Keys kKeys>
__device__ __forceinline__ void fetch_block(BlockInputs<kKey, kKeys>& to, const DeviceArgs& a,
                                            const BackwardPlan& plan, const WalkHead& own, std::int64_t first,
                                            int count, bool corrects, bool whole) {
    constexpr int kPieces = kKey / 4, kValuePieces = kWalkRows / 4;
    const auto copy = [](float* shared, const float* global) { copy_async(shared_address(shared), global); };
#pragma unroll 1
    for (int p = static_cast<int>(threadIdx.x); p < count * kPieces; p += kStepThreads) {
        const int i = p / kPieces, c = p % kPieces * 4;
        const float* const keys = plan.keys + ((first + i) * a.heads + own.head) * 2 * kKey + c;
        copy(&to.k[i][c], keys + kKey);
        copy(&to.decay[i][c], plan.decays + ((first + i) * a.value_heads + own.value_head) * kKey + c);
        if (whole) copy(&to.q[i][c], keys);
        const std::int64_t at = (first + i) * a.value_heads + own.value_head;
        if constexpr (kKeys == Keys::kErase) copy(&to.e[i][c], plan.other_keys + at * kKey + c);
        if constexpr (kKeys == Keys::kLowRank) {
            copy(&to.a[i][c], plan.other_keys + at * 2 * kKey + c);
            copy(&to.b[i][c], plan.other_keys + (at * 2 + 1) * kKey + c);
        }
    }
    const int i = static_cast<int>(threadIdx.x) / kValuePieces, c = threadIdx.x % kValuePieces * 4;
    static_assert(kBlockTokens<kKey, kKeys> * kValuePieces <= kStepThreads);
    if (i < count) {
        const float* const values = plan.values +
                                    ((first + i) * a.value_heads + own.value_head) * 3 * plan.value_dim +
                                    own.slice * kWalkRows + c;
        copy(&to.value[i][c], values);
        if (corrects) copy(&to.beta[i][c], values + plan.value_dim);
        if (whole) copy(&to.d_o[i][c], values + 2 * plan.value_dim);
    }
    commit_copies();
}

// S <- S'; returns the thread's part of S' . k, with erase keys of S' . e, with low-rank keys of S . a.
//
// This function and add_write name the instructions. Where nothing else reads the decayed state, as of an
// additive rule or with low-rank keys, a compiler may round either the decay's product or that of k and v,
// and may choose one in advance_block and the other in keep_decayed or keep_states. The gradients would
// depend on where blocks begin.
template <int kKey, Keys kKeys>
__device__ __forceinline__ float decay_and_read(float (&x)[kKey / kLanesPerRow],
                                                const BlockInputs<kKey, kKeys>& in, int i) {
    float read[2] = {};
#pragma unroll
    for (int p = 0; p < kKey / kLanesPerRow; p += 4) {
        float decay[4], key[4];
        load4(decay, in.decay[i] + lane_channel(p)), load4(key, in.reading_key(i) + lane_channel(p));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float before = x[p + e];
            x[p + e] = __fmul_rn(before, decay[e]);
            read[e % 2] = __fmaf_rn(kKeys == Keys::kLowRank ? before : x[p + e], key[e], read[e % 2]);
        }
    }
    return read[0] + read[1];
}

// S <- S + key write
template <int kPerLane>
__device__ __forceinline__ void add_write(float (&x)[kPerLane], const float* key_of, float write) {
#pragma unroll
    for (int p = 0; p < kPerLane; p += 4) {
        float key[4];
        load4(key, key_of + lane_channel(p));
#pragma unroll
        for (int e = 0; e < 4; ++e) x[p + e] = __fmaf_rn(key[e], write, x[p + e]);
    }
}

// The state goes over the first `count` tokens of a block.
template <int kKey, Keys kKeys>
__device__ __forceinline__ void advance_block(float (&x)[kKey / kLanesPerRow],
                                              const BlockInputs<kKey, kKeys>& in, int count, bool corrects) {
    const int own = static_cast<int>(threadIdx.x) / kLanesPerRow;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const float read = decay_and_read(x, in, i);
        float write = in.value[i][own];
        if constexpr (kKeys == Keys::kErase)
            write = in.beta[i][own] * write - row_sum(read);
        else if (corrects)
            write = in.beta[i][own] * (write - row_sum(read));
        add_write(x, in.k[i], write);
        if constexpr (kKeys == Keys::kLowRank) add_write(x, in.b[i], row_sum(read));
    }
}

}  // namespace cula::cuda::recurrent
