// SPDX-License-Identifier: Apache-2.0
// What the emulator must compute and what it must find, in kernels of a few lines.
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/pipe/barriers.cuh"
#include "cuda/pipe/launch.h"
#include "cuda/pipe/tensor_maps.h"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

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

// --- what sm_90 adds ---

constexpr int left(int i, int k) { return (3 * i + 5 * k) % 7 - 3; }
constexpr int right(int k, int n) { return (k + 2 * n) % 5 - 2; }

// d [64 x 32] = left [64 x 64] right [64 x 32], 2 + 2 of them: left from shared memory and from registers,
// right by rows of n in the 128-byte swizzle, and transposed in blocks of 8 x 8 without.
enum class Fault { kNone, kNoWait, kNoFence, kDifferent };
template <Fault kFault>
__global__ void multiply_by_warpgroup(float* d) {
    extern __shared__ __align__(1024) unsigned char raw[];
    auto* const a = reinterpret_cast<__nv_bfloat16*>(raw);
    __nv_bfloat16 *const b = a + 64 * 64, *const blocks = b + 32 * 64;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, first = thread / 32 * 16;
    const auto swizzled = [](int row, int k) { return row * 64 + (k / 8 ^ row % 8) * 8 + k % 8; };
    for (int i = thread; i < 64 * 64; i += 128) {
        const int row = i / 64, k = i % 64;
        a[swizzled(row, k)] = __float2bfloat16_rn(static_cast<float>(left(row, k)));
        if (row >= 32) continue;
        const auto x = __float2bfloat16_rn(static_cast<float>(right(k, row)));
        b[swizzled(row, k)] = x;
        blocks[(k / 8 * 4 + row / 8) * 64 + k % 8 * 8 + row % 8] = x;
    }
    cuda::fence_async_proxy();
    __syncthreads();
    const auto of_a = cuda::wgmma::operand<64>(shared_address(a)),
               of_b = cuda::wgmma::operand<64>(shared_address(b));
    float sum[4][4] = {}, others[4][4] = {};
    if (kFault != Fault::kNoFence) cuda::wgmma::fence();
    for (int step = 0; step < 4; ++step)
        cuda::wgmma::multiply_shared<__nv_bfloat16>(sum, of_a + 2 * step, of_b + 2 * step, step > 0);
    cuda::wgmma::commit();
    for (int step = 0; step < 4; ++step) {
        std::uint32_t words[4];
        for (int i = 0; i < 4; ++i) {
            const int row = first + lane / 4 + i % 2 * 8, k = 16 * step + lane % 4 * 2 + i / 2 * 8;
            words[i] = cuda::pack2<__nv_bfloat16>(static_cast<float>(left(row, k)),
                                                  static_cast<float>(left(row, k + 1)));
        }
        const auto of_blocks = cuda::wgmma::operand_in_blocks(shared_address(blocks + step * 512), 512, 128);
        cuda::wgmma::multiply<__nv_bfloat16, 4, true>(others, words, of_blocks, true);
        cuda::wgmma::multiply_shared<__nv_bfloat16, 4, false, true>(others, of_a + 2 * step, of_blocks, true);
        const int apart = kFault == Fault::kDifferent && first == 16 ? 1 : 0;
        cuda::wgmma::multiply<__nv_bfloat16, 4, false>(others, words, of_b + (2 * step ^ 2 * apart), true);
    }
    cuda::wgmma::commit();
    cuda::wgmma::wait<kFault == Fault::kNoWait ? 1 : 0>();
    for (int tile = 0; tile < 4; ++tile)
        for (int e = 0; e < 4; ++e)
            d[(first + lane / 4 + e / 2 * 8) * 32 + 8 * tile + lane % 4 * 2 + e % 2] =
                sum[tile][e] + others[tile][e];
    cuda::wgmma::wait<0>();
}

// Copies 64 numbers through shared memory of the other CTA of a cluster.
template <bool kWaits, bool kExpects>
__global__ void copy_through_peer(const float* from, float* to) {
    __shared__ __align__(16) float own[64], of_peer[64];
    __shared__ cuda::Mbarrier loaded, sent;
    const int thread = static_cast<int>(threadIdx.x), peer = cuda::cluster_rank() ^ 1;
    if (thread == 0) loaded.init(1), sent.init(1), cuda::publish_barriers();
    cuda::sync_cluster();
    if (thread == 0) {
        if (kExpects) sent.expect(192);
        sent.arrive_expecting(64);
        loaded.arrive_expecting(256);
        cuda::copy_bulk(shared_address(own), from + 64 * blockIdx.x, 256, loaded.address());
        if (kWaits) loaded.wait(0);
        cuda::copy_bulk_to(shared_address(of_peer), shared_address(own), 240, sent.address(), peer);
        cuda::send_to(shared_address(of_peer + 60), {own[60], own[61]}, sent.address(), peer);
        cuda::send_to(shared_address(of_peer + 62), {own[62], own[63]}, sent.address(), peer);
    }
    sent.wait(0);
    to[64 * (blockIdx.x ^ 1u) + threadIdx.x] = of_peer[threadIdx.x];
    cuda::sync_cluster();
}

