// SPDX-License-Identifier: Apache-2.0
// gradient_anchored, the tensors of a call as a warp reads and writes its patch of them.
#pragma once

#include "cuda/backward/anchored_config.cuh"
#include "cuda/backward/channel_columns.cuh"
#include "cuda/backward/gradients.h"
#include "cuda/chunked/reader.h"
#include "cuda/pipe/barriers.cuh"

namespace cula::cuda::backward {

using chunked::Reader;

// How much of the lane's column exists.
struct Extent {
    int count, channels;  // tokens of eight; channels of two, or fewer than one

    template <int kKey>
    __device__ __forceinline__ Extent(const ChannelPlace& place, const Patch<kKey>& patch, int key_dim)
        : count(patch.channel < key_dim ? place.count - patch.token : 0), channels(key_dim - patch.channel) {}

    // Whether channel i % 2 of token i / 2 does.
    __device__ __forceinline__ bool has(int i) const { return i / 2 < count && i % 2 < channels; }
    __device__ __forceinline__ bool is_whole() const { return count >= kHalf && channels >= 2; }
    // Zeros where it does not.
    __device__ __forceinline__ void mask(Column& x) const {
        if (is_whole()) return;
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i)
            if (!has(i)) x[i] = 0.0f;
    }
};

// The lane's column in global memory, of rows that are read and written by words of two channels
// (TokenRows::pieces).
template <class Word>
struct GlobalColumn {
    char* first;
    std::int32_t pitch;  // from a token's word to the next one's, in bytes

    // begin: where the chunk's rows begin, in elements.
    template <int kKey>
    __device__ __forceinline__ GlobalColumn(std::int64_t begin, const TokenRows& rows,
                                            const Patch<kKey>& patch)
        : pitch(static_cast<std::int32_t>(rows.token) * kElement) {
        first = static_cast<char*>(rows.data) + (begin + patch.channel) * kElement +
                std::int64_t{patch.token} * pitch;
    }
    __device__ __forceinline__ Word* at(int t) const {
        return reinterpret_cast<Word*>(first + std::int64_t{t} * pitch);
    }
    template <class WordOf>
    __device__ __forceinline__ void store(const Extent& extent, const WordOf& word_of) const {
        if (extent.is_whole()) {
#pragma unroll
            for (int t = 0; t < kHalf; ++t) *at(t) = word_of(t);
        } else {
#pragma unroll
            for (int t = 0; t < kHalf; ++t)
                if (t < extent.count) *at(t) = word_of(t);
        }
    }

private:
    static constexpr int kElement = sizeof(Word) / 2;
};

// The lane's two pieces of 16 bytes of rows of a patch, whose elements have two: of tokens l/4 and l/4 + 8.
struct RowPieces {
    int token, channel;  // of the first one, in the chunk
    bool in[2];          // which exist

    template <int kKey>
    __device__ __forceinline__ RowPieces(const ChannelPlace& place, const Patch<kKey>& patch, int key_dim)
        : token(patch.first + patch.lane / 4), channel(patch.group * kGroup + patch.lane % 4 * 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) in[i] = channel < key_dim && token + kHalf * i < place.count;
    }

    // Where the first one lies; the second is eight rows on. begin: where the chunk's rows begin, in
    // elements.
    __device__ __forceinline__ char* of(const TokenRows& rows, std::int64_t begin) const {
        return static_cast<char*>(rows.data) + (begin + channel) * 2 + std::int64_t{token} * pitch(rows);
    }
    static __device__ __forceinline__ std::int32_t pitch(const TokenRows& rows) {
        return static_cast<std::int32_t>(rows.token) * 2;
    }
    // Where piece i lies in a PatchOperand (operand_unit), in bytes.
    static CULA_HOST_DEVICE constexpr int in_patch(int lane, int i) {
        const int first = lane / 4 * 64 + (lane % 4 ^ lane / 8) * 16;
        return i == 0 ? first : (first ^ 64) + 512;
    }
};

// The lane's column of a PatchOperand as words of two channels. The matrices of ldmatrix have a token of both
// halves each: rows of four units.
template <class T>
struct ColumnWords {
    std::uint32_t patch;
    int lane;

    __device__ __forceinline__ ColumnWords(const PatchOperand<T>& of, int of_lane)
        : patch(shared_address(of)), lane(of_lane) {}

