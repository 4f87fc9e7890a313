// SPDX-License-Identifier: Apache-2.0
// carry on Hopper: o, final states <- chunk images, v, initial states; or the affine maps of segments
//
// ALGORITHM.md: read, output, carry.  grid (row blocks * value heads * segments), clusters of row blocks   warpgroups
// of 64 value rows, and one that copies
//
// The equations, and what a warp holds, are those of sm80/carry.cuh. Products are a warpgroup's and run on their own,
// with every second operand in shared memory as prepare left it:
//   copies   the image by bulk copies, each CTA of the cluster a part of it for all; values, q and k as boxes
//   R, S Q~  issued together; V - R is formed while S Q~ runs
//   U        S is multiplied by the chunk's decay meanwhile
//   S, O     both from U; O is turned in shared memory, and a warp that copies takes it from there
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/overlap.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/copier.cuh"
#include "cuda/sm90/scorer.cuh"

namespace cula::cuda::sm90 {

using Packed = std::uint32_t[4];  // 16 x 16 of a warp, as an A operand

template <class T, int kKey, bool kDelta, bool kPerChannel, bool kMaps>
__global__ void __launch_bounds__(kMaxCarryThreads<kMakesScores<kDelta, kPerChannel>>, 1)
    carry(const __grid_constant__ DeviceArgs a, const Schedule schedule, const Image<T, kKey, kPerChannel>* images,
          const __grid_constant__ CarryParams p, const __grid_constant__ RowMaps maps) {
    using S = Stage<T, kKey, kDelta, kPerChannel>;
    constexpr bool kScores = kMakesScores<kDelta, kPerChannel>;
    using ImageType = typename S::ImageType;
    constexpr int kRows = S::kRows, kBlocks = kRows / 16, kStepUnits = 2;  // of 16 columns along k
    constexpr int kRowUnits = 16 * 128 / 16;                               // of 16 rows of a panel
    constexpr int kPanelUnits = kRows * 128 / 16;
    extern __shared__ unsigned char unaligned_memory[];
    unsigned char* memory = unaligned_memory + (-shared_address(unaligned_memory) & 1023u);

    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int groups = static_cast<int>(blockDim.x) / kGroupThreads - kHelperGroups<kScores>;
    const int role = warp / kGroupWarps - groups;  // negative: multiplies
    unsigned char* outs = memory + p.stages * S::bytes(groups);
    auto& barriers = *reinterpret_cast<CarryBarriers*>(outs + groups * kOutBytes<T, kKey>);
    const std::uint32_t full = shared_address(barriers.full), empty = shared_address(barriers.empty);
    const int cluster = cluster_size();
    for (int stage = 0; stage < p.stages; ++stage) S::clear_upper(memory + stage * S::bytes(groups));
    fence_async_proxy();
    // What needs nothing of the kernels before comes while they end.
    if (thread == 0) {
        if (maps.inputs && !kPerChannel) prefetch_map(maps.k);
        if (maps.inputs && !kPerChannel && !kMaps) prefetch_map(maps.q);
        if (maps.inputs) prefetch_map(maps.v);
        if (maps.outputs) prefetch_map(maps.o);
        for (int stage = 0; stage < p.stages; ++stage) {
            init_barrier(full + stage * 8, 1 + kFetchThreads);
            init_barrier(empty + stage * 8, cluster * groups * kGroupThreads);
            init_barrier(shared_address(barriers.made + stage), kGroupThreads);
        }
        for (int group = 0; group < groups; ++group) {
            init_barrier(shared_address(barriers.turned + group), kGroupThreads);
            init_barrier(shared_address(barriers.taken + group), kPutThreads);
        }
        publish_barriers();
    }
    follow_kernels();
    const Walk<kKey, kMaps> walk(a, schedule, p, role < 0 ? warp : 0, groups * kGroupWarps);
    if (role < 0) walk.zero_skipped(schedule);
    if (walk.nothing()) return;
    const int value_head = walk.value_head, chunks = walk.segment.chunks;
    __syncthreads();
    if (cluster > 1) sync_cluster();

    if (kScores && role == 0) {
        if constexpr (kScores) {
            lower_registers<kScoreRegisters>();
            Scorer<T, kKey, kMaps>{a, walk, memory, barriers, groups, p.stages}.run();
        }
    } else if (role >= 0) {
        lower_registers<kCopyRegisters<kScores>>();
        const int copier = warp % kGroupWarps;
        if (copier < kFetchThreads / 32) {
            const std::int64_t first = static_cast<std::int64_t>(walk.segment.image) * a.value_heads + value_head;
            const Fetcher<T, kKey, kDelta, kPerChannel, kMaps> fetcher{
                a, maps, walk, images + first, p.exact_writes + first, memory, barriers, groups, p.stages};
            fetcher.run();
        } else if (copier == kGroupWarps - 1 && maps.outputs) {
            if constexpr (!kMaps) Putter<T, kKey>{a, maps.o, walk, outs, barriers, groups}.run();
        }
    } else {
        raise_registers<kMultiplyRegisters<kScores>>();
        float state[kKey / 8][4];  // [channel tile of 8][fragment]
        walk.first_state(state);
        DecayMap<kMaps && !kDelta ? kKey : 0, kPerChannel> decay_map(walk);

        const int row_base = walk.rows.first, lane_channel = RowWindow::channel();
        const int group = warp / kGroupWarps;
        // Where the lane's row of a matrix stands in a tile of values, as ldmatrix reads it, and of outputs.
        using RowTile = Tile<kRows, kGroupRows>;
        const int own_row = RowTile::unit(lane % 8 + lane / 16 * 8, warp % kGroupWarps * 2 + lane / 8 % 2) * 16;
        const std::uint32_t out_rows = shared_address(outs) + group * kOutBytes<T, kKey> + own_row;
        const std::uint32_t turned = shared_address(barriers.turned + group),
                            taken = shared_address(barriers.taken + group);
        int stage = 0, parity = 0;
#pragma unroll 1
        for (int chunk = 0;; ++chunk) {
            walk.store_asked(state, chunk);
            if (chunk == chunks) break;
            unsigned char* at = memory + stage * S::bytes(groups);
            const std::uint32_t stage_at = shared_address(at);
            const ImageType& image = S::image(at);
            const std::uint32_t image_at = stage_at - S::kImageBegin;
            wait_barrier(full + stage * 8, parity);
            if (kScores) wait_barrier(shared_address(barriers.made + stage), parity);
            const bool exact = kDelta && barriers.exact[stage];
            if constexpr (!kPerChannel) fence_async_proxy();
            if constexpr (kMaps && !kDelta) decay_map.pass(image.decay);

            std::uint32_t q_read, k_read, k_carry;
            const float *q_factor = nullptr, *k_factor = nullptr;
            if constexpr (kPerChannel) {
                q_read = image_at + offsetof(ImageType, q_decayed), k_read = image_at + offsetof(ImageType, k_decayed);
                k_carry = image_at + offsetof(ImageType, k_remaining);
            } else {
                q_read = stage_at + S::kQuery, k_read = k_carry = stage_at + S::kKeyRows;
                q_factor = image.q_factor, k_factor = image.k_factor;
            }
            // A factor per token: two neighbouring tokens of tile `tile`.
            const auto per_token = [&](const float* factor, int tile) {
                return *reinterpret_cast<const float2*>(factor + tile * 8 + lane_channel);
            };
            const auto scale_tokens = [&](float(&product)[kRows / 8][4], const float* factor) {
                if constexpr (!kPerChannel) {
#pragma unroll
                    for (int x = 0; x < kRows / 8; ++x) {
                        const float2 f = per_token(factor, x);
                        product[x][0] *= f.x, product[x][1] *= f.y, product[x][2] *= f.x, product[x][3] *= f.y;
                    }
                }
            };
            // product = S^T tile^T; product = or += rows square^T.
            Packed packed[kKey / 16];
#pragma unroll
            for (int step = 0; step < kKey / 16; ++step)
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float* pair = &state[2 * step + x / 2][x % 2 * 2];
                    packed[step][x] = pack2<T>(pair[0], pair[1]);
                }
            const auto read_state = [&](float(&product)[kRows / 8][4], std::uint32_t tile) {
                const std::uint64_t b = wgmma::operand(tile);
#pragma unroll
                for (int step = 0; step < kKey / 16; ++step)
                    wgmma::multiply<T, kRows / 8, false>(product, packed[step],
                                                         b + step / 4 * kPanelUnits + step % 4 * kStepUnits, step > 0);
            };
            const auto multiply_square = [&](float(&product)[kRows / 8][4], const Packed(&rows)[kBlocks],
                                             std::uint32_t square, bool add) {
                const std::uint64_t b = wgmma::narrow_operand(square);
#pragma unroll
                for (int step = 0; step < kBlocks; ++step)
                    wgmma::multiply<T, kRows / 8, false>(product, rows[step], b + step * Panels<kRows>::kUnits,
                                                         step > 0 || add);
            };
            const auto multiply_carry = [&](const Packed(&rows)[kBlocks]) {
                const std::uint64_t b = wgmma::operand(k_carry, kRows * 128);
#pragma unroll
                for (int step = 0; step < kBlocks; ++step)
                    wgmma::multiply<T, kKey / 8, true>(state, rows[step], b + step * kRowUnits, 1);
            };

            float out[kRows / 8][4], read[kRows / 8][4];
            wgmma::fence();
            if constexpr (kDelta) {
                read_state(read, k_read);
                wgmma::commit();
            }
            if constexpr (!kMaps) {
                read_state(out, q_read);
                wgmma::commit();
            }

            if constexpr (kDelta) {
                wgmma::wait<kMaps ? 0 : 1>();
                wgmma::hold(read);
                scale_tokens(read, k_factor);
            }
            // V^T in the layout of accumulators, and less R^T: words 0, 1: rows 0-7 and 8-15 of tokens 0-7; 2, 3: of
            // tokens 8-15.
            Packed writes[kBlocks] = {};
            if (!walk.of_m) {
                const std::uint32_t values = stage_at + S::kValues + group * S::kBoxBytes + own_row;
#pragma unroll
                for (int block = 0; block < kBlocks; ++block)
                    load_matrices_transposed(writes[block], values + RowTile::unit(block * 16, 0) * 16);
            }
            if constexpr (kDelta) {
#pragma unroll
                for (int block = 0; block < kBlocks; ++block)
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
                        const float2 v = unpack2<T>(writes[block][x]);
                        const float* r = &read[2 * block + x / 2][x % 2 * 2];
                        writes[block][x] = pack2<T>(v.x - r[0], v.y - r[1]);
                    }
                wgmma::fence();
                multiply_square(read, writes, image_at + offsetof(ImageType, inverse), false);
                wgmma::commit();
            }
            // Additive: ptxas would wait here by itself, as S came out of products too.
            if constexpr (!kDelta) wgmma::wait<0>();
#pragma unroll
            for (int tile = 0; tile < kKey / 8; ++tile) {
                float2 d;
                if constexpr (kPerChannel)
                    d = *reinterpret_cast<const float2*>(image.decay + tile * 8 + lane_channel);
                else
                    d = {image.decay[0], image.decay[0]};
                state[tile][0] *= d.x, state[tile][1] *= d.y, state[tile][2] *= d.x, state[tile][3] *= d.y;
            }
            if constexpr (kDelta) wgmma::wait<0>();
            if constexpr (!kMaps) {
                wgmma::hold(out);
                scale_tokens(out, q_factor);
            }

            // U as it goes to the output and, with one decay per token, times the rest of the chunk's decay to the
            // state; and where it matters what rounding takes off both.
            Packed carried[kBlocks];
            if constexpr (kDelta) {
                wgmma::hold(read);
                if (exact) {
                    wgmma::fence();
                    multiply_square(read, writes, image_at + offsetof(ImageType, inverse_low), true);
                    wgmma::commit();
                    wgmma::wait<0>();
                    wgmma::hold(read);
                }
            }
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    float* pair = &read[2 * block + x / 2][x % 2 * 2];
                    if constexpr (kDelta) {
                        writes[block][x] = pack2<T>(pair[0], pair[1]);
                    } else if constexpr (!kPerChannel) {
                        const float2 v = unpack2<T>(writes[block][x]);
                        pair[0] = v.x, pair[1] = v.y;
                    }
                    carried[block][x] = writes[block][x];
                    if constexpr (!kPerChannel) {
                        const float2 factor = per_token(image.k_rest, 2 * block + x / 2);
                        carried[block][x] = pack2<T>(pair[0] * factor.x, pair[1] * factor.y);
                    }
                }
            wgmma::hold(state);
            if (exact) {
                Packed rests[kBlocks];
                // What packing takes off `factor` times U.
                const auto take_rests = [&](const Packed(&rounded)[kBlocks], const float* factor) {
#pragma unroll
                    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
                        for (int x = 0; x < 4; ++x) {
                            const float* pair = &read[2 * block + x / 2][x % 2 * 2];
                            float2 f{1.0f, 1.0f};
                            if (factor) f = per_token(factor, 2 * block + x / 2);
                            rests[block][x] = pack_rest<T>({pair[0] * f.x, pair[1] * f.y}, rounded[block][x]);
                        }
                };
                if constexpr (!kMaps) {
                    take_rests(writes, nullptr);
                    wgmma::fence();
                    multiply_square(out, rests, image_at + offsetof(ImageType, scores), true);
                    multiply_square(out, writes, image_at + offsetof(ImageType, scores_low), true);
                    wgmma::commit();
                    wgmma::wait<0>();
                    wgmma::hold(out);
                }
                if constexpr (kPerChannel)
                    take_rests(carried, nullptr);
                else
                    take_rests(carried, image.k_rest);
                wgmma::fence();
                multiply_carry(rests);
                wgmma::commit();
                wgmma::wait<0>();
                wgmma::hold(state);
            }
            wgmma::fence();
            multiply_carry(carried);
            if constexpr (!kMaps) multiply_square(out, writes, image_at + offsetof(ImageType, scores), true);
            wgmma::commit();
            wgmma::wait<0>();
            wgmma::hold(state);
            // Every thread for what it read itself: one for its warp would be enough for the machine, not for
            // racecheck.
            for (int other = 0; other < cluster; ++other) arrive_at(empty + stage * 8, other);

