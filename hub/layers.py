# SPDX-License-Identifier: Apache-2.0
"""What the package `kernels` puts in the place of transformers' functions: four layers, each with a backward
pass, each for `torch.compile` too. The module that they come from says what they take."""

from ._package._kernel_layers import (
    chunk_gated_delta_rule,
    chunk_kimi_delta_attention,
    recurrent_gated_delta_rule,
    recurrent_kimi_delta_attention,
)

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
]
