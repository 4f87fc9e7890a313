// SPDX-License-Identifier: Apache-2.0
// verify: o, states <- q, k, v, gate, beta, state; up to kVerifyTokens tokens per sequence, all at once.
//
// Equation, per sequence and value head, with S [V, K] before the first token, decays a_t per channel, and
// A_t = a_1 ... a_t (ALGORITHM.md, "The family"):
//     r_t = S (A_t k_t) + sum over s < t of u_s L_ts      L_ts = sum over channels of k_s a_s+1 ... a_t k_t
//     u_t = beta_t (v_t - r_t)                            delta rules; additive rules: u_t = v_t; with
//                                                         erase strengths: beta_t v_t - r_t, and in r_t and
//                                                         L_ts the erase key e_t = erase_t o k_t for k_t
//     o_t = scale (S (A_t q_t) + sum over s <= t of u_s M_ts)            M_ts: as L_ts, with q_t for k_t
//     S_t = S_t-1 diag(a_t) + u_t k_t^T                   where somebody asked for S_t
// The state is contracted with the columns A_t k_t and A_t q_t of all tokens in one pass, by tensor cores.
//
// Grid: row blocks * value heads * sequences, 128 threads.
// A CTA owns a tile of kVerifyRows rows of one head's state, or two, a warp 16 of each. In this order:
// 1. All threads: indices, loads of the inputs (DecodeInputs::fetch), cp.async of the state's rows.
// 2. All threads: thread c computes channel c of the columns, decays and keys, and its part of the sums over
//    channels, which a warp adds up. The copies are waited for, and one __syncthreads() follows.
// 3. A warp contracts its rows with the columns. Lane l then has r_t and S (A_t q_t) of token t = l % 4, of
//    rows l / 4 and l / 4 + 8 of each tile. u_1 to u_4 go around the four lanes one after the other; outputs
//    leave.
// 4. Where states are asked for, a lane takes four neighbouring channels of each of its warp's rows, advances
//    them token by token in registers, and stores what is asked for.
// The state is read from memory once, and stays as it was read: arithmetic from token to token is float32.
//
// PDL: waits at once. Where forks are settled before, CTAs start beside that kernel.
//
// Words: tensor cores take TF32 or 16-bit numbers. A column is the sum of two of them, and so is a float32
// state; bfloat16 and float16 states are one as they are. Of a product less than 2^-19 is left out: the
// product of the second words, and the last two bits of a second word, which has 13 (bfloat16 states: 2^-16).
//
// Banks: rows of the state and columns consist of chunks of four channels, of which neighbouring rows have
// theirs at different banks (chunk_at).
//
// Budgets                                  K = 64          K = 128         K = 256
//     CTAs that registers must allow      5, 6, 5         5, 6, 5         2, 2      float32, one tile of 16
//     bits, registers per thread              96, 80, 96      96, 80, 96        255       two tiles shared
//     memory, KiB                   24              46              90       float32
//                                       16, 14          30, 26          58, 50      one tile: float16,
//                                       bfloat16 25, 23          47, 43                      two tiles
// Calls that keep no states have 3 to 9 KiB less (VerifyShared::Kept).
// Design page: docs/design/verify.md.
#pragma once

#include <cstddef>

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/recurrent/decode_inputs.cuh"
#include "cuda/tile/store_row.cuh"

