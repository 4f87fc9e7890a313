// SPDX-License-Identifier: Apache-2.0
// What the two walks of a backward leave to the gradient kernels, in global memory: of every chunk and value
// head the state S before it, Z = d loss / d state after it, the writes U, dV and dO. All are elements of T.
//
// What the carry saves, S and U, lies apart from what the return saves, so that a prefill can keep it for the
// backward pass of the same call (Args::saved). Both are cut into slices of 16 value channels, the rows of
// one warp of a walk, and stand in the order of the tensor cores' fragments (ptx/mma.cuh): a lane's 16 bytes
// are one operand of m16n8k16, or two neighbouring ones of m16n8. Walks write whole lines, the gradient
// kernels read shared memory without ldmatrix and without bank conflicts.
//
//   S, Z     B operands, reduced over value channels: step s (16 channels), lane l has
//            word 2 x + y = (value 2 (l % 4) + 8 y and the next, channel 16 s + 8 x + l / 4)
//   U,       A operands, reduced over value channels: block b (16 tokens), lane l has
//   dV, dO   word x + 2 y = (token 16 b + l / 4 + 8 x, value 2 (l % 4) + 8 y and the next)
//            words 0 and 2 are at once the B operand of the block's first eight tokens, 1 and 3 of the others
//
// The accumulators of a walk are transposed to this by `transposed` (movmatrix). Value channels beyond V and
// tokens beyond the chunk's are zero.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/chunked/chunk.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"

namespace cula::cuda::backward {

inline constexpr int kSliceValues = 16;  // value channels of a slice

// Of one chunk, one value head and kSliceValues value channels: what the carry saves, and what the return
// saves.
template <class T, int kKey>
struct alignas(128) CarrySlice {
    T writes[chunked::kTokens<kKey> * kSliceValues];  // U
    T state[kKey * kSliceValues];                     // S
};
template <class T, int kKey>
struct alignas(128) ReturnSlice {
    T d_values[chunked::kTokens<kKey> * kSliceValues];   // dV; of additive rules this is dU
    T d_outputs[chunked::kTokens<kKey> * kSliceValues];  // dO
    T d_state[kKey * kSliceValues];                      // Z
};

// Both, one behind the other, as the gradient kernels have them in shared memory.
template <class T, int kKey>
struct alignas(128) SavedSlice {
    T writes[chunked::kTokens<kKey> * kSliceValues];
    T state[kKey * kSliceValues];
    T d_values[chunked::kTokens<kKey> * kSliceValues];
    T d_outputs[chunked::kTokens<kKey> * kSliceValues];
    T d_state[kKey * kSliceValues];

    static constexpr int kCarried = sizeof(CarrySlice<T, kKey>), kReturned = sizeof(ReturnSlice<T, kKey>);
};

// Slices of all value channels: [chunks of the slab, HV, slices].
template <class T, int kKey>
struct Saved {
    CarrySlice<T, kKey>* carried = nullptr;
    ReturnSlice<T, kKey>* returned = nullptr;
    std::int32_t value_heads = 1, count = 1;  // count: slices of a value head

    CULA_HOST_DEVICE std::int64_t index(std::int64_t slot, int value_head, int slice) const {
        return (slot * value_heads + value_head) * count + slice;
    }
};

// Neighbouring value rows of a lane's tokens (CarrySlice::writes) from an A operand [16 value rows x 16
// tokens].
__device__ __forceinline__ uint4 transposed_rows(const Packed& packed) {
    return {transposed(packed[0]), transposed(packed[2]), transposed(packed[1]), transposed(packed[3])};
}

// An operand of a tensor core product as it lies in a slice, 16 bytes of every lane; `at` is the lane's.
inline constexpr int kFragment = 32 * 16;
__device__ __forceinline__ void load_fragment(std::uint32_t (&words)[4], const unsigned char* at) {
    const uint4 x = *reinterpret_cast<const uint4*>(at);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
}

// Stores a block of CarrySlice::writes, ReturnSlice::d_values or d_outputs.
template <class T>
__device__ __forceinline__ void save_rows(T* rows, int block, const uint4& words) {
    (reinterpret_cast<uint4*>(rows) + threadIdx.x % 32)[block * 32] = words;
}

// Stores step `step` of CarrySlice::state or ReturnSlice::d_state: channels 16 step to 16 step + 15, an A
// operand.
template <class T>
__device__ __forceinline__ void save_step(T* state, int step, const Packed& packed) {
    save_rows(state, step,
              {transposed(packed[0]), transposed(packed[1]), transposed(packed[2]), transposed(packed[3])});
}

// In a backward pass chunks take this for every write strength nearer to zero, so that dbeta = (dV / beta) .
// (U / beta) exists. Rows of U and dV are then small and not zero, with roundings that are relative.
template <class T>
inline constexpr float kLeastBeta = 0x1p-40f;
template <>
inline constexpr float kLeastBeta<__half> = 0x1p-12f;

// What the gradient kernels of a slab write besides the gradients; null where nothing needs it.
struct GradientScratch {
    // Where value heads share q and k: the sums of dq and dk over the heads so far, before norm and scale.
    float* keys = nullptr;  // [chunks of the slab, H, 2, tokens of a chunk, kKey]
    // Of every chunk and value head: the summand of dA_log, with its factor, and those of ddt_bias.
    float* parameters = nullptr;  // [chunks of the slab, HV, 1 + channels]; channels: K, or 1
    // Not 0: what gradient_anchored has left to gradient_left.
    std::uint8_t* left = nullptr;  // [chunks of the slab, H]
};

// Whether there is a gradient_anchored for inputs of this type and at most kKey channels.
template <class T, int kKey>
inline constexpr bool kHasAnchored = std::is_same_v<T, __nv_bfloat16> && kKey == 128;

}  // namespace cula::cuda::backward
