// SPDX-License-Identifier: Apache-2.0
// What the CUDA backends work out on the host; it needs no GPU and no nvcc.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <utility>

#include "cuda/chunked/plan.h"
#include "cuda/device_args.h"
#include "cuda/limits.h"
#include "cuda/tile/divisor.h"

namespace cula::cuda {
namespace {

using chunked::prefill_policy;
using chunked::PrefillPolicy;
using chunked::PrefillShape;

constexpr int kMultiprocessors = 132;
constexpr std::size_t kImage = 82944;
constexpr chunked::CutCosts kCosts{.whole = 1.2, .map = 1.0, .narrow = 1.4, .wide = 2.0, .halves = 0.8};

PrefillShape one_sequence(std::int64_t chunks, int heads) {
    return {.sequences = 1, .chunks = chunks, .longest = chunks, .value_heads = heads, .value_dim = 128};
}

TEST(Policy, SplitsTheRowsOfAHeadWhereThatTakesFewerRounds) {
    EXPECT_EQ(prefill_policy(one_sequence(128, 64), kImage, kMultiprocessors, 4).row_blocks, 2);
    EXPECT_EQ(prefill_policy(one_sequence(128, 96), kImage, kMultiprocessors, 4).row_blocks, 1);
}

TEST(Policy, CutsSequencesIntoSegmentsThatFillTheDevice) {
    const auto segments = [](const PrefillShape& shape) {
        const PrefillPolicy policy = prefill_policy(shape, kImage, kMultiprocessors, 4);
        return (policy.slab_chunks + policy.segment_chunks - 1) / policy.segment_chunks;
    };
    EXPECT_EQ(segments(one_sequence(512, 8)), 8);   // 8 heads x 2 row blocks x 8 segments
    EXPECT_EQ(segments(one_sequence(512, 64)), 1);  // full without
    EXPECT_EQ(segments(one_sequence(16, 1)), 1);    // too short to pay for maps
    PrefillShape invariant = one_sequence(512, 8);
    invariant.maps_pay = false;
    EXPECT_EQ(segments(invariant), 1);
}

TEST(Policy, CutsByCost) {
    PrefillShape shape = one_sequence(512, 32);
    EXPECT_FALSE(prefill_policy(shape, kImage, kMultiprocessors, 4).halves);
    shape.costs = kCosts;
    PrefillPolicy policy = prefill_policy(shape, kImage, kMultiprocessors, 4);
    EXPECT_TRUE(
        policy
            .halves);  // two segments of 64 CTAs, the first longer; four of 32 would take two rounds of maps
    EXPECT_EQ(policy.segment_chunks, 320);
    EXPECT_EQ(policy.warps, 4);
    shape.longest = shape.chunks = 63;
    EXPECT_FALSE(prefill_policy(shape, kImage, kMultiprocessors, 4).halves);

    shape = one_sequence(512, 8);
    shape.costs = kCosts;
    policy = prefill_policy(shape, kImage, kMultiprocessors, 4);
    EXPECT_FALSE(policy.halves);
    EXPECT_EQ(policy.warps, 8);  // whole heads, so that twice as many segments fit
    EXPECT_EQ(policy.segment_chunks, 32);
    shape.longest = shape.chunks = 96;  // composing twelve segments costs more than it saves
    policy = prefill_policy(shape, kImage, kMultiprocessors, 4);
    EXPECT_EQ(policy.warps, 4);
    EXPECT_EQ(policy.segment_chunks, 12);
    shape.longest = shape.chunks = 24;
    EXPECT_EQ(prefill_policy(shape, kImage, kMultiprocessors, 4).segment_chunks, 24);

    PrefillShape kept = one_sequence(512, 32);
    kept.costs = kCosts;
    kept.kept = true;  // nobody knows the state yet
    policy = prefill_policy(kept, kImage, kMultiprocessors, 4);
    EXPECT_FALSE(policy.halves);
    EXPECT_EQ(policy.warps, 8);  // four segments of 32 CTAs; their maps, of the last one too, take two rounds
    EXPECT_EQ(policy.segment_chunks, 128);
    kept.longest = kept.chunks = 16;
    policy = prefill_policy(kept, kImage, kMultiprocessors, 4);
    EXPECT_EQ(policy.segment_chunks, 16);  // too short to cut, though maps are made
    kept = one_sequence(512, 200);         // more heads than multiprocessors
    kept.costs = kCosts;
    EXPECT_EQ(prefill_policy(kept, kImage, kMultiprocessors, 4).segment_chunks,
              prefill_policy(one_sequence(512, 200), kImage, kMultiprocessors, 4).segment_chunks);
}

TEST(Policy, FirstSegmentsAreWalkedBesideTheMapsOfOthers) {
    const auto policy_of = [](const PrefillShape& shape) {
        return prefill_policy(shape, kImage, kMultiprocessors, 4);
    };
    PrefillShape shape = one_sequence(512, 8);
    EXPECT_FALSE(policy_of(shape).first_walks);
    shape.costs.walks = true;
    EXPECT_TRUE(policy_of(shape).first_walks);
    EXPECT_EQ(policy_of(shape).segment_chunks, 57);  // nine: 16 CTAs and 7 x 16 of maps, then 8 x 16
    for (const auto& [heads, chunks] : {std::pair{4, 32}, {12, 86}, {16, 103}, {22, 128}, {32, 512}}) {
        shape.value_heads = heads;  // of 4 segments are too short, of 32 too few
        EXPECT_EQ(policy_of(shape).first_walks, heads > 4 && heads < 32) << heads;
        EXPECT_EQ(policy_of(shape).segment_chunks, chunks) << heads;
    }
    shape = {.sequences = 2, .chunks = 1024, .longest = 512, .value_heads = 8, .value_dim = 128};
    shape.costs.walks = true;
    EXPECT_TRUE(policy_of(shape).first_walks);
    shape.chunks = 6000, shape.longest = 3000;
    EXPECT_FALSE(policy_of(shape).first_walks);  // several slabs, with parts of sequences
    shape.sequences = 1, shape.longest = 6000;
    EXPECT_TRUE(policy_of(shape).first_walks);
    shape.longest = shape.chunks = 512, shape.kept = true;
    EXPECT_FALSE(policy_of(shape).first_walks);
    shape.kept = false, shape.maps_pay = false;
    EXPECT_FALSE(policy_of(shape).first_walks);
}

TEST(Policy, WhatIsKeptStaysWholeAndIsCutFinely) {
    PrefillShape shape = one_sequence(1000, 32);
    EXPECT_EQ(prefill_policy(shape, kImage, kMultiprocessors, 4).segment_chunks, 500);  // the slab's
    shape.kept = true;
    const PrefillPolicy policy = prefill_policy(shape, kImage, kMultiprocessors, 4);
    EXPECT_EQ(policy.slab_chunks, 1000);
    EXPECT_EQ(policy.segment_chunks, 500);  // two, which is too few to pay for maps that are not made anyway
    shape.from_zero = true;
    shape.costs.first = 1.25;
    EXPECT_EQ(prefill_policy(shape, kImage, kMultiprocessors, 4).segment_chunks,
              556);  // no M of the first: longer
    shape.value_heads = 8;
    EXPECT_EQ(prefill_policy(shape, kImage, kMultiprocessors, 4).segment_chunks, 125);
    EXPECT_TRUE(prefill_policy(shape, kImage, kMultiprocessors, 4).first_apart);
    shape.value_heads = 32, shape.costs = kCosts;
    EXPECT_FALSE(
        prefill_policy(shape, kImage, kMultiprocessors, 4).first_apart);  // four: not all maps fit at once
    shape.maps_pay = false;
    EXPECT_EQ(prefill_policy(shape, kImage, kMultiprocessors, 4).segment_chunks, 1000);
}

TEST(Policy, HeadsThatShareKeysArePreparedTogetherWhereCtasAreMany) {
    using chunked::prepare_span;
    EXPECT_EQ(prepare_span(128 * 64, 4, kMultiprocessors), 4);
    EXPECT_EQ(prepare_span(128 * 32, 2, kMultiprocessors), 2);
    EXPECT_EQ(prepare_span(128 * 48, 3, kMultiprocessors), 1);
    EXPECT_EQ(prepare_span(128 * 48, 6, kMultiprocessors), 2);
    EXPECT_EQ(prepare_span(16 * 64, 4, kMultiprocessors), 1);  // few CTAs
    EXPECT_EQ(prepare_span(25 * 64, 4, kMultiprocessors), 2);
    EXPECT_EQ(prepare_span(0, 1, kMultiprocessors), 1);
}

TEST(Policy, CarriesWaitPerChunkWherePrepareEndsRaggedly) {
    using chunked::pays_per_chunk;
    constexpr int kAll = kMultiprocessors;
    EXPECT_TRUE(pays_per_chunk(1, 3, kAll));
    EXPECT_TRUE(pays_per_chunk(kAll / 2, 3, kAll));  // half of the device is free anyway
    EXPECT_FALSE(pays_per_chunk(kAll, 3, kAll));
    EXPECT_FALSE(pays_per_chunk(3 * kAll, 3, kAll));  // they all end together
    EXPECT_TRUE(pays_per_chunk(3 * kAll + 1, 3, kAll));
    EXPECT_FALSE(pays_per_chunk(3 * kAll + 1, 4, kAll));
    EXPECT_TRUE(pays_per_chunk(12 * kAll, 4, kAll));
    EXPECT_FALSE(pays_per_chunk(12 * kAll + 1, 4, kAll));  // what a CTA pays adds up
}

TEST(Policy, CutsLongCallsIntoEvenSlabs) {
    const PrefillPolicy policy = prefill_policy(one_sequence(1000, 64), kImage, kMultiprocessors, 4);
    EXPECT_EQ(policy.slab_chunks, 334);  // of at most 404
    EXPECT_LE(policy.slab_chunks * 64 * kImage, chunked::kSlabBytes);
    EXPECT_EQ(prefill_policy(one_sequence(1000, 64), 0, kMultiprocessors, 4).slab_chunks, 1000);  // no images
    EXPECT_EQ(prefill_policy(one_sequence(0, 64), kImage, kMultiprocessors, 4).slab_chunks, 1);
}

TEST(Policy, RowsComeInWholeSteps) {
    PrefillShape narrow = one_sequence(128, 64);
    narrow.value_dim = 16;
    EXPECT_EQ(prefill_policy(narrow, kImage, kMultiprocessors, 1).warps, 1);
    EXPECT_EQ(prefill_policy(narrow, kImage, kMultiprocessors, 4).warps, 4);
}

TEST(Policy, OneKernelWhereHeadsFillTheDeviceOrChunksAreFew) {
    constexpr chunked::FusedCosts kFused{
        .prepare = 4.0, .carry = {1.2, 2.5}, .fused = {3.0, 4.0}, .round = 8.0, .kernel = 10.0};
    const auto groups = [&](int heads, std::int64_t sequences, std::int64_t tokens, bool invariant = false,
                            bool always = false) {
        PrefillShape shape = one_sequence(128, heads);
        shape.sequences = sequences;
        return chunked::fused_groups(shape, sequences * tokens, invariant, kMultiprocessors, always, kFused);
    };
    EXPECT_EQ(groups(96, 1, 8192), 2);  // 96 CTAs; 192 of one warpgroup would take two rounds
    EXPECT_EQ(groups(64, 1, 8192), 1);
    EXPECT_EQ(groups(16, 1, 8192), 0);  // images of few heads are made by the whole device
    EXPECT_EQ(groups(16, 1, 8192, false, true), 1);
    EXPECT_EQ(groups(16, 1, 256), 1);  // a second kernel would take as long as the first
    EXPECT_EQ(groups(40, 4, 8192), 2);
    EXPECT_EQ(groups(8, 32, 8192), 0);        // one of them may be as long as all
    EXPECT_EQ(groups(8, 32, 16), 2);          // but not very long
    EXPECT_EQ(groups(40, 4, 8192, true), 0);  // as each alone
    EXPECT_EQ(groups(64, 4, 8192, true), 1);
    EXPECT_EQ(groups(16, 1, 256, true), 0);  // whatever its length
    const auto softplus = [&](int heads, std::int64_t tokens) {
        return chunked::fused_groups(one_sequence(128, heads), tokens, false, kMultiprocessors, false,
                                     chunked::kSoftplusCosts);
    };
    EXPECT_EQ(softplus(64, 8192), 1);
    EXPECT_EQ(softplus(48, 8192), 1);
    EXPECT_EQ(softplus(32, 8192), 0);
    EXPECT_EQ(softplus(96, 8192), 0);  // pairs would take two rounds
    EXPECT_EQ(softplus(32, 1024), 1);
    PrefillShape narrow = one_sequence(128, 96);
    narrow.value_dim = 64;  // for one CTA of one warpgroup, which has a peer all the same
    EXPECT_EQ(chunked::fused_groups(narrow, 8192, false, kMultiprocessors, false, kFused), 2);
}

TEST(Divisor, DividesLikeDivision) {
    for (const std::uint32_t by :
         {1u, 2u, 3u, 5u, 7u, 12u, 31u, 32u, 33u, 96u, 641u, 65535u, 65537u, 0x7fffffffu}) {
        const Divisor divisor(by);
        for (const std::uint32_t around : {0u, by, 2 * by, 1000 * by, 0x7fffffffu / by * by, 0x7fffffffu})
            for (std::int64_t x = std::int64_t{around} - 2; x <= std::int64_t{around} + 2; ++x)
                if (x >= 0 && x <= 0x7fffffff) {
                    EXPECT_EQ(divisor.divide(static_cast<std::uint32_t>(x)), x / by) << x << " / " << by;
                }
    }
}

// Distances between tokens are 32-bit numbers where rows are read in pieces: forwards and backwards.
TEST(DeviceArgs, RowsFarApartAreNotReadInPieces) {
    alignas(16) static float memory[4];
    const auto pieces = [](Dtype dtype, std::int64_t token) {
        Args args;
        args.q = args.k = args.v = args.o = {memory, dtype, 4, {1, 2, 1, 8}, {0, 8, 8, 1}};
        args.q.stride[1] = token;
        return device_args(args).q.pieces;
    };
    constexpr std::int64_t kLimit = 1 << 28;
    for (Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat32}) {
        EXPECT_TRUE(pieces(dtype, 8));
        EXPECT_TRUE(pieces(dtype, -8));
        EXPECT_TRUE(pieces(dtype, kLimit - 8));
        EXPECT_TRUE(pieces(dtype, 8 - kLimit));
        EXPECT_FALSE(pieces(dtype, kLimit));
        EXPECT_FALSE(pieces(dtype, -kLimit));
        EXPECT_FALSE(pieces(dtype, -(std::int64_t{1} << 32) + 8));  // as an int it would be 8
        EXPECT_FALSE(pieces(dtype, -(std::int64_t{1} << 40)));
    }
}

TEST(DeviceArgs, TablesOfManyColumnsKeepThem) {
    Args args;
    args.q = args.k = args.v = args.o = {nullptr, Dtype::kFloat32, 4, {1, 1, 1, 8}, {8, 8, 8, 1}};
    args.state_indices = {nullptr, Dtype::kInt32, 2, {1, (std::int64_t{1} << 32) + 3}, {0, 1}};
    EXPECT_EQ(device_args(args).state_indices.columns, kMostCounted);
}

TEST(Limits, CallsThatThirtyTwoBitsCannotCountAreRefused) {
    Problem problem;
    problem.tokens = 1, problem.batch = problem.sequences = 8;
    problem.heads = problem.value_heads = 4;
    problem.key_dim = problem.value_dim = 128;
    EXPECT_TRUE(counts_fit(problem));
    const auto reason = [&](std::int64_t Problem::* of, std::int64_t count) {
        Problem large = problem;
        large.*of = count;
        return counts_fit(large).reason();
    };
    constexpr std::int64_t kMany = std::int64_t{1} << 31;
    EXPECT_EQ(reason(&Problem::sequences, kMany), "takes up to 2147418112 sequences, got 2147483648");
    EXPECT_EQ(reason(&Problem::tokens, kMany), "takes up to 2147418112 tokens a row, got 2147483648");
    EXPECT_EQ(reason(&Problem::value_heads, kMany), "takes up to 2147418112 value heads, got 2147483648");
    EXPECT_EQ(reason(&Problem::sequences, kMany / 4),
              "takes up to 2147418112 value heads of all sequences, got 2147483648");
    // 2^32 + 512 blocks, of which 32 bits leave 512
    EXPECT_EQ(reason(&Problem::sequences, kMany / 16 + 16),
              "takes up to 2147418112 thread blocks of 16 rows of a state, got 4294967808");
    problem.value_dim = problem.value_heads = problem.heads = 1;
    problem.tokens = 6400;
    EXPECT_EQ(reason(&Problem::sequences, kMany / 128),
              "takes up to 2147418112 chunks of 32 tokens, got 3372220416");
    problem.varlen = true;
    EXPECT_EQ(reason(&Problem::sequences, kMany / 128), "");
    EXPECT_NE(reason(&Problem::tokens, std::numeric_limits<std::int64_t>::max()), "");
}

}  // namespace
}  // namespace cula::cuda
