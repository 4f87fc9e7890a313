// SPDX-License-Identifier: Apache-2.0
// compose(), as a C++ caller has it: maps against the products spelled out.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cula/cula.h"

namespace cula {
namespace {

constexpr std::size_t kMaps = 3, kSequences = 2, kHeads = 2, kValue = 3, kKey = 4;

struct Maps {
    bool diagonal;
    std::vector<double> m, b, state;
    std::array<bool, kMaps> joins{true, true, true};

    explicit Maps(bool of_additive)
        : diagonal(of_additive),
          m(fill(kMaps * kSequences * kHeads * (of_additive ? 1 : kKey) * kKey, 3)),
          b(fill(kMaps * kSequences * kHeads * kValue * kKey, 5)),
          state(kSequences * kHeads * kValue * kKey, -1.0) {}

    static std::vector<double> fill(std::size_t count, int step) {
        std::vector<double> x(count);
        for (std::size_t i = 0; i < count; ++i)
            x[i] = static_cast<double>(static_cast<int>(i) * step % 7 - 3) / 4;
        return x;
    }

    Composition composition() {
        return {
            .m = TensorRef::contiguous(
                m.data(), Dtype::kFloat64,
                {kMaps, kSequences, kHeads, static_cast<std::int64_t>(diagonal ? 1 : kKey), kKey}),
            .b = TensorRef::contiguous(b.data(), Dtype::kFloat64, {kMaps, kSequences, kHeads, kValue, kKey}),
            .joins = {},
            .state =
                TensorRef::contiguous(state.data(), Dtype::kFloat64, {kSequences, kHeads, kValue, kKey})};
    }

    // S <- S M^T + B, S being [V, K], from the map `first` on, which gives its B alone.
    std::vector<double> spelled_out(std::size_t first) const {
        constexpr std::size_t kColumns = kSequences * kHeads;
        const auto b_of = [&](std::size_t map) {
            std::vector<double> x(kColumns * kValue * kKey);
            for (std::size_t i = 0; i < x.size(); ++i) x[i] = b[map * x.size() + i];
            return x;
        };
        std::vector<double> now = b_of(first);
        for (std::size_t map = first + 1; map < kMaps; ++map) {
            std::vector<double> next = b_of(map);
            for (std::size_t row = 0; row < kColumns * kValue; ++row)
                for (std::size_t to = 0; to < kKey; ++to)
                    for (std::size_t from = 0; from < kKey; ++from) {
                        const std::size_t column = map * kColumns + row / kValue;
                        const double factor = !diagonal    ? m[(column * kKey + from) * kKey + to]
                                              : from == to ? m[column * kKey + to]
                                                           : 0.0;
                        next[row * kKey + to] += now[row * kKey + from] * factor;
                    }
            now.swap(next);
        }
        return now;
    }
};

class Compose : public testing::TestWithParam<bool> {};

TEST_P(Compose, AppliesEachMapInTurn) {
    Maps maps(GetParam());
    compose(maps.composition());
    const std::vector<double> wanted = maps.spelled_out(0);
    for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(maps.state[i], wanted[i], 1e-12) << i;
}

TEST_P(Compose, BeginsAfterTheLastMapThatDoesNotJoin) {
    Maps maps(GetParam());
    Composition composition = maps.composition();
    maps.joins = {true, false, true};
    composition.joins = TensorRef::contiguous(maps.joins.data(), Dtype::kBool, {kMaps});
    compose(composition);
    const std::vector<double> wanted = maps.spelled_out(2);
    for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(maps.state[i], wanted[i], 1e-12) << i;
}

INSTANTIATE_TEST_SUITE_P(Rules, Compose, testing::Bool(),
                         [](const auto& rule) { return std::string(rule.param ? "additive" : "delta"); });

TEST(ComposeErrors, NameTheArgument) {
    Maps maps(false);
    Composition composition = maps.composition();
    composition.b.size[0] = kMaps - 1;
    try {
        compose(composition);
        FAIL() << "b of fewer maps than m was taken";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("compose: b"), std::string::npos) << error.what();
    }
    EXPECT_TRUE(std::ranges::all_of(maps.state, [](double x) { return x == -1.0; }));
}

}  // namespace
}  // namespace cula
