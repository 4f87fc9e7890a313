// SPDX-License-Identifier: Apache-2.0
// The tensors of a backward call beside those of DeviceArgs, as kernels read them: the gradients that it gets
// and those that it writes. Plain data, passed by value at launch.
#pragma once

#include <cstdint>

#include "cuda/device_args.h"

namespace cula::cuda::backward {

// A float32 gradient of a parameter, [HV] or [HV, channels]; strides in floats. No data: not wanted.
struct ParameterGradient {
    float* data = nullptr;
    std::int64_t head = 0, channel = 0;
};

// A gradient without data is not wanted, or, of those that the call gets, zero.
struct Gradients {
    TokenRows d_o;   // [B, T, HV, V], the dtype of q or float32
    States d_final;  // [N, HV, V, K]

    TokenRows d_q, d_k;  // [B, T, H, K]
    TokenRows d_v;       // [B, T, HV, V]
    TokenRows d_g;       // [B, T, HV, K] or [B, T, HV]
    TokenRows d_beta;    // [B, T, HV], or [B, T, HV, V] token by token and with erase strengths
    ParameterGradient d_A_log, d_dt_bias;
    States d_initial;            // [N, HV, V, K]
    TokenRows d_erase;           // [B, T, HV, K]
    TokenRows d_a_key, d_b_key;  // the same

    CULA_HOST_DEVICE bool keys() const { return d_q.data || d_k.data; }
    CULA_HOST_DEVICE bool parameters() const { return d_A_log.data || d_dt_bias.data; }
    CULA_HOST_DEVICE bool decay() const { return d_g.data || parameters(); }
    // Of erase strengths and low-rank keys.
    CULA_HOST_DEVICE bool others() const { return d_erase.data || d_a_key.data || d_b_key.data; }
    // Whether chunks have to be differentiated at all: d_v and d_initial come from the return alone.
    CULA_HOST_DEVICE bool of_chunks() const { return keys() || decay() || d_beta.data || others(); }
};

Gradients gradients(const Args& args);

}  // namespace cula::cuda::backward
