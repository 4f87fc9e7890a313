// SPDX-License-Identifier: Apache-2.0
// The short convolution and the gated RMSNorm, as a C++ caller has them: against their equations spelled out,
// in memory of exactly their size, on every target that this machine has; and what they refuse.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/float16.h"
#include "cula/layers.h"

namespace cula {
namespace {

constexpr std::string_view kTargets[] = {"cpu:portable", "cpu:avx2", "cpu:avx512", "cpu:avx512bf16"};

// Numbers in memory of exactly their size, so that a sanitizer finds what is read beside them.
struct Numbers {
    std::vector<std::byte> memory;
    TensorRef ref;

    Numbers(Dtype dtype, std::initializer_list<std::int64_t> sizes, int step = 0) {
        std::int64_t count = 1;
        for (const std::int64_t size : sizes) count *= size;
        memory.resize(static_cast<std::size_t>(count) * size_bytes(dtype));
        memory.shrink_to_fit();
        ref = TensorRef::contiguous(memory.data(), dtype, sizes);
        if (step)
            for (std::int64_t i = 0; i < count; ++i) set(i, static_cast<double>(i * step % 23 - 11) / 8);
    }

    void set(std::int64_t i, double x) {
        void* p = memory.data() + i * static_cast<std::int64_t>(size_bytes(ref.dtype));
        if (ref.dtype == Dtype::kBFloat16)
            *static_cast<BFloat16*>(p) = BFloat16(static_cast<float>(x));
        else if (ref.dtype == Dtype::kFloat16)
            *static_cast<Float16*>(p) = Float16(static_cast<float>(x));
        else
            *static_cast<float*>(p) = static_cast<float>(x);
    }
    double operator[](std::int64_t i) const {
        const void* p = memory.data() + i * static_cast<std::int64_t>(size_bytes(ref.dtype));
        if (ref.dtype == Dtype::kBFloat16) return *static_cast<const BFloat16*>(p);
        if (ref.dtype == Dtype::kFloat16) return *static_cast<const Float16*>(p);
        return *static_cast<const float*>(p);
    }
};

double silu(double z) { return z / (1 + std::exp(-z)); }

void expect_close(double found, double wanted, Dtype dtype) {
    const double unit = dtype == Dtype::kFloat32 ? 1e-5 : dtype == Dtype::kFloat16 ? 2e-3 : 1.6e-2;
    EXPECT_NEAR(found, wanted, unit * (1 + std::abs(wanted)));
}

bool has(std::string_view target) {
    Numbers x(Dtype::kFloat32, {1, 1, 1}), weight(Dtype::kFloat32, {1, 1}), y(Dtype::kFloat32, {1, 1, 1});
    Convolution call;
    call.x = x.ref, call.weight = weight.ref, call.y = y.ref;
    try {
        convolve(call, {}, target);
    } catch (const Error&) {
        return false;
    }
    return true;
}

Context two_threads() {
    Context context;
    context.parallel_for = std_threads(2);
    return context;
}

template <class Body>
void on_every_target(Body body) {
    int ran = 0;
    for (const std::string_view target : kTargets) {
        if (!has(target)) continue;
        SCOPED_TRACE(target);
        body(target);
        ++ran;
    }
    EXPECT_GE(ran, 1);  // the portable one runs anywhere
}

struct Sizes {
    std::int64_t batch, tokens, channels, width, columns;
};

constexpr Sizes kSizes[] = {
    {2, 5, 3, 4, 4}, {1, 0, 7, 4, 3}, {1, 40, 37, 2, 1}, {2, 3, 130, 7, 9}, {1, 300, 16, 3, 2}};

TEST(Convolution, IsItsEquation) {
    on_every_target([](std::string_view target) {
        for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16})
            for (const auto& [batch, tokens, channels, width, columns] : kSizes) {
                const Numbers x(dtype, {batch, tokens, channels}, 7), weight(dtype, {channels, width}, 5),
                    bias(dtype, {channels}, 3), state(dtype, {batch, channels, columns}, 9);
                Numbers y(dtype, {batch, tokens, channels}), last(dtype, {batch, channels, columns});
                Convolution call;
                call.x = x.ref, call.weight = weight.ref, call.bias = bias.ref, call.y = y.ref;
                call.initial_state = state.ref, call.final_state = last.ref, call.silu = true;
                convolve(call, two_threads(), target);
                const auto token = [&, t_max = tokens](std::int64_t b, std::int64_t t, std::int64_t c) {
                    return t < 0 ? state[(b * channels + c) * columns + columns + t]
                                 : x[(b * t_max + t) * channels + c];
                };
                for (std::int64_t b = 0; b < batch; ++b)
                    for (std::int64_t c = 0; c < channels; ++c) {
                        for (std::int64_t t = 0; t < tokens; ++t) {
                            double z = bias[c];
                            for (std::int64_t j = 0; j < width; ++j)
                                z += weight[c * width + j] * token(b, t - width + 1 + j, c);
                            expect_close(y[(b * tokens + t) * channels + c], silu(z), dtype);
                        }
                        for (std::int64_t s = 0; s < columns; ++s)
                            EXPECT_EQ(last[(b * channels + c) * columns + s],
                                      token(b, tokens - columns + s, c));
                    }
            }
    });
}

