// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <vector>

#include "cula/cula.h"

namespace cula {
namespace {

TEST(StdThreads, DefaultsToOnePerCore) {
    EXPECT_GE(std_threads().threads, 1);
    EXPECT_GE(std_threads(-3).threads, 1);
    EXPECT_EQ(std_threads(3).threads, 3);
}

TEST(StdThreads, RunsEachIndexOnce) {
    const ParallelFor pool = std_threads(3);
    for (int count : {0, 1, 2, 5}) {
        std::vector<std::atomic<int>> calls(5);
        const auto work = [](void* arg, int index) {
            ++(*static_cast<std::vector<std::atomic<int>>*>(arg))[static_cast<std::size_t>(index)];
        };
        pool.run(pool.context, count, work, &calls);
        for (int i = 0; i < 5; ++i) EXPECT_EQ(calls[static_cast<std::size_t>(i)], i < count ? 1 : 0);
    }
}

// Workers that wait for each other would hang if they ran one after the other.
TEST(StdThreads, RunsThemAtTheSameTime) {
    const ParallelFor pool = std_threads(2);
    std::latch both(2);
    pool.run(
        pool.context, 2, [](void* arg, int) { static_cast<std::latch*>(arg)->arrive_and_wait(); }, &both);
    EXPECT_TRUE(both.try_wait());
}

}  // namespace
}  // namespace cula