    __device__ __forceinline__ void load(std::uint32_t (&words)[kHalf]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            std::uint32_t four[4];
            load_matrices(four, patch + row(lane, i));
#pragma unroll
            for (int t = 0; t < 4; ++t) words[4 * i + t] = four[t];
        }
    }
    // Of tokens 4 i to 4 i + 3.
    __device__ __forceinline__ void store(int i, const std::uint32_t (&words)[4]) const {
#if __CUDA_ARCH__ >= 900
        store_matrices(patch + row(lane, i), words);
#else
#pragma unroll
        for (int t = 0; t < 4; ++t) store_word(patch + row(8 * t + lane / 4, i) + lane % 4 * 4, words[t]);
#endif
    }

    // In bytes, where the row begins (operand_unit) of which the lane gives the address: of token 4 i + l/8
    // of half l/4 % 2.
    static CULA_HOST_DEVICE constexpr int row(int lane, int i) {
        const int half = lane / 4 % 2, token = lane / 8;
        const int first = half * 512 + (token ^ half) * 64 + (lane % 4 ^ token / 2) * 16;
        return i == 0 ? first : (first ^ 32) + 256;
    }
};

// Both write and read a patch where the products expect it.
constexpr bool patches_agree() {
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 2; ++i) {
            const int of_rows = operand_unit(lane / 4 + kHalf * i, lane % 4),
                      of_columns = operand_unit(lane / 4 % 2 * kHalf + lane / 8 + 4 * i, lane % 4);
            if (RowPieces::in_patch(lane, i) != 2 * of_rows) return false;
            if (ColumnWords<__nv_bfloat16>::row(lane, i) != 2 * of_columns) return false;
        }
    return true;
}
static_assert(patches_agree());

// The warp's patch from accumulators to columns.
template <int kKey>
__device__ __forceinline__ void turn_patch(Column& to, const float (&x)[4][4], TurnedPatch& of,
                                           const Patch<kKey>& patch) {
    const std::uint32_t turned = shared_address(&of);
    const int matrix = patch.lane / 8, row = patch.lane % 8;  // of which the lane gives the address
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    const std::uint32_t stored = turned + TurnedPatch::unit(matrix / 2, row, 0, matrix % 2);
#pragma unroll
    for (int n = 0; n < 4; ++n)
        store_matrices(stored + n * TurnedPatch::kEightChannels,
                       {__float_as_uint(x[n][0]), __float_as_uint(x[n][1]), __float_as_uint(x[n][2]),
                        __float_as_uint(x[n][3])});
#else
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store_word(turned + TurnedPatch::unit(i / 2, patch.lane / 4, n, i % 2) + patch.lane % 4 * 4,
                       __float_as_uint(x[n][i]));
#endif
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kHalf; t += 4) {
        const std::uint32_t loaded = turned + TurnedPatch::unit(row / 4, matrix / 2 + t, row % 4, matrix % 2);
#pragma unroll
        for (int two = 0; two < 4; two += 2) {
            std::uint32_t words[4];  // even and odd channels of two tokens
            load_matrices(words, loaded + two * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) to[2 * (t + two) + i] = __uint_as_float(words[i]);
        }
    }
}

// What is loaded to registers before its turn, behind what else is to be done until then: dt_bias of the
// lane's channels, A_log and, where they read, the erase keys of the lane's column.
template <bool kErases>
struct GivenNumbers {
    float2 bias;
    float A_log;
};
template <>
struct GivenNumbers<true> : GivenNumbers<false> {
    std::uint32_t readers[kHalf];
};

// What the phases of a chunk and head share. parity: of the chunk; which half of what has two.
template <class T, int kKey, Reader kReader>
struct AnchoredTensors {
    using P = Patches<kKey>;
    static constexpr bool kErases = erases(kReader);
    static_assert(kReader != Reader::kUndecayed);

    const DeviceArgs& a;
    const Gradients& d;
    AnchoredSmem<T, kKey>& s;
    int parity = 0;

