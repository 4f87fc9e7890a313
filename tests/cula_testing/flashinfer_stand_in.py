# SPDX-License-Identifier: Apache-2.0
"""In the place of FlashInfer's functions for GDN, on a CPU: what the benchmark calls, by the float64
recurrence, with the checks and the layouts of version 0.7.2. Written from what it does, not from its text."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from cula_testing import passes
from cula_testing.cases import Case, Inputs


def _exactly(inputs: Inputs) -> passes.Result:
    """[.., HV, V, K] states, none of them in a pool."""
    case = inputs.case.but(key_dim=128, value_dim=128)
    return passes.prefill(inputs.but(case=case).double(), backend="reference")


def chunk_gated_delta_rule(
    q, k, v, g, beta, *, scale, output_final_state, cu_seqlens, output, output_state
) -> tuple[torch.Tensor, torch.Tensor]:
    """g: the decay itself, in (0, 1]. q and k come normalized."""
    assert output_final_state
    assert q.ndim == k.ndim == v.ndim == 3
    assert q.dtype == k.dtype == v.dtype == output.dtype == torch.bfloat16
    assert g.dtype == beta.dtype == output_state.dtype == torch.float32
    assert g.shape == beta.shape == v.shape[:2]
    assert g.amin() > 0
    assert g.amax() <= 1
    assert torch.allclose(k.float().norm(dim=-1), torch.ones(()), atol=0.02)
    lengths = tuple(cu_seqlens.diff().tolist())
    case = Case("gdn", lengths, packed=True, heads=q.shape[1], value_heads=v.shape[1], scale=scale)
    inputs = Inputs(case, *(x[None] for x in (q, k, v)), g=g.log()[None], beta=beta[None])
    found = _exactly(inputs.but(cu_seqlens=cu_seqlens))
    output.copy_(found.o[0])
    return output, output_state.copy_(found.final_state)


def gated_delta_rule_decode_pretranspose(
    q, k, v, state, A_log, a, dt_bias, b, *, scale, output, use_qk_l2norm, initial_state,
    initial_state_indices, intermediate_states_buffer=None, disable_state_update=False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One token for each row, or several, after each of which the state may go to the buffer."""
    assert state is None
    rows, tokens = q.shape[:2]
    kept = intermediate_states_buffer
    if tokens == 1:
        assert kept is None
        assert not disable_state_update
    if initial_state.dtype == torch.float32 and kept is not None:
        assert kept.is_contiguous()
    assert initial_state.dtype in (torch.float32, torch.bfloat16)
    assert initial_state.shape[1:] == (v.shape[2], 128, 128)
    assert initial_state.is_contiguous()
    assert q.dtype == a.dtype == b.dtype == output.dtype == torch.bfloat16
    assert A_log.dtype == dt_bias.dtype == torch.float32
    assert a.shape == b.shape == v.shape[:3]
    case = Case(
        "gdn", (1,) * rows, heads=q.shape[2], value_heads=v.shape[2], gate="softplus", beta_is_logit=True,
        qk_l2norm=use_qk_l2norm, scale=scale,
    )  # fmt: skip
    slots = initial_state_indices.long()
    states = initial_state[slots]
    for t in range(tokens):
        now = [x[:, t : t + 1] for x in (q, k, v, a, b)]
        inputs = Inputs(case, *now[:3], g=now[3], beta=now[4], A_log=A_log, dt_bias=dt_bias)
        found = _exactly(inputs.but(initial_state=states))
        output[:, t : t + 1] = found.o
        states = found.final_state
        if kept is not None:
            kept[:, t] = states
    if not disable_state_update:
        initial_state[slots] = states.to(initial_state.dtype)
    return output, initial_state


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test."""
    functions = {
        "flashinfer.gdn_decode": gated_delta_rule_decode_pretranspose,
        "flashinfer.gdn_prefill": chunk_gated_delta_rule,
    }
    for name in ("flashinfer", *functions):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # which makes it one that can be found
        monkeypatch.setitem(sys.modules, name, module)
    for name, function in functions.items():
        setattr(sys.modules[name], function.__name__, function)
