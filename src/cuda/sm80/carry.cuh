// SPDX-License-Identifier: Apache-2.0
// carry: o, final states <- chunk images, v, initial states; or the affine maps of segments      ALGORITHM.md: read,
// output, carry
//
// grid (row blocks * value heads * segments)   a warp owns 16 value rows of S^T [V, K]
//
// S^T stands in float accumulators from the first chunk to the last; rounded and packed they are the A operand of the
// next product without a shuffle, and so are V^T - R^T and U^T. Every B operand is a row-major tile in shared memory,
// so warps never exchange anything; they only share the copies:
//   R^T = S^T K^^T      U^T = (V^T - R^T) T^T      O^T = S^T Q~^T + U^T A^T      S^T = S^T diag(decay) + U^T K+
// With one decay per token the tiles are k and q themselves, and factors per token multiply R^T, S^T Q^T and U^T.
// Copies of chunk c + 1 run behind the products of chunk c where two stages fit.
//
// Maps (kMaps): rows from zero with the values give B, rows from the identity without values give M, and nothing is put
// out.
#pragma once

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/chunk.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::sm80 {

inline constexpr int kWarpRows = 16;  // value rows of a warp
inline constexpr int kMaxCarryWarps = 8;

struct NoTiles {};
template <class T, int kKey>
struct RawTiles {
    T q[kTokens<kKey> * kKey], k[kTokens<kKey> * kKey];
};

template <class T, int kKey, bool kPerChannel>
struct CarryStage {
    Image<T, kKey, kPerChannel> image;
    std::conditional_t<kPerChannel, NoTiles, RawTiles<T, kKey>> raw;
    alignas(16) T values[kMaxCarryWarps][kTokens<kKey> * kWarpRows];  // [warp][token][value row]
};

// States between segments: [map][HV][rows][K], float.
struct CarryParams {
    int stages = 1, row_blocks = 1, value_blocks = 1;
    const std::int32_t* exact_writes = nullptr;  // [chunks of the slab, HV]
    States starts;                               // state before segment i: slot i
    States slab_start;                           // of the sequence that the slab before left unfinished
    States slab_end;
    States map_m, map_b;  // kMaps: slot i
};

// Where a lane reads a swizzled tile for load_matrices: 16 rows by two units at a time. Only an exclusive or and an
// addition are left to the loop.
template <int kColumns, bool kTransposed>
struct LaneReads {
    static constexpr int kPitch = kColumns * 2;
    std::uint32_t row, swizzle;

    __device__ __forceinline__ LaneReads() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int token = kTransposed ? lane % 16 : lane % 8 + lane / 16 * 8,
                  unit = kTransposed ? lane / 16 : lane / 8 % 2;
        row = static_cast<std::uint32_t>(token * kPitch);
        swizzle = static_cast<std::uint32_t>((Tile<kColumns>::unit(token, unit) - token * (kColumns / 8)) * 16);
    }
    __device__ __forceinline__ std::uint32_t at(std::uint32_t tile, int block, int units) const {
        return tile + block * 16 * kPitch + row + (swizzle ^ (units * 32));
    }
    // Keeps the compiler from carrying the addresses of all units through the loop, in registers that S needs.
    __device__ __forceinline__ LaneReads again() const {
        LaneReads copy = *this;
        asm volatile("" : "+r"(copy.swizzle));
        return copy;
    }
};

using Packed = std::uint32_t[4];  // 16 x 16, as an A operand

// product [16 x kRows] += packed (columns 16 step .. of tile [kRows x kColumns])^T, rows from 16 * first on.
template <class T, int kRows, int kColumns>
__device__ __forceinline__ void multiply_step(float (&product)[kRows / 8][4], const Packed& packed, std::uint32_t tile,
                                              const LaneReads<kColumns, false>& reads, int step, int first) {
#pragma unroll
    for (int block = 0; block < kRows / 16; ++block) {
        if (block < first) continue;
        std::uint32_t m[4];
        load_matrices(m, reads.at(tile, block, step));
        mma_16x8x16<T>(product[2 * block], packed, m[0], m[1]);
        mma_16x8x16<T>(product[2 * block + 1], packed, m[2], m[3]);
    }
}

