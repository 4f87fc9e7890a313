// SPDX-License-Identifier: Apache-2.0
// The gated RMSNorm of rows, and its gradients. Lanes are channels. A row is read once: its floats stay in
// scratch between the sum of squares and the product.
#pragma once

#include "cpu/layers.h"
#include "cpu/matrix.h"
#include "cpu/simd.h"

namespace cula::cpu::CULA_CPU_TARGET {

// The addresses of one row after another.
struct NormCursor {
    const NormCall& call;
    std::int64_t index[kNormDims] = {};

    CULA_INLINE NormCursor(const NormCall& norm, std::int64_t row) : call(norm) {
        for (int d = norm.dims - 1; d >= 0; --d) {
            index[d] = row % norm.size[d];
            row /= norm.size[d];
        }
    }

    CULA_INLINE std::byte* row(const NormRows& rows) const {
        std::int64_t offset = 0;
        for (int d = 0; d < call.dims; ++d) offset += index[d] * rows.stride[d];
        return element(rows.data, rows.dtype, offset);
    }

    CULA_INLINE void next() {
        for (int d = call.dims - 1; d >= 0 && ++index[d] == call.size[d]; --d) index[d] = 0;
    }
};

// The lanes from channel c on, zeros behind the last channel.
CULA_INLINE Vec load_lanes(const std::byte* row, Dtype dtype, int c, int channels) {
    const std::byte* p = element(row, dtype, c);
    if (c + kLanes <= channels) return load_vec(p, dtype);
    Vec x{};
    for (int l = 0; c + l < channels; ++l) x[l] = load_scalar(element(p, dtype, l), dtype);
    return x;
}

CULA_INLINE void store_lanes(std::byte* row, Dtype dtype, int c, int channels, Vec x) {
    std::byte* p = element(row, dtype, c);
    if (c + kLanes <= channels) return store_vec(p, dtype, x);
    for (int l = 0; c + l < channels; ++l) store_scalar(element(p, dtype, l), dtype, x[l]);
}

CULA_INLINE Vec activated(Vec gate, bool is_sigmoid) {
    const Vec s = sigmoid(gate);
    return is_sigmoid ? s : gate * s;
}

CULA_INLINE Vec slope(Vec gate, bool is_sigmoid) {
    const Vec s = sigmoid(gate);
    return is_sigmoid ? s * (1.0f - s) : s * (1.0f + gate * (1.0f - s));
}

// The parameters as floats, and two rows of one group. Each group is padded with zeros to whole vectors.
struct NormScratch {
    float *weight, *bias, *x, *slopes;

