# SPDX-License-Identifier: Apache-2.0
"""The arguments of a small call of each op, right in every way, for tests of what one of them may and may not
be."""

from __future__ import annotations

import pytest
import torch

from cula_testing import operators
from cula_testing.cases import Case, make, state_like
from cula_testing.compare import assert_same_bits

NAN = float("nan")
B, T, H, HV, K, V = 2, 8, 2, 4, 16, 24
BASE = Case("kda", (T, T), heads=H, value_heads=HV, key_dim=K, value_dim=V, dtype=torch.bfloat16)
PACKED = BASE.but(lengths=(5, 3), packed=True)


def i32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(pass_name: str, case: Case = BASE) -> dict:
    """A call that is right in every way."""
    x = make(case)
    N = case.sequences
    common = {**x.tensors(), **case.options, "null_index": -1, "batch_invariant": False, "backend": ""}
    if pass_name == "segment":
        m, b = torch.full((N, HV, K, K), NAN), torch.full((N, HV, V, K), NAN)
        return {**common, "m": m, "b": b}
    state = {**x.states(), "final_state_indices": None, "in_place": False}
    state["o"] = torch.full(x.o_shape, NAN, dtype=case.dtype)
    state["final_state"] = state_like(case, N)
    if pass_name == "decode":
        return {**common, **state}
    if pass_name == "prefill":
        more = {"checkpoints": None, "checkpoint_plan": None, "chunk_states": None, "chunk_tokens": 64}
        return {**common, **state, **more}
    state["final_state"] = None
    more = dict.fromkeys(("state_indices", "num_accepted", "snapshots", "snapshot_indices", "parents"))
    return {**common, **state, **more}


def pooled(**changes) -> dict:
    """A pool of six slots that is read and written in place."""
    pool = state_like(BASE, 6, fill=0.0)
    return {
        "initial_state": None,
        "final_state": pool,
        "in_place": True,
        "initial_state_indices": i32(1, 4),
        **changes,
    }


def refused(pass_name: str, named: dict) -> str:
    """The sentence of the ValueError that the call raises, after a check that it wrote nothing."""
    tensors = {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the caller compares the message)
        operators.call(pass_name, **named)
    assert raised.type is ValueError
    for name, tensor in tensors.items():
        assert_same_bits(name, before[name], tensor)
    return str(raised.value)
