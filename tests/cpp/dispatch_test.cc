// SPDX-License-Identifier: Apache-2.0
// Dispatch over a registry of this test's own: its kernels() is found before the archive's, so
// src/registry.cc is not linked.
#include <gtest/gtest.h>

#include <array>

#include "call.h"
#include "core/kernel.h"

namespace cula {
namespace {

using test::Call;
using test::error_of;

std::string_view ran;  // the target whose kernel ran last
std::size_t given_bytes;

constexpr std::size_t kWorkspaceBytes = 100;

Support always(const Problem&) { return Support::yes(); }
Support even_keys(const Problem& problem) {
    return problem.key_dim % 2 == 0 ? Support::yes() : Support::no("needs an even K");
}
Support never(const Problem&) { return Support::no("is not of this world"); }

std::size_t no_bytes(const Args&, const Context&) { return 0; }
std::size_t some_bytes(const Args&, const Context& context) {
    return kWorkspaceBytes * static_cast<std::size_t>(context.parallel_for.threads);
}

template <int row>
void record(const Args&, const Context& context) {
    ran = kernels()[row].target;
    given_bytes = context.workspace_bytes;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(context.workspace) % 64, 0u);
}

Prediction key_dim_as_time(const Problem& problem) { return static_cast<double>(problem.key_dim); }

constexpr std::array<Kernel, 5> kRows{{
    {"gpu", Pass::kPrefill, DeviceKind::kCuda, always, prepare<no_bytes, record<0>>},
    {"cpu:odd", Pass::kPrefill, DeviceKind::kCpu, never, prepare<no_bytes, record<1>>, key_dim_as_time},
    {"cpu:even", Pass::kPrefill, DeviceKind::kCpu, even_keys, prepare<some_bytes, record<2>>,
     key_dim_as_time},
    {"cpu:even", Pass::kDecode, DeviceKind::kCpu, even_keys, prepare<no_bytes, record<3>>},
    {"plain", Pass::kPrefill, DeviceKind::kCpu, always, prepare<no_bytes, record<4>>},
}};

std::string_view target_of(std::string_view backend, std::int64_t key_dim = 4) {
    const Call call(Pass::kPrefill, kKda, {.key_dim = key_dim});
    return plan(Pass::kPrefill, call.args, {}, backend).target();
}

TEST(Dispatch, TakesTheFirstRowThatSupportsTheProblem) {
    EXPECT_EQ(target_of("", 4), "cpu:even");
    EXPECT_EQ(target_of("", 3), "plain");
}

TEST(Dispatch, ForcesATargetOrAFamilyByName) {
    EXPECT_EQ(target_of("plain"), "plain");
    EXPECT_EQ(target_of("cpu:even"), "cpu:even");
    EXPECT_EQ(target_of("cpu"), "cpu:even");
}

TEST(Dispatch, AForcedBackendFailsWithItsOwnReason) {
    EXPECT_EQ(error_of([] { target_of("cpu:odd"); }),
              "prefill: backend \"cpu:odd\" does not take this call:\n  cpu:odd: is not of this world");
    EXPECT_EQ(error_of([] { target_of("cpu", 3); }),
              "prefill: backend \"cpu\" does not take this call:\n  cpu:odd: is not of this world\n  "
              "cpu:even: needs "
              "an even K");
    EXPECT_EQ(
        error_of([] { target_of("gpu"); }),
        "prefill: backend \"gpu\" does not take this call:\n  gpu: runs on CUDA tensors, these are on CPU");
}

TEST(Dispatch, ABackendWithoutThePassSaysSo) {
    const Call call(Pass::kDecode, kKda);
    EXPECT_EQ(error_of([&] { plan(Pass::kDecode, call.args, {}, "plain"); }),
              "decode: backend \"plain\" does not take this call: it has no decode kernel");
}

TEST(Dispatch, NoBackendAtAllGivesEveryReason) {
    const Call call(Pass::kDecode, kKda, {.key_dim = 3});
    EXPECT_EQ(error_of([&] { plan(Pass::kDecode, call.args, {}); }),
              "decode: no backend takes this call:\n  cpu:even: needs an even K");
}

TEST(Dispatch, AnUnknownBackendNamesTheKnownOnes) {
    for (std::string_view unknown : {"cpu:", "cp", "cpu:eve", "plainer", "CPU"})
        EXPECT_EQ(error_of([&] { target_of(unknown); }),
                  "prefill: backend must be one of gpu, cpu:odd, cpu:even, plain, got \"" +
                      std::string(unknown) + "\"");
}

TEST(Dispatch, BadArgumentsAreFoundBeforeTheBackend) {
    Call call(Pass::kPrefill, kKda);
    call.args.beta = {};
    EXPECT_EQ(error_of([&] { plan(Pass::kPrefill, call.args, {}, "nonsense"); }),
              "prefill: beta must be given for kda, got none");
}

TEST(Dispatch, ExplainListsEveryRowOfThePassInOrder) {
    const Call call(Pass::kPrefill, kKda, {.key_dim = 3});
    const std::vector<Explanation> rows = explain(describe(Pass::kPrefill, call.args, {}));
    ASSERT_EQ(rows.size(), 4u);
    EXPECT_EQ(rows[0].target, "gpu");
    EXPECT_EQ(rows[0].support.reason(), "runs on CUDA tensors, these are on CPU");
    EXPECT_EQ(rows[1].support.reason(), "is not of this world");
    EXPECT_EQ(rows[2].support.reason(), "needs an even K");
    EXPECT_EQ(rows[3].target, "plain");
    EXPECT_TRUE(rows[3].support);
    EXPECT_EQ(rows[3].support.reason(), "");
    for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i].chosen, i == 3);
}

