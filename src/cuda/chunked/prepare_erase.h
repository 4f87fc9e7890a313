// SPDX-License-Identifier: Apache-2.0
// Interface to the instances of what calls with erase strengths launch besides what the delta rule launches:
// erase_operands, and prepare_channel with erase keys (instances.txt).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/carve.h"
#include "core/check.h"
#include "cuda/call.h"
#include "cuda/chunked/chunk.cuh"
#include "cuda/chunked/plan.h"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::chunked {

class EarlyStarts;

inline constexpr int kEraseThreads = 256;
inline constexpr int kTokensOfLane = 4;  // of erase_operands

// Rows that a call makes have a multiple of eight channels.
CULA_HOST_DEVICE std::int64_t width_of_rows(std::int64_t channels) { return (channels + 7) / 8 * 8; }

// What one call makes (erase_operands.cuh).
template <class T>
struct EraseOperands {
    T* keys = nullptr;           // [B, T, HV, K]; for the gradient kernel
    float* strengths = nullptr;  // [B, T, HV, K]; where prepare_channel cannot read them as they came
    T* values = nullptr;         // [B, T, HV, V]

    // Whether prepare_channel cannot read erase strengths as they came: in whole pieces, of T or float32.
    static bool converts(const TokenRows& erase) {
        return !erase.pieces || (erase.dtype != kDtype<T> && erase.dtype != Dtype::kFloat32);
    }
    // rows: of all tokens and value heads.
    void carve(Carver& carver, std::int64_t rows, const PrefillShape& shape, bool with_keys) {
        if (with_keys) keys = carver.take<T>(rows * width_of_rows(shape.key_dim));
        if (shape.converts_erase) strengths = carver.take<float>(rows * width_of_rows(shape.key_dim));
        values = carver.take<T>(rows * width_of_rows(shape.value_dim));
    }
    // Rows of all tokens and value heads.
    static std::int64_t rows(const DeviceArgs& a) {
        return (a.cu_seqlens ? 1 : std::int64_t{a.sequences}) * a.tokens * a.value_heads;
    }
    // The same of kTokensOfLane tokens each.
    static std::int64_t runs(const DeviceArgs& a) {
        return a.tokens > 0 ? rows(a) / a.tokens * ((a.tokens + kTokensOfLane - 1) / kTokensOfLane) : 0;
    }
    // CTAs with kKey / 8 lanes for each of them.
    template <int kKey>
    static std::size_t blocks(std::int64_t rows) {
        return static_cast<std::size_t>((rows * (kKey / 8) + kEraseThreads - 1) / kEraseThreads);
    }
    template <class Element>
    static TokenRows rows_at(Element* data, const DeviceArgs& a, std::int64_t channels) {
        const std::int64_t head = width_of_rows(channels), token = head * a.value_heads;
        return {data, kDtype<Element>, token * a.tokens, token, head, 1, channels % 8 == 0};
    }
    // The arguments of the delta rule, with erase strengths.
    void replace(DeviceArgs& a) const {
        if (!strengths && converts(a.erase))
            throw Error("run: args must be those of the plan, got another erase");
        if (keys) a.erase_keys = rows_at(keys, a, a.key_dim);
        if (strengths) a.erase = rows_at(strengths, a, a.key_dim);
        if (strengths) a.erase.pieces = true;  // channels up to width_of_rows() are zeros
        a.v = rows_at(values, a, a.value_dim);
        a.beta = {};
    }
};

template <class T, int kKey>
void launch_erase_operands(const Call& call, const EraseOperands<T>& operands);

template <class T, int kKey>
void launch_prepare_erase(const Call& call, const DeviceArgs& a, const Schedule& schedule,
                          ChannelChunk<T, kKey>* operands, std::int32_t* is_compensated, EarlyStarts& early);

}  // namespace cula::cuda::chunked
