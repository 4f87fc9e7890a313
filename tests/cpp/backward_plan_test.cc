// SPDX-License-Identifier: Apache-2.0
// How a chunked backward call is divided, and what a prefill saves for it. A part of cuda_host_test.
#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/backward/plan.h"
#include "cula/status.h"

namespace cula::cuda {
namespace {

// A backward call whose chunks take `bytes` each: of so many sequences in a slab of at most `slab_bytes`.
// saves: it is the half of a call that `pass` is, with Args::saved.
backward::BackwardPlan backward_plan(std::int64_t sequences, std::int64_t tokens, bool packed,
                                     std::size_t slab_bytes, Pass pass = Pass::kBackward,
                                     bool saves = false) {
    Problem problem;
    problem.pass = pass, problem.saves = saves;
    problem.algorithm = {Decay::kPerChannel, Update::kDelta};
    problem.device = {.kind = DeviceKind::kCuda, .compute_capability = 90, .multiprocessors = 132};
    problem.varlen = packed;
    problem.batch = packed ? 1 : sequences, problem.sequences = sequences, problem.tokens = tokens;
    problem.heads = problem.value_heads = 2;
    problem.key_dim = problem.value_dim = 128;
    Args args;
    float number = 0.0f;
    args.d_q.data = &number;
    args.d_q.ndim = pass == Pass::kBackward ? 4 : 0;
    return backward::plan_backward(problem, args, {.chunk_tokens = 64}, {.of_value_head = 100, .of_head = 50},
                                   {.slab_bytes = slab_bytes});
}

TEST(BackwardPlan, SlabsHoldWholeSequencesWhereTheyCan) {
    // Ten sequences of five chunks of 300 bytes: three sequences a slab.
    const backward::BackwardPlan batch = backward_plan(10, 300, false, 5'000);
    EXPECT_EQ(batch.slab_chunks, 15);
    EXPECT_EQ(batch.slabs(), 4);
    EXPECT_FALSE(batch.cuts_sequences);
    const backward::BackwardPlan one = backward_plan(10, 300, false, 15'000);
    EXPECT_EQ(one.slabs(), 1);
    EXPECT_FALSE(one.cuts_sequences);
}

TEST(BackwardPlan, LongSequencesAndPackedOnesAreCut) {
    const backward::BackwardPlan longer = backward_plan(2, 64 * 100, false, 300 * 40);
    EXPECT_EQ(longer.slabs(), 5);
    EXPECT_EQ(longer.slab_chunks, 40);
    EXPECT_TRUE(longer.cuts_sequences);
    const backward::BackwardPlan packed = backward_plan(10, 3000, true, 5'000);
    EXPECT_GT(packed.slabs(), 1);
    EXPECT_TRUE(packed.cuts_sequences);
    EXPECT_FALSE(packed.by_warp);
}

TEST(BackwardPlan, FewHeadsAreCutIntoSegments) {
    constexpr std::size_t kOneSlab = std::size_t{1} << 40;
    for (const std::int64_t chunks : {64, 127, 512}) {
        const backward::BackwardPlan plan = backward_plan(1, 64 * chunks, false, kOneSlab);
        const std::int64_t made = (chunks + plan.segment_chunks - 1) / plan.segment_chunks;
        EXPECT_GT(plan.cut.segments, 1);
        EXPECT_GE(plan.segment_chunks, 4);
        EXPECT_EQ(plan.max_segments, made);
        EXPECT_LE(2 * 2 * plan.cut.rows.blocks * made, 132);  // both walks of two heads, side by side
    }
    EXPECT_EQ(backward_plan(1, 64 * 7, false, kOneSlab).cut.segments, 1);    // too short
    EXPECT_EQ(backward_plan(40, 64 * 64, false, kOneSlab).cut.segments, 1);  // enough without
}

TEST(BackwardPlan, TheHalvesOfACallAreCutAsTheWholeIs) {
    using backward::Half;
    constexpr std::size_t kOneSlab = std::size_t{1} << 40;
    for (const bool packed : {false, true})
        for (const std::int64_t chunks : {7, 64, 127, 512}) {
            const auto planned = [&](Pass pass, bool saves) {
                return backward_plan(packed ? 40 : 1, 64 * chunks, packed, kOneSlab, pass, saves);
            };
            const backward::BackwardPlan whole = planned(Pass::kBackward, false);
            EXPECT_EQ(whole.half, Half::kBoth);
            const backward::BackwardPlan first = planned(Pass::kPrefill, true),
                                         second = planned(Pass::kBackward, true);
            EXPECT_EQ(first.half, Half::kFirst);
            EXPECT_TRUE(first.wanted.any);
            EXPECT_EQ(second.half, Half::kSecond);
            for (const backward::BackwardPlan& half : {first, second}) {
                EXPECT_EQ(half.segment_chunks, whole.segment_chunks);
                EXPECT_EQ(half.cut.segments, whole.cut.segments);
                EXPECT_EQ(half.cut.rows.warps, whole.cut.rows.warps);
                EXPECT_EQ(half.max_segments, whole.max_segments);
                EXPECT_EQ(half.by_warp, whole.by_warp);
                EXPECT_EQ(half.slabs(), 1);
            }
        }
}

TEST(BackwardPlan, WhatAPrefillSavesHasAShape) {
    const backward::BackwardPlan plan =
        backward_plan(1, 300, false, std::size_t{1} << 40, Pass::kPrefill, true);
    Problem problem;
    problem.value_heads = 2;
    const Saving of{.chunk_tokens = 64, .words = 7, .most_chunks = 5};
    const auto check = [&](std::int64_t chunks, std::int64_t heads, std::int64_t words) {
        backward::check_saved(problem, TensorRef::contiguous(nullptr, Dtype::kInt32, {chunks, heads, words}),
                              of, plan);
    };
    EXPECT_NO_THROW(check(5, 2, 7));
    EXPECT_THROW(check(4, 2, 7), Error);
    EXPECT_THROW(check(5, 1, 7), Error);
    EXPECT_THROW(check(5, 2, 8), Error);
    const backward::BackwardPlan slabs = backward_plan(1, 300, false, 500, Pass::kPrefill, true);
    EXPECT_GT(slabs.slabs(), 1);
    EXPECT_THROW(
        backward::check_saved(problem, TensorRef::contiguous(nullptr, Dtype::kInt32, {5, 2, 7}), of, slabs),
        Error);
}

TEST(BackwardPlan, PackedSequencesThatFillTheDeviceAreNotCut) {
    const backward::BackwardPlan plan = backward_plan(4096, 64 * 4096, true, std::size_t{1} << 40);
    EXPECT_EQ(plan.cut.segments, 1);
    EXPECT_LE(plan.max_segments, 4096 + 1);
    EXPECT_GT(backward_plan(2, 64 * 512, true, std::size_t{1} << 40).cut.segments, 1);
}

TEST(BackwardPlan, AChunkIsTheLeastSlab) {
    const backward::BackwardPlan plan = backward_plan(1, 64 * 3, false, 1);
    EXPECT_EQ(plan.slab_chunks, 1);
    EXPECT_EQ(plan.slabs(), 3);
}

}  // namespace
}  // namespace cula::cuda
