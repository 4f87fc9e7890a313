# SPDX-License-Identifier: Apache-2.0
"""Linear attention kernels: KDA, GDN, GLA, Lightning, DeltaNet and their relatives, for training and serving.

    import cula
    o, state = cula.cula_kda(q, k, v, g, beta, output_final_state=True)      # a prompt
    o, state = cula.cula_decode(q1, k1, v1, state, g=g1, beta=beta1)         # the next token, state updated in place
    print(cula.explain())                                                    # which kernel runs, and why not the others

Level 1 is in `cula.api`, Level 2, over several processes, in `cula.dist`; drop-ins for FLA, cuLA, SGLang, vLLM and
FlashKDA in `cula.kda`, `cula.gdn`, `cula.gla`, `cula.simple_gla`, `cula.delta_rule`, `cula.lightning`,
`cula.linear_attn`, `cula.retention`, `cula.ops`, `cula.utils` and `cula.compat`.
"""

from importlib.metadata import PackageNotFoundError, version

from cula import api, compat, delta_rule, gdn, gla, kda, lightning, linear_attn, ops, retention, simple_gla, utils
from cula._explain import Explanation, explain
from cula.api import (
    Checkpoints,
    cula_decode,
    cula_delta,
    cula_gdn,
    cula_gla,
    cula_kda,
    cula_lightning,
    cula_segment,
    cula_simple_gla,
    cula_verify,
)
from cula.lightning import LinearAttentionChunkwiseDecay

try:
    __version__ = version("cula")
except PackageNotFoundError:  # run from the source tree
    __version__ = "0.0.0+source"

__all__ = [
    "Checkpoints",
    "Explanation",
    "LinearAttentionChunkwiseDecay",
    "api",
    "compat",
    "cula_decode",
    "cula_delta",
    "cula_gdn",
    "cula_gla",
    "cula_kda",
    "cula_lightning",
    "cula_segment",
    "cula_simple_gla",
    "cula_verify",
    "delta_rule",
    "explain",
    "gdn",
    "gla",
    "kda",
    "lightning",
    "linear_attn",
    "ops",
    "retention",
    "simple_gla",
    "utils",
]
