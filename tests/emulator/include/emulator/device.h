// SPDX-License-Identifier: Apache-2.0
// What nvcc knows without an #include, for translated kernels: the qualifiers, the built-in variables and
// functions. Included before every source (-include).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#ifdef CULA_EMULATED_SM90A  // CMakeLists.txt
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#else
#define __CUDA_ARCH__ 800
#endif
#define CULA_EMULATED 1

// --- vectors ---

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct uint3 {
    unsigned x, y, z;
};
struct float3 {
    float x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr explicit(false) dim3(unsigned of_x = 1, unsigned of_y = 1, unsigned of_z = 1)
        : x(of_x), y(of_y), z(of_z) {}
};
constexpr uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
constexpr uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
constexpr int2 make_int2(int x, int y) { return {x, y}; }
constexpr int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
constexpr float2 make_float2(float x, float y) { return {x, y}; }
constexpr float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- threads ---

// Of the running thread.
extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace emulator {

[[noreturn]] void fail(const std::string& what);
[[noreturn]] void unknown_asm(const char* ptx);

// Waits until all lanes of `mask` are at the collective `name`. The last of them calls run() for all, with
// what each has passed as `own`; lanes out of the mask have a null pointer.
using Lanes = void* const (&)[32];
void gather(const char* name, unsigned mask, void* own, void (*run)(Lanes lanes));

// bar.sync of `threads` threads; 0: of all that have not exited. The results of the reductions are of what
// each thread has passed.
struct Reduced {
    int any, all, count;
};
Reduced barrier_sync(int barrier, int threads, bool is = false);
void barrier_arrive(int barrier, int threads);
// Lets other threads run: in loops that wait for a number in memory.
void pause();

// The shared memory of the CTA. Its dynamic part must be aligned; a static part is made where the first
// thread comes upon its declaration, of which `key` is the name.
void* dynamic_shared(std::size_t alignment);
void* static_shared(const void* key, std::size_t bytes, std::size_t alignment);
template <class T>
T& static_shared(const void* key) {
    return *static_cast<T*>(static_shared(key, sizeof(T), alignof(T)));
}
std::size_t shared_address(const void* p);
// A piece of shared memory, by its 32-bit address, which must be a multiple of `alignment`.
void* shared(std::uint32_t address, std::size_t bytes, std::size_t alignment);

template <class T>
std::uint64_t bits_of(T x) {
    std::uint64_t bits = 0;
    static_assert(sizeof(T) <= sizeof(bits));
    std::memcpy(&bits, &x, sizeof(T));
    return bits;
}
template <class T>
T of_bits(std::uint64_t bits) {
    T x;
    std::memcpy(&x, &bits, sizeof(T));
    return x;
}
// Which lane a lane reads: `from` beside the own number is out of the segment of `width` lanes, or not.
enum class Shuffle { kIndex, kUp, kDown, kXor };
std::uint64_t shuffle(Shuffle kind, unsigned mask, std::uint64_t bits, int operand, int width);
unsigned ballot(const char* name, unsigned mask, bool is);
std::uint64_t reduce(const char* name, unsigned mask, std::int64_t x,
                     std::int64_t (*add)(std::int64_t, std::int64_t));

}  // namespace emulator

inline void __syncthreads() { emulator::barrier_sync(0, 0); }
inline int __syncthreads_or(int is) { return emulator::barrier_sync(0, 0, is != 0).any; }
inline int __syncthreads_and(int is) { return emulator::barrier_sync(0, 0, is != 0).all; }
inline int __syncthreads_count(int is) { return emulator::barrier_sync(0, 0, is != 0).count; }
inline void __syncwarp(unsigned mask = ~0u) { emulator::ballot("__syncwarp", mask, false); }
inline unsigned __ballot_sync(unsigned mask, int is) {
    return emulator::ballot("__ballot_sync", mask, is != 0);
}
inline int __any_sync(unsigned mask, int is) { return emulator::ballot("__any_sync", mask, is != 0) != 0; }
inline int __all_sync(unsigned mask, int is) { return emulator::ballot("__all_sync", mask, is == 0) == 0; }
template <class T>
T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
    return emulator::of_bits<T>(
        emulator::shuffle(emulator::Shuffle::kIndex, mask, emulator::bits_of(x), lane, width));
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned step, int width = 32) {
    return emulator::of_bits<T>(
        emulator::shuffle(emulator::Shuffle::kUp, mask, emulator::bits_of(x), static_cast<int>(step), width));
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned step, int width = 32) {
    return emulator::of_bits<T>(emulator::shuffle(emulator::Shuffle::kDown, mask, emulator::bits_of(x),
                                                  static_cast<int>(step), width));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) {
    return emulator::of_bits<T>(
        emulator::shuffle(emulator::Shuffle::kXor, mask, emulator::bits_of(x), bits, width));
}
template <class T>
T __reduce_add_sync(unsigned mask, T x) {
    return static_cast<T>(
        emulator::reduce("__reduce_add_sync", mask, x, [](std::int64_t a, std::int64_t b) { return a + b; }));
}
template <class T>
T __reduce_min_sync(unsigned mask, T x) {
    return static_cast<T>(emulator::reduce("__reduce_min_sync", mask, x,
                                           [](std::int64_t a, std::int64_t b) { return a < b ? a : b; }));
}
template <class T>
T __reduce_max_sync(unsigned mask, T x) {
    return static_cast<T>(emulator::reduce("__reduce_max_sync", mask, x,
                                           [](std::int64_t a, std::int64_t b) { return a < b ? b : a; }));
}
template <class T>
T __reduce_or_sync(unsigned mask, T x) {
    return static_cast<T>(
        emulator::reduce("__reduce_or_sync", mask, x, [](std::int64_t a, std::int64_t b) { return a | b; }));
}

// --- memory ---

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulator::pause(); }
template <class T>
T __ldg(const T* p) {
    return *p;
}
template <class T>
T __ldcs(const T* p) {
    return *p;
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
template <class T>
void __stcs(T* p, const T& x) {
    *p = x;
}
template <class T>
void __stcg(T* p, const T& x) {
    *p = x;
}
inline std::size_t __cvta_generic_to_shared(const void* p) { return emulator::shared_address(p); }

// --- numbers ---

inline float __uint_as_float(unsigned x) { return emulator::of_bits<float>(x); }
inline float __int_as_float(int x) { return emulator::of_bits<float>(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(emulator::bits_of(x)); }
inline int __float_as_int(float x) { return static_cast<int>(emulator::bits_of(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __umulhi(unsigned x, unsigned y) {
    return static_cast<unsigned>(static_cast<std::uint64_t>(x) * y >> 32);
}
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class T>
constexpr T min(T x, T y) {
    return y < x ? y : x;
}
template <class T>
constexpr T max(T x, T y) {
    return x < y ? y : x;
}
