// SPDX-License-Identifier: Apache-2.0
// The PTX instructions that translate.py replaces. Operands as in the asm statements: outputs first.
#pragma once

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <type_traits>

#include "core/float8.h"
#include "cuda.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emulator/device.h"

namespace emulator {

// d [16 x 8] += a [16 x kDepth] b [kDepth x 8] of a warp, of fragments as in src/cuda/ptx/mma.cuh.
enum class Element { kBf16, kF16, kTf32 };
void mma(Element element, int depth, float* const (&d)[4], const std::uint32_t* a, const std::uint32_t* b);

void load_matrices(int count, bool transposed, std::uint32_t* const* m, std::uint32_t row);
void store_matrices(int count, bool transposed, std::uint32_t row, const std::uint32_t* m);

// cp.async: until it is waited for, the target holds NaN.
void copy_async(std::uint32_t to, const void* from, int bytes, int given);
void commit_group();
void wait_group(int pending);
void wait_all();

// A product of a warpgroup (wgmma) as a lane issues it: d [64 x 8 tiles] (+)= a b, operands as in
// src/cuda/ptx/wgmma.cuh. a: fragments, or null where a lies in shared memory, as `left` describes. Until it
// is waited for, d holds NaN.
struct WarpgroupProduct {
    Element element;
    int tiles;
    float (*d)[4];
    const std::uint32_t* a;
    std::uint64_t left, right;
    bool transposed_left, transposed_right;
    int add;
};
void multiply_warpgroup(WarpgroupProduct own);

template <class T>
constexpr Element kElementOf = std::is_same_v<T, __half> ? Element::kF16 : Element::kBf16;

namespace ptx {

using Word = std::uint32_t;

inline void nothing() {}
template <class... Operands>
void nothing(const Operands&...) {}

#define CULA_EMULATED_MMA(name, element)                                                                    \
    inline void mma_m16n8k16_##name(float& d0, float& d1, float& d2, float& d3, Word a0, Word a1, Word a2,  \
                                    Word a3, Word b0, Word b1) {                                            \
        const Word a[] = {a0, a1, a2, a3}, b[] = {b0, b1};                                                  \
        mma(Element::element, 16, {&d0, &d1, &d2, &d3}, a, b);                                              \
    }                                                                                                       \
    inline void mma_m16n8k8_##name(float& d0, float& d1, float& d2, float& d3, Word a0, Word a1, Word b0) { \
        const Word a[] = {a0, a1}, b[] = {b0};                                                              \
        mma(Element::element, 8, {&d0, &d1, &d2, &d3}, a, b);                                               \
    }
CULA_EMULATED_MMA(bf16, kBf16)
CULA_EMULATED_MMA(f16, kF16)
#undef CULA_EMULATED_MMA
inline void mma_m16n8k8_tf32(float& d0, float& d1, float& d2, float& d3, Word a0, Word a1, Word a2, Word a3,
                             Word b0, Word b1) {
    const Word a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
    mma(Element::kTf32, 8, {&d0, &d1, &d2, &d3}, a, b);
}

template <int kCount, bool kTransposed>
void ldmatrix(Word& m0, Word& m1, Word& m2, Word& m3, Word row) {
    Word* const m[] = {&m0, &m1, &m2, &m3};
    load_matrices(kCount, kTransposed, m, row);
}
template <int kCount, bool kTransposed>
void ldmatrix(Word& m0, Word& m1, Word row) {
    Word* const m[] = {&m0, &m1};
    load_matrices(kCount, kTransposed, m, row);
}
template <int kCount, bool kTransposed>
void ldmatrix(Word& m0, Word row) {
    Word* const m[] = {&m0};
    load_matrices(kCount, kTransposed, m, row);
}
template <int kCount, bool kTransposed, class... Words>
void stmatrix(Word row, Words... words) {
    const Word m[] = {words...};
    static_assert(sizeof...(Words) == kCount);
    store_matrices(kCount, kTransposed, row, m);
}
void movmatrix(Word& to, Word from);

