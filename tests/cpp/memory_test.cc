// SPDX-License-Identifier: Apache-2.0
// What is said about tensors whose memory cannot be what they claim, and about states that lie in each
// other's way.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#include "call.h"
#include "core/check.h"
#include "core/kernel.h"

namespace cula {
namespace {

using test::Call;
using test::error_of;

constexpr std::int64_t kHuge = std::int64_t{1} << 32, kLeast = std::numeric_limits<std::int64_t>::min();

std::string refusal(const Call& call, Indices indices = Indices::kOnHost) {
    return error_of([&] { validate(call.pass, call.args, indices); });
}

TensorRef strided(void* data, Dtype dtype, std::initializer_list<std::int64_t> sizes,
                  std::initializer_list<std::int64_t> strides) {
    TensorRef ref{data, dtype, static_cast<int>(sizes.size()), {}, {}};
    std::copy(sizes.begin(), sizes.end(), ref.size.begin());
    std::copy(strides.begin(), strides.end(), ref.stride.begin());
    return ref;
}

TEST(Extent, CoversStridesOfBothSigns) {
    float data[64];
    const Extent extent = extent_of(strided(data, Dtype::kFloat32, {3, 4}, {-8, 2}));
    EXPECT_EQ(extent.first, -64);
    EXPECT_EQ(extent.end, 28);
    const Extent nothing = extent_of(strided(data, Dtype::kFloat32, {3, 0}, {-8, 2}));
    EXPECT_EQ(nothing.first, nothing.end);
}

TEST(Extent, MayBeTooLarge) {
    const auto fit = [&](std::initializer_list<std::int64_t> sizes,
                         std::initializer_list<std::int64_t> strides) {
        return fits(strided(nullptr, Dtype::kFloat32, sizes, strides));
    };
    EXPECT_TRUE(fit({kHuge, 1 << 21}, {0, 0}));
    EXPECT_FALSE(fit({kHuge, kHuge}, {0, 0}));
    EXPECT_FALSE(fit({kHuge, kHuge, 0}, {0, 0, 1}));
    EXPECT_FALSE(fit({-1, 4}, {4, 1}));
    EXPECT_FALSE(fit({2, 4}, {kLeast, 1}));
    EXPECT_FALSE(fit({1, 4}, {kLeast, 1}));
    EXPECT_FALSE(fit({3, 4}, {std::numeric_limits<std::int64_t>::max() / 4, 1}));
    EXPECT_FALSE(fit({2, 2}, {std::int64_t{1} << 53, -(std::int64_t{1} << 53)}));
}

TEST(Overlaps, EmptyTensorsDoNot) {
    EXPECT_FALSE(overlaps_itself(TensorRef::contiguous(nullptr, Dtype::kFloat32, {2, 0, 2, 3})));
    EXPECT_TRUE(overlaps_itself(strided(nullptr, Dtype::kFloat32, {2, 3}, {0, 1})));
}

TEST(Places, AreTheSameWhereEachElementCoincides) {
    float data[64];
    const TensorRef pool = strided(data, Dtype::kFloat32, {4, 2, 2, 4}, {16, 8, 4, 1});
    EXPECT_TRUE(same_places(pool, pool));
    TensorRef other = pool;
    other.size[0] = 1, other.stride[0] = 99;  // of one slot the stride is never gone
    EXPECT_TRUE(same_places(pool, other));
    std::swap(other.stride[2], other.stride[3]);
    EXPECT_FALSE(same_places(pool, other));
}

TEST(Places, AreApartWithinThePagesOfAPool) {
    std::array<float, 256> data{};
    const auto page = [&](std::ptrdiff_t offset, std::int64_t elements, std::int64_t period = 32) {
        return strided(data.data() + offset, Dtype::kFloat32, {4, 2, elements}, {period, elements, 1});
    };
    EXPECT_TRUE(apart(page(0, 4), page(8, 4)));
    EXPECT_TRUE(apart(page(0, 4), page(24, 4)));
    EXPECT_TRUE(apart(page(8, 4), page(0, 4)));
    EXPECT_FALSE(apart(page(0, 4), page(7, 4)));
    EXPECT_FALSE(apart(page(0, 4), page(25, 4)));  // meets the next page's
    EXPECT_TRUE(apart(page(0, 4), page(8, 4, 16)));
    EXPECT_FALSE(apart(page(0, 4), page(4, 4, 16)));
    EXPECT_TRUE(apart(page(0, 4), page(104, 4)));  // beyond the last of the first
    // Halves of the last dimension, and the same backwards.
    EXPECT_TRUE(apart(strided(data.data(), Dtype::kFloat32, {4, 2, 3, 4}, {48, 24, 8, 1}),
                      strided(data.data() + 4, Dtype::kFloat32, {4, 2, 3, 4}, {48, 24, 8, 1})));
    EXPECT_TRUE(apart(strided(data.data() + 96, Dtype::kFloat32, {4, 8}, {-32, 1}), page(8, 4)));
    EXPECT_FALSE(apart(strided(data.data() + 96, Dtype::kFloat32, {4, 9}, {-32, 1}), page(8, 4)));
    EXPECT_TRUE(apart(strided(data.data(), Dtype::kFloat32, {0, 4}, {4, 1}), page(0, 4)));
}

// --- sizes, strides and pointers of a call's tensors ---

TEST(Memory, SizesWhoseProductWrapsAreRefused) {
    Call call(Pass::kPrefill, kKda);
    call.args.q = TensorRef::contiguous(nullptr, Dtype::kFloat32, {kHuge, kHuge, 1, 4});
    EXPECT_EQ(refusal(call).substr(0, 80),
              "prefill: q must have sizes that are not negative and span less than 2^56 bytes, ");
}

TEST(Memory, NegativeSizesAreRefused) {
    Call call(Pass::kPrefill, kLinearAttention);
    call.args.q.size[1] = -1;
    EXPECT_EQ(refusal(call),
              "prefill: q must have sizes that are not negative and span less than 2^56 bytes, got shape [1, "
              "-1, 1, "
              "4], strides [16, 4, 4, 1]");
}

TEST(Memory, StridesWithoutAMagnitudeAreRefused) {
    for (auto field : {&Args::v, &Args::o, &Args::initial_state, &Args::final_state, &Args::beta}) {
        Call call(Pass::kPrefill, kDelta);
        (call.args.*field).stride[1] = kLeast;
        EXPECT_NE(refusal(call).find("span less than 2^56 bytes"), std::string::npos);
    }
}

TEST(Memory, AddressesBetweenElementsAreRefused) {
    Call call(Pass::kPrefill, kKda);
    call.args.v.data = static_cast<std::byte*>(call.args.v.data) + 1;
    EXPECT_EQ(refusal(call),
              "prefill: v must start at a multiple of its elements' size, got 1 bytes beyond one of 4");
}

TEST(Memory, MoreDimensionsThanThereAreAreRefused) {
    Call call(Pass::kPrefill, kKda);
    call.args.q.ndim = 9;
    EXPECT_EQ(refusal(call), "prefill: q must have shape [B, T, H, K], got [1, 4, 1, 4, 0, ...]");
}

TEST(Memory, EnumeratorsThatDoNotExistAreRefused) {
    Call call(Pass::kPrefill, kKda);
    call.args.algorithm.decay = static_cast<Decay>(9);
    EXPECT_EQ(refusal(call), "prefill: algorithm must be one of kAlgorithms, got decay 9, update 1");
    call.args.algorithm = kKda;
    call.args.gate = static_cast<Gate>(7);
    EXPECT_EQ(refusal(call), "prefill: gate must be one that Gate names, got 7");
}

TEST(Memory, BatchesBeyondThirtyTwoBitsAreRefused) {
    Call call(Pass::kDecode, kLinearAttention);
    call.args.initial_state = call.args.final_state = {};
    for (auto field : {&Args::q, &Args::k, &Args::v, &Args::o})
        (call.args.*field).size[0] = kHuge, (call.args.*field).size[1] = 0;
    EXPECT_EQ(refusal(call), "decode: q must have a batch size below 2^31, got 4294967296");
}

// Of a tensor without elements no two share an address, whatever its strides are.
TEST(Memory, EmptyOutputsAreTaken) {
    Call call(Pass::kPrefill, kKda, {.batch = 2, .tokens = 0});
    ASSERT_EQ(call.args.o.stride[0], 0);
    EXPECT_EQ(refusal(call), "");
    call.run();
    EXPECT_EQ(test::values(call.args.final_state), test::values(call.args.initial_state));
}

TEST(Memory, OutputsOfAPrefillAreRefusedInASegment) {
    Call call(Pass::kSegment, kKda, {.key_dim = 64, .value_dim = 16});
    call.args.o = call.zeros(Dtype::kFloat32, {1, 4, 2, 16});
    EXPECT_EQ(refusal(call), "segment: o must be left out: a segment has a map, no outputs, got a tensor");
}

TEST(Memory, APlanWithoutStatesIsRefusedInDecode) {
    Call call(Pass::kDecode, kKda);
    call.args.checkpoint_plan = call.table({{0, 0, 0}});
    EXPECT_EQ(refusal(call),
              "decode: checkpoints.plan must be left out: it belongs to prefill, got a tensor");
}

TEST(Memory, WorkspacesThatAreNoneAreRefused) {
    const Call call(Pass::kPrefill, kKda);
    Context context;
    const Plan planned = plan(Pass::kPrefill, call.args, context, "cpu");
    const auto error = [&] { return error_of([&] { run(planned, call.args, context); }); };
    context.workspace_bytes = planned.workspace_bytes;
    EXPECT_EQ(error(), "prefill: workspace must point to memory, got a null pointer");
    alignas(64) std::byte bytes[128];
    context.workspace = bytes + 8;
    EXPECT_EQ(error(), "prefill: workspace must start at a multiple of 64 bytes, got 8 bytes beyond one");
    EXPECT_EQ(error_of([&] { run(Plan{}, call.args, context); }),
              "run: plan must be one that plan() has made, got an empty one");
}

TEST(Memory, ComposeChecksItsTensors) {
    Call call(Pass::kSegment, kKda);
    Composition given{.m = call.zeros(Dtype::kFloat32, {2, 1, 2, 4, 4}),
                      .b = call.zeros(Dtype::kFloat32, {2, 1, 2, 3, 4}),
                      .joins = {},
                      .state = call.states(1)};
    EXPECT_EQ(error_of([&] { compose(given); }), "");
    given.m.data = nullptr;
    EXPECT_EQ(error_of([&] { compose(given); }), "compose: m must point to memory, got a null pointer");
    given.m = TensorRef::contiguous(nullptr, Dtype::kFloat32, {kHuge, 1, 2, 4, 4});
    given.b = TensorRef::contiguous(nullptr, Dtype::kFloat32, {kHuge, 1, 2, 3, 4});
    given.m.stride[0] = kLeast;
    EXPECT_NE(error_of([&] { compose(given); }).find("compose: m must have sizes"), std::string::npos);
}

// --- slots ---

// Rows without tokens have nowhere to start from in a table without columns.
TEST(Slots, ATableOfNoneIsRefused) {
    Call call(Pass::kVerify, kKda, {.batch = 2, .tokens = 0});
    call.args.initial_state = call.args.final_state = call.states(4);
    call.args.state_indices = call.zeros(Dtype::kInt32, {2, 0});
    EXPECT_EQ(refusal(call),
              "verify: state_indices must have a slot that each sequence starts from, got [2, 0]");
    EXPECT_EQ(refusal(call, Indices::kOnDevice), refusal(call));
    Call none(Pass::kVerify, kKda, {.batch = 0, .tokens = 0});
    none.args.initial_state = none.args.final_state = none.states(4);
    none.args.state_indices = none.zeros(Dtype::kInt32, {0, 0});
    EXPECT_EQ(refusal(none), "");
}

Call forking(Pass pass, std::initializer_list<std::int64_t> from, std::initializer_list<std::int64_t> to) {
    Call call(pass, kKda, {.batch = static_cast<std::int64_t>(from.size())});
    call.args.initial_state = call.args.final_state = call.states(6);
    call.args.initial_state_indices = call.ints(from);
    call.args.final_state_indices = call.ints(to);
    return call;
}

TEST(Forks, AChainIsRefused) {
    const auto sentence = [](Pass pass, int sequence, int slot, int other) {
        return std::string(name(pass)) + ": initial_state_indices must not let sequence " +
               std::to_string(sequence) +
               " start from a slot that another sequence writes and write one itself that a third starts "
               "from, got "
               "slot " +
               std::to_string(slot) + ", from which sequence " + std::to_string(other) + " starts";
    };
    for (Pass pass : {Pass::kPrefill, Pass::kDecode, Pass::kVerify}) {
        EXPECT_EQ(refusal(forking(pass, {0, 1, 2, 3}, {1, 2, 3, 4})), sentence(pass, 1, 2, 2));
        EXPECT_EQ(refusal(forking(pass, {0, 1}, {1, 0})), sentence(pass, 0, 1, 1));
        EXPECT_EQ(refusal(forking(pass, {0, 0, 1}, {0, 1, 2})), sentence(pass, 1, 1, 2));
        EXPECT_EQ(refusal(forking(pass, {0, 1, 2, 3}, {1, 2, 3, 4}), Indices::kOnDevice), "");
    }
}

TEST(Forks, OthersAreTaken) {
    for (Pass pass : {Pass::kPrefill, Pass::kDecode, Pass::kVerify}) {
        EXPECT_EQ(refusal(forking(pass, {0, 1, 2}, {0, 1, 2})), "");
        EXPECT_EQ(refusal(forking(pass, {0, 0, 0}, {1, 2, 3})), "");
        EXPECT_EQ(refusal(forking(pass, {0, 0, 0}, {1, 0, 3})), "");
        EXPECT_EQ(refusal(forking(pass, {0, 1}, {1, 2})), "");
        EXPECT_EQ(refusal(forking(pass, {0, 1}, {2, 1})), "");
        EXPECT_EQ(refusal(forking(pass, {0, -1}, {2, 0})), "");  // a padding row stores nothing
        Call fresh = forking(pass, {0, 1}, {1, 2});
        fresh.args.has_initial_state = fresh.list(Dtype::kBool, {1, 0});
        EXPECT_EQ(refusal(fresh), "");
        Call pools = forking(pass, {0, 1}, {1, 2});
        pools.args.final_state = pools.states(6);
        EXPECT_EQ(refusal(pools), "");
    }
}

TEST(Forks, Drafts) {
    Call call(Pass::kVerify, kKda, {.batch = 2, .tokens = 2});
    call.args.initial_state = call.args.final_state = call.states(8);
    call.args.state_indices = call.table({{1, 2, 3}, {4, 5, 6}});
    for (auto starts : {call.ints({5, 4}), call.ints({6, 0}), call.ints({0, 0}), call.ints({1, 1})}) {
        call.args.initial_state_indices = starts;
        EXPECT_EQ(refusal(call), "");
    }
    call.args.initial_state_indices = call.ints({4, 1});
    EXPECT_EQ(refusal(call),
              "verify: initial_state_indices must not let sequence 0 start from a slot that another sequence "
              "writes and "
              "write one itself that a third starts from, got slot 1, from which sequence 1 starts");
    call.args.state_indices = call.table({{-1, -1, 3}, {4, 5, 6}});
    call.args.initial_state_indices = call.ints({4, 4});
    EXPECT_EQ(refusal(call),
              "verify: initial_state_indices must not let sequence 0 start from a slot that another sequence "
              "writes "
              "where it writes none itself, got such a slot");
}

TEST(Buffers, StatesThatOverlapInOtherPlacesAreRefused) {
    const std::string message =
        "prefill: final_state must have each element where initial_state has it, or lie elsewhere, got "
        "memory that "
        "overlaps initial_state in other places";
    for (Indices indices : {Indices::kOnHost, Indices::kOnDevice}) {
        Call call(Pass::kPrefill, kKda, {.batch = 2, .key_dim = 4, .value_dim = 4});
        const TensorRef both = call.states(3);
        call.args.initial_state = call.args.final_state = both;
        call.args.initial_state.size[0] = call.args.final_state.size[0] = 2;
        EXPECT_EQ(refusal(call, indices), "");
        call.args.final_state.data = both.at<float>(1);
        EXPECT_EQ(refusal(call, indices), message);
        std::swap(call.args.initial_state, call.args.final_state);
        EXPECT_EQ(refusal(call, indices), message);
        call.args.initial_state = call.args.final_state;
        std::swap(call.args.final_state.stride[2], call.args.final_state.stride[3]);
        EXPECT_EQ(refusal(call, indices), message);
        call.args.initial_state = call.args.final_state;  // both stored with K first
        EXPECT_EQ(refusal(call, indices), "");
    }
}

TEST(Buffers, StatesThatShareThePagesOfAPoolAreTaken) {
    Call call(Pass::kPrefill, kKda, {.batch = 2});
    const TensorRef pages = call.zeros(Dtype::kFloat32, {2, 100});
    const auto state = [&](int offset) {
        return strided(pages.at<float>(0, offset), Dtype::kFloat32, {2, 2, 3, 4}, {100, 12, 4, 1});
    };
    call.args.initial_state = state(10), call.args.final_state = state(40);
    EXPECT_EQ(refusal(call), "");
    call.args.final_state = state(20);
    EXPECT_NE(refusal(call), "");
}

}  // namespace
}  // namespace cula