    CULA_INLINE NormScratch(std::byte* scratch, int channels, int group) {
        const std::int64_t room = padded(group);
        weight = reinterpret_cast<float*>(scratch);
        bias = weight + channels / group * room;
        x = bias + channels / group * room;
        slopes = x + room;
    }
};

inline std::size_t norm_scratch_bytes(int channels, int group) {
    return static_cast<std::size_t>(2 * (channels / group + 1)) * static_cast<std::size_t>(padded(group)) *
           sizeof(float);
}

inline void read_parameters(const NormCall& call, const NormScratch& scratch) {
    const std::int64_t room = padded(call.group);
    for (std::int64_t at = 0; at < call.channels / call.group * room; ++at) {
        const int lane = static_cast<int>(at % room), c = static_cast<int>(at / room) * call.group + lane;
        const bool real = lane < call.group;
        float weight = real ? 1.0f : 0.0f, bias = 0.0f;
        if (real && call.weight)
            weight = load_scalar(element(call.weight, call.weight_dtype, c * call.weight_stride),
                                 call.weight_dtype) +
                     (call.zero_centered ? 1.0f : 0.0f);
        if (real && call.bias)
            bias = load_scalar(element(call.bias, call.bias_dtype, c * call.bias_stride), call.bias_dtype);
        scratch.weight[at] = weight;
        scratch.bias[at] = bias;
    }
}

CULA_INLINE float inverse_rms(float squares, int count, float eps) {
    return 1.0f / __builtin_sqrtf(squares / static_cast<float>(count) + eps);
}

template <bool kGated, bool kNormFirst>
void norm_rows(const NormCall& call, std::int64_t begin, std::int64_t end, std::byte* memory) {
    const NormScratch scratch(memory, call.channels, call.group);
    read_parameters(call, scratch);
    const int group = call.group;
    const bool is_sigmoid = call.sigmoid;
    NormCursor cursor(call, begin);
    for (std::int64_t r = begin; r < end; ++r, cursor.next()) {
        const std::byte* x_row = cursor.row(call.x);
        const std::byte* gate_row = kGated ? cursor.row(call.gate) : nullptr;
        std::byte* y_row = cursor.row(call.y);
        const float *weight = scratch.weight, *bias = scratch.bias;
        for (int first = 0; first < call.channels;
             first += group, weight += padded(group), bias += padded(group)) {
            const std::byte* x = element(x_row, call.x.dtype, first);
            const std::byte* gate = kGated ? element(gate_row, call.gate.dtype, first) : nullptr;
            Vec squares{};
            for (int c = 0; c < group; c += kLanes) {
                Vec value = load_lanes(x, call.x.dtype, c, group);
                if constexpr (kGated && !kNormFirst)
                    value *= activated(load_lanes(gate, call.gate.dtype, c, group), is_sigmoid);
                store(scratch.x + c, value);
                squares += value * value;
            }
            const float scale = inverse_rms(sum(squares), group, call.eps);
            std::byte* y = element(y_row, call.y.dtype, first);
            for (int c = 0; c < group; c += kLanes) {
                Vec value = load(scratch.x + c) * scale * load(weight + c) + load(bias + c);
                if constexpr (kGated && kNormFirst)
                    value *= activated(load_lanes(gate, call.gate.dtype, c, group), is_sigmoid);
                store_lanes(y, call.y.dtype, c, group, value);
            }
        }
    }
}

inline void norm(const NormCall& call, std::int64_t begin, std::int64_t end, std::byte* memory) {
    if (!call.gate.data) return norm_rows<false, true>(call, begin, end, memory);
    if (call.norm_before_gate) return norm_rows<true, true>(call, begin, end, memory);
    norm_rows<true, false>(call, begin, end, memory);
}

// u = normalized, n = u w + b. Of y = n a(gate): dn = dy a, d_gate = dy n a'. Of y = n, u of h = x a(gate):
// d_gate = dh x a', d_x = dh a. Of both: du = dn w, dh = (du - u mean(du u)) / rms.
inline void norm_backward(const NormCall& call, std::int64_t begin, std::int64_t end, float* sums,
                          std::byte* memory) {
    const NormScratch scratch(memory, call.channels, call.group);
    read_parameters(call, scratch);
    const int group = call.group, channels = call.channels;
    const bool is_sigmoid = call.sigmoid, gated = call.gate.data != nullptr,
               gate_after = gated && call.norm_before_gate, gate_before = gated && !call.norm_before_gate;
    if (sums)
        for (int c = 0; c < 2 * channels; ++c) sums[c] = 0.0f;
    NormCursor cursor(call, begin);
    for (std::int64_t r = begin; r < end; ++r, cursor.next()) {
        const float *weight = scratch.weight, *bias = scratch.bias;
        for (int first = 0; first < channels;
             first += group, weight += padded(group), bias += padded(group)) {
            const auto part = [&](const NormRows& rows) {
                return rows.data ? element(cursor.row(rows), rows.dtype, first) : nullptr;
            };
            const std::byte *x = part(call.x), *gate = part(call.gate), *d_y = part(call.d_y);
            std::byte *d_x = part(call.d_x), *d_gate = part(call.d_gate);
            Vec squares{};
            for (int c = 0; c < group; c += kLanes) {
                Vec value = load_lanes(x, call.x.dtype, c, group);
                if (gate_before) value *= activated(load_lanes(gate, call.gate.dtype, c, group), is_sigmoid);
                store(scratch.x + c, value);
                squares += value * value;
            }
            const float scale = inverse_rms(sum(squares), group, call.eps);
            Vec products{};
            for (int c = 0; c < group; c += kLanes) {
                const Vec u = load(scratch.x + c) * scale, w = load(weight + c);
                Vec dn = load_lanes(d_y, call.d_y.dtype, c, group);
                if (gate_after) {
                    const Vec z = load_lanes(gate, call.gate.dtype, c, group);
                    if (d_gate)
                        store_lanes(d_gate, call.d_gate.dtype, c, group,
                                    dn * (u * w + load(bias + c)) * slope(z, is_sigmoid));
                    dn *= activated(z, is_sigmoid);
                }
                if (sums) {
                    const int lanes = group - c < kLanes ? group - c : kLanes;
                    float *dw = sums + first + c, *db = dw + channels;
                    if (lanes == kLanes) {
                        store(dw, load(dw) + dn * u);
                        store(db, load(db) + dn);
                    } else {
                        for (int l = 0; l < lanes; ++l) dw[l] += dn[l] * u[l], db[l] += dn[l];
                    }
                }
                store(scratch.slopes + c, dn * w);
                products += dn * w * u;
            }
            if (!d_x && !(d_gate && gate_before)) continue;
            const float mean = sum(products) / static_cast<float>(group);
            for (int c = 0; c < group; c += kLanes) {
                const Vec u = load(scratch.x + c) * scale;
                Vec dh = (load(scratch.slopes + c) - u * mean) * scale;
                if (gate_before) {
                    const Vec z = load_lanes(gate, call.gate.dtype, c, group);
                    if (d_gate)
                        store_lanes(d_gate, call.d_gate.dtype, c, group,
                                    dh * load_lanes(x, call.x.dtype, c, group) * slope(z, is_sigmoid));
                    dh *= activated(z, is_sigmoid);
                }
                if (d_x) store_lanes(d_x, call.d_x.dtype, c, group, dh);
            }
        }
    }
}

}  // namespace cula::cpu::CULA_CPU_TARGET