template <class T>
void load_shared(T& x, Word at) {
    std::memcpy(&x, shared(at, sizeof(T), sizeof(T)), sizeof(T));
}
template <class T>
void load_shared(T& x, T& y, Word at) {
    const T* const from = static_cast<const T*>(shared(at, 2 * sizeof(T), 2 * sizeof(T)));
    x = from[0], y = from[1];
}
template <class T>
void load_shared(T& x, T& y, T& z, T& w, Word at) {
    const T* const from = static_cast<const T*>(shared(at, 4 * sizeof(T), 4 * sizeof(T)));
    x = from[0], y = from[1], z = from[2], w = from[3];
}
template <class T, class... Rest>
void store_shared(Word at, T first, Rest... rest) {
    constexpr std::size_t kBytes = sizeof(T) * (1 + sizeof...(Rest));
    const T values[] = {first, rest...};
    std::memcpy(shared(at, kBytes, kBytes), values, kBytes);
}
template <class... Values>
void store_shared_if(Word is, Word at, Values... values) {
    if (is != 0) store_shared(at, values...);
}

template <class T>
void load_global_if(Word& x, const void* from, int in) {
    x = in != 0 ? *static_cast<const T*>(from) : Word{0};
}
inline void load_global_four_if(Word& x, Word& y, Word& z, Word& w, const void* from, int in) {
    if (in == 0) return;
    const uint4 four = *static_cast<const uint4*>(from);
    x = four.x, y = four.y, z = four.z, w = four.w;
}
template <class... Words>
void store_global_if(int is, void* to, Words... words) {
    const Word values[] = {words...};
    if (is != 0) std::memcpy(to, values, sizeof values);
}
inline void load_global(std::int32_t& x, const std::int32_t* from) { x = *from; }
inline void load_acquire(std::int32_t& x, const std::int32_t* from) {
    pause();
    x = __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
inline void store_release(std::int32_t* to, std::int32_t x) { __atomic_store_n(to, x, __ATOMIC_RELEASE); }

template <int kBytes>
void copy_async(Word to, const void* from) {
    emulator::copy_async(to, from, kBytes, kBytes);
}
template <int kBytes>
void copy_async(Word to, const void* from, int given) {
    emulator::copy_async(to, from, kBytes, given);
}
using emulator::commit_group, emulator::wait_all, emulator::wait_group;
inline void copy_async_of(Word to, const void* from, int bytes, int given) {
    emulator::copy_async(to, from, bytes, given);
}

inline void cvt_bf16x2(Word& to, float high, float low) {
    to = Word{__float2bfloat16_rn(high).bits} << 16 | __float2bfloat16_rn(low).bits;
}
inline void cvt_f16x2(Word& to, float high, float low) {
    to = Word{__float2half_rn(high).bits} << 16 | __float2half_rn(low).bits;
}
// To nearest, ties away from zero.
inline void cvt_rna_tf32(Word& to, float x) {
    to = x != x ? 0x7fffffffu : (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
}
// Into the finite numbers; a NaN stays one.
inline void clamp_f16x2(Word& x, Word, Word) {
    const auto clamp = [](Word half) { return (half & 0x7fffu) == 0x7c00u ? half - 1 : half; };
    x = clamp(x >> 16) << 16 | clamp(x & 0xffffu);
}

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline void ex2(float& y, float x) { y = flushed(std::exp2(flushed(x))); }
inline void lg2(float& y, float x) { y = std::log2(flushed(x)); }
inline void rcp(float& y, float x) { y = flushed(1.0f / flushed(x)); }
inline void rsqrt(float& y, float x) { y = 1.0f / std::sqrt(flushed(x)); }
inline void tanh(float& y, float x) { y = std::tanh(x); }
inline void min_nan(float& z, float x, float y) { z = x != x || y != y ? NAN : std::min(x, y); }
inline void max_nan(float& z, float x, float y) { z = x != x || y != y ? NAN : std::max(x, y); }
inline void mad_wide(std::int64_t& to, std::int32_t x, std::int32_t y, std::int64_t z) {
    to = std::int64_t{x} * y + z;
}
inline void join(std::uint64_t& to, Word low, Word high) { to = std::uint64_t{high} << 32 | low; }

// By the host's arithmetic, as the kernels before sm_89.
inline void cvt_e4m3x2(unsigned short& codes, float high, float low) {
    const auto code = [](float x) {
        return cula::Float8E4M3(x != x ? x : std::clamp(x, -448.0f, 448.0f)).bits;
    };
    codes = static_cast<unsigned short>(code(high) << 8 | code(low));
}
inline void cvt_f16x2_e4m3x2(Word& halves, unsigned short codes) {
    const auto half = [](int code) {
        cula::Float8E4M3 x;
        x.bits = static_cast<std::uint8_t>(code);
        return Word{__float2half_rn(x).bits};
    };
    halves = half(codes >> 8) << 16 | half(codes & 0xff);
}

template <class T>
void lane_id(T& to) {
    to = static_cast<T>(threadIdx.x % 32);
}
template <class T>
void thread_id(T& to) {
    to = static_cast<T>(threadIdx.x);
}
inline void barrier_sync(int barrier, int threads) { emulator::barrier_sync(barrier, threads); }
inline void barrier_arrive(int barrier, int threads) { emulator::barrier_arrive(barrier, threads); }
inline void barrier_any(Word& any, Word is, int barrier, int threads) {
    any = static_cast<Word>(emulator::barrier_sync(barrier, threads, is != 0).any);
}

// --- sm_90 (hopper.cc) ---

void mbarrier_init(Word at, int arrivals);
void mbarrier_arrive(Word at);
void mbarrier_arrive_at(Word at, int rank);
void mbarrier_arrive_expecting(Word at, int bytes);
void mbarrier_arrive_expecting_at(Word at, int bytes, int rank);
void mbarrier_expect(Word at, int bytes);
void mbarrier_expect_at(Word at, int bytes, int rank);
void mbarrier_test(Word& ended, Word at, int parity);
void mbarrier_wait(Word at, int parity);

// The target of a copy holds NaN until it comes. A store reads its source at once or when that is waited for,
// and reaches memory when its end is, or that of the thread.
void copy_bulk(Word to, const void* from, int bytes, Word barrier);
void copy_bulk_to_ranks(Word to, const void* from, int bytes, Word barrier, unsigned short ranks);
void copy_bulk_to(Word to, Word from, int bytes, Word barrier, int rank);
void send_to(Word to, float x, float y, Word barrier, int rank);
void load_tile(Word to, const CUtensorMap* map, std::initializer_list<int> from, Word barrier);
inline void load_tile_4d(Word to, const CUtensorMap* map, int a, int b, int c, int d, Word barrier) {
    load_tile(to, map, {a, b, c, d}, barrier);
}
inline void load_tile_5d(Word to, const CUtensorMap* map, int a, int b, int c, int d, int e, Word barrier) {
    load_tile(to, map, {a, b, c, d, e}, barrier);
}
void store_tile(const CUtensorMap* map, std::initializer_list<int> to, Word from);
inline void store_tile_4d(const CUtensorMap* map, int a, int b, int c, int d, Word from) {
    store_tile(map, {a, b, c, d}, from);
}
inline void store_tile_5d(const CUtensorMap* map, int a, int b, int c, int d, int e, Word from) {
    store_tile(map, {a, b, c, d, e}, from);
}
void store_bulk(void* to, Word from, int bytes);
void commit_stores();
void wait_stores_read(int pending = 0);
void commit_and_wait_stores_read();
void commit_and_wait_stores();

void cluster_rank(Word& rank);
void sync_cluster();

void fence_products();
void commit_products();
void wait_products(int pending);

}  // namespace ptx
}  // namespace emulator
