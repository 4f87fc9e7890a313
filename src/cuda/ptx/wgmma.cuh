// SPDX-License-Identifier: Apache-2.0
// Tensor core products of a warpgroup (wgmma), sm_90a: d [64 x N] += a [64 x 16] b [16 x N], float
// accumulators.
//
// A warpgroup is four consecutive warps, the first a multiple of four. Warp w of it holds rows 16 w to 16 w +
// 15 of d and a, in the fragments of ptx/mma.cuh. b lies in shared memory in the layout of Tile
// (chunked/chunk.cuh): [N x 16 channels] with rows that are contiguous along k, or transposed, [16 x N]
// contiguous along N. a may lie in shared memory, too, in either way.
//
// Products are asynchronous:
// - fence() comes before the first product that reads or adds to registers that were written since the last
//   one;
// - commit() closes a batch;
// - wait<pending>() waits until all but the latest `pending` batches have completed;
// - hold() keeps the compiler from moving registers that belong to products in flight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace cula::cuda {

inline constexpr int kWarpgroupWarps = 4, kWarpgroupThreads = 32 * kWarpgroupWarps,
                     kWarpgroupRows = 16 * kWarpgroupWarps;  // of d and a

}  // namespace cula::cuda

namespace cula::cuda::wgmma {

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kTiles>
__device__ __forceinline__ void hold(float (&d)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[i][e])::"memory");
}

// The descriptor of an operand in shared memory, as two words. Advancing by x bytes adds x / 16 to the low
// word and leaves the high one.
struct Operand {
    std::uint32_t low, high;

    __device__ __forceinline__ Operand operator+(int units) const { return {low + units, high}; }
    __device__ __forceinline__ std::uint64_t whole() const {
        std::uint64_t both;
        asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low), "r"(high));
        return both;
    }
};

// The descriptor of an operand that lies in panels of kColumns columns; their rows of 2 kColumns bytes are
// the span of the swizzle. Strides: between groups of eight rows, and, for transposed operands, panel_bytes
// between panels. The address should be uniform().
template <int kColumns>
__device__ __forceinline__ Operand operand(std::uint32_t address, std::uint32_t panel_bytes = 16) {
    static_assert(kColumns == 64 || kColumns == 32 || kColumns == 16);
    constexpr std::uint32_t kSwizzle = kColumns == 64   ? 1
                                       : kColumns == 32 ? 2
                                                        : 3,
                            kEightRows = 8 * 2 * kColumns;
    return {(panel_bytes >> 4) << 16 | (address & 0x3ffffu) >> 4, kSwizzle << 30 | kEightRows >> 4};
}

// The descriptor of a transposed operand without swizzle: blocks of eight rows along k, each of 16 bytes
// along n, or of a along m. Strides in bytes, between blocks along k and along n.
__device__ __forceinline__ Operand operand_in_blocks(std::uint32_t address, std::uint32_t along_k,
                                                     std::uint32_t along_n) {
    return {(along_k >> 4) << 16 | (address & 0x3ffffu) >> 4, along_n >> 4};
}

// x, which is the same in all lanes, in a form that the compiler knows to be uniform. Products take
// descriptors from uniform registers. From a uniform address they are computed there; from any other they are
// computed in every lane and moved for each product.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

// d += a b, or with add = 0: d = a b. N = 8 kTiles; a comes from registers, b from shared memory.
template <class T, int kTiles, bool kTransposed>
__device__ __forceinline__ void multiply(float (*d)[4], const std::uint32_t (&a)[4], Operand b, int add);

// The same with both operands in shared memory.
template <class T, int kTiles, bool kTransposedA = false, bool kTransposedB = kTransposedA>
__device__ __forceinline__ void multiply_shared(float (&d)[kTiles][4], Operand a, Operand b, int add);

#define CULA_TILE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define CULA_TILES_2 CULA_TILE(0), CULA_TILE(1)
#define CULA_TILES_4 CULA_TILES_2, CULA_TILE(2), CULA_TILE(3)
#define CULA_TILES_8 CULA_TILES_4, CULA_TILE(4), CULA_TILE(5), CULA_TILE(6), CULA_TILE(7)
#define CULA_TILES_16                                                                                     \
    CULA_TILES_8, CULA_TILE(8), CULA_TILE(9), CULA_TILE(10), CULA_TILE(11), CULA_TILE(12), CULA_TILE(13), \
        CULA_TILE(14), CULA_TILE(15)
