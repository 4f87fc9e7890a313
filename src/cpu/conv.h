// SPDX-License-Identifier: Apache-2.0
// The short causal convolution: prompts, their gradients, and the next tokens of many sequences.
//
// Lanes are channels, and four tokens go through the registers together: W + 3 rows of x make four rows of y.
// Where the channels of x and y are contiguous their memory is read and written as it is; anything else, and
// the first tokens of a sequence, whose window begins in the state, pass through rows of floats.
#pragma once

#include "cpu/layers.h"
#include "cpu/matrix.h"
#include "cpu/simd.h"

namespace cula::cpu::CULA_CPU_TARGET {

struct Bf16 {
    std::uint16_t bits;
};
struct Fp16 {
    std::uint16_t bits;
};

CULA_INLINE Vec load(const Bf16* p) { return load_bf16(&p->bits); }
CULA_INLINE Vec load(const Fp16* p) { return load_fp16(&p->bits); }
CULA_INLINE void store(Bf16* p, Vec x) { store_bf16(&p->bits, x); }
CULA_INLINE void store(Fp16* p, Vec x) { store_fp16(&p->bits, x); }

// Weights [W, channels] and, where bias is not null, bias [channels], in floats and padded.
struct ConvWeights {
    const float* taps;
    const float* bias;
    std::int64_t stride;
    int width, channels;
    bool silu;
};

// kTokens rows of y from kTokens + W - 1 rows of x, of which x is the first. kWidth = 0: any.
template <int kWidth, int kTokens, class In, class Out>
CULA_INLINE void convolve_tokens(const ConvWeights& w, const In* x, std::int64_t x_stride, Out* y,
                                 std::int64_t y_stride) {
    const int width = kWidth ? kWidth : w.width;
    for (int c = 0; c < w.channels; c += kLanes) {
        Vec sum[kTokens];
        const Vec bias = w.bias ? load(w.bias + c) : Vec{};
        CULA_UNROLL
        for (int t = 0; t < kTokens; ++t) sum[t] = bias;
        if constexpr (kWidth > 0) {
            Vec rows[kTokens + kWidth - 1];
            CULA_UNROLL
            for (int r = 0; r < kTokens + kWidth - 1; ++r) rows[r] = load(x + r * x_stride + c);
            CULA_UNROLL
            for (int j = 0; j < kWidth; ++j) {
                const Vec tap = load(w.taps + j * w.stride + c);
                CULA_UNROLL
                for (int t = 0; t < kTokens; ++t) sum[t] += tap * rows[t + j];
            }
        } else {
            for (int j = 0; j < width; ++j) {
                const Vec tap = load(w.taps + j * w.stride + c);
                CULA_UNROLL
                for (int t = 0; t < kTokens; ++t) sum[t] += tap * load(x + (t + j) * x_stride + c);
            }
        }
        CULA_UNROLL
        for (int t = 0; t < kTokens; ++t) {
            const Vec z = sum[t];
            store(y + t * y_stride + c, w.silu ? z * sigmoid(z) : z);
        }
    }
}

template <int kWidth, class In, class Out>
void convolve_rows(const ConvWeights& w, const In* x, std::int64_t x_stride, Out* y, std::int64_t y_stride,
                   std::int64_t tokens) {
    constexpr int kTogether = 4;
    std::int64_t t = 0;
    for (; t + kTogether <= tokens; t += kTogether)
        convolve_tokens<kWidth, kTogether>(w, x + t * x_stride, x_stride, y + t * y_stride, y_stride);
    for (; t < tokens; ++t)
        convolve_tokens<kWidth, 1>(w, x + t * x_stride, x_stride, y + t * y_stride, y_stride);
}

template <class In, class Out>
void convolve_rows(const ConvWeights& w, const In* x, std::int64_t x_stride, Out* y, std::int64_t y_stride,
                   std::int64_t tokens) {
    switch (w.width) {
        case 2: return convolve_rows<2>(w, x, x_stride, y, y_stride, tokens);
        case 3: return convolve_rows<3>(w, x, x_stride, y, y_stride, tokens);
        case 4: return convolve_rows<4>(w, x, x_stride, y, y_stride, tokens);
        default: return convolve_rows<0>(w, x, x_stride, y, y_stride, tokens);
    }
}

// The scratch of a task: what follows one another in rows of kConvChannels floats.
struct ConvScratch {
    float *taps, *bias, *window, *out;

