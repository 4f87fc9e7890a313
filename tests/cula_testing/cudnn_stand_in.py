# SPDX-License-Identifier: Apache-2.0
"""In the place of `cudnn.linear_attention.ops`, on a CPU: what the benchmark calls, checked as cuDNN does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from cula.bench import eager
from cula_testing.cases import Case, Inputs


def _attention(plan: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def kimi_delta_attention(q, k, v, g, beta, bounds, *, plan_name, scale, output_final_state=False, **raw):
        assert all(x.ndim == 3 for x in (q, k, v, g))
        assert (beta.ndim, g.dtype, beta.dtype, bounds.dtype) == (
            2,
            torch.float32,
            torch.float32,
            torch.int32,
        )
        assert q.dtype == torch.bfloat16
        assert plan_name == plan
        case = Case(heads=q.shape[1], value_heads=v.shape[1], key_dim=128, value_dim=128, scale=scale)
        if raw:
            assert raw.pop("safe_gate")
            case = case.but(
                gate="bounded",
                lower_bound=raw.pop("gate_lower_bound"),
                qk_l2norm=raw.pop("use_qk_l2norm_in_kernel"),
                beta_is_logit=raw.pop("use_beta_sigmoid_in_kernel"),
            )
        inputs = Inputs(case, *(x[None] for x in (q, k, v)), g=g[None], beta=beta[None])
        inputs = inputs.but(A_log=raw.pop("a_log", None), dt_bias=raw.pop("dt_bias", None))
        assert not raw
        edges = bounds.tolist()
        found = [eager.chunk_form(inputs.tokens(*edge)) for edge in pairwise(edges)]
        states = torch.cat([state for _, state in found]) if output_final_state else torch.empty(0)
        return torch.cat([o[0] for o, _ in found]), states

    return kimi_delta_attention


def install(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    """For one test. `plan`: the only one that it has."""
    module = ModuleType("cudnn.linear_attention.ops")
    module.kimi_delta_attention = _attention(plan)
    for name in ("cudnn", "cudnn.linear_attention"):
        package = ModuleType(name)
        package.__spec__ = ModuleSpec(name, None)  # which makes it one that can be found
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
