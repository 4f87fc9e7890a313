# SPDX-License-Identifier: Apache-2.0
"""Level 2: one call of Level 1 over several processes, each with its GPU (NCCL) or none (gloo).

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("tp", "cp"))
    o, state = cula_kda_cp(q, k, v, g, beta, sp_group=mesh["cp"])  # some tokens, all heads
    o, state = cula_kda_tp(q, k, v, g, beta, tp_group=mesh["tp"])  # all tokens, some heads
    o, state = cula_kda_tp_cp(q, k, v, g, beta, tp_group=mesh["tp"], sp_group=mesh["cp"])  # some of both

Pipeline parallelism needs nothing but `initial_state` and the final state of Level 1. docs/distributed.md has
the algorithm, the sizes of the messages and when which method wins.
"""

from .context import (
    cula_delta_cp,
    cula_gdn2_cp,
    cula_gdn_cp,
    cula_gdp_cp,
    cula_gla_cp,
    cula_kda_cp,
    cula_lightning_cp,
    cula_rwkv7_cp,
    cula_simple_gla_cp,
)
from .conv import conv_boundary_tokens
from .hybrid import (
    cula_delta_tp_cp,
    cula_gdn2_tp_cp,
    cula_gdn_tp_cp,
    cula_gdp_tp_cp,
    cula_gla_tp_cp,
    cula_kda_tp_cp,
    cula_lightning_tp_cp,
    cula_rwkv7_tp_cp,
    cula_simple_gla_tp_cp,
)
from .pools import alloc_decode_state_pool, alloc_state_buffer
from .shards import even_splits, split_cu_seqlens_for_sp
from .tensor import (
    cula_delta_tp,
    cula_gdn2_tp,
    cula_gdn_tp,
    cula_gdp_tp,
    cula_gla_tp,
    cula_kda_tp,
    cula_lightning_tp,
    cula_rwkv7_tp,
    cula_simple_gla_tp,
)

__all__ = [
    "alloc_decode_state_pool",
    "alloc_state_buffer",
    "conv_boundary_tokens",
    "cula_delta_cp",
    "cula_delta_tp",
    "cula_delta_tp_cp",
    "cula_gdn2_cp",
    "cula_gdn2_tp",
    "cula_gdn2_tp_cp",
    "cula_gdn_cp",
    "cula_gdn_tp",
    "cula_gdn_tp_cp",
    "cula_gdp_cp",
    "cula_gdp_tp",
    "cula_gdp_tp_cp",
    "cula_gla_cp",
    "cula_gla_tp",
    "cula_gla_tp_cp",
    "cula_kda_cp",
    "cula_kda_tp",
    "cula_kda_tp_cp",
    "cula_lightning_cp",
    "cula_lightning_tp",
    "cula_lightning_tp_cp",
    "cula_rwkv7_cp",
    "cula_rwkv7_tp",
    "cula_rwkv7_tp_cp",
    "cula_simple_gla_cp",
    "cula_simple_gla_tp",
    "cula_simple_gla_tp_cp",
    "even_splits",
    "split_cu_seqlens_for_sp",
]