#define CULA_D_2 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CULA_REST_2 "}, {%8, %9, %10, %11}, %12, p, 1, 1, %14;"
#define CULA_ADD_2 "%13"
#define CULA_D_4 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define CULA_REST_4 "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22;"
#define CULA_ADD_4 "%21"
#define CULA_D_8                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CULA_REST_8 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;"
#define CULA_ADD_8 "%37"
#define CULA_D_16                                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CULA_REST_16 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;"
#define CULA_ADD_16 "%69"
#define CULA_WGMMA(T, type, tiles, columns, transposed)                                                      \
    template <>                                                                                              \
    __device__ __forceinline__ void multiply<T, tiles, transposed>(float(*d)[4], const std::uint32_t(&a)[4], \
                                                                   Operand b, int add) {                     \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " CULA_ADD_##tiles                                      \
                     ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type              \
                     " {" CULA_D_##tiles CULA_REST_##tiles " }"                                              \
                     : CULA_TILES_##tiles                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.whole()), "r"(add),                 \
                       "n"(transposed));                                                                     \
    }
#define CULA_WGMMA_SHARED(T, type, tiles, columns, turn_a, turn_b, a, b, add, turns)                         \
    template <>                                                                                              \
    __device__ __forceinline__ void multiply_shared<T, tiles, turn_a, turn_b>(                               \
        float(&d)[tiles][4], Operand left, Operand right, int adds) {                                        \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" #columns \
                     "k16.f32." type "." type " {" CULA_D_##tiles "}, " a ", " b ", p, 1, 1, " turns "; }"   \
                     : CULA_TILES_##tiles                                                                    \
                     : "l"(left.whole()), "l"(right.whole()), "r"(adds), "n"(turn_a), "n"(turn_b));          \
    }
// x as multiply_tf32() takes it.
__device__ __forceinline__ std::uint32_t rounded_tf32(float x) {
    std::uint32_t word;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
    return word;
}
// d += a b, N = 128, of TF32. a is [64 x 8]: the lane has rows l/4 and l/4 + 8 at k = l%4, then both at k
// + 4. b has rows of 8 numbers along k, in panels of 32 of them (operand<64>).
__device__ __forceinline__ void multiply_tf32(float (&d)[16][4], const std::uint32_t (&a)[4], Operand b) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 "
        "{" CULA_D_16 "}, {%64, %65, %66, %67}, %68, p, 1, 1; }"
        : CULA_TILES_16
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.whole()), "r"(1));
}

#define CULA_WGMMA_OF(T, type)                                                       \
    CULA_WGMMA(T, type, 8, 64, false)                                                \
    CULA_WGMMA(T, type, 8, 64, true)                                                 \
    CULA_WGMMA(T, type, 16, 128, true)                                               \
    CULA_WGMMA(T, type, 4, 32, false)                                                \
    CULA_WGMMA(T, type, 4, 32, true)                                                 \
    CULA_WGMMA(T, type, 2, 16, true)                                                 \
    CULA_WGMMA_SHARED(T, type, 16, 128, true, true, "%64", "%65", "%66", "%67, %68") \
    CULA_WGMMA_SHARED(T, type, 8, 64, false, false, "%32", "%33", "%34", "%35, %36") \
    CULA_WGMMA_SHARED(T, type, 4, 32, false, false, "%16", "%17", "%18", "%19, %20") \
    CULA_WGMMA_SHARED(T, type, 4, 32, false, true, "%16", "%17", "%18", "%19, %20")  \
    CULA_WGMMA_SHARED(T, type, 4, 32, true, true, "%16", "%17", "%18", "%19, %20")

CULA_WGMMA_OF(__nv_bfloat16, "bf16")
CULA_WGMMA_OF(__half, "f16")

#undef CULA_WGMMA_OF
#undef CULA_WGMMA_SHARED
#undef CULA_WGMMA
#undef CULA_ADD_8
#undef CULA_REST_8
#undef CULA_D_8
#undef CULA_ADD_4
#undef CULA_REST_4
#undef CULA_D_4
#undef CULA_ADD_2
#undef CULA_REST_2
#undef CULA_D_2
#undef CULA_TILES_8
#undef CULA_TILES_4
#undef CULA_TILES_2
#undef CULA_ADD_16
#undef CULA_REST_16
#undef CULA_D_16
#undef CULA_TILES_16
#undef CULA_TILE

}  // namespace cula::cuda::wgmma