TEST(Convolution, HandsBackWhatItWasGiven) {
    on_every_target([](std::string_view target) {
        for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16})
            for (const auto& [batch, tokens, channels, width, columns] : kSizes) {
                const Numbers x(dtype, {batch, tokens, channels}, 7), weight(dtype, {channels, width}, 5),
                    state(dtype, {batch, channels, columns}, 9), d_y(dtype, {batch, tokens, channels}, 4);
                Numbers d_x(dtype, {batch, tokens, channels}), d_weight(dtype, {channels, width}),
                    d_state(dtype, {batch, channels, columns});
                Convolution call;
                call.x = x.ref, call.weight = weight.ref, call.initial_state = state.ref, call.d_y = d_y.ref;
                call.d_x = d_x.ref, call.d_weight = d_weight.ref, call.d_initial_state = d_state.ref;
                convolve_backward(call, two_threads(), target);
                // Without an activation: d_x[p] = sum over j of weight[j] d_y[p + W - 1 - j].
                const auto gradient = [&](std::int64_t b, std::int64_t p, std::int64_t c) {
                    double sum = 0;
                    for (std::int64_t j = 0; j < width; ++j)
                        if (const std::int64_t t = p + width - 1 - j; t >= 0 && t < tokens)
                            sum += weight[c * width + j] * d_y[(b * tokens + t) * channels + c];
                    return sum;
                };
                for (std::int64_t c = 0; c < channels; ++c) {
                    for (std::int64_t b = 0; b < batch; ++b) {
                        for (std::int64_t t = 0; t < tokens; ++t)
                            expect_close(d_x[(b * tokens + t) * channels + c], gradient(b, t, c), dtype);
                        for (std::int64_t s = 0; s < columns; ++s)
                            expect_close(d_state[(b * channels + c) * columns + s],
                                         gradient(b, s - columns, c), dtype);
                    }
                    for (std::int64_t j = 0; j < width; ++j) {
                        double sum = 0;
                        for (std::int64_t b = 0; b < batch; ++b)
                            for (std::int64_t t = 0; t < tokens; ++t) {
                                const std::int64_t p = t - width + 1 + j;
                                const double before = p < 0
                                                          ? state[(b * channels + c) * columns + columns + p]
                                                          : x[(b * tokens + p) * channels + c];
                                sum += before * d_y[(b * tokens + t) * channels + c];
                            }
                        expect_close(d_weight[c * width + j], sum, dtype);
                    }
                }
            }
    });
}

TEST(Convolution, StepsAsAPromptGoes) {
    on_every_target([](std::string_view target) {
        for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16})
            for (const std::int64_t channels : {16, 19, 160}) {
                constexpr std::int64_t kWidth = 4, kColumns = 4, kTokens = 9;
                const Numbers x(dtype, {1, kTokens, channels}, 7), weight(dtype, {channels, kWidth}, 5);
                Numbers y(dtype, {1, kTokens, channels}), last(dtype, {1, channels, kColumns}),
                    pool(dtype, {1, channels, kColumns}), one(dtype, {1, 1, channels});
                Convolution call;
                call.x = x.ref, call.weight = weight.ref, call.y = y.ref, call.final_state = last.ref;
                convolve(call, {}, target);
                ConvolutionStep step;
                step.state = pool.ref, step.weight = weight.ref, step.y = one.ref;
                for (std::int64_t t = 0; t < kTokens; ++t) {
                    step.x = TensorRef::contiguous(x.ref.ptr(0, t), dtype, {1, 1, channels});
                    convolve_step(step, {}, target);
                    for (std::int64_t c = 0; c < channels; ++c)
                        expect_close(one[c], y[t * channels + c], dtype);
                }
                for (std::int64_t i = 0; i < channels * kColumns; ++i) EXPECT_EQ(pool[i], last[i]);
            }
    });
}