// Leaves while a copy to its shared memory is in flight; or one phase has an arrival too many.
__global__ void leave_copy(const float* from) {
    __shared__ __align__(16) float own[4];
    __shared__ cuda::Mbarrier loaded;
    if (threadIdx.x > 0) return;
    loaded.init(1);
    loaded.arrive_expecting(16);
    cuda::copy_bulk(shared_address(own), from, 16, loaded.address());
}
__global__ void arrive_twice() {
    __shared__ cuda::Mbarrier barrier;
    if (threadIdx.x > 0) return;
    barrier.init(1);
    barrier.arrive_expecting(16);
    barrier.arrive();
}

// Tiles of two tokens x 64 channels: to shared memory, and on to other tokens, from `kToken` on.
template <bool kWaits, int kToken = 0>
__global__ void copy_tiles(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to) {
    extern __shared__ __align__(1024) unsigned char raw[];
    auto& loaded = *reinterpret_cast<cuda::Mbarrier*>(raw + 1024);
    if (threadIdx.x != 0) return;
    loaded.init(1);
    cuda::publish_barriers();
    loaded.arrive_expecting(256);
    cuda::tma_load(shared_address(raw), from, cuda::TileCoordinates{0, 1, 2, 0}, loaded.address());
    loaded.wait(0);
    cuda::tma_store(to, cuda::TileCoordinates{0, 1, kToken, 0}, shared_address(raw));
    if (kWaits) cuda::tma_wait_stores_read();
}

void run_hopper() {
    std::vector<float> d(64 * 32), x(256), y(256);
    const auto products = [&](auto run_kernel) {
        run_kernel();
        for (int i = 0; i < 64; ++i)
            for (int n = 0; n < 32; ++n) {
                int sum = 0;
                for (int k = 0; k < 64; ++k) sum += left(i, k) * right(k, n);
                if (d[static_cast<std::size_t>(i * 32 + n)] != static_cast<float>(4 * sum)) return false;
            }
        return true;
    };
    constexpr std::size_t kBytes = (64 + 32 + 32) * 128;
    expect(products([&] { run<multiply_by_warpgroup<Fault::kNone>>(128, kBytes, d.data()); }), "wgmma");
    run<multiply_by_warpgroup<Fault::kNoWait>>(128, kBytes, d.data());
    expect(d[0] != d[0], "a product that is not waited for is not seen");
    expect_error("without wgmma.fence",
                 [&] { run<multiply_by_warpgroup<Fault::kNoFence>>(128, kBytes, d.data()); });
    expect_error("whose warps issue different products",
                 [&] { run<multiply_by_warpgroup<Fault::kDifferent>>(128, kBytes, d.data()); });

    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
    const auto through_peer = [&]<auto kKernel>() {
        cuda::launch<kKernel>({.blocks = 4, .threads = 64, .cluster = 2}, nullptr,
                              static_cast<const float*>(x.data()), y.data());
    };
    through_peer.operator()<copy_through_peer<true, true>>();
    expect(x == y, "bulk copies, mbarriers and clusters");
    through_peer.operator()<copy_through_peer<false, true>>();
    expect(y[60] != y[60], "a bulk copy that is not waited for is not seen");
    expect_error("wait at an mbarrier", [&] { through_peer.operator()<copy_through_peer<true, false>>(); });

    // [batch 1, tokens 3, heads 2, channels 64]: the second of the two tokens lies beyond the tensor.
    std::vector<unsigned short> from(3 * 2 * 64 + 8), to(3 * 2 * 64 + 8, 7);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned short>(i);
    const auto map_of = [](std::vector<unsigned short>& numbers) {
        cuda::TokenRows rows{};
        rows.data = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(numbers.data()) + 15) &
                                            ~std::uintptr_t{15});
        rows.batch = 384, rows.token = 128, rows.head = 64, rows.dtype = Dtype::kBFloat16;
        CUtensorMap map{};
        expect(
            cuda::encode_map(map, rows, Dtype::kBFloat16, 1, 3, 2, 64, {64, 2, CU_TENSOR_MAP_SWIZZLE_128B}),
            "a tensor map");
        return std::pair(map, static_cast<unsigned short*>(rows.data));
    };
    const auto [source, first] = map_of(from);
    const auto [target, written] = map_of(to);
    run<copy_tiles<true>>(32, 1032, source, target);
    bool right = true;
    for (int i = 0; i < 3 * 2 * 64; ++i) {
        const int token = i / 128, head = i / 64 % 2;
        right = right && written[i] == (head == 0 || token == 2 ? 7 : token == 1 ? 0 : first[2 * 128 + i]);
    }
    expect(right, "tiles of a tensor map");
    expect_error("begins before its tensor", [&] { run<copy_tiles<true, -1>>(32, 1032, source, target); });
    expect_error("more often than its phase counts", [] { run<arrive_twice>(32, 0); });
    if (emulator::settings.order == 0)  // otherwise it may have come
        expect_error("a copy to or from its shared memory is in flight",
                     [&] { run<leave_copy>(32, 0, static_cast<const float*>(x.data())); });
    expect_error("ends before its bulk stores", [&] { run<copy_tiles<false>>(32, 1032, source, target); });
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
        cula::test::run_hopper();
    }
    std::printf("selftest: %d failed\n", cula::test::failures);
    return cula::test::failures == 0 ? 0 : 1;
}
