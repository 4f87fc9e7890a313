// SPDX-License-Identifier: Apache-2.0
// Interface to the instances of what calls with erase strengths launch besides what the delta rule launches:
// erase_operands, and prepare_channel with erase keys (instances.txt).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/call.h"
#include "cuda/chunked/chunk.cuh"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::chunked {

class EarlyStarts;

inline constexpr int kEraseThreads = 256;

// The operands that one call makes: rows of e and of beta o v, of a multiple of eight channels each.
template <class T>
struct EraseOperands {
    T *keys = nullptr, *values = nullptr;

    static std::int64_t width(std::int64_t channels) { return (channels + 7) / 8 * 8; }
    // Rows of all tokens and value heads.
    static std::int64_t rows(const DeviceArgs& a) {
        return (a.cu_seqlens ? 1 : std::int64_t{a.sequences}) * a.tokens * a.value_heads;
    }
    // CTAs with kKey / 8 lanes for each of them.
    template <int kKey>
    static std::size_t blocks(std::int64_t rows) {
        return static_cast<std::size_t>((rows * (kKey / 8) + kEraseThreads - 1) / kEraseThreads);
    }
    static TokenRows rows_at(T* data, const DeviceArgs& a, std::int64_t channels) {
        const std::int64_t head = width(channels), token = head * a.value_heads;
        return {data, kDtype<T>, token * a.tokens, token, head, 1, channels % 8 == 0};
    }
    // The arguments of the delta rule, with an erase key.
    void replace(DeviceArgs& a) const {
        a.erase_keys = rows_at(keys, a, a.key_dim), a.v = rows_at(values, a, a.value_dim);
        a.erase_keys.pieces = true;  // channels up to width() are zeros
        a.beta = {};
    }
};

template <class T, int kKey>
void launch_erase_operands(const Call& call, const EraseOperands<T>& operands);

template <class T, int kKey>
void launch_prepare_erase(const Call& call, const DeviceArgs& a, const Schedule& schedule,
                          ChannelChunk<T, kKey>* operands, std::int32_t* is_compensated, EarlyStarts& early);

}  // namespace cula::cuda::chunked