TEST(GatedNorm, IsItsEquation) {
    on_every_target([](std::string_view target) {
        for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16})
            for (const auto& [rows, channels, group] :
                 {std::array<std::int64_t, 3>{3, 7, 7}, {300, 48, 24}, {2, 130, 65}}) {
                const Numbers x(dtype, {rows, channels}, 7), gate(dtype, {rows, channels}, 5),
                    weight(dtype, {channels}, 3);
                Numbers y(dtype, {rows, channels}), d_x(dtype, {rows, channels}),
                    d_gate(dtype, {rows, channels}), d_weight(dtype, {channels});
                GatedNorm call;
                call.x = x.ref, call.gate = gate.ref, call.weight = weight.ref, call.y = y.ref;
                call.group = group, call.zero_centered = true;
                gated_norm(call, two_threads(), target);
                for (std::int64_t i = 0; i < rows * channels; ++i) {
                    const std::int64_t first = i / group * group;
                    double squares = 0;
                    for (std::int64_t c = first; c < first + group; ++c) squares += x[c] * x[c];
                    const double normal = x[i] / std::sqrt(squares / static_cast<double>(group) + call.eps);
                    expect_close(y[i], normal * (1 + weight[i % channels]) * silu(gate[i]), dtype);
                }
                call.d_y = x.ref, call.d_x = d_x.ref, call.d_gate = d_gate.ref, call.d_weight = d_weight.ref;
                gated_norm_backward(call, two_threads(), target);
                for (std::int64_t i = 0; i < rows * channels; ++i) EXPECT_TRUE(std::isfinite(d_x[i]));
            }
    });
}

template <class Call>
std::string refusal(void (*run)(const Call&, const Context&, std::string_view), const Call& call) {
    try {
        run(call, {}, {});
    } catch (const Error& error) {
        return error.what();
    }
    return {};
}

TEST(Convolution, RefusesWhatDoesNotFit) {
    const Numbers x(Dtype::kFloat32, {2, 5, 3}), weight(Dtype::kFloat32, {3, 4}),
        wide(Dtype::kFloat32, {3, 17});
    Numbers y(Dtype::kFloat32, {2, 5, 3}), state(Dtype::kFloat32, {2, 3, 2});
    Convolution call;
    call.x = x.ref, call.weight = weight.ref;
    EXPECT_EQ(refusal(convolve, call), "causal_conv1d: y must be given, got none");
    call.y = y.ref;
    EXPECT_EQ(refusal(convolve, call), "");
    call.initial_state = state.ref;
    EXPECT_EQ(
        refusal(convolve, call),
        "causal_conv1d: initial_state must have shape [N, D, S] = [2, 3, S], S at least 3, got [2, 3, 2]");
    call.initial_state = {};
    call.weight = wide.ref;
    EXPECT_EQ(refusal(convolve, call),
              "causal_conv1d: weight must have shape [D, W] of x's D = 3, W from 1 to 16, got [3, 17]");
    call.weight = weight.ref;
    call.x.dtype = Dtype::kFloat64;
    EXPECT_EQ(refusal(convolve, call),
              "causal_conv1d: x must have dtype float32, bfloat16 or float16, got float64");
}

// A view of `ref` that begins this many elements behind it.
TensorRef moved(TensorRef ref, std::int64_t elements) {
    ref.data = ref.ptr(0, 0, elements);
    return ref;
}

TEST(Convolution, WritesNowhereThatItReads) {
    // The tokens of two tensors of 3 channels lie beside each other, and one row of 6 is left behind them.
    Numbers both(Dtype::kFloat32, {1, 6, 6}, 7), weight(Dtype::kFloat32, {3, 4}, 5),
        states(Dtype::kFloat32, {2, 3, 4});
    Convolution call;
    call.x = both.ref, call.x.size = {1, 5, 3}, call.y = moved(call.x, 3), call.weight = weight.ref;
    EXPECT_EQ(refusal(convolve, call), "");
    for (const std::int64_t elements : {0, 1, 6}) {
        call.y = moved(call.x, elements);
        EXPECT_EQ(refusal(convolve, call),
                  "causal_conv1d: y must share no memory with x, got memory of both");
    }
    call.y = moved(call.x, 3);
    call.initial_state = states.ref, call.initial_state.size[0] = 1;
    call.final_state = moved(call.initial_state, 12);
    EXPECT_EQ(refusal(convolve, call), "");
    for (const std::int64_t elements : {0, 4}) {
        call.final_state = moved(call.initial_state, elements);
        EXPECT_EQ(refusal(convolve, call),
                  "causal_conv1d: final_state must share no memory with initial_state, got memory of both");
    }
    call.final_state = call.y, call.final_state.size = {1, 3, 1};
    EXPECT_EQ(refusal(convolve, call),
              "causal_conv1d: final_state must share no memory with y, got memory of both");
}

