# SPDX-License-Identifier: Apache-2.0
"""Linear attention kernels: KDA, GDN, GLA, Lightning, DeltaNet and their relatives.

Calls are differentiable, on CPUs and GPUs; what has no gradient raises NotImplementedError.

    import cula
    o, state = cula.cula_kda(q, k, v, g, beta, output_final_state=True)  # a prompt
    o, state = cula.cula_decode(q1, k1, v1, state, g=g1, beta=beta1)  # the next token, state updated in place
    print(cula.explain())  # which kernel runs, and why not the others

Level 1 is in `cula.api`, Level 2, over several processes, in `cula.dist`; adapters that put these kernels
behind FLA's own functions in `cula.integrations`; drop-ins for FLA, cuLA, SGLang,
vLLM and FlashKDA in `cula.kda`, `cula.gdn`, `cula.gdn2`, `cula.gated_delta_product`,
`cula.generalized_delta_rule`, `cula.rwkv7`, `cula.gla`, `cula.simple_gla`, `cula.delta_rule`,
`cula.lightning`, `cula.linear_attn`, `cula.retention`, `cula.ops`, `cula.utils` and `cula.compat`.
"""

import importlib as _importlib
import os as _os
from types import ModuleType as _ModuleType

from . import (
    api,
    compat,
    conv,
    delta_rule,
    gated_delta_product,
    gdn,
    gdn2,
    generalized_delta_rule,
    gla,
    kda,
    lightning,
    linear_attn,
    norm,
    ops,
    retention,
    rwkv7,
    simple_gla,
    utils,
)
from ._build import BuildInfo, build_info
from ._explain import Explanation, explain
from ._family import Algorithm, algorithms
from ._float8 import dequantize_states, expand_state_scales, quantize_states
from ._forget import tokens_to_forget
from ._library import INFO as _INFO
from ._ops import operator_options
from ._plans import checkpoint_plan
from .api import (
    Checkpoints,
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
)
from .lightning import LinearAttentionChunkwiseDecay

__version__ = _INFO["version"]

__all__ = [
    "Algorithm",
    "BuildInfo",
    "Checkpoints",
    "Explanation",
    "LinearAttentionChunkwiseDecay",
    "algorithms",
    "api",
    "build_info",
    "checkpoint_plan",
    "compat",
    "conv",
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
    "delta_rule",
    "dequantize_states",
    "expand_state_scales",
    "explain",
    "gated_delta_product",
    "gdn",
    "gdn2",
    "generalized_delta_rule",
    "gla",
    "kda",
    "lightning",
    "linear_attn",
    "norm",
    "operator_options",
    "ops",
    "quantize_states",
    "retention",
    "rwkv7",
    "simple_gla",
    "tokens_to_forget",
    "utils",
]


# Imported where they are first named: the others need neither process groups nor other projects.
_LATER = ("dist", "integrations")


def __getattr__(name: str) -> _ModuleType:
    if name not in _LATER:
        raise AttributeError(f"module 'cula' has no attribute {name!r}")
    return _importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def _register_on_import() -> None:
    """With the projects that the environment names."""
    switches = {
        "fla": _os.environ.get("CULA_FLA", "0"),
        "transformers": _os.environ.get("CULA_TRANSFORMERS", "0"),
    }
    for project in [name for name, switch in switches.items() if switch not in ("", "0")]:
        _importlib.import_module(".integrations", __name__).on_import(project)


if __name__ == "cula":  # a copy under another name leaves other projects alone
    _register_on_import()
