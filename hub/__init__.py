# SPDX-License-Identifier: Apache-2.0
"""cula as a kernel of the Hugging Face Hub: linear attention, forward and backward, on CPUs and NVIDIA GPUs.

    from kernels import get_kernel
    cula = get_kernel("<repository>", version=1)
    o, state = cula.cula_kda(q, k, v, g, beta, output_final_state=True)

`layers` has the four layers that transformers replaces; the functions beside them are those of the package
`cula`, whose documentation holds here too.
"""

from . import layers
from ._package import (
    Algorithm,
    BuildInfo,
    Checkpoints,
    Explanation,
    algorithms,
    build_info,
    checkpoint_plan,
    cula_decode,
    cula_delta,
    cula_gdn,
    cula_gdn2,
    cula_gdp,
    cula_gla,
    cula_kda,
    cula_lightning,
    cula_rwkv7,
    cula_segment,
    cula_simple_gla,
    cula_verify,
    dequantize_states,
    expand_state_scales,
    explain,
    quantize_states,
)
from ._package.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from ._package.gated_delta_product import chunk_gated_delta_product
from ._package.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from ._package.gdn2 import chunk_gdn2, fused_recurrent_gdn2
from ._package.generalized_delta_rule import (
    chunk_dplr_delta_rule,
    fused_recurrent_dplr_delta_rule,
)
from ._package.gla import chunk_gla, fused_recurrent_gla
from ._package.kda import chunk_kda, fused_recurrent_kda
from ._package.lightning import chunk_lightning_attn, fused_recurrent_lightning_attn
from ._package.rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7
from ._package.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

__all__ = [
    "Algorithm",
    "BuildInfo",
    "Checkpoints",
    "Explanation",
    "algorithms",
    "build_info",
    "checkpoint_plan",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "cula_decode",
    "cula_delta",
    "cula_gdn",
    "cula_gdn2",
    "cula_gdp",
    "cula_gla",
    "cula_kda",
    "cula_lightning",
    "cula_rwkv7",
    "cula_segment",
    "cula_simple_gla",
    "cula_verify",
    "dequantize_states",
    "expand_state_scales",
    "explain",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn2",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
    "layers",
    "quantize_states",
]
