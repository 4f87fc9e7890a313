// SPDX-License-Identifier: Apache-2.0
#include "core/rows.h"

#include <gtest/gtest.h>

#include "call.h"

namespace cula {
namespace {

using test::Call;

Call two_rows() { return {Pass::kPrefill, kKda, {.batch = 2, .tokens = 5}}; }

Call packed(Call call, Dtype dtype, std::initializer_list<std::int64_t> ends) {
    call.args.cu_seqlens = call.list(dtype, ends);
    return call;
}

TEST(Rows, BatchRowsAreSequences) {
    const Call call = two_rows();
    EXPECT_EQ(num_sequences(call.args), 2);
    const Tokens tokens = tokens_of(call.args, 1);
    EXPECT_EQ(tokens.batch, 1);
    EXPECT_EQ(tokens.begin, 0);
    EXPECT_EQ(tokens.length, 5);
    EXPECT_EQ(chunks_before(call.args, 1), 0);  // dense states of a batch start anew in each row
}

TEST(Rows, PackedSequencesAreSlicesOfTheTokens) {
    for (Dtype dtype : {Dtype::kInt32, Dtype::kInt64}) {
        Call call = packed({Pass::kPrefill, kKda, {.tokens = 200}}, dtype, {0, 65, 65, 199});
        EXPECT_EQ(num_sequences(call.args), 3);
        EXPECT_EQ(tokens_of(call.args, 1).length, 0);
        EXPECT_EQ(tokens_of(call.args, 2).batch, 0);
        EXPECT_EQ(tokens_of(call.args, 2).begin, 65);
        EXPECT_EQ(tokens_of(call.args, 2).length, 134);
        EXPECT_EQ(chunks_before(call.args, 1), 2);
        EXPECT_EQ(chunks_before(call.args, 3), 5);
        call.args.chunk_tokens = 32;
        EXPECT_EQ(chunks_before(call.args, 3), 8);
    }
}

TEST(Rows, WithoutIndicesRowAndSlotAreTheSame) {
    Call call = two_rows();
    call.args.null_index = 0;  // means nothing without indices
    const StateRows rows = states_of(call.args, 0);
    EXPECT_FALSE(rows.skipped);
    EXPECT_EQ(rows.initial.slot, 0);
    EXPECT_EQ(rows.final.slot, 0);
    EXPECT_EQ(states_of(call.args, 1).initial.ptr(1, 2, 3), call.args.initial_state.ptr(1, 1, 2, 3));
}

TEST(Rows, AbsentStatesAreZeroAndNotStored) {
    Call call = two_rows();
    call.args.initial_state = {};
    call.args.final_state = {};
    const StateRows rows = states_of(call.args, 0);
    EXPECT_FALSE(rows.skipped);
    EXPECT_FALSE(rows.initial);
    EXPECT_FALSE(rows.final);
}

TEST(Rows, FinalIndicesDefaultToInitialIndices) {
    Call call = two_rows();
    call.args.initial_state = call.args.final_state = call.states(8);
    call.args.initial_state_indices = call.ints({6, 3});
    EXPECT_EQ(states_of(call.args, 0).initial.slot, 6);
    EXPECT_EQ(states_of(call.args, 0).final.slot, 6);
    call.args.final_state_indices = call.ints({2, 7});
    EXPECT_EQ(states_of(call.args, 1).initial.slot, 3);
    EXPECT_EQ(states_of(call.args, 1).final.slot, 7);
}

TEST(Rows, NullOnEitherSideSkipsTheRow) {
    Call call = two_rows();
    call.args.initial_state = call.args.final_state = call.states(8);
    call.args.initial_state_indices = call.ints({-1, 3});
    EXPECT_TRUE(states_of(call.args, 0).skipped);
    EXPECT_FALSE(states_of(call.args, 1).skipped);
    call.args.final_state_indices = call.ints({5, -7});
    EXPECT_TRUE(states_of(call.args, 1).skipped);
    call.args.initial_state_indices = call.ints({0, 3});
    EXPECT_FALSE(states_of(call.args, 0).skipped);
    call.args.null_index = 0;
    EXPECT_TRUE(states_of(call.args, 0).skipped);
}

TEST(Rows, HasInitialStateFalseStartsFromZero) {
    Call call = two_rows();
    call.args.has_initial_state = call.list(Dtype::kBool, {0, 1});
    EXPECT_FALSE(states_of(call.args, 0).initial);
    EXPECT_TRUE(states_of(call.args, 0).final);
    EXPECT_FALSE(states_of(call.args, 0).skipped);
    EXPECT_TRUE(states_of(call.args, 1).initial);
}

}  // namespace
}  // namespace cula