namespace cula::cuda::recurrent {

// Tokens per sequence, and rows of a tile: 16 of each warp. A CTA has one tile or two.
inline constexpr int kVerifyTokens = 4, kVerifyRows = 16 * kStepWarps;

static_assert(kVerifyRows == kAccumulatorRows);

template <int kKey, Keys kKeys, int kRows>
using VerifyInputs = DecodeInputs<kKey, kRows, kVerifyTokens, kKeys, Values::kAccumulators>;

// The type of a column's two words.
template <class State>
struct VerifyWords {
    using Word = float;
};
template <>
struct VerifyWords<__nv_bfloat16> {
    using Word = __nv_bfloat16;
};

// x as the sum of two TF32 numbers: its leading 11 bits, and the leading 11 of the rest.
__device__ __forceinline__ void split_tf32(float x, std::uint32_t& first, std::uint32_t& rest) {
    first = __float_as_uint(x) & 0xffffe000u;
    rest = __float_as_uint(x - __uint_as_float(first)) & 0xffffe000u;
}
__device__ __forceinline__ void split_word(float x, float& first, float& rest) {
    std::uint32_t words[2];
    split_tf32(x, words[0], words[1]);
    first = __uint_as_float(words[0]), rest = __uint_as_float(words[1]);
}
__device__ __forceinline__ void split_word(float x, __nv_bfloat16& first, __nv_bfloat16& rest) {
    first = __float2bfloat16_rz(x);  // so that the largest float stays finite
    rest = __float2bfloat16_rn(x - __bfloat162float(first));
}

// Where chunk `chunk` of four elements of a row lies within it. Rows of bfloat16 are read by ldmatrix, eight
// rows of 16 bytes at a time, the others by lanes, a chunk each.
template <class T>
__device__ __forceinline__ int chunk_at(int row, int chunk) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return chunk ^ ((row & 7) << 1);
    return chunk ^ ((row & (sizeof(T) == 4 ? 1 : 3)) << 2);
}

template <class State, int kKey, int kRows>
struct alignas(128) VerifyShared {
    using Word = typename VerifyWords<State>::Word;
    static constexpr int kColumns = 2 * kVerifyTokens;  // 2 t: A_t k_t; 2 t + 1: A_t q_t
    static_assert(kColumns == 8, "a product of tensor cores has eight columns");
    static constexpr int kPairs = kVerifyTokens * (kVerifyTokens + 1) / 2;
    // Sums over channels: M_ts for s <= t; L_ts for s < t, and k_t . k_t in place of L_tt; q_t . q_t.
    static constexpr int kSums = 2 * kPairs + kVerifyTokens;
    static constexpr int kWarps = (kKey < kStepThreads ? kKey : kStepThreads) / 32;

    State state[kRows][kKey];
    Word columns[2][kColumns][kKey];
    alignas(16) float sums[kSums][kWarps];

    // What states are made of again after the tokens. A call that stores none has no such memory.
    struct alignas(16) Kept {
        float decay[kVerifyTokens][kKey], k[kVerifyTokens][kKey];
        float write[kRows][kVerifyTokens];
        std::int32_t slot[kVerifyTokens];
    } kept;

    static __device__ __forceinline__ constexpr int pair(int t, int s) { return t * (t + 1) / 2 + s; }
    __device__ __forceinline__ float sum_of_queries(int t, int s) const { return sum(sums[pair(t, s)]); }
    __device__ __forceinline__ float sum_of_keys(int t, int s) const {
        return sum(sums[kPairs + pair(t, s)]);
    }
    __device__ __forceinline__ float key_squared(int t) const { return sum_of_keys(t, t); }
    __device__ __forceinline__ float query_squared(int t) const { return sum(sums[2 * kPairs + t]); }
};

// Whether the call stores states after its tokens: to a pool, to snapshots, or to both.
__host__ __device__ __forceinline__ bool keeps_states(const DecodeArgs& a) {
    return a.snapshots.data || (a.final.data && a.state_indices.data);
}

// Shared memory of a CTA in bytes.
template <class State, int kKey, int kRows>
std::size_t verify_bytes(const DecodeArgs& a) {
    using Shared = VerifyShared<State, kKey, kRows>;
    return keeps_states(a) ? sizeof(Shared) : offsetof(Shared, kept);
}