    // To the second-level cache: rows of the chunk that comes next, a line per thread.
    __device__ __forceinline__ void prefetch_rows(const ChannelPlace& next) const {
        const int t = static_cast<int>(threadIdx.x) % P::kRows,
                  part = static_cast<int>(threadIdx.x) / P::kRows;
        if (t >= next.count) return;
        const auto prefetch_line = [&](AnchoredRows::Name name, const TokenRows& rows, int line) {
            const int element = rows.dtype == Dtype::kFloat32 ? 4 : 2;
            if (line * 128 < a.key_dim * element)
                prefetch(static_cast<const char*>(rows.data) +
                         ((s.rows[parity ^ 1][name] + t * rows.token) * element + line * 128));
        };
        constexpr int kLines = P::kThreads / P::kRows / 4;  // of rows of T
        if (part < kLines)
            prefetch_line(AnchoredRows::kQ, a.q, part);
        else if (part < 2 * kLines)
            prefetch_line(AnchoredRows::kK, a.k, part - kLines);
        else
            prefetch_line(AnchoredRows::kG, a.g, part - 2 * kLines);
        if constexpr (kErases) {
            if (part < kLines)
                prefetch_line(AnchoredRows::kEraseKeys, a.erase_keys, part);
            else if (part >= 2 * kLines)
                prefetch_line(AnchoredRows::kErase, a.erase, part - 2 * kLines);
        }
    }

    // Starts to load GivenNumbers, and to copy the patch of q, k and, if they have two bytes, gates to shared
    // memory. What is not in whole pieces is loaded at once.
    using Given = GivenNumbers<kErases>;
    __device__ __forceinline__ void load(Given& given, int parity_of) const {
        const AnchoredPatch<kKey> patch;
        const ChannelPlace place = s.place[parity_of].again();
        copy_keys(parity_of, place, patch);
        if (has_gate_words()) copy_gates(parity_of, place, patch);
        if constexpr (kErases)  // rows that the call has made: whole words
            load_words(given.readers, s.rows[parity_of][AnchoredRows::kEraseKeys], a.erase_keys, patch,
                       Extent(place, patch, a.key_dim));
        if constexpr (!kErases) load_parameters(given, place.head, patch);
        commit_copies();
    }
    // With erase keys in their turn: there are no registers for them before.
    __device__ __forceinline__ void load_parameters(Given& given, int head, const Patch<kKey>& patch) const {
        given.bias = load_bias(head, patch);
        given.A_log = a.A_log.data ? a.A_log.data[head * a.A_log.head] : 0.0f;
    }
    // Waits for copies of rows, and for the other lanes, which copy the rest of the patch. (Before sm_90 also
    // for the next pair's slices.)
    __device__ __forceinline__ void wait_for_rows() const {
        wait_copies<0>();
        __syncwarp();
    }
    // q and k as they came.
    __device__ __forceinline__ void given_keys(std::uint32_t (&q)[kHalf], std::uint32_t (&k)[kHalf],
                                               const Patch<kKey>& patch) const {
        ColumnWords<T>(s.own[patch.warp].q, patch.lane).load(q);
        ColumnWords<T>(s.own[patch.warp].k, patch.lane).load(k);
    }

    // k as it came.
    __device__ __forceinline__ void load_key_words(std::uint32_t (&words)[kHalf],
                                                   const Patch<kKey>& patch) const {
        const Extent extent(s.place[parity].again(), patch, a.key_dim);
        const std::int64_t begin = s.rows[parity][AnchoredRows::kK];
        if (a.k.pieces) return load_words(words, begin, a.k, patch, extent);
        Column x;
        load_elements(x, begin, a.k, patch, extent);
#pragma unroll
        for (int t = 0; t < kHalf; ++t) words[t] = pack2<T>(x[2 * t], x[2 * t + 1]);
    }
    // Erase strengths, which come in whole pieces, of T or float32.
    __device__ __forceinline__ void load_strengths(Column& x, const Patch<kKey>& patch,
                                                   const Extent& extent) const {
        const std::int64_t begin = s.rows[parity][AnchoredRows::kErase];
        if (a.erase.dtype == Dtype::kFloat32) return load_pairs(x, begin, a.erase, patch, extent);
        std::uint32_t words[kHalf];
        load_words(words, begin, a.erase, patch, extent);
        unpack_column<T>(x, words);
    }

    // What is differentiated is wanted once more: gates, their bias, and q and k where they have norms.
    __device__ __forceinline__ void copy_gates_again() const {
        if (!d.decay() || a.gate == Gate::kLogDecay || !has_gate_words()) return;
        const AnchoredPatch<kKey> patch;
        copy_gates(parity, s.place[parity].again(), patch);
        commit_copies();
    }
    __device__ __forceinline__ float2 load_bias_again() const {
        if (a.gate == Gate::kLogDecay) return {};
        return load_bias(s.place[parity].again().head, AnchoredPatch<kKey>());
    }
    __device__ __forceinline__ void copy_keys_again() const {
        if (!d.keys() || !a.qk_l2norm) return;
        const AnchoredPatch<kKey> patch;
        __syncwarp();
        copy_keys(parity, s.place[parity].again(), patch);
        commit_copies();
    }

