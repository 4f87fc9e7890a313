# SPDX-License-Identifier: Apache-2.0
"""The name of `sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent` that SGLang's backends
import."""

from ..kda import fused_sigmoid_gating_delta_rule_update

__all__ = ["fused_sigmoid_gating_delta_rule_update"]