// Adds up kCount numbers over a warp and stores the sum of number i to to[i * stride]. Each step halves the
// numbers that a lane carries, so that kCount of them take about as many shuffles. count: how many of x
// exist.
template <int kCount, int kMask = 16>
__device__ __forceinline__ void put_warp_sums(float (&x)[kCount], float* to, int stride, int count = kCount) {
    static_assert(kCount <= 2 * kMask || kMask == 0);
    if constexpr (kCount == 1) {
#pragma unroll
        for (int mask = kMask; mask > 0; mask /= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], mask);
        if (count > 0 && (threadIdx.x & (2 * kMask - (kMask > 0))) == 0) *to = x[0];
    } else {
        constexpr int kLower = (kCount + 1) / 2;
        const bool upper = threadIdx.x & kMask;  // these lanes keep the upper half
        float kept[kLower];
#pragma unroll
        for (int i = 0; i < kLower; ++i) {
            const float other = i + kLower < kCount ? x[i + kLower] : 0.0f;
            kept[i] = (upper ? other : x[i]) + __shfl_xor_sync(0xffffffffu, upper ? x[i] : other, kMask);
        }
        put_warp_sums<kLower, kMask / 2>(kept, upper ? to + kLower * stride : to, stride,
                                         upper ? count - kLower : min(count, kLower));
    }
}

// For bfloat16: d[i] [16 x 8] += rows row0 to row0 + 15 of tile i times all columns.
template <int kKey, int kRows, int kTiles>
__device__ __forceinline__ void contract(float (&d)[kTiles][4],
                                         const VerifyShared<__nv_bfloat16, kKey, kRows>& s, int row0) {
    const int lane = static_cast<int>(threadIdx.x % 32), row = row0 + lane % 16, column = lane % 8;
    // Where a lane's pieces of 16 bytes are: the first, and piece 2 j of a row behind it. A row starts at a
    // multiple of 128 bytes, within which pieces are permuted by exclusive or.
    const auto piece = [](const __nv_bfloat16* row_of, int number, int first) {
        return shared_address(row_of + 4 * chunk_at<__nv_bfloat16>(number, 2 * first));
    };
    const auto behind = [](std::uint32_t first, int j) { return (first ^ (j % 4 * 32)) + j / 4 * 128; };
    const std::uint32_t rows = piece(s.state[row], row, lane / 16);
    const std::uint32_t columns[2] = {piece(s.columns[0][column], column, lane / 8),
                                      piece(s.columns[1][column], column, lane / 8)};
    float rests[kTiles][4] = {};  // of the columns' second words
#pragma unroll
    for (int j = 0; j < kKey / 16; j += 2) {
        std::uint32_t b[2][4];
        load_matrices(b[0], behind(columns[0], j));
        load_matrices(b[1], behind(columns[1], j));
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                std::uint32_t a[4];
                load_matrices(a, behind(rows, j + i) + tile * kVerifyRows * kKey * 2);
                mma_16x8x16<__nv_bfloat16>(d[tile], a, b[0][2 * i], b[0][2 * i + 1]);
                mma_16x8x16<__nv_bfloat16>(rests[tile], a, b[1][2 * i], b[1][2 * i + 1]);
            }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) d[tile][i] += rests[tile][i];
}

