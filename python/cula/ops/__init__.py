# SPDX-License-Identifier: Apache-2.0
"""cuLA's `cula.ops`, by the names that its users import."""

from ..kda import fused_sigmoid_gating_delta_rule_update, kda_decode
from ..lightning import linear_attention_decode

__all__ = ["fused_sigmoid_gating_delta_rule_update", "kda_decode", "linear_attention_decode"]
