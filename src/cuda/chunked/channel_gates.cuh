// SPDX-License-Identifier: Apache-2.0
// The gates of 16 tokens, one per channel: asked for, turned into log2 decays, and summed from the block's
// middle, after token 7, to both ends.
#pragma once

#include "cuda/chunked/block.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/gate.cuh"

namespace cula::cuda::chunked {

// One, two or four floats to shared memory, or zero where not `in`.
template <int kCount>
__device__ __forceinline__ void copy_floats_if(float* to, const float* from, bool in) {
    constexpr int kBytes = 4 * kCount;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
                 "n"(kBytes), "r"(in ? kBytes : 0));
}

// Where prepare has no other way to raw gates than loads. What a kernel knows instead (sm90/gate_tiles.cuh):
struct NoGateTiles {
    // Whether a block of `count` tokens can come as a box: whole ones, where the call's gates have a map.
    static __device__ __forceinline__ bool has(int) { return false; }
    // By one thread of a warp: the block from `token` on, [token][channel], to shared memory; `full`, which
    // nobody has used, completes its first phase with it. `ahead` as that of BlockRows::fetch.
    static __device__ __forceinline__ void ask(std::uint16_t*, std::uint64_t*, std::int64_t, std::int64_t,
                                               int, int) {}
    // After the thread that asked and all others of the warp have met.
    static __device__ __forceinline__ void wait(std::uint64_t*) {}
};

// The gates of one block. A lane owns kChannels / 32 neighbouring channels.
template <class T, int kKey>
struct BlockGates {
    using P = Parts<kKey>;
    static constexpr int kOwned = P::kChannels / 32;

    const DeviceArgs& a;
    float* sums;         // [group][token][channel of 32], units of four permuted by the token
    std::uint16_t* raw;  // [token][channel]
    int first_channel;   // of the part
    int count;           // tokens of the block that exist
    const bool narrow =  // gates of type T wait in raw, all others as floats in sums
        a.g.dtype == kDtype<T> && a.g.pieces;
    const int lane = static_cast<int>(threadIdx.x) % 32, channel = first_channel + lane * kOwned;

    __device__ __forceinline__ int last() const { return count > 0 ? count - 1 : 0; }
    // Where a unit of four channels of a token stands; where the lane's own channels do.
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

    // Tokens beyond `count` get the gates of the last; sum() leaves them out. `ahead` as that of
    // BlockRows::fetch.
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
                        channel + i < a.key_dim
                            ? load_float(a.g.data, a.g.dtype, row + min(t, last()) * a.g.token + channel + i)
                            : 0.0f;
        }
    }

    // 16 bytes a lane, as many rows at once as that makes.
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
                copy_async(shared_address(place_of_unit(t)), advanced(from, min(t, last()), pitch));
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

    // log2 decays summed from the middle, after token 7, outward; the whole to the middle (head) and from it
    // (tail).
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
    // After sum(): the log2 decay of the slowest channel, summed over every fourth of the block's tokens.
    // That is a bound for all of them, and a quarter of the work.
    __device__ __forceinline__ float slowest() const {
        float sum = 0.0f;
#pragma unroll 2
        for (int t = 3; t < kBlock; t += 4) {
            float before[kOwned], x[kOwned], least = 3e38f;
            get(before, t - 1);
            get(x, t);
#pragma unroll
            for (int i = 0; i < kOwned; ++i) least = fminf(least, before[i] - x[i]);
            // Floats that are not negative have the order of their bits; what is no number counts as none.
            sum -= __uint_as_float(__reduce_min_sync(0xffffffffu, __float_as_uint(fmaxf(least, 0.0f))));
        }
        return sum;
    }
    // Where a half of a channel decays by more than `most`, its sums run from where both halves decay alike
    // instead; head, tail: what sum() gave, of the lane's channels. Whether that is still too much for one.
    // Rare, and one number at a time, so that it takes no registers.
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
            // Channels beyond K hold zeros, which a factor out of range would turn into NaN: they do not
            // decay.
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
                // A given log decay is exactly what it is.
                x[i] = gate_shape<kGate, GateBits::k14>(
                    kGate == Gate::kLogDecay ? x[i] : fmaf(gate.in, x[i], offset[i]));
                if (kClamped) x[i] = fminf(x[i], most);
            }
        };
#pragma unroll 2
        for (int i = 0; i < kBlock / 2; ++i) {
            const int after = kBlock / 2 + i, before = kBlock / 2 - 1 - i;
            float x[kOwned], y[kOwned];
            shapes(x, after);
            shapes(y, before);
            const float out = after < count ? gate.out : 0.0f, back = before < count ? -gate.out : 0.0f;
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