// The same for the other types, of which a product takes words of TF32.
template <class State, int kKey, int kRows, int kTiles>
__device__ __forceinline__ void contract(float (&d)[kTiles][4], const VerifyShared<State, kKey, kRows>& s,
                                         int row0) {
    using Word = typename VerifyShared<State, kKey, kRows>::Word;
    const int lane = static_cast<int>(threadIdx.x % 32), column = lane / 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        const int row = row0 + tile * kVerifyRows + lane / 4;
        float rests[2][4] = {};  // first word times rest, rest times first word
#pragma unroll
        for (int j = 0; j < kKey / 16; ++j) {
            const int chunk = 4 * j + lane % 4;
            const auto of_state = [&](int r) {
                return reinterpret_cast<const std::uint32_t*>(&s.state[r][4 * chunk_at<State>(r, chunk)]);
            };
            const auto of_columns = [&](int word) {
                return *reinterpret_cast<const uint4*>(
                    &s.columns[word][column][4 * chunk_at<Word>(column, chunk)]);
            };
            const Four<State> upper(of_state(row)), lower(of_state(row + 8));
            const uint4 first = of_columns(0), rest = of_columns(1);
            const std::uint32_t b[2][4] = {{first.x, first.y, first.z, first.w},
                                           {rest.x, rest.y, rest.z, rest.w}};
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                std::uint32_t a[2][4];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    split_tf32(upper.get(i + e), a[0][2 * e], a[1][2 * e]);
                    split_tf32(lower.get(i + e), a[0][2 * e + 1], a[1][2 * e + 1]);
                }
                const auto multiply = [&](float(&to)[4], int of_a, int of_b) {
                    mma_16x8x8_tf32(to, a[of_a], b[of_b][i], b[of_b][i + 1]);
                };
                multiply(d[tile], 0, 0);
                multiply(rests[0], 0, 1);
                if constexpr (sizeof(State) == 4) multiply(rests[1], 1, 0);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) d[tile][i] += rests[0][i] + rests[1][i];
    }
}

// The thread's values and write strengths.
template <int kKey, Keys kKeys, int kRows, int kCount>
__device__ __forceinline__ void prepare_values(const DecodeArgs& a,
                                               const VerifyInputs<kKey, kKeys, kRows>& inputs,
                                               float (&value)[kCount], float (&strength)[kCount]) {
    const bool by_channel = a.beta.last != 0;  // otherwise a token's rows have one strength
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        value[i] = inputs.value[i].value(a.v.type);
        if (i == 0 || by_channel)
            strength[i] = beta_exact(inputs.beta[i].value(a.beta.type), a.beta_is_logit, a.most_beta);
        else
            strength[i] = strength[0];
    }
    if constexpr (kKeys == Keys::kErase)
#pragma unroll
        for (int i = 0; i < kCount; ++i) inputs.weigh(value[i], strength[i]);
}

// Columns, decays, keys and sums of the tokens, from the inputs that a thread has fetched.
template <class State, int kKey, Keys kKeys, int kRows>
__device__ __forceinline__ void prepare(const DecodeArgs& a, const VerifyInputs<kKey, kKeys, kRows>& inputs,
                                        int value_head, VerifyShared<State, kKey, kRows>& s) {
    using Shared = VerifyShared<State, kKey, kRows>;
    constexpr int kOwned = VerifyInputs<kKey, kKeys, kRows>::kOwned;
    if (inputs.owns_channels()) {
        const HeadGate gate(value_head, a.gate, inputs.A_log, a.lower_bound, inputs.gamma);
        float decay[kVerifyTokens * kOwned], shift[kVerifyTokens * kOwned], sums[Shared::kSums] = {};
#pragma unroll
        for (int i = 0; i < kVerifyTokens * kOwned; ++i) {
            decay[i] = inputs.g[i].value(a.g.type);
            shift[i] = inputs.bias[i % kOwned];
        }
        if (a.g.type != Element::kNone) gate.log2_decays(decay, shift);
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            const int channel = inputs.channel(i), chunk = channel / 4;
            float k[kVerifyTokens], q[kVerifyTokens], reads[kVerifyTokens], all = 1.0f;
#pragma unroll
            for (int t = 0; t < kVerifyTokens; ++t) {
                k[t] = inputs.k[t * kOwned + i].value(a.k.type),
                q[t] = inputs.q[t * kOwned + i].value(a.q.type);
                reads[t] = k[t];
                if constexpr (kKeys == Keys::kErase) reads[t] *= inputs.erases(a, t * kOwned + i);
                float& own = decay[t * kOwned + i];
                own = exp2_fast(own + gate.gamma2);
                all *= own;
                const auto put = [&](int column, float x) {
                    const int at = 4 * chunk_at<typename Shared::Word>(column, chunk) + channel % 4;
                    split_word(x, s.columns[0][column][at], s.columns[1][column][at]);
                };
                put(2 * t, all * reads[t]);
                put(2 * t + 1, all * q[t]);
                sums[2 * Shared::kPairs + t] += q[t] * q[t];
            }
            if (keeps_states(a))
#pragma unroll
                for (int t = 0; t < kVerifyTokens; ++t)
                    s.kept.decay[t][channel] = decay[t * kOwned + i], s.kept.k[t][channel] = k[t];
#pragma unroll
            for (int from = 0; from < kVerifyTokens; ++from) {
                float key = k[from];
#pragma unroll
                for (int t = from; t < kVerifyTokens; ++t) {
                    if (t > from) key *= decay[t * kOwned + i];
                    sums[Shared::pair(t, from)] += key * q[t];
                    sums[Shared::kPairs + Shared::pair(t, from)] += key * (t > from ? reads[t] : k[t]);
                }
            }
        }
        put_warp_sums(sums, &s.sums[0][threadIdx.x / 32], Shared::kWarps);
    }
    if (keeps_states(a) && threadIdx.x < kVerifyTokens) s.kept.slot[threadIdx.x] = inputs.state_index;
}