// state [16 x kKey] += packed [16 x 16 tokens] tile [16 x kKey], the tile's rows from 16 * block on.
template <class T, int kKey>
__device__ __forceinline__ void multiply_carry(float (&state)[kKey / 8][4], const Packed& packed, std::uint32_t tile,
                                               const LaneReads<kKey, true>& reads, int block) {
#pragma unroll
    for (int column = 0; column < kKey / 16; ++column) {
        std::uint32_t m[4];
        load_matrices_transposed(m, reads.at(tile, block, column));
        mma_16x8x16<T>(state[2 * column], packed, m[0], m[1]);
        mma_16x8x16<T>(state[2 * column + 1], packed, m[2], m[3]);
    }
}

// Two words of what packing `x` rounded away.
template <class T>
__device__ __forceinline__ std::uint32_t pack_rest(float2 x, std::uint32_t packed) {
    const float2 rounded = unpack2<T>(packed);
    return pack2<T>(x.x - rounded.x, x.y - rounded.y);
}

// The tokens of [first, first + kRows) x channels of a head as they are, zero beyond `count` tokens.
template <class T, int kRows, int kKey>
__device__ __forceinline__ void copy_tokens(T* tile, std::uint32_t tile_at, const TokenRows& rows, std::int64_t offset,
                                            int count, int key_dim, bool wide, int thread, int threads) {
    // A lane stays on its unit, and goes down the tokens by as many as the threads cover: the permutation repeats every
    // eight.
    constexpr int kUnits = kKey / 8;
    const int unit = thread % kUnits, step = threads / kUnits;
    const T* base = static_cast<const T*>(rows.data) + offset;
    if (wide) {
#pragma unroll 4
        for (int token = thread / kUnits; token < kRows; token += step) {
            const bool in = token < count && unit * 8 < key_dim;
            copy_async(tile_at + Tile<kKey>::unit(token, unit) * 16, base + (in ? token * rows.token + unit * 8 : 0),
                       in ? 16 : 0);
        }
    } else {
#pragma unroll 1
        for (int token = thread / kUnits; token < kRows; token += step)
#pragma unroll 1
            for (int e = 0; e < 8; ++e)
                tile[Tile<kKey>::unit(token, unit) * 8 + e] = token < count && unit * 8 + e < key_dim
                                                                  ? base[token * rows.token + unit * 8 + e]
                                                                  : from_float<T>(0.0f);
    }
}

