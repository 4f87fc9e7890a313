// SPDX-License-Identifier: Apache-2.0
// What the two walks of a backward leave to the gradient kernels, in global memory: of every chunk and value
// head the state S before it, Z = d loss / d state after it, the writes U, dV and dO. All are elements of T.
//
// What the carry saves, S and U, lies apart from what the return saves, so that a prefill can keep it for the
// backward pass of the same call (Args::saved). Both are cut into slices of 16 value channels, the rows of
// one warp of a walk. All tensors of a slice are columns of its 16 rows, channels for S and Z, tokens for U,
// dV and dO, and lie in matrices of 8 x 8 elements, each of them contiguous, by rows:
//
//   matrix 2 c + v of a tensor has value channels 8 v to 8 v + 7 and columns 8 c to 8 c + 7
//
// So the A operands of a walk, [16 value channels x 16 columns], are stored as they are, a word of the warp
// in one line. The gradient kernels reduce over value channels. In shared memory the slices are their
// operands: by ldmatrix, which transposes them without bank conflicts, or by descriptors of wgmma, which
// takes the matrices as core matrices without swizzle. Value channels beyond V and tokens beyond the chunk's
// are zero.
//
// Where gradient kernels can read dV and dO from the tensors of the call (Saved::by_rows), the return saves Z
// alone.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/chunked/chunk.cuh"
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
    // Slices have no dV and dO: gradient_anchored, and gradient_token on Hopper, read rows of Gradients::d_v
    // and d_o. gradient_left adds them to the slices of chunks that it takes.
    bool by_rows = false;

    CULA_HOST_DEVICE std::int64_t index(std::int64_t slot, int value_head, int slice) const {
        return (slot * value_heads + value_head) * count + slice;
    }
};

// Where a gradient kernel has dV and dO from: from slices, or by rows from the tensors of the call, which
// tensor maps describe (sm_90).
struct FromSlices {};
struct FromRows {
    CUtensorMap d_o, d_v;  // d_v: of rules that solve
};

// Bytes of one matrix, and of a block: 16 columns.
inline constexpr int kSavedMatrix = 8 * 16, kSavedBlock = 4 * kSavedMatrix;

// Stores block `block` of a tensor of a slice, an A operand of the warp. Its first column is 16 block.
template <class T>
__device__ __forceinline__ void save_block(T* tensor, int block, const Packed& packed) {
    auto* const to = reinterpret_cast<std::uint32_t*>(tensor) + threadIdx.x % 32 + block * (kSavedBlock / 4);
#pragma unroll
    for (int matrix = 0; matrix < 4; ++matrix) to[matrix * (kSavedMatrix / 4)] = packed[matrix];
}

// Where a lane reads a block in shared memory, by load_matrices_transposed(). In bytes from the block's
// begin.
struct SavedLane {
    // Two B operands, of the block's first eight columns (words 0 and 1) and of the others; reduced over
    // value channels.
    static __device__ __forceinline__ int columns(int lane) { return lane * 16; }
    // An A operand, whose rows are the block's columns.
    static __device__ __forceinline__ int rows(int lane) {
        return lane / 8 % 2 * (2 * kSavedMatrix) + lane / 16 * kSavedMatrix + lane % 8 * 16;
    }
};

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