    // Gates with their bias, or log decays. If gates are loaded element by element, q and k in shared memory
    // are lost.
    __device__ __forceinline__ void load_gates(Column& x, float2 bias, const Patch<kKey>& patch,
                                               const Extent& extent) const {
        if (!has_gate_words()) {
            const std::int64_t begin = s.rows[parity][AnchoredRows::kG];
            if (a.g.pieces && a.g.dtype == Dtype::kFloat32)
                load_pairs(x, begin, a.g, patch, extent);
            else
                load_elements(x, begin, a.g, patch, extent);
        } else {
            std::uint32_t words[kHalf];
            ColumnWords<T>(s.own[patch.warp].gates, patch.lane).load(words);
            if (a.g.dtype == Dtype::kBFloat16)
                unpack_column<__nv_bfloat16>(x, words);
            else
                unpack_column<__half>(x, words);
        }
#pragma unroll
        for (int t = 0; t < kHalf; ++t) x[2 * t] += bias.x, x[2 * t + 1] += bias.y;
    }
    // Of the lane's channels.
    __device__ __forceinline__ float2 load_bias(int head, const Patch<kKey>& patch) const {
        if (!a.dt_bias.data || patch.channel >= a.key_dim) return {};
        const float* bias = a.dt_bias.data + head * a.dt_bias.head + patch.channel * a.dt_bias.channel;
        return {bias[0], patch.channel + 1 < a.key_dim ? bias[a.dt_bias.channel] : 0.0f};
    }
    // staged: memory of the warp for a patch, which no other warp uses.
    __device__ __forceinline__ void store(const Column& x, AnchoredRows::Name name, const TokenRows& rows,
                                          const Extent& extent, const Patch<kKey>& patch,
                                          StagedPatch<T>& staged) const {
        const std::int64_t begin = s.rows[parity][name];
        __syncwarp();
        if (!by_words(rows)) {
            const std::int64_t first = begin + column_of(rows, patch);
#pragma unroll
            for (int i = 0; i < 2 * kHalf; ++i) staged.elements[i][patch.lane] = x[i];
#pragma unroll 1
            for (int i = 0; i < 2 * kHalf; ++i)
                if (extent.has(i))
                    store_gradient(rows.data, rows.dtype, first + i / 2 * rows.token + i % 2 * rows.last,
                                   staged.elements[i][patch.lane]);
            return;
        }
        if (rows.dtype == Dtype::kFloat32) {
            GlobalColumn<float2>(begin, rows, patch).store(extent, [&](int t) {
                return float2{x[2 * t], x[2 * t + 1]};
            });
            return;
        }
        const auto stage_words = [&](const auto& pack) {
            const ColumnWords<T> column(staged.rows, patch.lane);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                std::uint32_t words[4];
#pragma unroll
                for (int t = 0; t < 4; ++t) words[t] = pack(x[8 * i + 2 * t], x[8 * i + 2 * t + 1]);
                column.store(i, words);
            }
        };
        if (rows.dtype == Dtype::kBFloat16)
            stage_words([](float low, float high) { return pack2<__nv_bfloat16>(low, high); });
        else
            stage_words([](float low, float high) { return pack2<__half>(low, high); });
        __syncwarp();
        const RowPieces pieces(s.place[parity].again(), patch, a.key_dim);
        char* const to = pieces.of(rows, begin);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            std::uint32_t piece[4];
            cuda::load_words(piece, shared_address(staged.rows) + RowPieces::in_patch(patch.lane, i));
            if (pieces.in[i])
                *reinterpret_cast<uint4*>(to + std::int64_t{kHalf * i} * RowPieces::pitch(rows)) = {
                    piece[0], piece[1], piece[2], piece[3]};
        }
    }

