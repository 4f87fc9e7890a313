// SPDX-License-Identifier: Apache-2.0
#include "cuda/backward/gradients.h"

namespace cula::cuda::backward {
namespace {

ParameterGradient parameter(const TensorRef& ref) {
    if (!ref) return {};
    return {static_cast<float*>(ref.data), ref.stride[0], ref.ndim > 1 ? ref.stride[1] : 0};
}

}  // namespace

Gradients gradients(const Args& args) {
    Gradients of;
    of.d_o = token_rows(args.d_o);
    of.d_final = states(args.d_final_state);
    of.d_q = token_rows(args.d_q);
    of.d_k = token_rows(args.d_k);
    of.d_v = token_rows(args.d_v);
    of.d_g = token_rows(args.d_g);
    of.d_beta = token_rows(args.d_beta);
    of.d_A_log = parameter(args.d_A_log);
    of.d_dt_bias = parameter(args.d_dt_bias);
    of.d_initial = states(args.d_initial_state);
    of.d_erase = token_rows(args.d_erase);
    of.d_a_key = token_rows(args.d_a_key);
    of.d_b_key = token_rows(args.d_b_key);
    return of;
}

}  // namespace cula::cuda::backward