// Predicated, without a branch: a warp's stores of several rows follow each other closely.
template <class State>
__device__ __forceinline__ void store_if(State* p, const Four<State>& x, bool in) {
    if constexpr (sizeof(State) == 4)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2,%3,%4,%5}; }" ::"r"(
                         static_cast<int>(in)),
                     "l"(p), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
                     : "memory");
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.cs.v2.b32 [%1], {%2,%3}; }" ::"r"(
                         static_cast<int>(in)),
                     "l"(p), "r"(x.word[0]), "r"(x.word[1])
                     : "memory");
}

// Stores the states after each token of the 16 rows from row0 on. to[j]: the lane's first chunk of the CTA's
// first row after token j, or null. No row beyond `last` is stored.
template <class State, int kKey, int kRows>
__device__ __forceinline__ void store_states(const VerifyShared<State, kKey, kRows>& s,
                                             char* const (&to)[kVerifyTokens], std::int32_t stride, int row0,
                                             int last) {
    constexpr int kChunks = kKey / 4, kLanes = kChunks < 32 ? kChunks : 32, kRowsOfWarp = 32 / kLanes;
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
    for (int part = 0; part < kChunks; part += kLanes) {
        const int chunk = part + lane % kLanes;
        float decay[kVerifyTokens][4], key[kVerifyTokens][4];
#pragma unroll
        for (int j = 0; j < kVerifyTokens; ++j) {
            load4(decay[j], &s.kept.decay[j][4 * chunk]);
            load4(key[j], &s.kept.k[j][4 * chunk]);
        }
#pragma unroll 4
        for (int i = 0; i < 16; i += kRowsOfWarp) {
            const int row = row0 + i + lane / kLanes;
            const Four<State> four(
                reinterpret_cast<const std::uint32_t*>(&s.state[row][4 * chunk_at<State>(row, chunk)]));
            float x[4], write[kVerifyTokens];
            load4(write, s.kept.write[row]);
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = four.get(e);
#pragma unroll
            for (int j = 0; j < kVerifyTokens; ++j) {
                Four<State> rounded;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    x[e] = __fmaf_rn(key[j][e], write[j], x[e] * decay[j][e]);
                    rounded.set(e, x[e]);
                }
                store_if(reinterpret_cast<State*>(advanced(to[j], row, stride)) + 4 * part, rounded,
                         to[j] && row <= last);
            }
        }
    }
}

// CTAs per multiprocessor that registers must allow.
template <class State, int kKey, int kRows>
constexpr int verify_ctas() {
    if (kKey > 128) return 2;
    return sizeof(State) == 2 && kRows == kVerifyRows ? 6 : 5;
}

