// SPDX-License-Identifier: Apache-2.0
// Conversion of Args to DeviceArgs.
#include "cuda/device_args.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "cuda/limits.h"
#include "cuda/rule.h"

namespace cula::cuda {
namespace {

bool at_multiple_of_16(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

Indices indices(const TensorRef& ref) {
    if (!ref) return {};
    static_assert(std::endian::native == std::endian::little);
    const std::int64_t words = ref.dtype == Dtype::kInt64 ? 2 : 1;
    return {static_cast<const std::int32_t*>(ref.data), ref.stride[0] * words,
            ref.ndim > 1 ? ref.stride[1] * words : 0,
            static_cast<std::int32_t>(ref.ndim > 1 ? std::min(ref.size[1], kMostCounted) : 1), words > 1};
}

HeadParameter head_parameter(const TensorRef& ref) {
    if (!ref) return {};
    HeadParameter parameter{static_cast<const float*>(ref.data), ref.stride[0],
                            ref.ndim > 1 ? ref.stride[1] : 0};
    parameter.pieces = ref.ndim > 1 && parameter.channel == 1 && (parameter.head | ref.size[1]) % 4 == 0 &&
                       at_multiple_of_16(ref.data);
    return parameter;
}

StateScales state_scales(const TensorRef& ref) {
    if (!ref) return {};
    return {static_cast<float*>(ref.data), ref.stride[0], ref.stride[1], ref.stride[2]};
}

}  // namespace

TokenRows token_rows(const TensorRef& ref) {
    if (!ref) return {};
    TokenRows rows{ref.data,      ref.dtype,     ref.stride[0],
                   ref.stride[1], ref.stride[2], ref.ndim > 3 ? ref.stride[3] : 1};
    const std::int64_t piece = ref.dtype == Dtype::kFloat64 ? 2 : ref.dtype == Dtype::kFloat32 ? 4 : 8;
    constexpr std::int64_t kMostPitch = 1 << 28;
    rows.pieces = ref.ndim > 3 && rows.last == 1 &&
                  (rows.batch | rows.token | rows.head | ref.size[3]) % piece == 0 &&
                  at_multiple_of_16(ref.data) && std::abs(rows.token) < kMostPitch;
    return rows;
}

States states(const TensorRef& ref) {
    if (!ref) return {};
    return {ref.data, ref.dtype, ref.size[0], ref.stride[0], ref.stride[1], ref.stride[2], ref.stride[3]};
}

DeviceArgs device_args(const Args& args) {
    DeviceArgs a;
    a.algorithm = {args.algorithm.decay, kernels_of(args.algorithm.update)};
    a.gate = args.gate;
    a.qk_l2norm = args.qk_l2norm;
    a.beta_is_logit = args.beta_is_logit;
    a.allow_neg_eigval = args.allow_neg_eigval;
    a.batch_invariant = args.batch_invariant;
    a.beta_per_value = args.beta.ndim == 4;
    a.cu_seqlens_64 = args.cu_seqlens.dtype == Dtype::kInt64;
    a.null_index = args.null_index;
    a.heads = static_cast<std::int32_t>(args.q.size[2]);
    a.value_heads = static_cast<std::int32_t>(args.v.size[2]);
    a.group = a.value_heads / a.heads;
    a.by_value_heads = Divisor(static_cast<std::uint32_t>(a.value_heads));
    a.by_group = Divisor(static_cast<std::uint32_t>(a.group));
    a.key_dim = static_cast<std::int32_t>(args.q.size[3]);
    a.value_dim = static_cast<std::int32_t>(args.v.size[3]);
    a.chunk_tokens = args.chunk_tokens;
    a.sequences = static_cast<std::int32_t>(args.cu_seqlens ? args.cu_seqlens.size[0] - 1 : args.q.size[0]);
    a.writes = static_cast<std::int32_t>(writes_per_token(args));
    a.scale = static_cast<float>(args.scale);
    a.lower_bound = static_cast<float>(args.lower_bound);
    a.tokens = args.q.size[1];
    a.q = token_rows(args.q);
    a.k = token_rows(args.k);
    a.v = token_rows(args.v);
    a.g = token_rows(args.g);
    a.beta = token_rows(args.beta);
    a.erase = token_rows(args.erase);
    a.a_key = token_rows(args.a_key);
    a.b_key = token_rows(args.b_key);
    a.o = token_rows(args.o);
    a.gamma = head_parameter(args.gamma);
    a.A_log = head_parameter(args.A_log);
    a.dt_bias = head_parameter(args.dt_bias);
    a.cu_seqlens = args.cu_seqlens.data;
    a.initial = states(args.initial_state);
    a.final = states(args.final_state);
    a.initial_scales = state_scales(args.initial_scales);
    a.final_scales = state_scales(args.final_scales);
    a.checkpoints = states(args.checkpoints);
    a.initial_indices = indices(args.initial_state_indices);
    a.final_indices = indices(args.final_state_indices);
    a.has_initial = static_cast<const bool*>(args.has_initial_state.data);
    a.checkpoint_plan = indices(args.checkpoint_plan);
    a.num_checkpoints = args.checkpoint_plan ? args.checkpoint_plan.size[0] : 0;
    if (const TensorRef& dense = args.chunk_states) {
        a.chunk_states = {dense.data,      dense.dtype,     dense.size[1],  dense.stride[1],
                          dense.stride[2], dense.stride[3], dense.stride[4]};
        a.chunk_states_batch = dense.stride[0];
    }
    if (const TensorRef& m = args.segment_m) {
        const bool square = m.ndim == 4;
        a.segment_m = {m.data,     m.dtype, m.size[0], m.stride[0], m.stride[1], square ? m.stride[3] : 0,
                       m.stride[2]};
    }
    if (args.segment_b) a.segment_b = states(args.segment_b);
    a.state_indices = indices(args.state_indices);
    a.num_accepted = indices(args.num_accepted);
    a.snapshot_indices = indices(args.snapshot_indices);
    a.parents = indices(args.parents);
    if (const TensorRef& shots = args.snapshots) {
        a.snapshots = {shots.data,      shots.dtype,     shots.size[0],  shots.stride[0],
                       shots.stride[2], shots.stride[3], shots.stride[4]};
        a.snapshots_token = shots.stride[1];
    }
    return a;
}

}  // namespace cula::cuda