template <class T, int kKey, bool kDelta, bool kPerChannel, bool kMaps>
__global__ void __launch_bounds__(kMaxCarryWarps * 32, 1)
    carry(const __grid_constant__ DeviceArgs a, const Schedule schedule, const Image<T, kKey, kPerChannel>* images,
          const __grid_constant__ CarryParams p) {
    constexpr int kRows = kTokens<kKey>, kBlocks = kRows / 16;
    using Stage = CarryStage<T, kKey, kPerChannel>;
    using ImageType = Image<T, kKey, kPerChannel>;
    using RawT = RawTiles<T, kKey>;
    extern __shared__ __align__(128) unsigned char raw_memory[];
    auto* stages = reinterpret_cast<Stage*>(raw_memory);

    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
    const int row_block = static_cast<int>(blockIdx.x) % p.row_blocks;
    const int value_head = static_cast<int>(blockIdx.x) / p.row_blocks % a.value_heads;
    const int number = static_cast<int>(blockIdx.x) / p.row_blocks / a.value_heads;
    const Segment segment = segment_of(a, schedule, number);
    const bool of_m = kMaps && row_block >= p.value_blocks;
    const int row_base =
        ((of_m ? row_block - p.value_blocks : row_block) * warps + warp) * kWarpRows;  // the warp's first row
    const int row_end = of_m ? a.key_dim : a.value_dim;

    const auto zero_outputs = [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t)
            if (lane < kWarpRows && row_base + lane < a.value_dim)
                store_float(a.o.data, a.o.dtype, a.o.offset(batch, t, value_head) + row_base + lane, 0.0f);
    };
    // Tokens after the last sequence belong to nobody.
    if (!kMaps && a.cu_seqlens && number == 0 && schedule.slab_begin == 0)
        zero_outputs(0, a.sequences > 0 ? clamped_offset(a, a.sequences) : 0, a.tokens);
    if (segment.sequence < 0) return;
    if (kMaps && segment.rank + 1 >= segment.count && !p.map_m.slots) return;

    const std::int64_t n = segment.sequence;
    TokenRange tokens = tokens_of(a, n);
    const std::int64_t done_before = static_cast<std::int64_t>(segment.chunk) * kRows, whole_length = tokens.length;
    const StateSlots slots = states_of(a, n);
    const bool starts_sequence = segment.chunk == 0;
    const bool ends_sequence = done_before + static_cast<std::int64_t>(segment.chunks) * kRows >= whole_length;
    tokens.begin += done_before;
    tokens.length = min(whole_length - done_before, static_cast<std::int64_t>(segment.chunks) * kRows);
    if (!kMaps && slots.skipped) return zero_outputs(tokens.batch, tokens.begin, tokens.begin + tokens.length);

    const std::uint32_t shared_base = shared_address(raw_memory);

    // --- copies ---
    const auto aligned = [](const TokenRows& rows, int width) {
        return (rows.batch | rows.token | rows.head | width) % 8 == 0 &&
               reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0;
    };
    const bool wide_values = aligned(a.v, a.value_dim);
    const bool wide_keys = kPerChannel || (aligned(a.q, a.key_dim) && aligned(a.k, a.key_dim));
    const ImageType* first_image = images + static_cast<std::int64_t>(segment.image) * a.value_heads + value_head;
    const std::int32_t* exact_writes =
        kDelta ? p.exact_writes + static_cast<std::int64_t>(segment.image) * a.value_heads + value_head : nullptr;
    // Loaded two chunks ahead and not looked at before: nothing waits for it.
    const auto exact_at = [&](int chunk) {
        return kDelta && chunk < segment.chunks ? __ldg(exact_writes + static_cast<std::int64_t>(chunk) * a.value_heads)
                                                : 0;
    };
    const auto copy_chunk = [&](int chunk, std::int32_t exact) {
        const bool odd = chunk % p.stages;
        Stage& stage = stages[odd];
        const std::uint32_t stage_at = shared_base + (odd ? static_cast<std::uint32_t>(sizeof(Stage)) : 0u);
        {
            constexpr int kPart = kDelta ? offsetof(ImageType, inverse_low) : offsetof(ImageType, inverse);
            const int bytes = kDelta && exact ? static_cast<int>(sizeof(ImageType)) : kPart;
            // Eight units of 512 bytes a warp at a time.
            constexpr int kRun = 8 * 512;
            const auto* from =
                reinterpret_cast<const unsigned char*>(first_image + static_cast<std::int64_t>(chunk) * a.value_heads) +
                lane * 16;
            const std::uint32_t to = stage_at + lane * 16;
            int x = warp * kRun;
#pragma unroll 1
            for (; x + kRun <= bytes; x += warps * kRun)
#pragma unroll
                for (int i = 0; i < 8; ++i) copy_async(to + x + i * 512, from + x + i * 512);
            if (x < bytes) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (x + i * 512 + lane * 16 < bytes) copy_async(to + x + i * 512, from + x + i * 512);
            }
        }
        const int left = static_cast<int>(
            min(tokens.length - static_cast<std::int64_t>(chunk) * kRows, static_cast<std::int64_t>(kRows)));
        const std::int64_t t0 = tokens.begin + static_cast<std::int64_t>(chunk) * kRows;
        if constexpr (!kPerChannel) {
            const int head = value_head / a.group;
            if constexpr (!kMaps)
                copy_tokens<T, kRows, kKey>(stage.raw.q, stage_at + offsetof(Stage, raw), a.q,
                                            a.q.offset(tokens.batch, t0, head), left, a.key_dim, wide_keys, thread,
                                            threads);
            copy_tokens<T, kRows, kKey>(stage.raw.k, stage_at + offsetof(Stage, raw) + offsetof(RawT, k), a.k,
                                        a.k.offset(tokens.batch, t0, head), left, a.key_dim, wide_keys, thread,
                                        threads);
        }
        if (of_m) return;
        constexpr int kUnits = kWarpRows / 8;
        T* values = stage.values[warp];
        const std::uint32_t values_at = stage_at + offsetof(Stage, values) + warp * sizeof(stage.values[0]);
        // Eight or sixteen tokens on, the permutation is the same.
        constexpr int kStep = 32 / kUnits;
        const int unit = lane % kUnits, row = row_base + unit * 8, place = Tile<kWarpRows>::unit(lane / kUnits, unit);
        const T* from = static_cast<const T*>(a.v.data) + a.v.offset(tokens.batch, t0, value_head) + row +
                        lane / kUnits * a.v.token;
        if (wide_values) {
            const bool in = row < a.value_dim;
#pragma unroll 1
            for (int i = 0; i < kRows; i += 2 * kStep, from += 2 * kStep * a.v.token) {
                const bool first = in && i + lane / kUnits < left, second = in && i + kStep + lane / kUnits < left;
                copy_async(values_at + place * 16 + i * kUnits * 16, first ? from : a.v.data, first ? 16 : 0);
                copy_async(values_at + place * 16 + (i + kStep) * kUnits * 16,
                           second ? from + kStep * a.v.token : a.v.data, second ? 16 : 0);
            }
            return;
        }
