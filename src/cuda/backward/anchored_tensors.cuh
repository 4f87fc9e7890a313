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
    // Zeros where it does not.
    __device__ __forceinline__ void mask(Column& x) const {
        if (count >= kHalf && channels >= 2) return;
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i)
            if (!has(i)) x[i] = 0.0f;
    }
};

// Erase keys of the lane's column, where they read.
template <bool kErases>
struct GivenReaders {};
template <>
struct GivenReaders<true> {
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

    // q, k, erase keys and, if they have two bytes, gates of the lane's column, as they came: loaded before
    // their turn, behind what else is to be done until then.
    struct Given : GivenReaders<kErases> {
        std::uint32_t q[kHalf], k[kHalf], gates[kHalf];
    };
    __device__ __forceinline__ void load(Given& given, int parity_of) const {
        const Patch<kKey> patch;
        const Extent extent(s.place[parity_of].again(), patch, a.key_dim);
        load_keys(given.q, a.q, s.rows[parity_of][AnchoredRows::kQ], patch, extent);
        load_keys(given.k, a.k, s.rows[parity_of][AnchoredRows::kK], patch, extent);
        if constexpr (kErases)  // rows that the call has made: whole words
            load_words(given.readers, a.erase_keys,
                       s.rows[parity_of][AnchoredRows::kEraseKeys] + patch.token * a.erase_keys.token +
                           patch.channel,
                       extent);
        load_gates(given.gates, parity_of, patch, extent);
    }

    // k as it came.
    __device__ __forceinline__ void load_key_words(std::uint32_t (&words)[kHalf],
                                                   const Patch<kKey>& patch) const {
        load_keys(words, a.k, s.rows[parity][AnchoredRows::kK], patch,
                  Extent(s.place[parity].again(), patch, a.key_dim));
    }
    // Erase strengths, which come in whole pieces, of T or float32.
    __device__ __forceinline__ void load_strengths(Column& x, const Patch<kKey>& patch,
                                                   const Extent& extent) const {
        const std::int64_t first = column_of(AnchoredRows::kErase, a.erase, patch);
        if (a.erase.dtype == Dtype::kFloat32) return load_pairs(x, a.erase, first, extent);
        std::uint32_t words[kHalf];
        load_words(words, a.erase, first, extent);
        unpack_column<T>(x, words);
    }

    __device__ __forceinline__ void gates_again(Given& given) const {
        const Patch<kKey> patch;
        given = {};
        if (a.gate != Gate::kLogDecay)
            load_gates(given.gates, parity, patch, Extent(s.place[parity].again(), patch, a.key_dim));
    }
    __device__ __forceinline__ void keys_again(Given& given) const {
        const Patch<kKey> patch;
        given = {};
        load_again(given, patch, Extent(s.place[parity].again(), patch, a.key_dim));
    }