    ConvScratch(std::byte* scratch, int width, std::int64_t window_rows) {
        taps = reinterpret_cast<float*>(scratch);
        bias = taps + width * kConvChannels;
        window = bias + kConvChannels;
        out = window + window_rows * kConvChannels;
    }
};

// Rows of x, of z = the convolution, and of dz that a tile of the backward pass has besides its tokens.
CULA_INLINE int margin(int width) { return width - 1; }

inline std::size_t conv_scratch_bytes(int width) {
    const std::int64_t rows =
        width + 1 + (kConvTile + 2 * margin(width)) + 2 * (kConvTile + 2 * margin(width));
    return static_cast<std::size_t>(rows) * kConvChannels * sizeof(float);
}

inline ConvWeights read_weights(const ConvScratch& scratch, const Matrix& weight, const Matrix& bias,
                                int width, int channels, bool silu) {
    read_rows(scratch.taps, kConvChannels, weight, 0, width, channels);
    if (bias.data) read_rows(scratch.bias, kConvChannels, bias, 0, 1, channels);
    return {scratch.taps, bias.data ? scratch.bias : nullptr, kConvChannels, width, padded(channels), silu};
}

// Rows [first, first + count) of a sequence as floats: those before token 0 are the last rows of the state,
// or zero; so are those from `length` on.
inline void read_window(float* dst, const ConvTask& task, std::int64_t first, int count) {
    int r = 0;
    for (; r < count && first + r < 0; ++r) {
        const std::int64_t row = task.initial_rows + first + r;
        if (task.initial.data && row >= 0)
            read_rows(dst + r * kConvChannels, kConvChannels, task.initial, row, 1, task.channels);
        else
            zero_rows(dst + r * kConvChannels, kConvChannels, 1, task.channels);
    }
    const std::int64_t rest = task.length - (first + r);
    const int here = static_cast<int>(rest < count - r ? (rest < 0 ? 0 : rest) : count - r);
    read_rows(dst + r * kConvChannels, kConvChannels, task.x, first + r, here, task.channels);
    r += here;
    zero_rows(dst + r * kConvChannels, kConvChannels, count - r, task.channels);
}

// The last rows of the state and the tokens, where the task has the last of them.
inline void write_final(const ConvTask& task, float* row) {
    if (!task.final.data || task.end != task.length) return;
    for (std::int64_t r = 0; r < task.final_rows; ++r) {
        read_window(row, task, task.length - task.final_rows + r, 1);
        write_rows(task.final, r, row, kConvChannels, 1, task.channels);
    }
}

template <class Element>
void convolve_in_place(const ConvWeights& weights, const ConvTask& task, std::int64_t begin) {
    const auto* x = static_cast<const Element*>(task.x.data) + (begin - margin(task.width)) * task.x.row;
    auto* y = static_cast<Element*>(task.y.data) + begin * task.y.row;
    convolve_rows(weights, x, task.x.row, y, task.y.row, task.end - begin);
}

inline void conv(const ConvTask& task, std::byte* memory) {
    const int before = margin(task.width);
    const ConvScratch scratch(memory, task.width, kConvTile + before);
    const ConvWeights weights =
        read_weights(scratch, task.weight, task.bias, task.width, task.channels, task.silu);
    const bool direct = task.x.column == 1 && task.y.column == 1 && task.x.dtype == task.y.dtype &&
                        task.channels % kLanes == 0;
    const std::int64_t staged = !direct ? task.end : task.end < before ? task.end : before;
    std::int64_t t = task.begin;
    while (t < staged) {
        const int count = static_cast<int>(staged - t < kConvTile ? staged - t : kConvTile);
        read_window(scratch.window, task, t - before, count + before);
        convolve_rows(weights, scratch.window, kConvChannels, scratch.out, kConvChannels, count);
        write_rows(task.y, t, scratch.out, kConvChannels, count, task.channels);
        t += count;
    }
    if (t < task.end) {
        switch (task.x.dtype) {
            case Dtype::kBFloat16: convolve_in_place<Bf16>(weights, task, t); break;
            case Dtype::kFloat16: convolve_in_place<Fp16>(weights, task, t); break;
            default: convolve_in_place<float>(weights, task, t); break;
        }
    }
    write_final(task, scratch.out);
}

// What a state [rows] hands back to token `position` of the sequence, if it has that token.
CULA_INLINE void add_final(float* dst, float* row, const ConvTask& task, std::int64_t position) {
    const std::int64_t r = position - (task.length - task.final_rows);
    if (!task.d_final.data || r < 0 || r >= task.final_rows) return;
    read_rows(row, kConvChannels, task.d_final, r, 1, task.channels);
    for (int c = 0; c < padded(task.channels); c += kLanes) store(dst + c, load(dst + c) + load(row + c));
}

// d_x[p] = sum over j of weight[j] * dz[p + W - 1 - j]; dz: the row of token p.
CULA_INLINE void input_gradient(float* dst, const ConvWeights& w, const float* dz) {
    for (int c = 0; c < w.channels; c += kLanes) {
        Vec sum{};
        for (int j = 0; j < w.width; ++j)
            sum += load(w.taps + j * w.stride + c) * load(dz + (w.width - 1 - j) * kConvChannels + c);
        store(dst + c, sum);
    }
}

inline void initial_gradient(const ConvTask& task, const ConvWeights& weights, const float* dz_of_first,
                             float* row, float* other) {
    for (std::int64_t r = 0; r < task.initial_rows; ++r) {
        const std::int64_t position = r - task.initial_rows;
        if (position >= -static_cast<std::int64_t>(margin(task.width)))
            input_gradient(row, weights, dz_of_first + position * kConvChannels);
        else
            zero_rows(row, kConvChannels, 1, task.channels);
        add_final(row, other, task, position);
        write_rows(task.d_initial, r, row, kConvChannels, 1, task.channels);
    }
}

// d_weight and d_bias of `count` tokens, of which x and dz are the first windows and rows.
template <int kWidth>
void add_sums(const ConvTask& task, const float* x, const float* dz, int count) {
    const int width = kWidth ? kWidth : task.width;
    for (int c = 0; c < task.channels; c += kLanes) {
        Vec sum[(kWidth ? kWidth : static_cast<int>(kMostWidth)) + 1] = {};
        for (int i = 0; i < count; ++i) {
            const Vec d = load(dz + i * kConvChannels + c);
            CULA_UNROLL
            for (int j = 0; j < width; ++j) sum[j] += d * load(x + (i + j) * kConvChannels + c);
            sum[width] += d;
        }
        const int lanes = task.channels - c < kLanes ? task.channels - c : kLanes;
        for (int j = 0; j <= width; ++j)
            for (int l = 0; l < lanes; ++l) task.sums[j * task.channels + c + l] += sum[j][l];
    }
}

// One tile: tokens [t, t + count). Its dz reaches W - 1 tokens further, and begins W - 1 rows of zeros before
// where those rows are before the sequence.
inline void conv_backward(const ConvTask& task, std::byte* memory) {
    const int before = margin(task.width), channels = padded(task.channels);
    constexpr std::int64_t kStride = kConvChannels;
    const ConvScratch scratch(memory, task.width, kConvTile + 2 * before);
    const ConvWeights weights =
        read_weights(scratch, task.weight, task.bias, task.width, task.channels, false);
    float* gradients = scratch.out;                                // dz
    float* rows = gradients + (kConvTile + 2 * before) * kStride;  // z, then d_x
    const bool sums = task.sums != nullptr;
    if (sums)
        for (int i = 0; i < (task.width + 1) * task.channels; ++i) task.sums[i] = 0.0f;
    for (std::int64_t t = task.begin; t < task.end || t == 0; t += kConvTile) {
        const std::int64_t rest = task.end - t;
        const int count = static_cast<int>(rest < kConvTile ? rest : kConvTile);
        const std::int64_t behind = task.length - (t + count);
        const int reach = count + static_cast<int>(behind < before ? behind : before);
        read_window(scratch.window, task, t - before, reach + before);
        float* dz = gradients + before * kStride;
        zero_rows(gradients, kStride, before, task.channels);
        zero_rows(dz + reach * kStride, kStride, count + before - reach, task.channels);
        if (task.d_y.data)
            read_rows(dz, kStride, task.d_y, t, reach, task.channels);
        else
            zero_rows(dz, kStride, reach, task.channels);
        if (task.silu) {
            convolve_rows(weights, scratch.window, kStride, rows, kStride, reach);
            for (std::int64_t i = 0; i < reach * kStride; i += kStride)
                for (int c = 0; c < channels; c += kLanes) {
                    const Vec z = load(rows + i + c), s = sigmoid(z);
                    store(dz + i + c, load(dz + i + c) * (s * (1.0f + z * (1.0f - s))));
                }
        }
        if (sums) {
            switch (task.width) {
                case 2: add_sums<2>(task, scratch.window, dz, count); break;
                case 3: add_sums<3>(task, scratch.window, dz, count); break;
                case 4: add_sums<4>(task, scratch.window, dz, count); break;
                default: add_sums<0>(task, scratch.window, dz, count); break;
            }
        }
        if (task.d_x.data) {
            for (int i = 0; i < count; ++i) {
                input_gradient(rows + i * kStride, weights, dz + i * kStride);
                add_final(rows + i * kStride, scratch.window, task, t + i);
            }
            write_rows(task.d_x, t, rows, kStride, count, task.channels);
        }
        if (task.d_initial.data && t == 0) initial_gradient(task, weights, dz, rows, scratch.window);
    }
}

inline std::size_t conv_step_scratch_bytes(int width, std::int64_t tokens) {
    const std::int64_t rows = width + 1 + margin(width) + 2 * tokens;
    return static_cast<std::size_t>(rows) * kConvChannels * sizeof(float);
}

// One token, four bf16 of state for each channel side by side: the state of a channel is one word, which
// moves by one bf16.
inline void step_words(const ConvStepTask& task, const ConvWeights& w, const float* token, float* out) {
    for (int c = 0; c < task.channels; c += kLanes) {
        std::byte* place = at(task.state, 0, c);
        WordVec words;
        load_words(words, place);
        const Vec x = load(token + c);
        Vec sum = w.bias ? load(w.bias + c) : Vec{};
        for (int j = 0; j + 1 < task.width; ++j)
            sum += load(w.taps + j * w.stride + c) * bf16_of(words, 4 - (task.width - 1) + j);
        sum += load(w.taps + (task.width - 1) * w.stride + c) * x;
        store(out + c, w.silu ? sum * sigmoid(sum) : sum);
        std::uint16_t last[kLanes];
        store_bf16(last, x);
        typedef std::uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
        HalfVec halves;
        __builtin_memcpy(&halves, last, sizeof halves);
        const WordVec moved = (words >> 16) | (__builtin_convertvector(halves, WordVec) << 48);
        __builtin_memcpy(place, &moved, sizeof moved);
    }
}

inline void conv_step(const ConvStepTask& task, std::byte* memory) {
    const int before = margin(task.width);
    const auto tokens = static_cast<int>(task.tokens);
    const ConvScratch scratch(memory, task.width, before + task.tokens);
    const ConvWeights weights =
        read_weights(scratch, task.weight, task.bias, task.width, task.channels, task.silu);
    float* fresh = scratch.window + before * kConvChannels;
    read_rows(fresh, kConvChannels, task.x, 0, tokens, task.channels);
    const Matrix& state = task.state;
    if (task.tokens == 1 && task.state_rows == 4 && task.width <= 4 && state.dtype == Dtype::kBFloat16 &&
        state.row == 1 && state.column == 4 && task.kept == 3 && task.kept_from == 1 && task.new_from == 3 &&
        task.window == 4 - before && task.channels % kLanes == 0) {
        step_words(task, weights, fresh, scratch.out);
        return write_rows(task.y, 0, scratch.out, kConvChannels, 1, task.channels);
    }
    for (int i = 0; i < before; ++i)
        read_rows(scratch.window + i * kConvChannels, kConvChannels, state,
                  (task.window + i) % task.state_rows, 1, task.channels);
    convolve_rows(weights, scratch.window, kConvChannels, scratch.out, kConvChannels, tokens);
    write_rows(task.y, 0, scratch.out, kConvChannels, tokens, task.channels);
    for (std::int64_t r = 0; r < task.kept; ++r) {
        read_rows(scratch.out, kConvChannels, state, task.kept_from + r, 1, task.channels);
        write_rows(state, r, scratch.out, kConvChannels, 1, task.channels);
    }
    const std::int64_t skipped = task.tokens > task.state_rows ? task.tokens - task.state_rows : 0;
    for (std::int64_t r = skipped; r < task.tokens; ++r)
        write_rows(state, (task.new_from + r) % task.state_rows, fresh + r * kConvChannels, kConvChannels, 1,
                   task.channels);
}

}  // namespace cula::cpu::CULA_CPU_TARGET