TEST(Dispatch, ExplainChoosesOneOfSeveral) {
    Problem problem;
    problem.key_dim = 4;
    std::vector<std::string_view> chosen;
    for (const Explanation& row : explain(problem)) {
        if (row.chosen) chosen.push_back(row.target);
        // A row that does not take the problem, or has no model, predicts nothing.
        EXPECT_EQ(row.microseconds, row.target == "cpu:even" ? Prediction(4.0) : std::nullopt) << row.target;
    }
    EXPECT_EQ(chosen, std::vector<std::string_view>{"cpu:even"});
}

TEST(Dispatch, TargetsAreListedOnce) {
    EXPECT_EQ(targets(), (std::vector<std::string_view>{"gpu", "cpu:odd", "cpu:even", "plain"}));
}

TEST(Explain, AsksForAWriteOfAToken) {
    Problem problem;
    problem.writes = 0;
    EXPECT_EQ(error_of([&] { explain(problem); }), "explain: writes must be at least 1, got 0");
}

TEST(Workspace, IsAllocatedWhereTheCallerGivesNone) {
    const Call call(Pass::kPrefill, kKda);
    prefill(call.args);
    EXPECT_EQ(ran, "cpu:even");
    EXPECT_GE(given_bytes, kWorkspaceBytes);
    prefill(call.args, {}, "plain");
    EXPECT_EQ(ran, "plain");
    EXPECT_EQ(given_bytes, 0u);
}

TEST(Workspace, OfTheCallerIsUsedAndMustBeLargeEnough) {
    const Call call(Pass::kPrefill, kKda);
    alignas(64) std::array<std::byte, kWorkspaceBytes> memory;
    Context context;
    context.workspace = memory.data();
    context.workspace_bytes = memory.size();
    prefill(call.args, context);
    EXPECT_EQ(given_bytes, kWorkspaceBytes);

    ran = "";
    context.workspace_bytes -= 1;
    EXPECT_EQ(error_of([&] { prefill(call.args, context); }),
              "prefill: workspace must hold 100 bytes, got 99");
    const Plan planned = plan(Pass::kPrefill, call.args, {});
    EXPECT_EQ(planned.workspace_bytes, kWorkspaceBytes);
    EXPECT_EQ(error_of([&] { run(planned, call.args, {}); }),
              "prefill: workspace must hold 100 bytes, got 0");
    EXPECT_EQ(ran, "");
}

TEST(Workspace, IsThatOfThePlansThreads) {
    const Call call(Pass::kPrefill, kKda);
    alignas(64) std::array<std::byte, 3 * kWorkspaceBytes> memory;
    Context context;
    context.workspace = memory.data();
    context.workspace_bytes = memory.size();
    const Plan planned = plan(Pass::kPrefill, call.args, context);
    context.parallel_for = std_threads(3);
    ran = "";
    EXPECT_EQ(
        error_of([&] { run(planned, call.args, context); }),
        "run: args and context must be those of the plan, whose workspace has 100 bytes, got lengths or "
        "threads that need 300");
    EXPECT_EQ(ran, "");
    run(plan(Pass::kPrefill, call.args, context), call.args, context);
    EXPECT_EQ(ran, "cpu:even");
}

TEST(Dispatch, ACallThatWritesNothingIsCheckedAndNotRun) {
    Call call(Pass::kPrefill, kKda, {.tokens = 0});
    ran = "";
    prefill(call.args);
    EXPECT_EQ(ran, "cpu:even");  // the final state is the initial one

    call.args.final_state = {};
    ran = "";
    prefill(call.args);
    EXPECT_EQ(ran, "");
    EXPECT_EQ(error_of([&] { prefill(call.args, {}, "cpu:odd"); }),
              "prefill: backend \"cpu:odd\" does not take this call:\n  cpu:odd: is not of this world");

    Call tokens(Pass::kPrefill, kKda, {.tokens = 1});
    tokens.args.final_state = {};
    prefill(tokens.args);
    EXPECT_EQ(ran, "cpu:even");
}

}  // namespace

std::span<const Kernel> kernels() { return kRows; }

}  // namespace cula
