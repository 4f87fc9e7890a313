// SPDX-License-Identifier: Apache-2.0
// Gates of one block of 16 tokens, one per channel: loaded, turned into log2
// decays, and summed from the block's middle (after token 7) to both ends.
#pragma once

#include "cuda/chunked/block.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::chunked {

// Copies one, two or four floats to shared memory by cp.async; writes zeros if not `in`.
template <int kCount>
__device__ __forceinline__ void copy_floats_if(float* to, const float* from, bool in) {
    constexpr int kBytes = 4 * kCount;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
                 "n"(kBytes), "r"(in ? kBytes : 0));
}

// GateTiles of a kernel that loads raw gates by cp.async only. A target may bring one that uses TMA
// (ChunkedTarget).
struct NoGateTiles {
    // Whether a block of `count` tokens can come as one TMA tile: it
    // must be whole, and the call's gates must have a tensor map.
    static __device__ __forceinline__ bool has(int) { return false; }
    // By one thread of a warp: loads the block from `token` on, [token][channel], to shared memory.
    // The load completes the first phase of the mbarrier `full`, which this call initializes.
    // `ahead`: as in BlockRows::fetch.
    static __device__ __forceinline__ void ask(std::uint16_t*, std::uint64_t*, std::int64_t, std::int64_t,
                                               int, int) {}
    // After the asking thread and the rest of the warp have synchronized.
    static __device__ __forceinline__ void wait(std::uint64_t*) {}
};

// The gates of one block. A lane owns kChannels / 32 neighbouring channels.
// kPairs: a token is two rows of the block (RowsOfPairs), of which the second does not decay.
template <class T, int kKey, bool kPairs = false>
struct BlockGates {
    using P = Parts<kKey>;
    static constexpr int kOwned = P::kChannels / 32;

    const DeviceArgs& a;
    float* sums;         // [group][token][channel of 32], units of four floats swizzled by the token
    std::uint16_t* raw;  // [token][channel]
    int first_channel;   // of the warp's part
    int count;           // existing tokens of the block
    const bool narrow =  // gates of type T stay in `raw`; all others are converted to floats in `sums`
        a.g.dtype == kDtype<T> && a.g.pieces;
    const int lane = static_cast<int>(threadIdx.x) % 32, channel = first_channel + lane * kOwned;

    __device__ __forceinline__ int last() const { return count > 0 ? count - 1 : 0; }
    // unit_at: position of a unit of four channels of a token. place: position of the lane's own channels.
    static __device__ __forceinline__ int unit_at(int unit, int token) {
        return unit / 8 * (kBlock * 8) + token * 8 + (unit % 8 ^ (token & 1));
    }
    __device__ __forceinline__ float* place(int token) const {
        if constexpr (kOwned == 4) return sums + unit_at(lane, token) * 4;
        return sums + unit_at(lane / 2, token) * 4 + lane % 2 * 2;
    }
    using Owned = std::conditional_t<kOwned == 4, float4, float2>;
    __device__ __forceinline__ void get(float (&x)[kOwned], int token) const {
        const Owned whole = *reinterpret_cast<const Owned*>(place(token));
        x[0] = whole.x, x[1] = whole.y;
        if constexpr (kOwned == 4) x[2] = whole.z, x[3] = whole.w;
    }
    static __device__ __forceinline__ void put(const float (&x)[kOwned], float* to) {
        if constexpr (kOwned == 4)
            *reinterpret_cast<float4*>(to) = float4{x[0], x[1], x[2], x[3]};
        else
            *reinterpret_cast<float2*>(to) = float2{x[0], x[1]};
    }

    // The token of a row, counted from the block's first, and whether the row has one.
    __device__ __forceinline__ int token_of(int row) const {
        return kPairs ? RowsOfPairs::token(min(row, last())) : min(row, last());
    }
    static __device__ __forceinline__ bool decays(int row) { return !kPairs || RowsOfPairs::is_first(row); }

