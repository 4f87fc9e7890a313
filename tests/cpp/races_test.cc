// SPDX-License-Identifier: Apache-2.0
// The same bits from many threads as from one. tools/check_sanitizers.sh runs it under the thread sanitizer,
// which knows std::thread.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "call.h"

namespace cula {
namespace {

using test::Call;

constexpr int kThreads = 4;

// Enough state that decode and verify share it out.
Call a_call(Pass pass, Algorithm algorithm, std::int64_t rows = 4, std::int64_t tokens = 3) {
    return {pass,
            algorithm,
            {.batch = rows, .tokens = tokens, .heads = 2, .value_heads = 4, .key_dim = 64, .value_dim = 96}};
}

// Runs the call that `make` makes with one thread and with many, on every CPU target.
void expect_same(const std::function<Call()>& make) {
    for (const std::string_view target : targets()) {
        std::vector<std::vector<double>> results[2];
        for (const int threads : {1, kThreads}) {
            const Call call = make();
            Context context;
            if (threads > 1) context.parallel_for = std_threads(threads);
            if (!test::error_of([&] { plan(call.pass, call.args, context, target); }).empty()) continue;
            call.run(context, target);
            for (const TensorRef& output : test::outputs(call.args))
                results[threads > 1].push_back(test::values(output));
        }
        EXPECT_EQ(results[0], results[1]) << target;
    }
}

TEST(Threads, RowsThatStartFromOneSlot) {
    for (Pass pass : {Pass::kPrefill, Pass::kDecode, Pass::kVerify})
        expect_same([&] {
            Call call = a_call(pass, kKda);
            call.args.initial_state = call.random(Dtype::kFloat32, {6, 4, 96, 64}, -1, 1);
            call.args.final_state = call.args.initial_state;
            call.args.initial_state_indices = call.ints({0, 0, 2, 0});
            call.args.final_state_indices = call.ints({1, 3, 2, 5});
            return call;
        });
}

TEST(Threads, EveryPassInPlace) {
    for (Pass pass : {Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment, Pass::kBackward})
        for (const Algorithm algorithm : {kKda, kGdn, kLightning})
            expect_same([&] {
                Call call = a_call(pass, algorithm);
                if (call.args.final_state) call.args.final_state = call.args.initial_state;
                return call;
            });
}

TEST(Threads, FewRowsShareTheirValueChannels) {
    for (Pass pass : {Pass::kPrefill, Pass::kDecode, Pass::kSegment})
        expect_same([&] {
            return Call(pass, kGdn, {.tokens = 70, .value_heads = 1, .key_dim = 128, .value_dim = 128});
        });
}

TEST(Threads, StatesOnTheWay) {
    expect_same([] {
        Call call = a_call(Pass::kPrefill, kKda, 2, 130);
        call.args.checkpoints = call.states(3);
        call.args.checkpoint_plan = call.table({{0, 64, 2}, {1, 128, 0}, {1, 130, 1}});
        call.args.chunk_states = call.zeros(Dtype::kFloat32, {2, 3, 4, 96, 64});
        return call;
    });
}

TEST(Threads, DraftsOfAPool) {
    for (const bool tree : {false, true})
        expect_same([&] {
            Call call = a_call(Pass::kVerify, kKda, 3);
            call.args.initial_state = call.args.final_state =
                call.random(Dtype::kFloat32, {9, 4, 96, 64}, -1, 1);
            call.args.state_indices = call.table({{0, 1, 2}, {3, 4, 5}, {6, 7, 8}});
            call.args.num_accepted = call.ints({1, 2, 3});
            call.args.snapshots = call.zeros(Dtype::kFloat32, {3, 3, 4, 96, 64});
            // Where the row's start is stored to by a token, later tokens of a tree still start from what it
            // was.
            if (tree) call.args.parents = call.table({{-1, 0, -1}, {-1, -1, 1}, {-1, 0, 0}});
            return call;
        });
}

TEST(Threads, Compose) {
    std::vector<std::vector<double>> results;
    for (const int threads : {1, 3, 100}) {
        Call call(Pass::kSegment, kKda);
        const Composition given{.m = call.random(Dtype::kFloat32, {3, 2, 5, 8, 8}, -1, 1),
                                .b = call.random(Dtype::kFloat32, {3, 2, 5, 4, 8}, -1, 1),
                                .joins = {},
                                .state = call.zeros(Dtype::kFloat32, {2, 5, 4, 8})};
        Context context;
        context.parallel_for = std_threads(threads);
        compose(given, context);
        results.push_back(test::values(given.state));
    }
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(results[0], results[2]);
}

}  // namespace
}  // namespace cula
