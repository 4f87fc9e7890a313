// SPDX-License-Identifier: Apache-2.0
// What the CUDA backends work out on the host; it needs no GPU and no nvcc.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>

#include "cuda/backward/plan.h"
#include "cuda/backward/three_walks.h"
#include "cuda/chunked/plan.h"
#include "cuda/device_args.h"
#include "cuda/limits.h"
#include "cuda/tile/divisor.h"

namespace cula::cuda {
namespace {

using chunked::Candidate;
using chunked::CarryTraits;
using chunked::Fused;
using chunked::Joined;
using chunked::kind;
using chunked::PrefillPlan;
using chunked::PrefillShape;
using chunked::Segments;
using chunked::Strategy;
using chunked::StrategyKind;

constexpr int kMultiprocessors = 132;
constexpr std::size_t kOperandBytes = 82944;
// In the order of Costs: prepare, carry, map, segment, halves, fused.
constexpr std::array kCutCosts{0.0, 1.2, 1.8, 1.0, 1.4, 2.0, 0.8, 0.0, 0.0};
constexpr std::array kFusedCosts{4.0, 1.2, 2.5, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0};

// The plan of a call that has one.
PrefillPlan planned(const std::optional<PrefillPlan>& plan) {
    if (!plan) throw std::logic_error("there is no such plan");
    return *plan;
}

// A call of a carry with costs of the test's own; all options have the values of most tests.
struct Sketch {
    int heads = 8;
    std::int64_t sequences = 1, tokens = 512 * 64;  // of each sequence
    bool packed = false, invariant = false, kept = false, segment = false, from_zero = false;
    bool first_beside_maps = false, with_fused = false, joins = false;
    int value_dim = 128, warp_step = 4;
    std::size_t operand_bytes = kOperandBytes;
    std::span<const double> costs = kCutCosts;