#pragma unroll 1
        for (int i = 0; i < kRows; i += kStep, from += kStep * a.v.token)
#pragma unroll 1
            for (int e = 0; e < 8; ++e)
                values[(place + i * kUnits) * 8 + e] =
                    i + lane / kUnits < left && row + e < a.value_dim ? from[e] : from_float<T>(0.0f);
    };

    // --- state ---
    float state[kKey / 8][4];  // [channel tile of 8][fragment]
    // Neighbouring pairs of float where the layout allows, else element by element: body(pair, row, channel).
    const auto each_pair = [&](auto body) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int tile = 0; tile < kKey / 8; ++tile) {
                float2 pair{state[tile][2 * half], state[tile][2 * half + 1]};
                body(pair, 8 * half, 8 * tile);
                state[tile][2 * half] = pair.x, state[tile][2 * half + 1] = pair.y;
            }
    };
    const int lane_row = row_base + lane / 4, lane_channel = lane % 4 * 2;
    const bool whole_rows = row_base + kWarpRows <= row_end && a.key_dim == kKey;
    const auto in_pairs = [&](const States& states, std::int64_t base) {
        return whole_rows && states.dtype == Dtype::kFloat32 && states.k == 1 && (states.v | base) % 2 == 0 &&
               reinterpret_cast<std::uintptr_t>(states.data) % 8 == 0;
    };
    const auto store_state = [&](const States& states, std::int64_t base) {
        base += lane_row * states.v + lane_channel * states.k;
        if (in_pairs(states, base)) {
            auto* to = static_cast<float*>(states.data) + base;
            each_pair([&](float2& pair, int row, int channel) {
                *reinterpret_cast<float2*>(to + row * states.v + channel) = pair;
            });
            return;
        }
        each_pair([&](float2& pair, int row, int channel) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (lane_row + row < row_end && lane_channel + channel + e < a.key_dim)
                    store_float(states.data, states.dtype, base + row * states.v + (channel + e) * states.k,
                                e ? pair.y : pair.x);
        });
    };
    const auto load_state = [&](const States& states, std::int64_t base) {
        base += lane_row * states.v + lane_channel * states.k;
        if (in_pairs(states, base)) {
            const auto* from = static_cast<const float*>(states.data) + base;
            each_pair([&](float2& pair, int row, int channel) {
                pair = *reinterpret_cast<const float2*>(from + row * states.v + channel);
            });
            return;
        }
        each_pair([&](float2& pair, int row, int channel) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const bool in = lane_row + row < row_end && lane_channel + channel + e < a.key_dim;
                (e ? pair.y : pair.x) =
                    in ? load_float(states.data, states.dtype, base + row * states.v + (channel + e) * states.k) : 0.0f;
            }
        });
    };

    std::int32_t exact = exact_at(0), exact_next = exact_at(1);
    if (segment.chunks > 0) copy_chunk(0, exact);
    commit_copies();
    {
        States from{};
        std::int64_t slot = 0;
        if constexpr (kMaps) {
            if (!starts_sequence && p.map_m.slots) from = of_m ? p.map_m : p.map_b, slot = n;
        } else {
            if (segment.rank > 0)
                from = p.starts, slot = number;
            else if (!starts_sequence)
                from = p.slab_start;
            else if (slots.initial >= 0)
                from = a.initial, slot = slots.initial;
        }
        if (from.data)
            load_state(from, from.offset(slot, value_head));
        else
            each_pair([&](float2& pair, int row, int channel) {
                const int diagonal = of_m ? lane_row + row - lane_channel - channel : -1;
                pair = {diagonal == 0 ? 1.0f : 0.0f, diagonal == 1 ? 1.0f : 0.0f};
            });
    }
    const ChunkStates dense = !kMaps && a.chunk_states.data ? chunk_states_of(a, n, value_head) : ChunkStates{};
    // Where the state before chunk `chunk` of the segment goes: the final state, dense chunk states, checkpoints.
    const auto store_asked = [&](int chunk) {
        const bool end = chunk == segment.chunks;
        const std::int64_t done =
            end ? done_before + tokens.length : done_before + static_cast<std::int64_t>(chunk) * kRows;
        const bool plan = end ? ends_sequence : true;
        const std::int64_t asked = plan ? a.num_checkpoints : 0;
        if (!end && asked == 0 && dense.room == 0) return;
#pragma unroll 1
        for (std::int64_t m = -2; m < asked; ++m) {
            States to{};
            std::int64_t base = 0;
            if (m == -2) {
                if (!end) continue;
                if (kMaps)
                    to = of_m ? p.map_m : p.map_b, base = to.offset(p.map_m.slots ? n : number, value_head);
                else if (!ends_sequence && segment.rank + 1 == segment.count)
                    to = p.slab_end, base = to.offset(0, value_head);
                else if (ends_sequence && slots.final >= 0)
                    to = a.final, base = to.offset(slots.final, value_head);
            } else if (m == -1) {
                const std::int64_t index = done / a.chunk_tokens;
                if (end || index >= dense.room || done % a.chunk_tokens != 0) continue;
                to = a.chunk_states, base = dense.offset + index * to.slot;
            } else {
                const std::int64_t slot = a.checkpoint_plan.at(m, 2);
                if (a.checkpoint_plan.at(m, 0) != n || a.checkpoint_plan.at(m, 1) != done || slot < 0 ||
                    slot >= a.checkpoints.slots)
                    continue;
                to = a.checkpoints, base = to.offset(slot, value_head);
            }
            if (to.data) store_state(to, base);
        }
    };

    const LaneReads<kKey, false> key_reads;
    const LaneReads<kRows, false> pair_reads;
    const LaneReads<kKey, true> carry_reads;
    const LaneReads<kWarpRows, false> value_reads;

    // The map of an additive segment is its decay.
    float whole_decay[kKey / 32];
