// SPDX-License-Identifier: Apache-2.0
// The real registry, and each of its targets on this machine against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <utility>

#include "call.h"
#include "core/kernel.h"

namespace cula {
namespace {

using test::Call;
using test::Shape;

constexpr Pass kPasses[] = {Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment, Pass::kBackward};

TEST(Registry, NamesEachTargetOncePerPass) {
    std::set<std::pair<std::string_view, Pass>> rows;
    for (const Kernel& kernel : kernels())
        EXPECT_TRUE(rows.emplace(kernel.target, kernel.pass).second) << kernel.target;
}

TEST(Registry, PrefersTheCpuBackendToTheOracle) {
    const std::vector<std::string_view> names = targets();
    ASSERT_GE(names.size(), 3u);
    EXPECT_EQ(names[names.size() - 3], "cpu:portable");
    EXPECT_EQ(names[names.size() - 2], "reference");
    EXPECT_EQ(names[names.size() - 1], "reference:naive");
}

TEST(Registry, TakesEveryCellInEveryPassOnTheCpu) {
    for (const NamedAlgorithm& row : kAlgorithms)
        for (Pass pass : kPasses)
            for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
                const Call call(pass, row.algorithm, {.key_dim = 16, .dtype = dtype});
                EXPECT_TRUE(plan(pass, call.args, {}).target().starts_with("cpu:"))
                    << row.name << " " << name(pass);
            }
}

TEST(Registry, TakesDoublesInTheOracleAlone) {
    const Call call(Pass::kPrefill, kKda, {.dtype = Dtype::kFloat64});
    EXPECT_EQ(plan(Pass::kPrefill, call.args, {}).target(), "reference");
}

TEST(Registry, KeepsEachTargetToItsDevice) {
    const Call call(Pass::kPrefill, kKda);
    const Device gpu{.kind = DeviceKind::kCuda, .compute_capability = 90};
    for (const Explanation& row : explain(describe(Pass::kPrefill, call.args, gpu))) {
        const bool on_cpu = row.target.starts_with("cpu:") || row.target.starts_with("reference");
        EXPECT_EQ(row.support.reason() == "runs on CPU tensors, these are on CUDA", on_cpu) << row.target;
    }
}

struct Errors {
    double rms = 0, max = 0;  // relative to the oracle's root mean square and maximum
};

Errors errors(const std::vector<double>& found, const std::vector<double>& oracle) {
    double squares = 0, size = 0, worst = 0, largest = 0;
    for (std::size_t i = 0; i < oracle.size(); ++i) {
        const double difference = std::abs(found[i] - oracle[i]);
        if (std::isnan(difference)) return {difference, difference};
        squares += difference * difference;
        size += oracle[i] * oracle[i];
        worst = std::max(worst, difference);
        largest = std::max(largest, std::abs(oracle[i]));
    }
    return oracle.empty() ? Errors{} : Errors{std::sqrt(squares / size), worst / largest};
}

double epsilon(Dtype dtype) {
    switch (dtype) {
        case Dtype::kFloat16: return 0x1p-10;
        case Dtype::kBFloat16: return 0x1p-7;
        case Dtype::kFloat32: return 0x1p-23;
        default: return 0x1p-52;
    }
}

// Runs the call with NaN in its outputs and its workspace: nothing may be read before it is written.
void run_poisoned(Call& call, std::string_view backend) {
    for (const TensorRef& ref : test::outputs(call.args))
        for (std::int64_t i = 0; i < test::numel(ref); ++i) test::write(ref, i, std::nan(""));
    Context context;
    context.parallel_for = std_threads(3);
    const Plan planned = plan(call.pass, call.args, context, backend);
    std::vector<std::byte> memory(planned.workspace_bytes + 64, std::byte{0xff});
    context.workspace = memory.data();
    std::size_t space = memory.size();
    std::align(64, planned.workspace_bytes, context.workspace, space);
    context.workspace_bytes = planned.workspace_bytes;
    run(planned, call.args, context);
}

// The same call in double, with the values of the inputs as they were rounded.
Call widened(const Call& call) {
    Shape shape = call.shape;
    shape.dtype = Dtype::kFloat64;
    Call wide(call.pass, call.args.algorithm, shape);
    for (auto input : {&Args::q, &Args::k, &Args::v, &Args::d_o})
        for (std::int64_t i = 0; wide.args.*input && i < test::numel(wide.args.*input); ++i)
            test::write(wide.args.*input, i, test::read(call.args.*input, i));
    for (auto output : test::kOutputs) {
        // Gradients of float32 inputs stay as they are, unless they are of states.
        TensorRef& ref = wide.args.*output;
        if (!ref || output == &Args::d_g || output == &Args::d_beta || output == &Args::d_erase ||
            output == &Args::d_a_key || output == &Args::d_b_key)
            continue;
        ref.data = wide.zeros(Dtype::kFloat64, {test::numel(ref)}).data;
        ref.dtype = Dtype::kFloat64;
    }
    return wide;
}

struct Target {
    std::string_view name;
    Pass pass;