    PrefillShape shape() const {
        Problem problem;
        problem.tokens = packed ? sequences * tokens : tokens;
        problem.sequences = sequences;
        problem.heads = problem.value_heads = heads;
        problem.key_dim = 128, problem.value_dim = value_dim;
        problem.varlen = packed, problem.batch_invariant = invariant;
        problem.costs = costs;
        PrefillShape shape = chunked::shape_of(problem, 64);
        shape.kept = kept, shape.segment = segment, shape.from_zero = from_zero, shape.joins = joins;
        return shape;
    }
    CarryTraits carry() const {
        return {.warp_step = warp_step,
                .operand_bytes = operand_bytes,
                .warpgroups = true,
                .first_beside_maps = first_beside_maps,
                .first_apart = 1.25};
    }
    std::optional<PrefillPlan> find(StrategyKind wanted) const {
        return plan_prefill(shape(), carry(), {.multiprocessors = kMultiprocessors}, wanted, with_fused);
    }
    PrefillPlan plan() const { return planned(find(StrategyKind::kAny)); }
    StrategyKind chosen() const { return kind(plan().strategy); }
    Segments segments() const { return std::get<Segments>(plan().strategy); }
    // That the fused kernel does everything at once.
    void expect_one_slab(StrategyKind wanted, int chunks, int segments) const {
        const PrefillPlan plan = planned(find(wanted));
        EXPECT_EQ(kind(plan.strategy), wanted);
        EXPECT_EQ(plan.slab_chunks, chunks);
        EXPECT_EQ(plan.max_segments, segments);
        EXPECT_FALSE(plan.prepares);
    }
};

// How one sequence would be run on the first machine of the table.
Strategy on_the_first_machine(Algorithm algorithm, Gate gate, int heads, std::int64_t tokens,
                              std::size_t operand_bytes, bool joins = false) {
    const bool per_channel = varies_by_channel(algorithm.decay), delta = algorithm.update == Update::kDelta;
    Problem problem;
    problem.algorithm = algorithm, problem.gate = gate;
    problem.tokens = tokens;
    problem.heads = problem.value_heads = heads;
    problem.key_dim = problem.value_dim = 128;
    const Machine& machine = machines().front();
    const CarryTraits carry{.warp_step = 4,
                            .operand_bytes = operand_bytes,
                            .warpgroups = true,
                            .family = family(algorithm, gate),
                            .first_beside_maps = per_channel && delta,
                            .first_apart = 1.25};
    Device device{.kind = DeviceKind::kCuda};
    device.multiprocessors = kMultiprocessors;
    device.compute_capability = machine.compute_capability;
    device.clock_mhz = machine.clock_mhz, device.memory_gbps = machine.memory_gbps;
    const bool with_fused = per_channel && delta && gate != Gate::kLogDecay;
    PrefillShape shape = chunked::shape_of(problem, 64);
    shape.joins = joins;
    return planned(plan_prefill(shape, carry, device, StrategyKind::kAny, with_fused)).strategy;
}

TEST(Plan, RunsTheBenchmarksShapesAsTheyAreFastest) {
    static constexpr Algorithm kKda{Decay::kPerChannel, Update::kDelta},
        kGdn{Decay::kPerToken, Update::kDelta}, kLightning{Decay::kPerHead, Update::kAdditive};
    constexpr std::size_t kTokenBytes = 49152;
    const auto kda = [](int heads, std::int64_t tokens) {
        return on_the_first_machine(kKda, Gate::kBounded, heads, tokens, kOperandBytes);
    };
    const auto gdn = [](int heads, std::int64_t tokens) {
        return on_the_first_machine(kGdn, Gate::kSoftplus, heads, tokens, kTokenBytes);
    };
    for (int heads : {64, 96}) EXPECT_EQ(kind(kda(heads, 8192)), StrategyKind::kFused);
    EXPECT_EQ(kind(kda(32, 32768)), StrategyKind::kWhole);
    EXPECT_TRUE(std::get<Segments>(kda(8, 32768)).first_beside_maps);
    EXPECT_EQ(kind(gdn(64, 8192)), StrategyKind::kWhole);
    EXPECT_EQ(kind(gdn(32, 32768)), StrategyKind::kHalves);
    EXPECT_EQ(std::get<Segments>(gdn(8, 32768)).count, 16);  // of eight warps; four took 9 % longer
    const Strategy lightning = on_the_first_machine(kLightning, Gate::kLogDecay, 64, 32768, 0);
    EXPECT_EQ(kind(lightning), StrategyKind::kWhole);
    EXPECT_EQ(chunked::rows_of(lightning).warps, 4);
}

TEST(Plan, SharesTheRowsOfAHeadWhereThatTakesLess) {
    const auto blocks = [](int heads) {
        const Sketch call{.heads = heads, .tokens = 128 * 64};
        return chunked::rows_of(planned(call.find(StrategyKind::kWhole)).strategy).blocks;
    };
    EXPECT_EQ(blocks(64), 2);  // 128 CTAs of four warps
    EXPECT_EQ(blocks(96), 1);  // 192 would take two rounds
    EXPECT_EQ(blocks(8), 2);
}

TEST(Plan, RowsComeInWholeSteps) {
    const auto warps = [](int step) {
        return chunked::rows_of(Sketch{.value_dim = 16, .warp_step = step}.plan().strategy).warps;
    };
    EXPECT_EQ(warps(1), 1);
    EXPECT_EQ(warps(4), 4);
}

TEST(Plan, CutsSequencesIntoSegmentsThatFillTheDevice) {
    EXPECT_EQ(Sketch{}.segments().count, 16);  // whole heads in CTAs of eight warps
    EXPECT_EQ(Sketch{}.plan().segment_chunks, 32);
    const Sketch shorter{.tokens = 96 * 64};  // composing twelve segments costs more than it saves
    EXPECT_EQ(shorter.segments().count, 8);   // 8 heads x 2 row blocks x 8 segments
    EXPECT_EQ(shorter.segments().rows.warps, 4);
    EXPECT_EQ(shorter.plan().segment_chunks, 12);
    EXPECT_EQ(Sketch{.heads = 64}.chosen(), StrategyKind::kWhole);  // they fill it without
    EXPECT_EQ((Sketch{.heads = 1, .tokens = 16 * 64}).chosen(), StrategyKind::kWhole);  // too short
    EXPECT_EQ(Sketch{.invariant = true}.chosen(), StrategyKind::kWhole);
    EXPECT_EQ(Sketch{.segment = true}.chosen(), StrategyKind::kWhole);  // which makes the map itself
}

TEST(Plan, CutsInTwoWhereMoreSegmentsTakeRounds) {
    const Sketch call{.heads = 32};  // four segments of 32 CTAs would take two rounds of maps
    EXPECT_EQ(call.chosen(), StrategyKind::kHalves);
    EXPECT_EQ(call.plan().segment_chunks, 320);
    EXPECT_EQ((Sketch{.heads = 32, .tokens = 63 * 64}).chosen(), StrategyKind::kWhole);
    EXPECT_EQ((Sketch{.heads = 40}).chosen(), StrategyKind::kWhole);  // they do not fit
    EXPECT_EQ((Sketch{.heads = 32, .costs = kFusedCosts}).find(StrategyKind::kHalves), std::nullopt);
}

TEST(Plan, PredictsWhatItChooses) {
    const Sketch call{.heads = 32};
    const PrefillShape shape = call.shape();
    const CarryTraits carry = call.carry();
    const chunked::Candidates all =
        chunked::Planner(shape, carry, {.multiprocessors = kMultiprocessors}).candidates(false);
    const Candidate* const chosen = all.choose(StrategyKind::kAny);
    EXPECT_GE(all.all().size(), 3u);
    for (const Candidate& other : all.all()) EXPECT_LE(chosen->expected, other.expected);
    // prepare costs a kernel of 10 us here and a round takes 8; 0.8 for each of 512 chunks
    EXPECT_NEAR(chosen->expected, 10 + 8 + 0.8 * 512, 1e-6);
    const Candidate* const whole = all.choose(StrategyKind::kWhole);
    EXPECT_NEAR(whole->expected, 10 + 8 + 1.2 * 512, 1e-6);
}

TEST(Plan, APackedCallIsCutForTheLengthsThatMayCome) {
    // Four sequences of equal length would need no cut, one with all tokens does.
    const Sketch few{.heads = 4, .sequences = 4, .tokens = 128 * 64, .packed = true};
    EXPECT_EQ(few.chosen(), StrategyKind::kSegments);
    const Sketch many{.heads = 4, .sequences = 32, .tokens = 16 * 64, .packed = true};
    EXPECT_EQ(many.chosen(), StrategyKind::kWhole);
    EXPECT_TRUE(many.plan().by_warp);
    EXPECT_EQ(many.plan().max_segments, 32);
    const Sketch more{.heads = 4, .sequences = 33, .tokens = 16 * 64, .packed = true};
    EXPECT_FALSE(more.plan().by_warp);
    EXPECT_GT(more.plan().max_segments, 33);
}

TEST(Plan, FirstSegmentsAreCarriedBesideTheMapsOfOthers) {
    Sketch call{.first_beside_maps = true};
    constexpr std::array kNarrow{0.0, 1.2, 9.0, 1.0, 1.4, 9.0, 0.0, 0.0, 0.0};
    call.costs = kNarrow;
    EXPECT_TRUE(call.segments().first_beside_maps);
    EXPECT_EQ(call.plan().segment_chunks, 57);  // nine: 16 CTAs and 7 x 16 of maps, then 8 x 16
    for (const auto& [heads, chunks] : {std::pair{4, 32}, {12, 86}, {16, 103}, {22, 128}}) {
        call.heads = heads;
        EXPECT_EQ(call.segments().first_beside_maps, heads > 4) << heads;  // of 4 segments are too short
        EXPECT_EQ(call.plan().segment_chunks, chunks) << heads;
    }
    call.heads = 8, call.sequences = 2;
    EXPECT_TRUE(call.segments().first_beside_maps);
    call.tokens = 3000 * 64;
    EXPECT_FALSE(call.segments().first_beside_maps);  // several slabs, with parts of sequences
    call.sequences = 1, call.tokens = 6000 * 64;
    EXPECT_TRUE(call.segments().first_beside_maps);
    call.tokens = 512 * 64, call.kept = true;
    EXPECT_FALSE(call.segments().first_beside_maps);
    call.kept = false, call.packed = true;
    EXPECT_FALSE(call.segments().first_beside_maps);
}

TEST(Plan, WhatIsKeptStaysWholeAndIsCutFinely) {
    Sketch call{.heads = 32, .tokens = 1000 * 64, .costs = kCutCosts};
    call.kept = true;  // nobody knows the state yet
    PrefillPlan plan = call.plan();
    EXPECT_EQ(plan.slab_chunks, 1000);
    EXPECT_EQ(call.segments().count, 4);  // of CTAs of eight warps; maps take two rounds
    constexpr std::array kNarrow{0.0, 1.2, 9.0, 1.0, 1.4, 9.0, 0.0, 0.0, 0.0};
    call.costs = kNarrow;
    EXPECT_EQ(call.plan().segment_chunks, 500);  // two: too few to pay for maps that are not made anyway
    call.from_zero = true;
    EXPECT_EQ(call.plan().segment_chunks, 556);  // no M of the first: longer
    call.heads = 8;
    EXPECT_EQ(call.plan().segment_chunks, 125);
    EXPECT_TRUE(call.segments().first_apart);
    call.invariant = true;
    EXPECT_EQ(call.plan().segment_chunks, 1000);
    call = {.heads = 200, .kept = true};  // more heads than multiprocessors
    EXPECT_EQ(call.chosen(), StrategyKind::kWhole);
    call = {.heads = 32, .tokens = 16 * 64, .kept = true};
    EXPECT_EQ(call.plan().segment_chunks, 16);  // too short to cut, though maps are made
}

TEST(Plan, CutsLongCallsIntoEvenSlabs) {
    const PrefillPlan plan = Sketch{.heads = 64, .tokens = 1000 * 64}.plan();
    EXPECT_EQ(plan.slab_chunks, 334);  // of at most 404
    EXPECT_EQ(plan.slabs(), 3);
    EXPECT_LE(plan.slab_chunks * 64 * kOperandBytes, chunked::kSlabBytes);
    EXPECT_EQ((Sketch{.heads = 64, .tokens = 1000 * 64, .operand_bytes = 0}).plan().slab_chunks, 1000);
    EXPECT_EQ((Sketch{.heads = 64, .tokens = 0}).plan().slab_chunks, 1);
}

TEST(Plan, OneKernelWhereHeadsFillTheDeviceOrChunksAreFew) {
    const auto warpgroups = [&](Sketch call) {
        call.with_fused = true, call.costs = kFusedCosts;
        const PrefillPlan plan = call.plan();
        const auto* const fused = std::get_if<Fused>(&plan.strategy);
        return fused ? fused->warpgroups : 0;
    };
    EXPECT_EQ(warpgroups({.heads = 96, .tokens = 8192}), 2);  // 192 CTAs in pairs would take two rounds
    EXPECT_EQ(warpgroups({.heads = 64, .tokens = 8192}), 1);
    EXPECT_EQ(warpgroups({.heads = 16, .tokens = 8192}), 0);  // the whole device prepares few heads
    EXPECT_EQ(warpgroups({.heads = 16, .tokens = 256}), 1);   // a second kernel would take as long
    EXPECT_EQ(warpgroups({.heads = 40, .sequences = 4, .tokens = 8192}), 2);
    EXPECT_EQ(warpgroups({.heads = 16, .sequences = 4, .tokens = 8192}), 0);  // one may be as long as all
    EXPECT_EQ(warpgroups({.heads = 16, .sequences = 4, .tokens = 64}), 1);    // but not very long
    EXPECT_EQ(warpgroups({.heads = 40, .sequences = 4, .tokens = 8192, .invariant = true}), 0);
    EXPECT_EQ(warpgroups({.heads = 64, .sequences = 4, .tokens = 8192, .invariant = true}), 1);
    EXPECT_EQ(warpgroups({.heads = 16, .tokens = 256, .invariant = true}), 0);  // whatever its length
    EXPECT_EQ(warpgroups({.heads = 96, .tokens = 8192, .value_dim = 64}), 2);
    for (bool packed : {false, true})  // a batch and the same sequences packed get the same bits
        EXPECT_EQ(warpgroups({.heads = 40, .sequences = 4, .tokens = 8192, .packed = packed}), 2);
    Sketch forced{.heads = 16, .with_fused = true, .costs = kFusedCosts};
    EXPECT_EQ(kind(planned(forced.find(StrategyKind::kFused)).strategy), StrategyKind::kFused);
    forced.tokens = 0;  // states are copied, whatever is wanted
    EXPECT_EQ(kind(planned(forced.find(StrategyKind::kFused)).strategy), StrategyKind::kWhole);
    forced.tokens = 8192, forced.with_fused = false;
    EXPECT_EQ(forced.find(StrategyKind::kFused), std::nullopt);
}

TEST(Plan, AFormOfTheFusedKernelThatIsNotTooLongForSkewedLengths) {
    constexpr std::array kCosts{6.0, 1.2, 1.2, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0};
    Sketch call{.heads = 16, .sequences = 8, .tokens = 2048, .with_fused = true, .costs = kCosts};
    for (bool packed : {false, true}) {
        call.packed = packed;
        // 128 CTAs would take less than 256 in pairs, in two rounds, but twice as long as whole sequences if
        // one of them had all tokens.
        EXPECT_EQ(std::get<Fused>(call.plan().strategy).warpgroups, 1);
        EXPECT_EQ(std::get<Fused>(planned(call.find(StrategyKind::kFused)).strategy).warpgroups, 2);
    }
}

TEST(Plan, JoinedSegmentsRunAllAtOnce) {
    const auto cut = [](Sketch call) {
        call.with_fused = call.joins = true, call.costs = kFusedCosts;
        const auto plan = call.find(StrategyKind::kJoined);
        return plan ? std::get<Joined>(plan->strategy).chunks : 0;
    };
    EXPECT_EQ(cut({.heads = 16, .tokens = 8192}), 32);
    EXPECT_EQ(cut({.heads = 8, .tokens = 8192}), 16);
    EXPECT_EQ(cut({.heads = 8, .tokens = 8192, .value_dim = 256}), 32);
    EXPECT_EQ(cut({.heads = 1, .tokens = 256}), 2);
    EXPECT_EQ(cut({.heads = 1, .tokens = 128}), 0);  // no shorter ones
    EXPECT_EQ(cut({.heads = 22, .tokens = 8192}), 43);
    EXPECT_EQ(cut({.heads = 33, .tokens = 8192}), 64);
    EXPECT_EQ(cut({.heads = 34, .tokens = 8192}), 0);
    EXPECT_EQ(cut({.heads = 16, .tokens = 8192, .invariant = true}), 0);
    for (bool packed : {false, true})  // a batch and the same sequences packed get the same bits
        EXPECT_EQ(cut({.heads = 4, .sequences = 4, .tokens = 8192, .packed = packed}), 32);
    EXPECT_EQ((Sketch{.heads = 16, .tokens = 8192, .with_fused = true}).find(StrategyKind::kJoined),
              std::nullopt);

    EXPECT_EQ(cut({.heads = 1, .tokens = 8192}), 6);  // more segments are more maps, too
    // One of several sequences may be cut into all segments that there are.
    EXPECT_EQ(cut({.heads = 1, .sequences = 16, .tokens = 8192}), 64);
    EXPECT_EQ(cut({.heads = 1, .sequences = 17, .tokens = 8192}), 0);

    constexpr std::array kSegmentCosts{4.0, 1.2, 2.5, 3.0, 1.4, 2.0, 0.0, 3.0, 4.0};
    Sketch wanted{.heads = 8, .tokens = 4096, .with_fused = true, .costs = kSegmentCosts};
    EXPECT_NE(wanted.chosen(), StrategyKind::kJoined);
    wanted.joins = true;
    EXPECT_EQ(wanted.chosen(), StrategyKind::kJoined);
    wanted.expect_one_slab(StrategyKind::kJoined, 64, 8);
}

TEST(Plan, JoinsSegmentsOfFewHeads) {
    const auto joins = [](Gate gate, int heads, std::int64_t tokens) {
        return kind(on_the_first_machine({Decay::kPerChannel, Update::kDelta}, gate, heads, tokens,
                                         kOperandBytes, true)) == StrategyKind::kJoined;
    };
    constexpr std::array<std::pair<int, std::int64_t>, 7> kFaster{
        {{4, 1024}, {12, 2048}, {8, 4096}, {12, 4096}, {16, 8192}, {8, 16384}, {4, 32768}}};
    constexpr std::array<std::pair<int, std::int64_t>, 6> kLonger{
        {{24, 8192}, {33, 8192}, {16, 16384}, {8, 32768}, {32, 32768}, {8, 131072}}};
    for (const auto& [heads, tokens] : kFaster)
        EXPECT_TRUE(joins(Gate::kBounded, heads, tokens)) << heads << ' ' << tokens;
    for (const auto& [heads, tokens] : kLonger)
        EXPECT_TRUE(joins(Gate::kBounded, heads, tokens)) << heads << ' ' << tokens;
    // One head of 16,384 tokens takes less on average, but lasting gates would pass 31 maps.
    constexpr std::array<std::pair<int, std::int64_t>, 5> kSlower{
        {{4, 128}, {16, 512}, {34, 8192}, {64, 8192}, {1, 16384}}};
    for (const auto& [heads, tokens] : kSlower)
        EXPECT_FALSE(joins(Gate::kBounded, heads, tokens)) << heads << ' ' << tokens;
    EXPECT_TRUE(joins(Gate::kSoftplus, 8, 4096));
    EXPECT_TRUE(joins(Gate::kSoftplus, 16, 8192));
    EXPECT_FALSE(joins(Gate::kSoftplus, 64, 8192));
}

TEST(Machines, CostsOfJoinedSegmentsAreThereWhereThoseOfTheFusedKernelAre) {
    for (const Machine& machine : machines())  // bench.fit does not print them
        for (const Costs& costs : machine.warpgroups)
            EXPECT_EQ(costs.fused[0] > 0, costs.joined[0] > 0 && costs.joined[1] > 0) << machine.name;
}

TEST(Machines, OtherGpusAreEstimatedByTheirRates) {
    const Device h200{.compute_capability = 90,
                      .multiprocessors = 132,
                      .clock_mhz = machines()[0].clock_mhz,
                      .memory_gbps = machines()[0].memory_gbps};
    const auto prepare = [](const Device& device) {
        return Estimate(device).costs(false, Family::kTokenDelta).prepare;
    };
    const auto carry = [](const Device& device) {
        return Estimate(device).costs(false, Family::kTokenDelta).carry[0];
    };
    EXPECT_EQ(Estimate(h200).machine.name, machines()[0].name);
    EXPECT_EQ(carry(h200), carry({}));  // rates unknown
    Device slower = h200;
    slower.compute_capability = 89, slower.clock_mhz /= 2;
    slower.multiprocessors = 33, slower.memory_gbps /= 4;  // as much memory for each multiprocessor
    EXPECT_NEAR(carry(slower), carry(h200) * 2 * 2.5, 1e-9);
    EXPECT_NEAR(prepare(slower), prepare(h200) * 2 * 2.5, 1e-9);
    slower.memory_gbps /= 10;
    EXPECT_NEAR(prepare(slower), prepare(h200) * 10, 1e-9);  // bound by memory now
    EXPECT_NEAR(carry(slower), carry(h200) * 2 * 2.5, 1e-9);
    EXPECT_NEAR(Estimate(slower).copy_rate(), Estimate(h200).copy_rate() / 40, 1e-6);
}

TEST(Policy, HeadsThatShareKeysArePreparedTogetherWhereCtasAreMany) {
    const auto span = [](std::size_t chunks, int group) {
        return chunked::prepare_share(chunks, group, kMultiprocessors).span;
    };
    EXPECT_EQ(span(128 * 64, 4), 4);
    EXPECT_EQ(span(128 * 32, 2), 2);
    EXPECT_EQ(span(128 * 48, 3), 1);
    EXPECT_EQ(span(128 * 48, 6), 2);
    EXPECT_EQ(span(16 * 64, 4), 1);  // few CTAs
    EXPECT_EQ(span(25 * 64, 4), 2);
    EXPECT_EQ(span(0, 1), 1);
}

TEST(Policy, HeadsOfTheirOwnKeysArePreparedInPairsWhereCtasAreMany) {
    const auto pairs = [](std::size_t chunks, int group) {
        return chunked::prepare_share(chunks, group, kMultiprocessors).pairs;
    };
    EXPECT_EQ(pairs(128 * 64, 1), 2);
    EXPECT_EQ(pairs(128 * 64, 3), 2);
    EXPECT_EQ(pairs(128 * 64, 4), 1);  // four value heads share keys
    EXPECT_EQ(pairs(12 * 132, 1), 2);
    EXPECT_EQ(pairs(12 * 132 - 2, 1), 1);  // few CTAs
    EXPECT_EQ((chunked::PrepareShare{.pairs = 2}.blocks(5)), 3u);
    EXPECT_EQ((chunked::PrepareShare{.span = 4}.blocks(8)), 2u);
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

TEST(ThreeWalks, HaveTheTensorsOfThePrefillInOtherPlaces) {
    using backward::Walk;
    DeviceArgs call;
    backward::Gradients d;
    float memory[9];
    TokenRows* const rows[] = {&call.q, &call.k, &call.v, &d.d_o, &d.d_q, &d.d_k, &d.d_v};
    for (int i = 0; i < 7; ++i) rows[i]->data = memory + i;
    constexpr bool kHas[1] = {true};
    call.key_dim = 96, call.value_dim = 80, call.has_initial = kHas;
    call.initial = {memory + 7, Dtype::kFloat32, 1, 0, 96 * 80, 96, 1};
    d.d_final = d.d_initial = {memory + 8, Dtype::kFloat32, 1, 0, 96 * 80, 1, 80};

    const auto expect = [&](Walk walk, const TokenRows& q, const TokenRows& k, const TokenRows& v,
                            const TokenRows& o) {
        const DeviceArgs a = backward::walk_args(call, d, walk);
        EXPECT_EQ(a.q.data, q.data);
        EXPECT_EQ(a.k.data, k.data);
        EXPECT_EQ(a.v.data, v.data);
        EXPECT_EQ(a.o.data, o.data);
        EXPECT_EQ(a.key_dim, walk == Walk::kValue ? 96 : 80);
        EXPECT_EQ(a.value_dim, walk == Walk::kValue ? 80 : 96);
        return a;
    };
    const DeviceArgs query = expect(Walk::kQuery, d.d_o, call.v, call.k, d.d_q);
    EXPECT_FALSE(query.reversed || query.final.data);
    EXPECT_EQ(query.initial.data, call.initial.data);
    EXPECT_EQ(query.has_initial, kHas);
    EXPECT_EQ(query.initial.k, 96);
    EXPECT_EQ(query.initial.v, 1);
    const DeviceArgs key = expect(Walk::kKey, call.v, d.d_o, call.q, d.d_k);
    EXPECT_TRUE(key.reversed && !key.has_initial && !key.final.data);
    EXPECT_EQ(key.initial.data, d.d_final.data);
    EXPECT_EQ(key.initial.v, 80);
    const DeviceArgs value = expect(Walk::kValue, call.k, call.q, d.d_o, d.d_v);
    EXPECT_TRUE(value.reversed && !value.has_initial);
    EXPECT_EQ(value.has_final, kHas);
    EXPECT_EQ(value.initial.v, 1);
    EXPECT_EQ(value.final.data, d.d_initial.data);
}

TEST(ThreeWalks, LeaveToOthersWhatIsNoPrefill) {
    Problem problem;
    problem.pass = Pass::kBackward;
    problem.algorithm = kLightning;
    problem.heads = problem.value_heads = 2;
    problem.key_dim = 64, problem.value_dim = 128;
    ASSERT_TRUE(backward::takes_three_walks(problem));
    const Problem key = backward::walk_problem(problem, backward::Walk::kKey);
    EXPECT_EQ(key.pass, Pass::kPrefill);
    EXPECT_EQ(key.key_dim, 128);
    EXPECT_EQ(key.value_dim, 64);
    const auto takes = [&](auto change) {
        Problem other = problem;
        change(other);
        return static_cast<bool>(backward::takes_three_walks(other));
    };
    EXPECT_FALSE(takes([](Problem& other) { other.qk_l2norm = true; }));
    EXPECT_FALSE(takes([](Problem& other) { other.wide_d_o = true; }));
    EXPECT_FALSE(takes([](Problem& other) { other.value_heads = 4; }));
    EXPECT_FALSE(takes([](Problem& other) { other.key_dim = 129; }));
    EXPECT_FALSE(takes([](Problem& other) { other.value_dim = 129; }));
    EXPECT_FALSE(takes([](Problem& other) { other.value_dim = 15; }));
    for (const NamedAlgorithm& row : kAlgorithms)
        EXPECT_EQ(takes([&](Problem& other) { other.algorithm = row.algorithm; }),
                  row.algorithm == kLightning || row.algorithm == kLinearAttention)
            << row.name;
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