    // Starts loading. Tokens beyond `count` get the gates of the last one, and sum() leaves them out.
    // `ahead`: as in BlockRows::fetch.
    __device__ __forceinline__ void load(std::int64_t row, int ahead) const {
        if (narrow) {
            copy<T>(row, raw, ahead);
        } else if (a.g.dtype == Dtype::kFloat32 && a.g.pieces) {
            copy<float>(row, sums, ahead);
        } else {
#pragma unroll 1
            for (int t = 0; t < kBlock; ++t)
#pragma unroll
                for (int i = 0; i < kOwned; ++i)
                    place(t)[i] =
                        channel + i < a.key_dim && decays(t)
                            ? load_float(a.g.data, a.g.dtype, row + token_of(t) * a.g.token + channel + i)
                            : 0.0f;
        }
    }

    // 16 bytes per lane; the warp covers as many rows at once as that makes.
    template <class Element>
    __device__ __forceinline__ void copy(std::int64_t row, void* to, int ahead) const {
        constexpr int kPieces = P::kChannels * sizeof(Element) / 16, kRows = 32 / kPieces;
        const int piece = lane % kPieces,
                  c = first_channel + piece * (16 / static_cast<int>(sizeof(Element))),
                  pitch = static_cast<int>(a.g.token) * static_cast<int>(sizeof(Element));
        uint4* units = static_cast<uint4*>(to);
        const auto place_of_unit = [&](int t) {
            return units + (sizeof(Element) == 4 ? unit_at(piece, t) : t * kPieces + piece);
        };
        if (c < a.key_dim) {
            const auto* from = static_cast<const Element*>(a.g.data) + row + c;
#pragma unroll
            for (int first = 0; first < kBlock; first += kRows) {
                const int t = first + lane / kPieces;
                if (decays(t))
                    copy_async(shared_address(place_of_unit(t)), advanced(from, token_of(t), pitch));
                else
                    *place_of_unit(t) = uint4{};
            }
        } else {
#pragma unroll 1
            for (int t = lane / kPieces; t < kBlock; t += kRows) *place_of_unit(t) = uint4{};
        }
        constexpr int kLine = 128 / static_cast<int>(sizeof(Element)), kLines = P::kChannels / kLine;
        if (ahead == 0) return;
#pragma unroll
        for (int i = lane / kBlock; i < kLines; i += 2) {
            const int line = first_channel + i * kLine;
            if (line < a.key_dim)
                prefetch(advanced(static_cast<const Element*>(a.g.data) + row + line, lane % kBlock + ahead,
                                  pitch));
        }
    }

