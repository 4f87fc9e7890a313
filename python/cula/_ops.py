# SPDX-License-Identifier: Apache-2.0
"""The operators of `torch.ops.cula`: one per pass, written in C++ (bindings/torch/ops.cc), and `explain`.

Each is a cached overload, since looking one up through `torch.ops` costs time at every call. A bad argument raises
`ValueError` from C++ with the name of the argument, what was expected and what was given.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

_LIBRARY = Path(__file__).parent / "lib" / "libcula_torch.so"
if not _LIBRARY.exists():
    raise ImportError(
        f"cula is not built: {_LIBRARY} does not exist; run `pip install .` or `make build` in its source tree"
    )
torch.ops.load_library(_LIBRARY)

prefill = torch.ops.cula.prefill.default
decode = torch.ops.cula.decode.default
verify = torch.ops.cula.verify.default
segment = torch.ops.cula.segment.default
explain = torch.ops.cula.explain.default


def _fake(op: torch._ops.OpOverload) -> Callable[..., None]:
    """What tracing runs in place of an operator: it returns nothing, so only the devices are left to check."""
    names = [argument.name for argument in op._schema.arguments]

    def fake(*args: object, **kwargs: object) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        device = given["q"].device
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                pass_name = op._schema.name.removeprefix("cula::")
                raise ValueError(f"{pass_name}: {name} must be on q's device, {device}, got {value.device}")

    return fake


for _op in (prefill, decode, verify, segment):
    torch.library.register_fake(_op._schema.name, _fake(_op))