#pragma unroll
    for (int i = 0; i < kKey / 32; ++i) {
        whole_decay[i] = 1.0f;
        if (kMaps && !kDelta && !starts_sequence && p.map_m.slots && lane + 32 * i < a.key_dim)
            whole_decay[i] =
                static_cast<const float*>(p.map_m.data)[p.map_m.offset(n, value_head) + (lane + 32 * i) * p.map_m.k];
    }

    const int lane_value = row_base + lane % 4 * 2;  // of an output
    const bool pairs_out = (a.o.batch | a.o.token | a.o.head | a.value_dim) % 2 == 0 &&
                           reinterpret_cast<std::uintptr_t>(a.o.data) % 4 == 0;
    for (int chunk = 0;; ++chunk) {
        if constexpr (kMaps) {
            if (chunk == segment.chunks) store_asked(chunk);
        } else {
            store_asked(chunk);
        }
        if (chunk == segment.chunks) break;
        const bool odd = chunk % p.stages;
        const ImageType& image = stages[odd].image;
        const std::uint32_t stage_at = shared_base + (odd ? static_cast<std::uint32_t>(sizeof(Stage)) : 0u);
        const std::int32_t exact_after = exact_at(chunk + 2);
        if (p.stages > 1) {
            if (chunk + 1 < segment.chunks) copy_chunk(chunk + 1, exact_next);
            commit_copies();
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();

        if constexpr (kMaps && !kDelta) {
#pragma unroll
            for (int i = 0; i < kKey / 32; ++i) whole_decay[i] *= image.decay[kPerChannel ? lane + 32 * i : 0];
        }
        std::uint32_t k_read = stage_at, q_read = stage_at, k_carry = stage_at;
        if constexpr (kPerChannel) {
            k_read += offsetof(ImageType, k_decayed), q_read += offsetof(ImageType, q_decayed);
            k_carry += offsetof(ImageType, k_remaining);
        } else {
            q_read += offsetof(Stage, raw), k_read += offsetof(Stage, raw) + offsetof(RawT, k);
            k_carry = k_read;
        }
        // A factor per token: two neighbouring tokens of tile `tile`.
        const auto per_token = [&](const float* factor, int tile) {
            return *reinterpret_cast<const float2*>(factor + tile * 8 + lane % 4 * 2);
        };
        // product = S^T tile^T. S^T is rounded and packed again each time: kept, it would take the registers of another
        // product.
        const auto read_state = [&](float(&product)[kRows / 8][4], std::uint32_t tile, const float* factor) {
            const auto reads = key_reads.again();
#pragma unroll
            for (int step = 0; step < kKey / 16; ++step) {
                Packed packed;
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float* pair = &state[2 * step + x / 2][x % 2 * 2];
                    packed[x] = pack2_again<T>(pair[0], pair[1]);
                }
                multiply_step<T, kRows, kKey>(product, packed, tile, reads, step, 0);
            }
            if constexpr (!kPerChannel) {
#pragma unroll
                for (int x = 0; x < kRows / 8; ++x) {
                    const float2 scale = per_token(factor, x);
                    product[x][0] *= scale.x, product[x][1] *= scale.y, product[x][2] *= scale.x,
                        product[x][3] *= scale.y;
                }
            }
        };

        // V^T in the layout of accumulators, and less R^T: words 0, 1: rows 0-7 and 8-15 of tokens 0-7; 2, 3: of tokens
        // 8-15.
        Packed writes[kBlocks];
        const float *q_factor = nullptr, *k_factor = nullptr;
        if constexpr (!kPerChannel) q_factor = image.q_factor, k_factor = image.k_factor;
        {
            float read[kRows / 8][4] = {};
            if constexpr (kDelta) read_state(read, k_read, k_factor);
            const std::uint32_t values_at = stage_at + offsetof(Stage, values) + warp * sizeof(stages->values[0]);
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                std::uint32_t m[4] = {};
                if (!of_m) load_matrices_transposed(m, value_reads.at(values_at, block, 0));
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    writes[block][x] = m[x];
                    if constexpr (kDelta) {
                        const float2 v = unpack2<T>(m[x]);
                        const float* r = &read[2 * block + x / 2][x % 2 * 2];
                        writes[block][x] = pack2<T>(v.x - r[0], v.y - r[1]);
                    }
                }
            }
        }
        // What rounding takes off U, where it matters, waits in the place of the values.
        auto* rests = reinterpret_cast<std::uint32_t*>(stages[odd].values[warp]) + lane;
        const auto load_rest = [&](Packed& rest, int block) {
#pragma unroll
            for (int x = 0; x < 4; ++x) rest[x] = rests[(block * 4 + x) * 32];
        };
        if constexpr (kDelta) {
            float u[kRows / 8][4] = {};
            const auto reads = pair_reads.again();
#pragma unroll
            for (int step = 0; step < kBlocks; ++step)
                multiply_step<T, kRows, kRows>(u, writes[step], stage_at + offsetof(ImageType, inverse), reads, step,
                                               step);
            if (exact) {
#pragma unroll
                for (int step = 0; step < kBlocks; ++step)
                    multiply_step<T, kRows, kRows>(u, writes[step], stage_at + offsetof(ImageType, inverse_low), reads,
                                                   step, step);
                __syncwarp();
            }
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float2 pair{u[2 * block + x / 2][x % 2 * 2], u[2 * block + x / 2][x % 2 * 2 + 1]};
                    writes[block][x] = pack2<T>(pair.x, pair.y);
                    if (exact) rests[(block * 4 + x) * 32] = pack_rest<T>(pair, writes[block][x]);
                }
        }
        if constexpr (!kMaps) {
            float out[kRows / 8][4] = {};
            read_state(out, q_read, q_factor);
            const auto reads = pair_reads.again();
#pragma unroll
            for (int step = 0; step < kBlocks; ++step)
                multiply_step<T, kRows, kRows>(out, writes[step], stage_at + offsetof(ImageType, scores), reads, step,
                                               step);
            if constexpr (kDelta) {
                if (exact) {
#pragma unroll
                    for (int step = 0; step < kBlocks; ++step) {
                        Packed rest;
                        load_rest(rest, step);
                        multiply_step<T, kRows, kRows>(out, rest, stage_at + offsetof(ImageType, scores), reads, step,
                                                       step);
                        multiply_step<T, kRows, kRows>(out, writes[step], stage_at + offsetof(ImageType, scores_low),
                                                       reads, step, step);
                    }
                }
            }
            const int left = static_cast<int>(
                min(tokens.length - static_cast<std::int64_t>(chunk) * kRows, static_cast<std::int64_t>(kRows)));
            const std::int64_t first_out =
                a.o.offset(tokens.batch, tokens.begin + static_cast<std::int64_t>(chunk) * kRows, value_head);
            if (a.o.dtype == Dtype::kFloat32) {
#pragma unroll
                for (int tile = 0; tile < kRows / 8; ++tile)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int token = tile * 8 + lane_channel + e % 2, row = lane_row + e / 2 * 8;
                        if (token < left && row < a.value_dim)
                            static_cast<float*>(a.o.data)[first_out + token * a.o.token + row] = out[tile][e];
                    }
            }
            T* to = static_cast<T*>(a.o.data) + lane_value + first_out + lane / 4 * a.o.token;
            const std::int64_t eight_tokens = 8 * a.o.token;
            // Turned 8 x 8 by 8 x 8, a lane holds two neighbouring rows of one token.
