// SPDX-License-Identifier: Apache-2.0
// The first allocation of a call fails, then the second, and so on: it throws std::bad_alloc before it has
// written anything, or it does without, and nothing leaks.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "call.h"

namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
std::atomic<std::int64_t> left = kNever;  // allocations until the one that fails
std::atomic<std::int64_t> living = 0;

void* allocate(std::size_t bytes, std::size_t alignment) {
    if (left.load() != kNever && left.fetch_sub(1) == 1) throw std::bad_alloc();
    void* memory = nullptr;
    if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), bytes) != 0) throw std::bad_alloc();
    living.fetch_add(1);
    return memory;
}

void release(void* memory) noexcept {
    if (memory) living.fetch_sub(1);
    std::free(memory);
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new[](std::size_t bytes) { return allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
    return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace cula {
namespace {

using test::Call;
using Values = std::vector<std::vector<double>>;

// Runs `action` with each of its allocations failing once, and once more with all of them. `written` are what
// it writes, which `reset` makes anew.
void fail_each(const std::function<void()>& action, const std::function<Values()>& written,
               const std::function<void()>& reset) {
    reset();
    const Values before = written();
    action();
    const Values after = written();
    ASSERT_NE(before, after);
    std::int64_t failures = 0;
    for (std::int64_t nth = 1;; ++nth) {
        reset();
        const std::int64_t alive = living;
        bool threw = false;
        left = nth;
        try {
            action();
        } catch (const std::bad_alloc&) {
            threw = true;
        }
        const bool failed = left.exchange(kNever) <= 0;
        EXPECT_EQ(living, alive) << "allocation " << nth << " leaks";
        EXPECT_EQ(written(), threw ? before : after) << "allocation " << nth;
        if (!failed) break;
        ++failures;
        ASSERT_LT(nth, 1000);
    }
    EXPECT_GT(failures, 0);
}

class Allocations : public testing::TestWithParam<Pass> {};

TEST_P(Allocations, FailBeforeAnythingIsWritten) {
    const Pass pass = GetParam();
    for (const std::string_view target : {"reference", "cpu"})
        for (const int threads : {1, 3}) {
            Call call(pass, kKda,
                      {.batch = 2, .tokens = 70, .value_heads = 4, .key_dim = 32, .value_dim = 32});
            if (pass == Pass::kPrefill) {
                call.args.checkpoints = call.states(3);
                call.args.checkpoint_plan = call.table({{0, 64, 2}, {1, 70, 0}});
            } else if (pass == Pass::kVerify) {
                call.args.parents = call.zeros(Dtype::kInt32, {2, 70});
                for (std::int64_t i = 0; i < 140; ++i) test::write(call.args.parents, i, -1);
                call.args.final_state = {};
            } else if (pass == Pass::kDecode) {
                call.args.initial_state_indices = call.ints({0, 1});
                call.args.final_state_indices = call.ints({1, 0});
            }
            const std::vector<TensorRef> outputs = test::outputs(call.args);
            Context context;
            if (threads > 1) context.parallel_for = std_threads(threads);
            fail_each([&] { call.run(context, target); },
                      [&] {
                          Values values;
                          for (const TensorRef& ref : outputs) values.push_back(test::values(ref));
                          return values;
                      },
                      [&] {
                          for (const TensorRef& ref : outputs)
                              for (std::int64_t i = 0; i < test::numel(ref); ++i) test::write(ref, i, 7);
                      });
        }
}

INSTANTIATE_TEST_SUITE_P(All, Allocations,
                         testing::Values(Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment,
                                         Pass::kBackward),
                         [](const auto& row) { return std::string(name(row.param)); });

TEST(Allocation, OfComposeFailsBeforeAnythingIsWritten) {
    Call call(Pass::kSegment, kKda);
    const Composition given{.m = call.random(Dtype::kFloat32, {3, 2, 5, 8, 8}, -1, 1),
                            .b = call.random(Dtype::kFloat32, {3, 2, 5, 4, 8}, -1, 1),
                            .joins = {},
                            .state = call.zeros(Dtype::kFloat32, {2, 5, 4, 8})};
    for (const int threads : {1, 4}) {
        Context context;
        if (threads > 1) context.parallel_for = std_threads(threads);
        fail_each([&] { compose(given, context); }, [&] { return Values{test::values(given.state)}; },
                  [&] {
                      for (std::int64_t i = 0; i < test::numel(given.state); ++i)
                          test::write(given.state, i, 7);
                  });
    }
}

// Of a call that is wrong the message needs memory too.
TEST(Allocation, OfAMessageFailsWithoutAnotherException) {
    Call call(Pass::kPrefill, kKda);
    call.args.k = call.zeros(Dtype::kFloat32, {1, 4, 1, 8});
    for (std::int64_t nth = 1; nth < 100; ++nth) {
        const std::int64_t alive = living;
        bool failed = false, refused = false;
        left = nth;
        try {
            call.run();
        } catch (const Error&) {
            refused = true;
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        left = kNever;
        EXPECT_EQ(living, alive);
        EXPECT_NE(failed, refused);
        if (refused) return;
    }
    FAIL() << "never refused";
}

}  // namespace
}  // namespace cula
