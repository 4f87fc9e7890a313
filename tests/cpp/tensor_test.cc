// SPDX-License-Identifier: Apache-2.0
#include "cula/tensor.h"

#include <gtest/gtest.h>

#include <vector>

#include "cula/algorithm.h"

namespace cula {
namespace {

TEST(TensorRef, WithoutDimensionsIsAbsent) {
    EXPECT_FALSE(TensorRef{});
    float one = 1;
    EXPECT_TRUE(TensorRef::contiguous(&one, Dtype::kFloat32, {1}));
    EXPECT_TRUE(TensorRef::contiguous(nullptr, Dtype::kFloat32, {0}));
}

TEST(TensorRef, ContiguousIsRowMajor) {
    const TensorRef ref = TensorRef::contiguous(nullptr, Dtype::kInt32, {2, 3, 4});
    EXPECT_EQ(ref.ndim, 3);
    EXPECT_EQ(ref.size, (std::array<std::int64_t, kMaxDims>{2, 3, 4}));
    EXPECT_EQ(ref.stride, (std::array<std::int64_t, kMaxDims>{12, 4, 1}));
}

TEST(TensorRef, AtAndPtrFollowTheStrides) {
    std::vector<std::int32_t> data(24);
    for (int i = 0; i < 24; ++i) data[static_cast<std::size_t>(i)] = i;
    TensorRef ref = TensorRef::contiguous(data.data(), Dtype::kInt32, {2, 3, 4});
    EXPECT_EQ(*ref.at<std::int32_t>(1, 2, 3), 23);
    EXPECT_EQ(*ref.at<std::int32_t>(1), 12);  // trailing indices left out
    std::swap(ref.size[0], ref.size[2]);
    std::swap(ref.stride[0], ref.stride[2]);
    EXPECT_EQ(*ref.at<std::int32_t>(3, 2, 1), 23);
    EXPECT_EQ(ref.ptr(3, 2, 1), ref.at<std::int32_t>(3, 2, 1));
}

TEST(TensorRef, OffsetsAreSixtyFourBit) {
    TensorRef ref = TensorRef::contiguous(nullptr, Dtype::kBFloat16, {3, std::int64_t{1} << 31});
    const auto address = reinterpret_cast<std::uintptr_t>(ref.ptr(2));
    EXPECT_EQ(address, std::uintptr_t{1} << 33);
}

TEST(Dtype, NamesAndSizes) {
    EXPECT_EQ(size_bytes(Dtype::kFloat64), 8u);
    EXPECT_EQ(size_bytes(Dtype::kBFloat16), 2u);
    EXPECT_EQ(size_bytes(Dtype::kFloat8E4M3), 1u);
    EXPECT_EQ(size_bytes(Dtype::kBool), 1u);
    EXPECT_EQ(name(Dtype::kBFloat16), "bfloat16");
    EXPECT_EQ(name(Dtype::kFloat8E4M3), "float8_e4m3fn");
    EXPECT_EQ(name(Dtype::kInt64), "int64");
}

TEST(Algorithm, EveryCellHasOneName) {
    EXPECT_EQ(find_algorithm("kda"), kKda);
    EXPECT_EQ(find_algorithm("KDA"), std::nullopt);
    for (const NamedAlgorithm& row : kAlgorithms) {
        EXPECT_EQ(name(row.algorithm), row.name);
        EXPECT_EQ(find_algorithm(row.name), row.algorithm);
    }
    for (Decay decay : {Decay::kNone, Decay::kPerHead, Decay::kPerToken, Decay::kPerChannel})
        for (Update update : {Update::kAdditive, Update::kDelta})
            EXPECT_NE(name(Algorithm{decay, update}), "unknown");
}

}  // namespace
}  // namespace cula
