// SPDX-License-Identifier: Apache-2.0
// float8_e4m3fn, the scales of rows, and calls on states of that format.
#include "core/float8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "call.h"

namespace cula {
namespace {

using test::Call;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float of_code(int code) {
    Float8E4M3 x;
    x.bits = static_cast<std::uint8_t>(code);
    return x;
}

// The number of a code by the definition of the format.
double defined(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    return code & 0x80 ? -magnitude : magnitude;
}

TEST(Float8, EveryCodeIsItsNumber) {
    for (int code = 0; code < 256; ++code) {
        if ((code & 0x7f) == 0x7f) {
            EXPECT_TRUE(std::isnan(of_code(code)));
            continue;
        }
        EXPECT_EQ(of_code(code), defined(code)) << code;
        EXPECT_EQ(std::signbit(of_code(code)), code >= 0x80) << code;
        EXPECT_EQ(Float8E4M3(of_code(code)).bits, code);
    }
    EXPECT_EQ(of_code(0x7e), 448.0f);
}

TEST(Float8, RoundsToNearestWithTiesToEven) {
    for (int code = 0; code < 0x7e; ++code) {
        const float low = of_code(code), high = of_code(code + 1), middle = (low + high) / 2;
        EXPECT_EQ(Float8E4M3(middle).bits, code + code % 2) << code;
        EXPECT_EQ(Float8E4M3(std::nextafter(middle, 0.0f)).bits, code) << code;
        EXPECT_EQ(Float8E4M3(std::nextafter(middle, kInfinity)).bits, code + 1) << code;
        EXPECT_EQ(Float8E4M3(-middle).bits, 0x80 | (code + code % 2)) << code;
    }
    EXPECT_EQ(Float8E4M3(464.0f).bits, 0x7e);
    for (float x : {465.0f, 1e30f, kInfinity, std::numeric_limits<float>::quiet_NaN()})
        EXPECT_EQ(Float8E4M3(x).bits & 0x7f, 0x7f) << x;
}

TEST(Float8, ScalesOfRows) {
    EXPECT_EQ(row_scale(448.0f).scale, 1.0f);
    EXPECT_EQ(row_scale(448.0f).inverse, 1.0f);
    for (float most : {6e-36f, 1.0f, 3.4e38f}) {
        const RowScale row = row_scale(most);
        EXPECT_EQ(row.scale, most / 448.0f);
        EXPECT_EQ(Float8E4M3(most * row.inverse).bits, 0x7e) << most;
    }
    for (float most : {0.0f, 1e-40f, 5e-36f}) {
        EXPECT_EQ(row_scale(most).scale, 0.0f);
        EXPECT_EQ(row_scale(most).inverse, 0.0f);
    }
    for (float most : {kInfinity, std::numeric_limits<float>::quiet_NaN()})
        EXPECT_TRUE(std::isnan(row_scale(most).scale));
}

// The states and scales of a call in place, on two slots of each sequence.
struct Pool {
    TensorRef states, scales;
};

Pool make_pool(Call& call, std::int64_t slots) {
    const test::Shape& of = call.shape;
    Pool pool{call.zeros(Dtype::kFloat8E4M3, {slots, of.value_heads, of.value_dim, of.key_dim}),
              call.zeros(Dtype::kFloat32, {slots, of.value_heads, of.value_dim})};
    for (std::int64_t i = 0; i < test::numel(pool.states); ++i)
        test::write(pool.states, i, std::sin(static_cast<double>(i)) * 400);
    for (std::int64_t i = 0; i < test::numel(pool.scales); ++i)
        test::write(pool.scales, i, 0.001 * static_cast<double>(1 + i % 7));
    return pool;
}

std::vector<double> dequantised(const Pool& pool) {
    std::vector<double> states = test::values(pool.states);
    const std::int64_t key_dim = pool.states.size[3];
    for (std::size_t i = 0; i < states.size(); ++i)
        states[i] *= test::read(pool.scales, static_cast<std::int64_t>(i) / key_dim);
    return states;
}

// With more value channels than one kernel call takes, in parts.
TEST(Float8, CallsOnFloat8ReadAndStoreScaledRows) {
    for (const std::int64_t value_dim : {3, 40, 300})
        for (const Pass pass : {Pass::kPrefill, Pass::kDecode})
            for (const char* backend : {"reference", "cpu:portable", ""}) {
                Call call(pass, kGdn, {.batch = 2, .tokens = 1, .key_dim = 20, .value_dim = value_dim});
                const Pool pool = make_pool(call, 4);
                const std::vector<double> before = dequantised(pool);
                Call wide(pass, kGdn, {.batch = 2, .tokens = 1, .key_dim = 20, .value_dim = value_dim});
                TensorRef exact = wide.states(4);
                for (std::size_t i = 0; i < before.size(); ++i)
                    test::write(exact, static_cast<std::int64_t>(i), before[i]);
                wide.args.initial_state = wide.args.final_state = exact;
                call.args.initial_state = call.args.final_state = pool.states;
                call.args.initial_scales = call.args.final_scales = pool.scales;
                for (Call* one : {&call, &wide})
                    one->args.initial_state_indices = one->list(Dtype::kInt32, {3, 1});
                for (Call* one : {&call, &wide})
                    pass == Pass::kPrefill ? prefill(one->args, {}, backend) : decode(one->args, {}, backend);
                const std::vector<double> after = dequantised(pool), expected = test::values(exact);
                for (std::size_t i = 0; i < after.size(); ++i) {
                    const bool written =
                        i / static_cast<std::size_t>(2 * value_dim * 20) % 2 == 1;  // slots 1 and 3
                    if (!written) {
                        EXPECT_EQ(after[i], before[i]);
                        continue;
                    }
                    const double scale = test::read(pool.scales, static_cast<std::int64_t>(i) / 20);
                    EXPECT_NEAR(after[i], expected[i],
                                std::fabs(expected[i]) * 0x1.0001p-4 + scale * 0x1.0001p-10)
                        << backend << " " << name(pass) << " " << i;
                }
                for (std::int64_t i = 0; i < test::numel(call.args.o); ++i)
                    EXPECT_NEAR(test::read(call.args.o, i), test::read(wide.args.o, i), 1e-5);
            }
}

TEST(Float8, ScalesMustFitTheStates) {
    const auto refused = [](auto spoil) {
        Call call(Pass::kDecode, kKda, {.batch = 2, .tokens = 1});
        const Pool pool = make_pool(call, 2);
        call.args.initial_state = call.args.final_state = pool.states;
        call.args.initial_scales = call.args.final_scales = pool.scales;
        spoil(call);
        return test::error_of([&] { plan(Pass::kDecode, call.args, {}); });
    };
    EXPECT_EQ(refused([](Call&) {}), "");
    EXPECT_EQ(refused([](Call& c) { c.args.final_scales = {}; }),
              "decode: state_scales must be given with a state of float8_e4m3fn, got none");
    EXPECT_EQ(refused([](Call& c) { c.args.final_scales = c.like(c.args.final_scales); }),
              "decode: state_scales must be the same memory where the states are, and other memory where "
              "not, got one of the two");
    EXPECT_EQ(refused([](Call& c) { c.args.initial_scales.stride[2] = 0; }),
              "decode: state_scales must have each scale that is read where it is written, or lie elsewhere, "
              "got memory that overlaps in other places");
    EXPECT_EQ(refused([](Call& c) { c.args.initial_scales.dtype = Dtype::kBFloat16; }),
              "decode: state_scales must have dtype float32, got bfloat16");
}

}  // namespace
}  // namespace cula
