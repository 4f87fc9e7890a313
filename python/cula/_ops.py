# SPDX-License-Identifier: Apache-2.0
"""The operators of `torch.ops.cula`: one per pass, written in C++ (bindings/torch/ops.cc), and `explain`.

The package calls the overload `packed` of each, with its options in one integer (`pack`), because PyTorch spends as
much time on each number as on a tensor; the default overload spells them out. A bad argument raises `ValueError` from
C++ with the name of the argument, what was expected and what was given.
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

prefill = torch.ops.cula.prefill.packed
decode = torch.ops.cula.decode.packed
verify = torch.ops.cula.verify.packed
segment = torch.ops.cula.segment.packed
explain = torch.ops.cula.explain.default

# The bits of `options` (bindings/torch/ops.cc): algorithm, gate, flags, and from bit 16 on the chunk size.
_ALGORITHMS = ("kda", "gdn", "gla", "simple_gla", "lightning", "linear", "delta", "delta_per_head")
_ALGORITHM = {name: row for row, name in enumerate(_ALGORITHMS)}
_GATE = {"log_decay": 0 << 8, "softplus": 1 << 8, "bounded": 2 << 8}


def pack(
    algorithm: str,
    gate: str,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    batch_invariant: bool,
    in_place: bool,
    chunk_size: int,
) -> int:
    return (
        _ALGORITHM[algorithm] | _GATE[gate] | qk_l2norm << 10 | beta_is_logit << 11 | allow_neg_eigval << 12
        | batch_invariant << 13 | in_place << 14 | chunk_size << 16
    )  # fmt: skip


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


for _packet in (torch.ops.cula.prefill, torch.ops.cula.decode, torch.ops.cula.verify, torch.ops.cula.segment):
    for _op in (_packet.default, _packet.packed):
        torch.library.register_fake(_op.name(), _fake(_op))
