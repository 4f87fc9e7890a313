// SPDX-License-Identifier: Apache-2.0
// The warpgroup that makes what prepare_token would for an additive algorithm, chunk after chunk: the factors of every
// token and the scores, out of q and k as they came. A warp has 16 rows of the scores.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/stage.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/scan.cuh"

namespace cula::cuda::sm90 {

template <class T, int kKey, bool kMaps>
struct Scorer {
    using S = Stage<T, kKey, false, false>;
    using ImageType = typename S::ImageType;
    static constexpr int kRows = S::kRows, kEach = kRows / 32;

    const DeviceArgs& a;
    const Walk<kKey, kMaps>& walk;
    unsigned char* memory;
    CarryBarriers& barriers;
    int groups, stages;

    // Sums of squares of q and k, two threads a token.
    __device__ __forceinline__ void make_norms(const unsigned char* stage) const {
        const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, token = thread / 2;
#pragma unroll
        for (int which = kMaps ? 1 : 0; which < 2; ++which) {
            const unsigned char* tile = stage + (which == 0 ? S::kQuery : S::kKeyRows);
            float sum = 0.0f;
#pragma unroll 4
            for (int i = 0; i < kKey / 16; ++i) {
                const int unit = thread % 2 * (kKey / 16) + i;
                const uint4 x = *reinterpret_cast<const uint4*>(tile + Tile<kRows, kKey>::unit(token, unit) * 16);
                const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const float2 pair = unpack2<T>(words[w]);
                    sum += pair.x * pair.x + pair.y * pair.y;
                }
            }
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            if (thread % 2 == 0) barriers.norms[which][token] = rsqrtf(sum + 1e-6f);
        }
    }

    // log2 decays from the chunk's start: neighbouring tokens a lane, then a scan over the lanes. By one warp.
    __device__ __forceinline__ void make_decays(const HeadGate& gate, int chunk) const {
        const int lane = static_cast<int>(threadIdx.x) % 32, count = walk.count(chunk);
        float sum[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int t = lane * kEach + i;
            sum[i] = t < count ? fmaxf(token_log2_decay(a, gate, walk.batch, walk.token(chunk) + t, walk.value_head),
                                       kLeastLog2Decay)
                               : 0.0f;
        }
        running_sums(sum);
#pragma unroll
        for (int i = 0; i < kEach; ++i) barriers.log_decay[lane * kEach + i] = sum[i];
    }

    __device__ __forceinline__ void run() const {
        const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, lane = thread % 32, warp = thread / 32;
        const HeadGate gate(a, walk.value_head);
        const auto norm = [&](int which, int token) { return a.qk_l2norm ? barriers.norms[which][token] : 1.0f; };
        int stage = 0, parity = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < walk.segment.chunks; ++chunk) {
            unsigned char* at = memory + stage * S::bytes(groups);
            ImageType& image = S::image(at);
            sync_group();  // nobody reads the chunk before any more
            if (warp == 0) make_decays(gate, chunk);
            wait_barrier(shared_address(barriers.full + stage), parity);
            if (a.qk_l2norm) make_norms(at);
            float product[kRows / 8][4];
            if constexpr (!kMaps) {
                fence_async_proxy();
                const std::uint64_t rows = wgmma::operand(shared_address(at) + S::kQuery),
                                    columns = wgmma::operand(shared_address(at) + S::kKeyRows);
                wgmma::fence();
#pragma unroll
                for (int step = 0; step < kKey / 16; ++step) {
                    const int x = step / 4 * (kRows * 128 / 16) + step % 4 * 2;
                    wgmma::multiply_shared<T>(product, rows + x, columns + x, step > 0);
                }
                wgmma::commit();
            }
            sync_group();
            const float whole = barriers.log_decay[kRows - 1];
            if (thread < kRows) {
                const float log_decay = barriers.log_decay[thread];
                image.q_factor[thread] = a.scale * norm(0, thread) * exp2_fast(log_decay);
                image.k_rest[thread] =
                    thread < walk.count(chunk) ? norm(1, thread) * exp2_fast(whole - log_decay) : 0.0f;
                image.decay[thread] = exp2_fast(whole);
            }
            if constexpr (!kMaps) {
                wgmma::wait<0>();
                wgmma::hold(product);
                const int row = warp * 16 + lane / 4;
                const float decays[2] = {barriers.log_decay[row], barriers.log_decay[row + 8]};
                const float scales[2] = {a.scale * norm(0, row), a.scale * norm(0, row + 8)};
#pragma unroll
                for (int tile = 0; tile < kRows / 8; ++tile) {
                    const int column = tile * 8 + lane % 4 * 2;
                    const float2 past = *reinterpret_cast<const float2*>(barriers.log_decay + column);
                    const float scale[2] = {norm(1, column), norm(1, column + 1)};
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int i = row + 8 * half;
                        const auto score = [&](float x, int j, float before, float k_norm) {
                            return j <= i ? x * scales[half] * k_norm * exp2_fast(decays[half] - before) : 0.0f;
                        };
                        const std::uint32_t word =
                            pack2<T>(score(product[tile][2 * half], column, past.x, scale[0]),
                                     score(product[tile][2 * half + 1], column + 1, past.y, scale[1]));
                        reinterpret_cast<std::uint32_t*>(
                            image.scores)[Tile<kRows, kRows>::unit(i, tile) * 4 + lane % 4] = word;
                    }
                }
                fence_async_proxy();
            }
            arrive(shared_address(barriers.made + stage));
            if (++stage == stages) stage = 0, parity ^= 1;
        }
    }

    static __device__ __forceinline__ void sync_group() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
};

}  // namespace cula::cuda::sm90