// kKeys: with or without erase keys. kRows: one tile, or two.
template <class State, int kKey, Keys kKeys, int kRows>
__global__ void __launch_bounds__(kStepThreads, verify_ctas<State, kKey, kRows>())
    verify(const __grid_constant__ DecodeArgs a) {
    using Shared = VerifyShared<State, kKey, kRows>;
    constexpr int kTiles = kRows / kVerifyRows;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    Shared& s = *reinterpret_cast<Shared*>(shared_bytes);

    pdl_wait();
    const auto [n, value_head, row0] = decode_place<kRows>(a, blockIdx.x);
    // The indices that name the slots of the state, and whether there is an initial state. Without sequences
    // the grid has the CTAs of one, which zero the outputs.
    const bool exists = n < a.sequences;
    std::int32_t from = load(a.initial_indices, n, 0, exists);
    const std::uint32_t has_initial = load8_if(a.has_initial + n, a.has_initial && exists);
    DecodeRange range{n, 0, a.tokens};
    bool reads_at = a.initial_indices.data != nullptr;
    if (a.cu_seqlens) {
        range = {0, 0, 0};
        if (exists) {
            range.begin = clamped_offset(a, n);
            range.length = max(clamped_offset(a, n + 1) - range.begin, 0);
        }
    }
    // Rows beyond the last are zeros, and not stored.
    const int last = min(a.value_dim - 1 - row0, kRows - 1);
    const auto output_at = [&](int t, int row) {
        char* const at = advanced(advanced(a.o.data, range.batch, a.o.batch), value_head, a.o.head);
        return advanced(advanced(at, range.begin + t, a.o.token), row0 + row, a.o.last);
    };
    const auto put_outputs = [&](int begin, int end, float x) {
        for (int t = begin; t < end; ++t)
            for (int row = static_cast<int>(threadIdx.x); row < kRows; row += kStepThreads)
                store_row_if(output_at(t, row), a.o.type, x, row <= last);
    };
    // Tokens after the last sequence belong to none: their outputs are zero.
    if (a.cu_seqlens && n + 1 >= a.sequences) put_outputs(range.length, a.tokens - range.begin, 0.0f);
    if (!exists || range.length == 0) return;

    VerifyInputs<kKey, kKeys, kRows> inputs;
    inputs.fetch_head(a, value_head);
    inputs.fetch(a, n, range, 0, value_head, row0);
    if (a.state_indices.data && !reads_at) {
        const int accepted = a.num_accepted.data ? load(a.num_accepted, n) : 1;
        from = load(a.state_indices, n, min(max(accepted, 1), a.state_indices.columns) - 1);
        reads_at = true;
    }
    const int length = min(range.length, kVerifyTokens);

    const bool skipped = reads_at && is_null(a, a.initial, from),
               starts = a.initial.data && !skipped && (!a.has_initial || has_initial != 0);
    from = reads_at ? from : n;
    // A table of slots has a column for every token of a row. Where that does not hold, outputs are NaN.
    put_outputs(kVerifyTokens, range.length, skipped ? 0.0f : __int_as_float(0x7fffffff));

    // Where chunk `chunk` of the CTA's first row is in the state of a slot.
    const auto first_row = [&](const DecodeStates& states, std::int32_t slot, int chunk) {
        char* const at = advanced(advanced(states.data, value_head, states.head), row0, states.v);
        return advanced(at, slot, states.slot) + chunk * 4 * sizeof(State);
    };
    // Pieces of 16 bytes: one chunk or two.
    constexpr int kChunks = kKey / 4, kPieceChunks = 4 / sizeof(State), kPieces = kChunks / kPieceChunks,
                  kRowsAtOnce = kStepThreads / kPieces;
    {
        const int piece = static_cast<int>(threadIdx.x) % kPieces,
                  row_of_piece = static_cast<int>(threadIdx.x) / kPieces;
        const char* const first =
            advanced(first_row(a.initial, from, piece * kPieceChunks), row_of_piece, a.initial.v);
#pragma unroll
        for (int i = 0; i < kRows; i += kRowsAtOnce) {
            const int row = row_of_piece + i;
            copy_async(shared_address(&s.state[row][4 * chunk_at<State>(row, piece * kPieceChunks)]),
                       advanced(first, i, a.initial.v), starts && row <= last ? 16 : 0);
        }
    }
    commit_copies();
    float value[inputs.kValues], strength[inputs.kValues];
    prepare(a, inputs, value_head, s);
    prepare_values(a, inputs, value, strength);
    wait_copies<0>();
    __syncthreads();

    const int lane = static_cast<int>(threadIdx.x % 32), warp_row = static_cast<int>(threadIdx.x / 32) * 16;
    float sums[kTiles][4] = {};
    contract(sums, s, warp_row);
    const int t = lane % kVerifyTokens;
    float of_keys[kVerifyTokens], of_queries[kVerifyTokens];  // L_tj and M_tj
#pragma unroll
    for (int j = 0; j < kVerifyTokens; ++j) {
        of_keys[j] = j < t ? s.sum_of_keys(t, j) : 0.0f;
        of_queries[j] = j <= t ? s.sum_of_queries(t, j) : 0.0f;
    }
    float scale_q = a.scale, scale_k = 1.0f;  // factors on sums, as SumScales has them
    if (a.qk_l2norm) {
        scale_q *= inverse_norm(s.query_squared(t));
        scale_k = inverse_norm(s.key_squared(t));
    }
    char* const out_at = output_at(t, warp_row + lane / 4);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int further = kVerifyRows * tile + 8 * half, row = warp_row + lane / 4 + further;
            float read = sums[tile][2 * half], out = sums[tile][2 * half + 1], writes[kVerifyTokens];
            const int i = 2 * tile + half;
#pragma unroll
            for (int j = 0; j < kVerifyTokens; ++j) {
                const float u = a.corrects ? strength[i] * __fmaf_rn(-read, scale_k, value[i]) : value[i];
                writes[j] = __shfl_sync(0xffffffffu, u * scale_k, j, kVerifyTokens);
                if (j < t) read = __fmaf_rn(writes[j], of_keys[j], read);  // a later token may be NaN
                if (j <= t) out = __fmaf_rn(writes[j], of_queries[j], out);
            }
            if (keeps_states(a) && t == 0)
                *reinterpret_cast<float4*>(s.kept.write[row]) = {writes[0], writes[1], writes[2], writes[3]};
            store_row_if(advanced(out_at, further, a.o.last), a.o.type, skipped ? 0.0f : out * scale_q,
                         t < length && row <= last);
        }
    if (skipped || !keeps_states(a)) return;

    // States are stored to the slots of a pool, to snapshots, or to both, one after the other.
    __syncwarp();
    const int chunk = lane % kChunks;
#pragma unroll 1
    for (int kind = 0; kind < 2; ++kind) {
        const bool to_pool = kind == 0;
        const DecodeStates& states = to_pool ? a.final : a.snapshots;
        if (!states.data || (to_pool && !a.state_indices.data)) continue;
        char* to[kVerifyTokens];  // the CTA's first row after each token; null: not stored
        bool stores = false;
        std::int32_t slot = n;
        if (!to_pool && a.snapshot_indices.data) slot = load(a.snapshot_indices, n);
#pragma unroll
        for (int j = 0; j < kVerifyTokens; ++j) {
            if (to_pool) slot = s.kept.slot[j];
            const bool in = to_pool ? j < a.state_indices.columns && !is_null(a, states, slot)
                                    : !a.snapshot_indices.data || !is_null(a, states, slot);
            to[j] = nullptr;
            if (j < length && in) {
                to[j] = advanced(first_row(states, slot, chunk), j, to_pool ? 0 : a.snapshots_token);
                stores = true;
            }
        }
        if (!stores) continue;
#pragma unroll 1
        for (int tile = 0; tile < kTiles; ++tile)
            store_states(s, to, states.v, warp_row + kVerifyRows * tile, last);
    }
}

}  // namespace cula::cuda::recurrent
