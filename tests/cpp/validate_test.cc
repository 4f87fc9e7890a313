// SPDX-License-Identifier: Apache-2.0
// What validate() says about calls that are wrong in one way.
#include <gtest/gtest.h>

#include <limits>
#include <ostream>

#include "call.h"
#include "core/kernel.h"

namespace cula {
namespace {

using test::Call;
using test::error_of;

struct Wrong {
    const char* name;
    Pass pass;
    Algorithm algorithm;
    void (*spoil)(Call&);
    const char* message;

    friend std::ostream& operator<<(std::ostream& out, const Wrong& wrong) { return out << wrong.name; }
};

// The calls have B = 2, T = 5, H = 1, HV = 2, K = 4, V = 3.
Call valid_call(Pass pass, Algorithm algorithm) { return {pass, algorithm, {.batch = 2, .tokens = 5}}; }

void pack(Call& call, std::initializer_list<std::int64_t> ends) {
    const Pass pass = call.pass;
    call = Call(pass, call.args.algorithm, {.tokens = 10});
    call.args.initial_state = call.args.final_state = {};
    call.args.cu_seqlens = call.ints(ends);
}

void pool(Call& call, std::initializer_list<std::int64_t> read) {
    call.args.initial_state = call.args.final_state = call.states(6);
    call.args.initial_state_indices = call.ints(read);
}

void drafts(Call& call) {
    call.args.initial_state = call.args.final_state = call.states(20);
    call.args.state_indices = call.table({{1, 2, 3, 4, 5}, {6, 7, 8, 9, 10}});
}

const Wrong kWrongs[] = {
    {"MissingQ", Pass::kPrefill, kKda, [](Call& c) { c.args.q = {}; },
     "prefill: q must be given always, got none"},
    {"ShapeOfK", Pass::kDecode, kKda, [](Call& c) { c.args.k = c.zeros(Dtype::kFloat32, {2, 5, 1, 8}); },
     "decode: k must have shape [B, T, H, K] = [2, 5, 1, 4], got [2, 5, 1, 8]"},
    {"RankOfV", Pass::kPrefill, kKda, [](Call& c) { c.args.v = c.zeros(Dtype::kFloat32, {5, 2, 3}); },
     "prefill: v must have shape [B, T, HV, V] = [2, 5, HV, V], got [5, 2, 3]"},
    {"ValueHeads", Pass::kPrefill, kKda,
     [](Call& c) {
         c.args.q = c.args.k = c.zeros(Dtype::kFloat32, {2, 5, 2, 4});
         c.args.v = c.zeros(Dtype::kFloat32, {2, 5, 3, 3});
     },
     "prefill: v must have a number of heads that is a multiple of q's 2, got 3"},
    {"KeyDimension", Pass::kPrefill, kKda,
     [](Call& c) { c.args.q = c.args.k = c.zeros(Dtype::kFloat32, {2, 5, 1, 257}); },
     "prefill: q must have a key dimension K from 1 to 256, got 257"},
    {"DtypeOfQ", Pass::kPrefill, kKda, [](Call& c) { c.args.q.dtype = Dtype::kInt32; },
     "prefill: q must have a floating-point dtype, got int32"},
    {"DtypesDiffer", Pass::kPrefill, kKda, [](Call& c) { c.args.v.dtype = Dtype::kBFloat16; },
     "prefill: v must have dtype float32, got bfloat16"},
    {"LastStride", Pass::kPrefill, kKda, [](Call& c) { c.args.k.stride[3] = 2; },
     "prefill: k must be contiguous in its last dimension, got stride 2"},
    {"NullPointer", Pass::kPrefill, kKda, [](Call& c) { c.args.v.data = nullptr; },
     "prefill: v must point to memory, got a null pointer"},
    {"OutputOverlaps", Pass::kPrefill, kKda, [](Call& c) { c.args.o.stride[1] = 0; },
     "prefill: o must not overlap itself in memory, got strides that make elements share an address"},
    {"ScaleIsNotANumber", Pass::kPrefill, kKda,
     [](Call& c) { c.args.scale = std::numeric_limits<double>::quiet_NaN(); },
     "prefill: scale must be a finite float32 number, got nan"},
    {"ChunkSize", Pass::kPrefill, kKda, [](Call& c) { c.args.chunk_tokens = 48; },
     "prefill: chunk_size must be 16, 32 or 64, got 48"},

    {"ShapeOfOutputGradient", Pass::kBackward, kKda,
     [](Call& c) { c.args.d_o = c.zeros(Dtype::kFloat32, {2, 5, 1, 3}); },
     "backward: d_o must have shape [B, T, HV, V] = [2, 5, 2, 3], got [2, 5, 1, 3]"},
    {"DtypeOfStateGradient", Pass::kBackward, kKda,
     [](Call& c) { c.args.d_final_state.dtype = Dtype::kInt32; },
     "backward: d_final_state must have dtype float32 or bfloat16 or float16, got int32"},
    {"ShapeOfGradient", Pass::kBackward, kKda,
     [](Call& c) { c.args.d_k = c.zeros(Dtype::kFloat32, {2, 5, 2, 4}); },
     "backward: d_k must have the shape of k, [2, 5, 1, 4], got [2, 5, 2, 4]"},
    {"DtypeOfGradient", Pass::kBackward, kKda,
     [](Call& c) { c.args.d_beta = c.zeros(Dtype::kFloat64, {2, 5, 2}); },
     "backward: d_beta must have dtype float32, got float64"},
    {"GradientOfNothing", Pass::kBackward, kLightning,
     [](Call& c) { c.args.d_beta = c.zeros(Dtype::kFloat32, {2, 5, 2}); },
     "backward: d_beta must be left out without beta, got a tensor"},
    {"GradientOnItsInput", Pass::kBackward, kKda, [](Call& c) { c.args.d_v = c.args.v; },
     "backward: d_v must share no memory with v, got memory that overlaps it"},
    {"GradientsOnEachOther", Pass::kBackward, kKda, [](Call& c) { c.args.d_k = c.args.d_q; },
     "backward: d_k must share no memory with d_q, got memory that overlaps it"},
    {"BackwardWithOutputs", Pass::kBackward, kKda,
     [](Call& c) { c.args.o = c.zeros(Dtype::kFloat32, {2, 5, 2, 3}); },
     "backward: o must be left out: backward takes dense states and computes no outputs, got a tensor"},
    {"GradientsElsewhere", Pass::kPrefill, kKda,
     [](Call& c) { c.args.d_q = c.zeros(Dtype::kFloat32, {2, 5, 1, 4}); },
     "prefill: d_q must be left out: it belongs to backward, got a tensor"},

    {"GateOfKda", Pass::kPrefill, kKda, [](Call& c) { c.args.g = c.zeros(Dtype::kFloat32, {2, 5, 2}); },
     "prefill: g must have shape [B, T, HV, K] = [2, 5, 2, 4], got [2, 5, 2]"},
    {"GateOfGdn", Pass::kPrefill, kGdn, [](Call& c) { c.args.g = c.zeros(Dtype::kFloat32, {2, 5, 1}); },
     "prefill: g must have shape [B, T, HV] = [2, 5, 2], got [2, 5, 1]"},
    {"GateOfLightning", Pass::kPrefill, kLightning, [](Call& c) { c.args.g = c.args.q; },
     "prefill: g must be left out for lightning, which has no decay per token, got [2, 5, 1, 4]"},
    {"DecayOfLightning", Pass::kDecode, kLightning, [](Call& c) { c.args.gamma = {}; },
     "decode: decay must be given for lightning, got none"},
    {"DecayOfKda", Pass::kDecode, kKda, [](Call& c) { c.args.gamma = c.zeros(Dtype::kFloat32, {2}); },
     "decode: decay must be left out for kda, got [2]"},
    {"BetaOfGla", Pass::kPrefill, kGla, [](Call& c) { c.args.beta = c.zeros(Dtype::kFloat32, {2, 5, 2}); },
     "prefill: beta must be left out for gla, got [2, 5, 2]"},
    {"BetaOfDelta", Pass::kPrefill, kDelta, [](Call& c) { c.args.beta = {}; },
     "prefill: beta must be given for delta, got none"},
    {"EraseOfGdn2", Pass::kPrefill, kGdn2, [](Call& c) { c.args.erase = {}; },
     "prefill: erase must be given for gdn2, got none"},
    {"EraseOfKda", Pass::kDecode, kKda, [](Call& c) { c.args.erase = c.args.g; },
     "decode: erase must be left out for kda, got [2, 5, 2, 4]"},
    {"ShapeOfErase", Pass::kVerify, kGdn2,
     [](Call& c) { c.args.erase = c.zeros(Dtype::kFloat32, {2, 5, 1, 4}); },
     "verify: erase must have shape [B, T, HV, K] = [2, 5, 2, 4], got [2, 5, 1, 4]"},
    {"DtypeOfErase", Pass::kPrefill, kGdn2,
     [](Call& c) { c.args.erase = c.zeros(Dtype::kInt32, {2, 5, 2, 4}); },
     "prefill: erase must have a floating-point dtype, got int32"},
    {"StridesOfErase", Pass::kSegment, kGdn2, [](Call& c) { c.args.erase.stride[3] = 2; },
     "segment: erase must be contiguous in its last dimension, got stride 2"},
    {"GradientOfNoErase", Pass::kBackward, kKda,
     [](Call& c) { c.args.d_erase = c.zeros(Dtype::kFloat32, {2, 5, 2, 4}); },
     "backward: d_erase must be left out without erase, got a tensor"},
    {"LowRankKeyOfRwkv7", Pass::kPrefill, kRwkv7, [](Call& c) { c.args.a_key = {}; },
     "prefill: a_key must be given for rwkv7, got none"},
    {"LowRankKeyOfKda", Pass::kDecode, kKda, [](Call& c) { c.args.b_key = c.args.g; },
     "decode: b_key must be left out for kda, got [2, 5, 2, 4]"},
    {"ShapeOfLowRankKey", Pass::kVerify, kRwkv7,
     [](Call& c) { c.args.b_key = c.zeros(Dtype::kFloat32, {2, 5, 1, 4}); },
     "verify: b_key must have shape [B, T, HV, K] = [2, 5, 2, 4], got [2, 5, 1, 4]"},
    {"DtypeOfLowRankKey", Pass::kSegment, kRwkv7,
     [](Call& c) { c.args.a_key = c.zeros(Dtype::kInt32, {2, 5, 2, 4}); },
     "segment: a_key must have a floating-point dtype, got int32"},
    {"StridesOfLowRankKey", Pass::kBackward, kRwkv7, [](Call& c) { c.args.b_key.stride[3] = 2; },
     "backward: b_key must be contiguous in its last dimension, got stride 2"},
    {"GradientOfNoLowRankKey", Pass::kBackward, kKda,
     [](Call& c) { c.args.d_a_key = c.zeros(Dtype::kFloat32, {2, 5, 2, 4}); },
     "backward: d_a_key must be left out without a_key, got a tensor"},
    {"BetaOfRwkv7", Pass::kPrefill, kRwkv7,
     [](Call& c) { c.args.beta = c.zeros(Dtype::kFloat32, {2, 5, 2}); },
     "prefill: beta must be left out for rwkv7, got [2, 5, 2]"},
    {"LowRankKeysWithoutAName", Pass::kPrefill, kRwkv7,
     [](Call& c) { c.args.algorithm.decay = Decay::kNone; },
     "prefill: algorithm must be one of kAlgorithms, got decay 0, update 4"},
    {"EraseWithoutAName", Pass::kPrefill, kGdn2, [](Call& c) { c.args.algorithm.decay = Decay::kPerToken; },
     "prefill: algorithm must be one of kAlgorithms, got decay 2, update 2"},
    {"RowsOfKeysOfNoWholeTokens", Pass::kPrefill, kGatedDeltaProduct,
     [](Call& c) { c.args.k = c.zeros(Dtype::kFloat32, {2, 11, 1, 4}); },
     "prefill: k must have n rows for each of the 5 tokens of q, n from 1 to 2^24, got 11 rows"},
    {"FewerKeysThanTokens", Pass::kBackward, kDeltaProduct,
     [](Call& c) { c.args.k = c.zeros(Dtype::kFloat32, {2, 0, 1, 4}); },
     "backward: k must have n rows for each of the 5 tokens of q, n from 1 to 2^24, got 0 rows"},
    {"KeysOfNoTokens", Pass::kPrefill, kGatedDeltaProduct,
     [](Call& c) { c.args.q = c.zeros(Dtype::kFloat32, {2, 0, 1, 4}); },
     "prefill: k must have n rows for each of the 0 tokens of q, n from 1 to 2^24, got 10 rows"},
    {"TooManyWrites", Pass::kDecode, kGatedDeltaProduct,
     [](Call& c) {
         c.args.k.size[1] = 5 * ((1 << 24) + 1);
         c.args.k.stride[1] = 0;
     },
     "decode: k must have n rows for each of the 5 tokens of q, n from 1 to 2^24, got 83886085 rows"},
    {"HeadsOfKeysOfWrites", Pass::kDecode, kGatedDeltaProduct,
     [](Call& c) { c.args.k = c.zeros(Dtype::kFloat32, {2, 10, 2, 4}); },
     "decode: k must have shape [B, T n, H, K] = [2, T n, 1, 4], got [2, 10, 2, 4]"},
    {"RowsOfValues", Pass::kSegment, kGatedDeltaProduct,
     [](Call& c) { c.args.v = c.zeros(Dtype::kFloat32, {2, 5, 2, 3}); },
     "segment: v must have shape [B, T n, HV, V] = [2, 10, HV, V], got [2, 5, 2, 3]"},
    {"RowsOfStrengths", Pass::kVerify, kDeltaProduct,
     [](Call& c) { c.args.beta = c.zeros(Dtype::kFloat32, {2, 5, 2}); },
     "verify: beta must have shape [B, T n, HV] = [2, 10, 2], got [2, 5, 2]"},
    {"GateOfWrites", Pass::kPrefill, kGatedDeltaProduct,
     [](Call& c) { c.args.g = c.zeros(Dtype::kFloat32, {2, 10, 2}); },
     "prefill: g must have shape [B, T, HV] = [2, 5, 2], got [2, 10, 2]"},
    {"SeveralKeysOfGdn", Pass::kPrefill, kGdn,
     [](Call& c) { c.args.k = c.zeros(Dtype::kFloat32, {2, 10, 1, 4}); },
     "prefill: k must have shape [B, T, H, K] = [2, 5, 1, 4], got [2, 10, 1, 4]"},
    {"ProductWithoutAName", Pass::kPrefill, kDeltaProduct,
     [](Call& c) { c.args.algorithm.decay = Decay::kPerHead; },
     "prefill: algorithm must be one of kAlgorithms, got decay 1, update 3"},
    {"ALogWithoutGate", Pass::kPrefill, kKda, [](Call& c) { c.args.A_log = c.zeros(Dtype::kFloat32, {2}); },
     "prefill: A_log must be left out when g is the log decay, got [2]"},
    {"LowerBound", Pass::kPrefill, kKda,
     [](Call& c) {
         c.args.gate = Gate::kBounded;
         c.args.lower_bound = 1;
     },
     "prefill: lower_bound must be negative, got 1.000000"},
    {"NegativeEigenvalues", Pass::kPrefill, kKda, [](Call& c) { c.args.allow_neg_eigval = true; },
     "prefill: allow_neg_eigval must come with use_beta_sigmoid_in_kernel: it doubles the sigmoid, got true "
     "without "
     "it"},

    {"BatchWithCuSeqlens", Pass::kPrefill, kKda, [](Call& c) { c.args.cu_seqlens = c.ints({0, 5}); },
     "prefill: q must have batch size 1 with cu_seqlens (pack the sequences along T), got 2"},
    {"CuSeqlensStart", Pass::kPrefill, kKda, [](Call& c) { pack(c, {1, 5}); },
     "prefill: cu_seqlens must start at 0, got cu_seqlens[0] = 1"},
    {"CuSeqlensDecrease", Pass::kPrefill, kKda, [](Call& c) { pack(c, {0, 6, 5}); },
     "prefill: cu_seqlens must not decrease, got cu_seqlens[2] = 5 after 6"},
    {"CuSeqlensBeyondT", Pass::kPrefill, kKda, [](Call& c) { pack(c, {0, 6, 11}); },
     "prefill: cu_seqlens must end within the 10 tokens of q, got cu_seqlens[2] = 11"},
    {"CuSeqlensDtype", Pass::kPrefill, kKda,
     [](Call& c) {
         pack(c, {0, 10});
         c.args.cu_seqlens.dtype = Dtype::kFloat32;
     },
     "prefill: cu_seqlens must have dtype int32 or int64, got float32"},

    {"ShapeOfState", Pass::kPrefill, kKda, [](Call& c) { c.args.initial_state = c.states(3); },
     "prefill: initial_state must have shape [N, HV, V, K] = [2, 2, 3, 4], got [3, 2, 3, 4]"},
    {"StateStrides", Pass::kDecode, kKda,
     [](Call& c) {
         c.args.final_state.stride[3] = 2;
         c.args.final_state.stride[2] = 8;
     },
     "decode: final_state must be contiguous along K or along V, got strides 8, 2"},
    {"SlotBeyondPool", Pass::kDecode, kKda, [](Call& c) { pool(c, {0, 6}); },
     "decode: initial_state_indices must stay below the 6 slots of the pool, got 6 for sequence 1"},
    {"SlotWrittenTwice", Pass::kDecode, kKda, [](Call& c) { pool(c, {4, 4}); },
     "decode: initial_state_indices must name each slot that is written once, got slot 4 for sequences 0 and "
     "1"},
    {"IndicesAlone", Pass::kDecode, kKda,
     [](Call& c) {
         pool(c, {0, 1});
         c.args.initial_state = c.args.final_state = {};
     },
     "decode: initial_state_indices must come with a state, got indices alone"},
    {"MaskAlone", Pass::kDecode, kKda,
     [](Call& c) {
         c.args.initial_state = {};
         c.args.has_initial_state = c.list(Dtype::kBool, {1, 0});
     },
     "decode: has_initial_state must come with an initial state, got the mask alone"},

    {"CheckpointsWithoutPlan", Pass::kPrefill, kKda, [](Call& c) { c.args.checkpoints = c.states(2); },
     "prefill: checkpoints must be given as states and plan together, got one of them"},
    {"PlanOffTheGrid", Pass::kPrefill, kKda,
     [](Call& c) {
         c.args.checkpoints = c.states(2);
         c.args.checkpoint_plan = c.table({{0, 5, 0}, {1, 3, 1}});
     },
     "prefill: checkpoints.plan must name a multiple of 64 tokens within the sequence, or its length 5, got "
     "3 in row "
     "1"},
    {"PlanNamesASlotTwice", Pass::kPrefill, kKda,
     [](Call& c) {
         c.args.checkpoints = c.states(2);
         c.args.checkpoint_plan = c.table({{0, 5, 1}, {1, 5, 1}});
     },
     "prefill: checkpoints.plan must name each slot once, got slot 1 twice"},
    {"TooFewChunkStates", Pass::kPrefill, kKda,
     [](Call& c) { c.args.chunk_states = c.zeros(Dtype::kFloat32, {2, 0, 2, 3, 4}); },
     "prefill: chunk_states must have room for 1 chunks, got 0"},
    {"CheckpointsInDecode", Pass::kDecode, kKda, [](Call& c) { c.args.checkpoints = c.states(2); },
     "decode: checkpoints must be left out: it belongs to prefill, got a tensor"},

    {"AcceptedBeyondS", Pass::kVerify, kKda,
     [](Call& c) {
         drafts(c);
         c.args.num_accepted = c.ints({1, 6});
     },
     "verify: num_accepted must lie in 1..5, got 6 for sequence 1"},
    {"ShortStateIndices", Pass::kVerify, kKda,
     [](Call& c) {
         drafts(c);
         c.args.state_indices = c.table({{1, 2}, {3, 4}});
     },
     "verify: state_indices must have room for the longest row's 5 tokens, got 2"},
    {"ParentIsLater", Pass::kVerify, kKda,
     [](Call& c) {
         drafts(c);
         c.args.parents = c.table({{-1, 0, 1, 2, 3}, {-1, 0, 2, 2, 3}});
     },
     "verify: parents must name an earlier token of the row, got 2 for token 2 of row 1"},
    {"TreeWithALastState", Pass::kVerify, kKda,
     [](Call& c) { c.args.parents = c.table({{-1, 0, 1, 2, 3}, {-1, 0, 1, 2, 3}}); },
     "verify: final_state must be left out with parents (a tree has no last state), or be indexed per token "
     "by "
     "state_indices, got a state"},
    {"ParentsInPrefill", Pass::kPrefill, kKda, [](Call& c) { c.args.parents = c.ints({0}); },
     "prefill: parents must be left out: it belongs to verify, got a tensor"},

    {"KeepInPrefill", Pass::kPrefill, kKda, [](Call& c) { c.args.keep = true; },
     "prefill: keep must be false: it belongs to segment, got true"},
    {"KeepOfManyValues", Pass::kSegment, kKda,
     [](Call& c) { c.args.keep = true, c.args.v = c.zeros(Dtype::kFloat32, {2, 5, 2, 257}); },
     "segment: keep must be false with V beyond 256, got true with V = 257"},
    {"KeptOfManyValues", Pass::kPrefill, kKda,
     [](Call& c) {
         c.args.kept = c.zeros(Dtype::kInt32, {4}), c.args.v = c.zeros(Dtype::kFloat32, {2, 5, 2, 257});
     },
     "prefill: kept must be left out with V beyond 256, got a tensor with V = 257"},
    {"SegmentWithoutB", Pass::kSegment, kKda, [](Call& c) { c.args.segment_b = {}, c.args.keep = true; },
     "segment: b must be given as the output, got none"},
    {"SegmentForNothing", Pass::kSegment, kKda, [](Call& c) { c.args.segment_m = c.args.segment_b = {}; },
     "segment: b must be given as the output, got none"},
    {"DiagonalSegment", Pass::kSegment, kGla,
     [](Call& c) { c.args.segment_m = c.zeros(Dtype::kFloat32, {2, 2, 4, 4}); },
     "segment: m must have shape [N, HV, K] = [2, 2, 4], got [2, 2, 4, 4]"},
    {"SegmentWithAState", Pass::kSegment, kKda, [](Call& c) { c.args.initial_state = c.states(2); },
     "segment: initial_state must be left out: a segment's map does not depend on it, got a state"},
};

class Validate : public testing::TestWithParam<Wrong> {};

TEST_P(Validate, SaysWhatIsWrong) {
    const Wrong& wrong = GetParam();
    Call call = valid_call(wrong.pass, wrong.algorithm);
    ASSERT_EQ(error_of([&] { validate(wrong.pass, call.args, Indices::kOnHost); }), "");
    wrong.spoil(call);
    EXPECT_EQ(error_of([&] { validate(wrong.pass, call.args, Indices::kOnHost); }), wrong.message);
}

INSTANTIATE_TEST_SUITE_P(All, Validate, testing::ValuesIn(kWrongs),
                         [](const auto& wrong) { return std::string(wrong.param.name); });

TEST(ValidateAccepts, EveryCellInEveryPass) {
    for (const NamedAlgorithm& row : kAlgorithms)
        for (Pass pass : {Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment})
            EXPECT_EQ(
                error_of([&] { validate(pass, valid_call(pass, row.algorithm).args, Indices::kOnHost); }), "")
                << row.name << " " << name(pass);
}

TEST(ValidateAccepts, NothingToDo) {
    const Call call(Pass::kPrefill, kKda, {.batch = 0, .tokens = 0});
    EXPECT_EQ(error_of([&] { validate(Pass::kPrefill, call.args, Indices::kOnHost); }), "");
}

TEST(ValidateAccepts, IndicesThatTheHostCannotRead) {
    Call call = valid_call(Pass::kDecode, kKda);
    pool(call, {0, 600});
    EXPECT_EQ(error_of([&] { validate(Pass::kDecode, call.args, Indices::kOnDevice); }), "");
}

TEST(Describe, TellsWhatDecidesTheKernel) {
    Call call = valid_call(Pass::kPrefill, kKda);
    call.args.final_state.dtype = call.args.initial_state.dtype = Dtype::kBFloat16;
    call.args.beta = call.zeros(Dtype::kFloat32, {2, 5, 2, 3});
    const Problem problem = describe(Pass::kPrefill, call.args, {});
    EXPECT_EQ(problem.algorithm, kKda);
    EXPECT_EQ(problem.batch, 2);
    EXPECT_EQ(problem.tokens, 5);
    EXPECT_EQ(problem.sequences, 2);
    EXPECT_EQ(problem.heads, 1);
    EXPECT_EQ(problem.value_heads, 2);
    EXPECT_EQ(problem.key_dim, 4);
    EXPECT_EQ(problem.value_dim, 3);
    EXPECT_EQ(problem.dtype, Dtype::kFloat32);
    EXPECT_EQ(problem.state_dtype, Dtype::kBFloat16);
    EXPECT_TRUE(problem.beta_per_value);
    EXPECT_FALSE(problem.varlen);
    EXPECT_FALSE(problem.tree);
}

}  // namespace
}  // namespace cula