    // Replaces the gates by sums of log2 decays from the middle (after token 7) outward.
    // head: the log2 decay from the block's start to its middle. tail: from the middle to its end.
    __device__ __forceinline__ void sum(const HeadGate& gate, const float (&bias)[kOwned],
                                        float (&head)[kOwned], float (&tail)[kOwned]) const {
        switch (gate.kind) {
            case Gate::kSoftplus: sum_of<Gate::kSoftplus, true>(gate, bias, head, tail); break;
            case Gate::kBounded:
                if (gate.out >= kLeastLog2Decay)
                    sum_of<Gate::kBounded, false>(gate, bias, head, tail);
                else
                    sum_of<Gate::kBounded, true>(gate, bias, head, tail);
                break;
            case Gate::kLogDecay: sum_of<Gate::kLogDecay, true>(gate, bias, head, tail); break;
        }
    }
    // After sum(): the log2 decay of the slowest channel, summed over every fourth token of the block.
    // Decays are at most 1, so this bounds the sum over all tokens, at a quarter of the work.
    __device__ __forceinline__ float slowest() const {
        float sum = 0.0f;
#pragma unroll 2
        for (int t = 3; t < kBlock; t += 4) {
            float before[kOwned], x[kOwned], least = 3e38f;
            get(before, t - 1);
            get(x, t);
#pragma unroll
            for (int i = 0; i < kOwned; ++i) least = fminf(least, before[i] - x[i]);
            // Non-negative floats order like their bits. fmaxf turns a NaN into 0, no decay.
            sum -= __uint_as_float(__reduce_min_sync(0xffffffffu, __float_as_uint(fmaxf(least, 0.0f))));
        }
        return sum;
    }
    // Moves the reference of channels of which a half decays
    // by more than 2^-most to where both halves decay alike.
    // head, tail: what sum() gave for the lane's channels; updated.
    // Returns whether that is still too much for one of them.
    // Rare, and therefore one number at a time, so that it adds no register pressure.
    __device__ __forceinline__ bool balance(float* head, float* tail, float most) const {
        bool too_much = false;
#pragma unroll 1
        for (int i = 0; i < kOwned; ++i) {
            const float half = 0.5f * (head[i] + tail[i]), shift = head[i] - half;
            if (channel + i >= a.key_dim || fminf(head[i], tail[i]) >= -most) continue;
            head[i] = tail[i] = half;
            too_much |= half < -most;
#pragma unroll 1
            for (int t = 0; t < kBlock; ++t) place(t)[i] += shift;
        }
        return too_much;
    }
    template <Gate kGate, bool kClamped>
    __device__ __forceinline__ void sum_of(const HeadGate& gate, const float (&bias)[kOwned],
                                           float (&head)[kOwned], float (&tail)[kOwned]) const {
        if (narrow)
            sum_from<kGate, kClamped, true>(gate, bias, head, tail);
        else
            sum_from<kGate, kClamped, false>(gate, bias, head, tail);
    }
    template <Gate kGate, bool kClamped, bool kNarrow>
    __device__ __forceinline__ void sum_from(const HeadGate& gate, const float (&bias)[kOwned],
                                             float (&head)[kOwned], float (&tail)[kOwned]) const {
        const float most = fminf(__fdividef(kLeastLog2Decay, gate.out), 3e38f);
        float offset[kOwned];
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            // Channels beyond K hold zeros. They must not decay:
            // a factor out of range times zero would be NaN.
            constexpr float kNoGate = kGate == Gate::kBounded ? 3e38f : -3e38f;
            offset[i] = channel + i < a.key_dim ? gate.in * bias[i] : kNoGate;
            head[i] = tail[i] = 0.0f;
        }
        const auto shapes = [&](float(&x)[kOwned], int t) {
            if constexpr (kNarrow) {
                const auto* from =
                    reinterpret_cast<const std::uint32_t*>(raw + t * P::kChannels + lane * kOwned);
                std::uint32_t words[kOwned / 2];
                if constexpr (kOwned == 4) {
                    const uint2 two = *reinterpret_cast<const uint2*>(from);
                    words[0] = two.x, words[1] = two.y;
                } else {
                    words[0] = from[0];
                }
#pragma unroll
                for (int i = 0; i < kOwned; i += 2) {
                    const float2 pair = unpack2<T>(words[i / 2]);
                    x[i] = pair.x, x[i + 1] = pair.y;
                }
            } else {
                get(x, t);
            }
#pragma unroll
            for (int i = 0; i < kOwned; ++i) {
                // A given log decay is used exactly as it is: no fmaf.
                x[i] = gate_shape<kGate, GateBits::k14>(
                    kGate == Gate::kLogDecay ? x[i] : fmaf(gate.in, x[i], offset[i]));
                if (kClamped) x[i] = min_or_nan(x[i], most);
            }
        };
#pragma unroll 2
        for (int i = 0; i < kBlock / 2; ++i) {
            const int after = kBlock / 2 + i, before = kBlock / 2 - 1 - i;
            float x[kOwned], y[kOwned];
            shapes(x, after);
            shapes(y, before);
            const float out = after < count && decays(after) ? gate.out : 0.0f,
                        back = before < count && decays(before) ? -gate.out : 0.0f;
#pragma unroll
            for (int c = 0; c < kOwned; ++c) tail[c] = fmaf(out, x[c], tail[c]);
            put(tail, place(after));
            put(head, place(before));
#pragma unroll
            for (int c = 0; c < kOwned; ++c) head[c] = fmaf(back, y[c], head[c]);
        }
#pragma unroll
        for (int i = 0; i < kOwned; ++i) head[i] = -head[i];
    }
};

}  // namespace cula::cuda::chunked
