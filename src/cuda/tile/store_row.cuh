// SPDX-License-Identifier: Apache-2.0
// Where o is written. A kernel that has made a number of o hands it, still as a float, to one of the
// functions here, zeros of skipped rows included. An epilogue joins in them: what it needs to know of the
// number's place (token, head, value row) the callers have at hand. docs/design/architecture.md lists the
// callers.
//   store_row       stores a number of any dtype
//   store_row_if    the same, predicated
//   round_row       rounds two numbers that leave through registers of other lanes or a tile in shared memory
//   move_row        stores what round_row() has rounded; nothing joins here
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda {

__device__ __forceinline__ void store_row(void* o, Dtype dtype, std::int64_t at, float x) {
    store_float(o, dtype, at, x);
}
__device__ __forceinline__ void store_row(float* to, float x) { *to = x; }
__device__ __forceinline__ void store_row_if(void* to, Element type, float x, bool in) {
    store_float_if(to, type, x, in);
}

template <class T>
__device__ __forceinline__ std::uint32_t round_row(float first, float second) {
    return pack2<T>(first, second);
}
// A word is two numbers, or eight where rows lie in whole pieces of 16 bytes.
template <class Word, class T>
__device__ __forceinline__ void move_row(T* to, const Word& rounded) {
    static_assert(sizeof(T) == 2 && (sizeof(Word) == 4 || sizeof(Word) == 16));
    *reinterpret_cast<Word*>(to) = rounded;
}

}  // namespace cula::cuda
