// SPDX-License-Identifier: Apache-2.0
// The one list of the gradients that a backward writes.
#pragma once

#include <array>
#include <string_view>

#include "cula/problem.h"

namespace cula {

// A gradient and what it is the gradient of, with their names in errors and schemas.
struct Gradient {
    std::string_view name;
    TensorRef Args::* field;
    std::string_view of_name;
    TensorRef Args::* of;
};

// In the order in which the operator returns them.
inline constexpr std::array kGradients{
    Gradient{"d_q", &Args::d_q, "q", &Args::q},
    Gradient{"d_k", &Args::d_k, "k", &Args::k},
    Gradient{"d_v", &Args::d_v, "v", &Args::v},
    Gradient{"d_g", &Args::d_g, "g", &Args::g},
    Gradient{"d_beta", &Args::d_beta, "beta", &Args::beta},
    Gradient{"d_A_log", &Args::d_A_log, "A_log", &Args::A_log},
    Gradient{"d_dt_bias", &Args::d_dt_bias, "dt_bias", &Args::dt_bias},
    Gradient{"d_initial_state", &Args::d_initial_state, "initial_state", &Args::initial_state},
    Gradient{"d_erase", &Args::d_erase, "erase", &Args::erase},
    Gradient{"d_a_key", &Args::d_a_key, "a_key", &Args::a_key},
    Gradient{"d_b_key", &Args::d_b_key, "b_key", &Args::b_key},
};

}  // namespace cula
