// SPDX-License-Identifier: Apache-2.0
// What the emulator must compute and what it must find, in kernels of a few lines.
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/pipe/launch.h"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"

namespace cula::test {
namespace {

using cuda::copy_async, cuda::shared_address, cuda::wait_copies;

int failures = 0;

void expect(bool is, const char* what) {
    if (!is) std::printf("FAILED: %s\n", what), ++failures;
}
// The launch must fail with a message that contains `part`.
template <class Launch>
void expect_error(const char* part, Launch launch) {
    std::string message = "nothing";
    try {
        launch();
    } catch (const std::runtime_error& error) {
        message = error.what();
    }
    if (message.find(part) == std::string::npos)
        std::printf("FAILED: expected \"%s\", got \"%s\"\n", part, message.c_str()), ++failures;
}
template <auto kKernel, class... Args>
void run(int threads, std::size_t shared_bytes, const Args&... args) {
    cuda::launch<kKernel>({.blocks = 3, .threads = threads, .shared_bytes = shared_bytes}, nullptr, args...);
}

// --- what is right ---

__global__ void reverse(float* x) {
    __shared__ float turned[64], unused[2];
    const int i = static_cast<int>(threadIdx.x);
    float* const own = x + blockIdx.x * blockDim.x;
    unused[i % 2] = 0.0f;
    turned[63 - i] = own[i];
    __syncthreads();
    own[i] = turned[i] + __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}

// d = a b with a[i][k] = i + k / 8, b[k][j] = (k == j).
__global__ void multiply(float* d) {
    const int lane = static_cast<int>(threadIdx.x), row = lane / 4, column = lane % 4 * 2;
    std::uint32_t a[4], b[2];
    for (int part = 0; part < 2; ++part) {
        const float k = static_cast<float>(8 * part + column);
        for (int half = 0; half < 2; ++half) {
            const float i = static_cast<float>(row + 8 * half);
            a[2 * part + half] = cuda::pack2<__nv_bfloat16>(i + k / 8, i + (k + 1) / 8);
        }
        b[part] = cuda::pack2<__nv_bfloat16>(8 * part + column == row, 8 * part + column + 1 == row);
    }
    float sum[4] = {};
    cuda::mma_16x8x16<__nv_bfloat16>(sum, a, b[0], b[1]);
    for (int e = 0; e < 4; ++e) d[(row + e / 2 * 8) * 8 + column + e % 2] = sum[e];
}

// A matrix of shared memory, transposed in two ways.
__global__ void transpose(int* differs) {
    __shared__ __align__(16) unsigned short tile[32 * 8];
    const int lane = static_cast<int>(threadIdx.x);
    for (int j = 0; j < 8; ++j) tile[lane * 8 + j] = static_cast<unsigned short>(lane * 8 + j);
    __syncwarp();
    std::uint32_t plain[4], turned[4];
    cuda::load_matrices(plain, shared_address(tile + lane * 8));
    cuda::load_matrices_transposed(turned, shared_address(tile + lane * 8));
    for (int m = 0; m < 4; ++m)
        if (cuda::transposed(plain[m]) != turned[m] ||
            (turned[m] & 0xffffu) != static_cast<unsigned>(m * 64 + lane % 4 * 16 + lane / 4))
            *differs = 1;
}

// --- what is wrong ---

__global__ void skip_barrier(float* x) {
    __shared__ float s;
    if (threadIdx.x == 0) {
        __syncthreads();
        s = x[0];
    } else {
        __syncwarp();
    }
    __syncthreads();
    x[0] = s;
}

__global__ void diverge() {
    if (threadIdx.x % 2 == 0)
        __syncwarp();
    else
        __ballot_sync(0xffffffffu, 1);
}

// The other warp's number, without a barrier before it is read.
__global__ void race(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = 1.0f;
    for (int i = 0; i < 20; ++i) __syncwarp();
    if (s[threadIdx.x ^ 32u] != 1.0f) *x = 1.0f;
}

template <bool kWaits>
__global__ void copy(const float* from, float* to) {
    __shared__ __align__(16) float s[4 * 32];
    const unsigned i = threadIdx.x * 4;
    copy_async(shared_address(s + i), from + i, i < 16 ? 16 : 8);
    cuda::commit_copies();
    if (kWaits) wait_copies<0>();
    for (unsigned e = 0; e < 4; ++e) to[i + e] = s[i + e];
}

__global__ void beyond_shared() {
    extern __shared__ __align__(128) unsigned char raw[];
    std::uint32_t m[4];
    cuda::load_matrices(m, shared_address(raw) + threadIdx.x * 16);
}

__global__ void write_beyond_shared() {
    extern __shared__ __align__(128) unsigned char raw[];
    raw[100 + threadIdx.x] = 0;
}

__global__ void misaligned() {
    extern __shared__ __align__(128) unsigned char raw[];
    std::uint32_t words[4];
    cuda::load_words(words, shared_address(raw) + 8);
}

__global__ void uninitialised(float* x) {
    extern __shared__ __align__(128) float unset[];
    x[threadIdx.x] = unset[threadIdx.x];
}

void run_all() {
    std::vector<float> x(3 * 64), y(128);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
    run<reverse>(64, 0, x.data());
    expect(x[0] == 64 && x[63] == 1 && x[64] == 128 && x[191] == 129, "shared memory, barriers, shuffles");
    run<multiply>(32, 0, y.data());
    bool right = true;
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 8; ++j)
            right = right && y[static_cast<std::size_t>(8 * i + j)] ==
                                 static_cast<float>(i) + static_cast<float>(j) / 8;
    expect(right, "mma");
    int differs = 0;
    run<transpose>(32, 0, &differs);
    expect(differs == 0, "ldmatrix and movmatrix");
    run<copy<true>>(32, 0, static_cast<const float*>(x.data()), y.data());
    expect(y[3] == x[3] && y[17] == x[17] && y[18] == 0, "cp.async");

    expect_error("deadlock; threads 1-31 wait at __syncwarp", [&] { run<skip_barrier>(64, 0, x.data()); });
    expect_error("wait at __ballot_sync", [] { run<diverge>(32, 0); });
    x[0] = 0;
    run<race>(64, 0, x.data());
    expect(x[0] == 1, "a race between warps is not seen");
    run<copy<false>>(32, 0, static_cast<const float*>(x.data()), y.data());
    expect(y[3] != y[3], "a copy that is not waited for is not seen");
    expect_error("beyond what the CTA has", [] { run<beyond_shared>(32, 500); });
    expect_error("beside its dynamic part", [] { run<write_beyond_shared>(32, 128); });
    expect_error("not a multiple of 16", [] { run<misaligned>(32, 128); });
    run<uninitialised>(32, 128, y.data());
    expect(y[0] != y[0], "shared memory that is not written is not seen");
    expect_error("it may have", [] { run<uninitialised>(32, 300'000, static_cast<float*>(nullptr)); });
}

}  // namespace
}  // namespace cula::test

int main() {
    for (const std::uint64_t order : {0, 1, 2}) {
        emulator::settings.order = order;
        cula::test::run_all();
    }
    std::printf("selftest: %d failed\n", cula::test::failures);
    return cula::test::failures == 0 ? 0 : 1;
}
