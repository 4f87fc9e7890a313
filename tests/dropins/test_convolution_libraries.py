# SPDX-License-Identifier: Apache-2.0
"""What other libraries of short convolutions are handed on GPUs, on stand-ins that refuse what those refuse
and compute on CPUs."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor

from cula import _conv_gpu, _plain

pytestmark = pytest.mark.cpu_only("stand-ins in place of libraries for GPUs")

x = torch.randn(2, 20, 16, dtype=torch.bfloat16)  # [B, T, D]
weight, bias = torch.randn(16, 4, dtype=torch.bfloat16), torch.randn(16, dtype=torch.bfloat16)


class Package:
    """causal-conv1d 1.6: channels side by side where there are numbers or states."""

    calls = 0

    def causal_conv1d_fn(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None, return_final_states: bool = False,
        final_states_out: Tensor | None = None, activation: str | None = None,
    ) -> object:  # fmt: skip
        self.calls += 1
        assert final_states_out is None
        assert x.stride(1) == 1
        assert x.shape[1] % 8 == 0
        assert 2 <= weight.shape[1] <= 4
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32
            assert initial_states is None
            assert not return_final_states
            assert bool((seq_idx >= 0).all())
        if initial_states is not None:
            assert initial_states.shape == (x.shape[0], x.shape[1], weight.shape[1] - 1)
            assert initial_states.stride(1) == 1
        columns = weight.shape[1] - 1 if return_final_states else 0
        y, final = _plain.convolve(
            x.transpose(1, 2), weight, bias, initial_states, None, seq_idx, activation == "silu", columns
        )
        return (y.transpose(1, 2), final) if return_final_states else y.transpose(1, 2)

    def causal_conv1d_update(
        self, x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None, cache_seqlens: Tensor | None = None,
        conv_state_indices: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        for each in (cache_seqlens, conv_state_indices):
            assert each is None or each.dtype == torch.int32
        y = _plain.convolve_step(
            x.transpose(1, 2), conv_state, weight, bias, activation == "silu", conv_state_indices, None,
            cache_seqlens,
        )  # fmt: skip
        return y.transpose(1, 2)


class Fla:
    """FLA: no numbers of tokens, states of W columns, what is behind the last sequence is anything."""

    calls = 0

    def causal_conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None,
        output_final_state: bool = False, activation: str | None = None, cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        self.calls += 1
        width = weight.shape[1]
        assert initial_state is None or initial_state.shape[1:] == (x.shape[2], width)
        columns = width if output_final_state else 0
        y, final = _plain.convolve(
            x, weight, bias, initial_state, cu_seqlens, None, activation == "silu", columns
        )
        if cu_seqlens is not None:
            y[:, int(cu_seqlens[-1]) :] = torch.nan
        return y, final


@pytest.fixture
def libraries(monkeypatch):
    package, fla = Package(), Fla()
    installed = {"causal_conv1d": package, "fla.modules.convolution": fla}
    monkeypatch.setattr(
        _conv_gpu, "library_function", lambda module, name: getattr(installed.get(module), name, None)
    )
    return types.SimpleNamespace(package=package, fla=fla, installed=installed)


LENGTHS = torch.tensor([0, 7, 7, 18])
NUMBERS = torch.tensor([[1] * 5 + [2] * 2 + [1] * 9 + [-1] * 4] * 2)
# what: (changed arguments of `_plain.convolve`, who takes the call)
CALLS = {
    "alone": ({}, "package"),
    "states": (
        {"initial_state": torch.randn(2, 16, 5, dtype=torch.bfloat16), "final_state_len": 3},
        "package",
    ),
    "numbers": ({"seq_idx": NUMBERS}, "package"),
    "lengths": ({"x": x[:1], "cu_seqlens": LENGTHS}, "package"),
    "lengths and states": (
        {
            "x": x[:1],
            "cu_seqlens": LENGTHS,
            "initial_state": x[:1, :12].reshape(3, 16, 4),
            "final_state_len": 4,
        },
        "fla",
    ),
    "short states of lengths": (
        {
            "x": x[:1],
            "cu_seqlens": LENGTHS,
            "initial_state": x[:1, :9].reshape(3, 16, 3),
            "final_state_len": 2,
        },
        "fla",
    ),
    "odd channels": ({"x": x[..., :15], "weight": weight[:15], "bias": bias[:15]}, "fla"),
    "a wide window": ({"weight": torch.randn(16, 7, dtype=torch.bfloat16)}, "fla"),
    "tokens first": ({"x": x.transpose(1, 2).contiguous().transpose(1, 2)}, "fla"),
    "odd channels and numbers": (
        {"x": x[..., :15], "weight": weight[:15], "bias": bias[:15], "seq_idx": NUMBERS},
        None,
    ),
    "long states": ({"final_state_len": 9}, None),
    "float64": ({"x": x.double(), "weight": weight.double(), "bias": bias.double()}, None),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_prompt_goes_to_the_library_that_takes_it(what, libraries):
    changed, taker = CALLS[what]
    given = {
        "x": x, "weight": weight, "bias": bias, "initial_state": None, "cu_seqlens": None, "seq_idx": None,
        "silu": True, "final_state_len": 0, **changed,
    }  # fmt: skip
    found = _conv_gpu.convolve(**given)
    assert (libraries.package.calls, libraries.fla.calls) == (taker == "package", taker == "fla")
    if taker is None:
        assert found is None
        return
    y, final = _plain.convolve(**given)
    assert torch.equal(found[0], y)
    assert (final is None) == (found[1] is None)
    if final is not None:
        assert torch.equal(found[1], final)


def test_without_libraries_nobody_takes_it(libraries):
    libraries.installed.clear()
    assert _conv_gpu.convolve(x, weight, bias, None, None, None, True, 0) is None
    assert _conv_gpu.convolve_step(x, x, weight, bias, True, None, None, None, None, -1) is None


def test_the_next_token_goes_to_the_package(libraries):
    state = torch.randn(4, 16, 4, dtype=torch.bfloat16)
    other, slots = state.clone(), torch.tensor([3, 1])
    y = _conv_gpu.convolve_step(x[:, :1], state, weight, bias, True, slots, None, None, None, -1)
    wanted = _plain.convolve_step(x[:, :1], other, weight, bias, True, slots)
    assert torch.equal(y, wanted)
    assert torch.equal(state, other)
    for number, changed in (("null_index", 0), ("cu_seqlens", LENGTHS), ("num_accepted_tokens", slots)):
        given = {
            "x": x[:, :1], "conv_state": state, "weight": weight, "bias": bias, "silu": True,
            "conv_state_indices": slots, "cu_seqlens": None, "cache_seqlens": None,
            "num_accepted_tokens": None, "null_index": -1, number: changed,
        }  # fmt: skip
        assert _conv_gpu.convolve_step(**given) is None
    assert libraries.package.calls == 1
