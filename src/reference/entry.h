// SPDX-License-Identifier: Apache-2.0
// The oracle, as rows of the registry: `reference` runs the recurrence in double whatever the inputs are,
// `reference:naive` rounds the result of every equation to the dtype of q, as eager code would; its error is
// the budget of the tests.
#pragma once

#include <cstddef>

#include "cula/cula.h"

namespace cula::reference {

Support supports(const Problem& problem);
std::size_t workspace_bytes(Pass pass, const Args& args, const Context& context);
void prefill(const Args& args, const Context& context);
void decode(const Args& args, const Context& context);
void verify(const Args& args, const Context& context);
void segment(const Args& args, const Context& context);
void backward(const Args& args, const Context& context);

namespace naive {

Support supports(const Problem& problem);
std::size_t workspace_bytes(Pass pass, const Args& args, const Context& context);
void prefill(const Args& args, const Context& context);
void decode(const Args& args, const Context& context);
void verify(const Args& args, const Context& context);
void segment(const Args& args, const Context& context);
void backward(const Args& args, const Context& context);

}  // namespace naive
}  // namespace cula::reference