#pragma unroll
            for (int tile = 0; tile < kRows / 8; ++tile, to += eight_tokens)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const std::uint32_t word = transposed(pack2<T>(out[tile][half * 2], out[tile][half * 2 + 1]));
                    if (a.o.dtype == Dtype::kFloat32) continue;
                    if (tile * 8 + lane / 4 >= left || lane_value + half * 8 >= a.value_dim) continue;
                    if (pairs_out) {
                        *reinterpret_cast<std::uint32_t*>(to + half * 8) = word;
                    } else {
                        const float2 pair = unpack2<T>(word);
                        to[half * 8] = from_float<T>(pair.x);
                        if (lane_value + half * 8 + 1 < a.value_dim) to[half * 8 + 1] = from_float<T>(pair.y);
                    }
                }
        }
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile) {
            float2 d;
            if constexpr (kPerChannel)
                d = *reinterpret_cast<const float2*>(image.decay + tile * 8 + lane_channel);
            else
                d = {image.decay[0], image.decay[0]};
            state[tile][0] *= d.x, state[tile][1] *= d.y, state[tile][2] *= d.x, state[tile][3] *= d.y;
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            Packed rest = {};
            if (kDelta && exact) load_rest(rest, block);
            if constexpr (!kPerChannel) {
                // The factor from each token to the chunk's end goes to what is written.
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float2 factor = per_token(image.k_rest, 2 * block + x / 2);
                    float2 pair = unpack2<T>(writes[block][x]);
                    if constexpr (kDelta) {
                        const float2 more = unpack2<T>(rest[x]);
                        pair = {pair.x + more.x, pair.y + more.y};
                    }
                    pair = {pair.x * factor.x, pair.y * factor.y};
                    writes[block][x] = pack2<T>(pair.x, pair.y);
                    if constexpr (kDelta) rest[x] = pack_rest<T>(pair, writes[block][x]);
                }
            }
            const auto reads = carry_reads.again();
            multiply_carry<T, kKey>(state, writes[block], k_carry, reads, block);
            if (kDelta && exact) multiply_carry<T, kKey>(state, rest, k_carry, reads, block);
        }
        __syncthreads();
        if (p.stages == 1) {
            if (chunk + 1 < segment.chunks) copy_chunk(chunk + 1, exact_next);
            commit_copies();
        }
        exact = exact_next, exact_next = exact_after;
    }
    if constexpr (kMaps && !kDelta) {
        if (row_block > 0 || warp > 0) return;
        const std::int64_t base = p.map_m.offset(p.map_m.slots ? n : number, value_head);
#pragma unroll
        for (int i = 0; i < kKey / 32; ++i)
            if (lane + 32 * i < a.key_dim)
                static_cast<float*>(p.map_m.data)[base + (lane + 32 * i) * p.map_m.k] = whole_decay[i];
    }
}

}  // namespace cula::cuda::sm80