private:
    // Where the lane's column begins, from where the chunk's rows do, in elements.
    static __device__ __forceinline__ std::int64_t column_of(const TokenRows& rows,
                                                             const Patch<kKey>& patch) {
        return patch.token * rows.token + patch.channel * rows.last;
    }
    // Rows that are not read by words of two channels are so element by element, through shared memory: a
    // loop that is not unrolled keeps the code small.
    __device__ __forceinline__ void load_elements(Column& x, std::int64_t begin, const TokenRows& rows,
                                                  const Patch<kKey>& patch, const Extent& extent) const {
        const std::int64_t first = begin + column_of(rows, patch);
        auto& elements = s.own[patch.warp].staged.elements;
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < 2 * kHalf; ++i)
            elements[i][patch.lane] =
                extent.has(i)
                    ? load_float(rows.data, rows.dtype, first + i / 2 * rows.token + i % 2 * rows.last)
                    : 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) x[i] = elements[i][patch.lane];
    }
    // Two channels of eight tokens, of float32 or of two bytes each; zeros where there are none.
    static __device__ __forceinline__ void load_pairs(Column& x, std::int64_t begin, const TokenRows& rows,
                                                      const Patch<kKey>& patch, const Extent& extent) {
        const GlobalColumn<const float2> column(begin, rows, patch);
#pragma unroll
        for (int t = 0; t < kHalf; ++t) {
            const float2 pair = t < extent.count ? *column.at(t) : float2{0.0f, 0.0f};
            x[2 * t] = pair.x, x[2 * t + 1] = pair.y;
        }
    }
    static __device__ __forceinline__ void load_words(std::uint32_t (&words)[kHalf], std::int64_t begin,
                                                      const TokenRows& rows, const Patch<kKey>& patch,
                                                      const Extent& extent) {
        const GlobalColumn<const std::uint32_t> column(begin, rows, patch);
        if (extent.is_whole()) {
#pragma unroll
            for (int t = 0; t < kHalf; ++t) words[t] = *column.at(t);
        } else {
#pragma unroll
            for (int t = 0; t < kHalf; ++t) words[t] = load32_if(column.at(t), t < extent.count);
        }
    }
    __device__ __forceinline__ bool has_gate_words() const {
        return a.g.pieces && (a.g.dtype == Dtype::kBFloat16 || a.g.dtype == Dtype::kFloat16);
    }
    __device__ __forceinline__ void copy_gates(int parity_of, const ChannelPlace& place,
                                               const Patch<kKey>& patch) const {
        copy_pieces(s.own[patch.warp].gates, s.rows[parity_of][AnchoredRows::kG], a.g, place, patch);
    }
    __device__ __forceinline__ void copy_keys(int parity_of, const ChannelPlace& place,
                                              const Patch<kKey>& patch) const {
        const auto copy = [&](PatchOperand<T>& to, AnchoredRows::Name name, const TokenRows& rows) {
            const std::int64_t begin = s.rows[parity_of][name];
            if (rows.pieces)
                copy_pieces(to, begin, rows, place, patch);
            else
                copy_elements(to, begin, rows, patch, Extent(place, patch, a.key_dim));
        };
        copy(s.own[patch.warp].q, AnchoredRows::kQ, a.q), copy(s.own[patch.warp].k, AnchoredRows::kK, a.k);
    }
    __device__ __forceinline__ void copy_pieces(PatchOperand<T>& to, std::int64_t begin,
                                                const TokenRows& rows, const ChannelPlace& place,
                                                const Patch<kKey>& patch) const {
        const RowPieces pieces(place, patch, a.key_dim);
        const char* const from = pieces.of(rows, begin);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            copy_async(shared_address(to) + RowPieces::in_patch(patch.lane, i),
                       from + std::int64_t{kHalf * i} * RowPieces::pitch(rows), pieces.in[i] ? 16 : 0);
    }
    // Element by element, those of the lane's column.
    static __device__ __forceinline__ void copy_elements(PatchOperand<T>& to, std::int64_t begin,
                                                         const TokenRows& rows, const Patch<kKey>& patch,
                                                         const Extent& extent) {
        const std::int64_t first = begin + column_of(rows, patch);
        const int column = patch.lane % 16;
#pragma unroll 1
        for (int i = 0; i < 2 * kHalf; ++i)
            to[operand_unit(patch.half * kHalf + i / 2, column / 4) + column % 4 * 2 + i % 2] =
                from_float<T>(extent.has(i) ? load_float(rows.data, rows.dtype,
                                                         first + i / 2 * rows.token + i % 2 * rows.last)
                                            : 0.0f);
    }
};

}  // namespace cula::cuda::backward