TEST(Convolution, HandsNothingBackToWhatItReads) {
    Numbers x(Dtype::kFloat32, {1, 5, 3}, 7), weight(Dtype::kFloat32, {3, 4}, 5),
        d_y(Dtype::kFloat32, {1, 5, 3}, 4), d_x(Dtype::kFloat32, {1, 5, 3});
    Convolution call;
    call.x = x.ref, call.weight = weight.ref, call.d_y = d_y.ref, call.d_x = d_x.ref;
    EXPECT_EQ(refusal(convolve_backward, call), "");
    const std::pair<std::string, TensorRef> read[] = {{"d_y", d_y.ref}, {"x", x.ref}};
    for (const auto& [name, ref] : read) {
        call.d_x = ref;
        EXPECT_EQ(refusal(convolve_backward, call),
                  "causal_conv1d_backward: d_x must share no memory with " + name + ", got memory of both");
    }
    call.d_x = d_x.ref;
    call.d_weight = d_x.ref, call.d_weight.ndim = 2, call.d_weight.size = {3, 4};
    call.d_weight.stride = {4, 1};
    EXPECT_EQ(refusal(convolve_backward, call),
              "causal_conv1d_backward: d_weight must share no memory with d_x, got memory of both");
}

TEST(Convolution, StepsInPlace) {
    on_every_target([](std::string_view target) {
        for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
            constexpr std::int64_t kRows = 8, kTokens = 5, kChannels = 300;
            const Numbers weight(dtype, {kChannels, 4}, 5);
            Numbers x(dtype, {kRows, kTokens, kChannels}, 7), y(dtype, {kRows, kTokens, kChannels}),
                pool(dtype, {kRows, kChannels, 4}, 3), same(dtype, {kRows, kChannels, 4}, 3);
            ConvolutionStep step;
            step.x = x.ref, step.y = y.ref, step.state = pool.ref, step.weight = weight.ref;
            convolve_step(step, two_threads(), target);
            step.y = x.ref, step.state = same.ref;
            convolve_step(step, two_threads(), target);
            EXPECT_EQ(x.memory, y.memory);
            EXPECT_EQ(same.memory, pool.memory);
        }
    });
}

TEST(Convolution, StepsNowhereElse) {
    Numbers x(Dtype::kFloat32, {2, 4, 3}, 7), weight(Dtype::kFloat32, {3, 4}, 5),
        pool(Dtype::kFloat32, {2, 3, 4});
    ConvolutionStep step;
    step.x = x.ref, step.x.size[1] = 3, step.weight = weight.ref, step.state = pool.ref;
    step.y = moved(step.x, 3);
    EXPECT_EQ(refusal(convolve_step, step),
              "causal_conv1d_update: y must have each element where x has it, or lie elsewhere, got memory "
              "that overlaps x in other places");
    step.y = pool.ref, step.y.size = {2, 3, 3};
    EXPECT_EQ(refusal(convolve_step, step),
              "causal_conv1d_update: y must share no memory with conv_state, got memory of both");
    step.y = step.x, step.state = x.ref, step.state.size = {2, 3, 3}, step.state.stride = {12, 1, 3};
    EXPECT_EQ(refusal(convolve_step, step),
              "causal_conv1d_update: conv_state must share no memory with x, got memory of both");
}

TEST(GatedNorm, RefusesWhatDoesNotFit) {
    const Numbers x(Dtype::kFloat32, {1, 1, 1, 2, 3}, 7), weight(Dtype::kFloat32, {3}, 5);
    Numbers y(Dtype::kFloat32, {1, 1, 1, 2, 3}), sums(Dtype::kFloat32, {3});
    GatedNorm call;
    call.x = x.ref, call.y = y.ref, call.weight = weight.ref;
    EXPECT_EQ(refusal(gated_norm, call), "");
    for (const int dimensions : {6, 100}) {
        call.x.ndim = dimensions;
        EXPECT_EQ(refusal(gated_norm, call),
                  "rms_norm_gated: x must have from 1 to 5 dimensions, got [1, 1, 1, 2, 3, ...]");
    }
    call.x = x.ref, call.bias = weight.ref, call.d_y = y.ref;
    for (const auto& [name, gradient] :
         {std::pair{"d_weight", &GatedNorm::d_weight}, std::pair{"d_bias", &GatedNorm::d_bias}}) {
        GatedNorm given = call;
        given.*gradient = sums.ref;
        EXPECT_EQ(refusal(gated_norm_backward, given), "");
        (given.*gradient).stride[0] = 0;
        EXPECT_EQ(refusal(gated_norm_backward, given),
                  std::string("rms_norm_gated_backward: ") + name +
                      " must not overlap itself in memory, got strides that make elements share an address");
    }
}

}  // namespace
}  // namespace cula