    // Gates with their bias, or log decays. words: from load_gates.
    __device__ __forceinline__ void unpack_gates(Column& x, const std::uint32_t (&words)[kHalf],
                                                 const Patch<kKey>& patch, const Extent& extent,
                                                 int head) const {
        if (!has_gate_words()) {
            const std::int64_t first = column_of(AnchoredRows::kG, a.g, patch);
            if (a.g.pieces && a.g.dtype == Dtype::kFloat32)
                load_pairs(x, a.g, first, extent);
            else
                load_elements(x, a.g, first, patch, extent);
        } else if (a.g.dtype == Dtype::kBFloat16) {
            unpack_column<__nv_bfloat16>(x, words);
        } else {
            unpack_column<__half>(x, words);
        }
        if (!a.dt_bias.data || patch.channel >= a.key_dim) return;
        const float* bias = a.dt_bias.data + head * a.dt_bias.head + patch.channel * a.dt_bias.channel;
        const float first = bias[0], second = extent.channels > 1 ? bias[a.dt_bias.channel] : 0.0f;
#pragma unroll
        for (int t = 0; t < kHalf; ++t) x[2 * t] += first, x[2 * t + 1] += second;
    }
    // q and k, where the norms are differentiated.
    __device__ __forceinline__ void load_again(Given& given, const Patch<kKey>& patch,
                                               const Extent& extent) const {
        if (!d.keys() || !a.qk_l2norm) return;
        load_keys(given.q, a.q, s.rows[parity][AnchoredRows::kQ], patch, extent);
        load_keys(given.k, a.k, s.rows[parity][AnchoredRows::kK], patch, extent);
    }
    __device__ __forceinline__ void store(const Column& x, AnchoredRows::Name name, const TokenRows& rows,
                                          const Extent& extent, const Patch<kKey>& patch) const {
        const std::int64_t first = column_of(name, rows, patch);
        if (!by_words(rows)) {
#pragma unroll
            for (int i = 0; i < 2 * kHalf; ++i) element(patch, i) = x[i];
#pragma unroll 1
            for (int i = 0; i < 2 * kHalf; ++i)
                if (extent.has(i))
                    store_gradient(rows.data, rows.dtype, first + i / 2 * rows.token + i % 2 * rows.last,
                                   element(patch, i));
            return;
        }
        if (rows.dtype == Dtype::kFloat32) {
            auto* to = static_cast<float*>(rows.data) + first;
#pragma unroll
            for (int t = 0; t < kHalf; ++t, to += rows.token)
                if (t < extent.count) *reinterpret_cast<float2*>(to) = {x[2 * t], x[2 * t + 1]};
            return;
        }
        const auto store_words = [&](const auto& pack) {
            auto* to = static_cast<std::uint16_t*>(rows.data) + first;
#pragma unroll
            for (int t = 0; t < kHalf; ++t, to += rows.token)
                if (t < extent.count) *reinterpret_cast<std::uint32_t*>(to) = pack(x[2 * t], x[2 * t + 1]);
        };
        if (rows.dtype == Dtype::kBFloat16)
            store_words([](float low, float high) { return pack2<__nv_bfloat16>(low, high); });
        else
            store_words([](float low, float high) { return pack2<__half>(low, high); });
    }

private:
    // Where the lane's column begins in a tensor, in elements.
    __device__ __forceinline__ std::int64_t column_of(AnchoredRows::Name name, const TokenRows& rows,
                                                      const Patch<kKey>& patch) const {
        return s.rows[parity][name] + patch.token * rows.token + patch.channel * rows.last;
    }
    // Rows that are not read and written by words of two channels are so element by element, through the
    // lane's column of the patch in shared memory.
    __device__ __forceinline__ float& element(const Patch<kKey>& patch, int i) const {
        return ColumnFloats(s.own[patch.warp].turned, patch).element(i);
    }
    __device__ __forceinline__ void load_elements(Column& x, const TokenRows& rows, std::int64_t first,
                                                  const Patch<kKey>& patch, const Extent& extent) const {
#pragma unroll 1
        for (int i = 0; i < 2 * kHalf; ++i)
            element(patch, i) = extent.has(i) ? load_float(rows.data, rows.dtype,
                                                           first + i / 2 * rows.token + i % 2 * rows.last)
                                              : 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) x[i] = element(patch, i);
    }
    // Two channels of eight tokens, of float32 or of two bytes each.
    static __device__ __forceinline__ void load_pairs(Column& x, const TokenRows& rows, std::int64_t first,
                                                      const Extent& extent) {
        const auto* from = static_cast<const float*>(rows.data) + first;
#pragma unroll
        for (int t = 0; t < kHalf; ++t, from += rows.token) {
            const float2 pair =
                t < extent.count ? *reinterpret_cast<const float2*>(from) : float2{0.0f, 0.0f};
            x[2 * t] = pair.x, x[2 * t + 1] = pair.y;
        }
    }
    static __device__ __forceinline__ void load_words(std::uint32_t (&words)[kHalf], const TokenRows& rows,
                                                      std::int64_t first, const Extent& extent) {
        const auto* from = static_cast<const std::uint16_t*>(rows.data) + first;
#pragma unroll
        for (int t = 0; t < kHalf; ++t, from += rows.token) words[t] = load32_if(from, t < extent.count);
    }
    // q or k as they came. begin: where the chunk's rows begin.
    __device__ __forceinline__ void load_keys(std::uint32_t (&words)[kHalf], const TokenRows& rows,
                                              std::int64_t begin, const Patch<kKey>& patch,
                                              const Extent& extent) const {
        const std::int64_t first = begin + patch.token * rows.token + patch.channel * rows.last;
        if (rows.pieces) return load_words(words, rows, first, extent);
        Column x;
        load_elements(x, rows, first, patch, extent);
#pragma unroll
        for (int t = 0; t < kHalf; ++t) words[t] = pack2<T>(x[2 * t], x[2 * t + 1]);
    }
    __device__ __forceinline__ bool has_gate_words() const {
        return a.g.pieces && (a.g.dtype == Dtype::kBFloat16 || a.g.dtype == Dtype::kFloat16);
    }
    __device__ __forceinline__ void load_gates(std::uint32_t (&words)[kHalf], int parity_of,
                                               const Patch<kKey>& patch, const Extent& extent) const {
        if (has_gate_words())
            return load_words(words, a.g,
                              s.rows[parity_of][AnchoredRows::kG] + patch.token * a.g.token + patch.channel,
                              extent);
#pragma unroll
        for (std::uint32_t& word : words) word = 0u;
    }
};

}  // namespace cula::cuda::backward