            if constexpr (!kMaps) {
                wgmma::hold(out);
                if (maps.outputs) {
                    wait_barrier(taken, chunk + 1 & 1);
#pragma unroll
                    for (int block = 0; block < kBlocks; ++block) {
                        std::uint32_t m[4];
#pragma unroll
                        for (int x = 0; x < 4; ++x) {
                            const float* pair = &out[2 * block + x / 2][x % 2 * 2];
                            m[x] = pack2<T>(pair[0], pair[1]);
                        }
                        store_matrices_transposed(out_rows + RowTile::unit(block * 16, 0) * 16, m);
                    }
                    fence_async_proxy();
                    arrive(turned);
                } else {
                    const int count = walk.count(chunk), row = walk.rows.row();
                    const std::int64_t to =
                        a.o.offset(walk.batch, walk.token(chunk), value_head) + lane_channel * a.o.token + row;
                    each_pair(out, [&](float2& pair, int more_rows, int token) {
                        if (row + more_rows >= a.value_dim) return;
                        const std::int64_t place = to + token * a.o.token + more_rows;
                        if (lane_channel + token < count) store_float(a.o.data, a.o.dtype, place, pair.x);
                        if (lane_channel + token + 1 < count)
                            store_float(a.o.data, a.o.dtype, place + a.o.token, pair.y);
                    });
                }
            }
            if (++stage == p.stages) stage = 0, parity ^= 1;
        }
        if constexpr (kMaps && !kDelta)
            if (blockIdx.x % p.row_blocks == 0 && warp == 0) decay_map.store(walk);
    }
    if (cluster > 1) sync_cluster();
}

}  // namespace cula::cuda::sm90