    friend std::ostream& operator<<(std::ostream& out, const Target& target) { return out << target.name; }
};

class Targets : public testing::TestWithParam<Target> {};

// The error rule of tests/cula_testing/compare.py: at most twice the naive recurrence's error, of gradients
// three times, plus one unit in the last place.
TEST_P(Targets, AgreeWithTheOracle) {
    const auto [target, pass] = GetParam();
    const std::int64_t tokens = pass == Pass::kDecode || pass == Pass::kVerify ? 3 : 130;
    const double budget = pass == Pass::kBackward ? 3 : 2;
    const Shape shapes[] = {
        {.batch = 40, .tokens = 1, .heads = 2, .value_heads = 2, .key_dim = 1, .value_dim = 1},
        {.batch = 1, .tokens = tokens, .heads = 2, .value_heads = 4, .key_dim = 40, .value_dim = 24},
        {.batch = 2, .tokens = tokens, .heads = 1, .value_heads = 1, .key_dim = 64, .value_dim = 128},
    };
    std::string reason;
    bool ran = false;
    for (const NamedAlgorithm& row : kAlgorithms) {
        for (Shape shape : shapes) {
            for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
                shape.dtype = dtype;
                Call call(pass, row.algorithm, shape), naive(pass, row.algorithm, shape);
                const Problem problem = describe(pass, call.args, {});
                for (const Explanation& kernel : explain(problem))
                    if (kernel.target == target) reason = kernel.support.reason();
                if (!reason.empty()) continue;
                ran = true;
                Call oracle = widened(call);
                run_poisoned(oracle, "reference");
                run_poisoned(naive, "reference:naive");
                run_poisoned(call, target);
                for (std::size_t i = 0; i < test::outputs(call.args).size(); ++i) {
                    const std::vector<double> truth = test::values(test::outputs(oracle.args)[i]);
                    const TensorRef output = test::outputs(call.args)[i];
                    const Errors found = errors(test::values(output), truth);
                    const Errors allowed = errors(test::values(test::outputs(naive.args)[i]), truth);
                    const std::string where = std::string(row.name) + " " + std::string(name(dtype)) + " K " +
                                              std::to_string(shape.key_dim) + " output " + std::to_string(i);
                    EXPECT_LE(found.rms, budget * allowed.rms + epsilon(output.dtype)) << where;
                    EXPECT_LE(found.max, budget * allowed.max + epsilon(output.dtype)) << where;
                }
            }
        }
    }
    if (!ran) GTEST_SKIP() << target << ": " << reason;
}

std::vector<Target> targets_and_passes() {
    std::vector<Target> rows;
    for (const Kernel& kernel : kernels())
        if (kernel.device == DeviceKind::kCpu) rows.push_back({kernel.target, kernel.pass});
    return rows;
}

INSTANTIATE_TEST_SUITE_P(All, Targets, testing::ValuesIn(targets_and_passes()), [](const auto& row) {
    std::string text = std::string(row.param.name) + "_" + std::string(name(row.param.pass));
    std::replace(text.begin(), text.end(), ':', '_');
    return text;
});

}  // namespace
}  // namespace cula
