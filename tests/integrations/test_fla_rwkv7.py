# SPDX-License-Identifier: Apache-2.0
"""Which calls of RWKV-7's functions on a GPU `cula.integrations.fla` takes, and which it leaves to FLA, on a
stand-in of FLA. There need be no GPU: the tensors have no memory, and nothing is computed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import cula
from cula.integrations import fla
from cula_testing import fla_stand_in

pytestmark = pytest.mark.cpu_only("the adapter asks FLA, and no kernel")

CHUNKED = ["chunk_rwkv7", "chunk_dplr_delta_rule"]
RECURRENT = ["fused_recurrent_rwkv7", "fused_mul_recurrent_rwkv7", "fused_recurrent_dplr_delta_rule"]


@pytest.fixture(params=["0.5", "0.6"], autouse=True)
def _registered(request, monkeypatch) -> Iterator[None]:
    """What would run on these kernels returns "ran here"."""
    fla_stand_in.install(monkeypatch, request.param)
    monkeypatch.delenv("FLA_CULA", raising=False)
    monkeypatch.setattr("cula._passes.forward", lambda *_, **__: ("ran here", None, None))
    fla.calls.clear()
    fla.register()
    yield
    fla.unregister()
    fla.calls.clear()


def arguments(
    name: str, tokens: int, device: str = "cuda", dtype: torch.dtype = torch.float32, channels: int = 16
) -> dict[str, torch.Tensor]:
    query, gate = ("r", "w") if "rwkv7" in name else ("q", "gk")
    last = "kk" if name == "fused_mul_recurrent_rwkv7" else "b"
    with FakeTensorMode():
        return {
            each: torch.empty(1, tokens, 2, channels, device=device, dtype=dtype)
            for each in (query, gate, *"kva", last)
        }


def call(
    name: str,
    tokens: int,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
    channels: int = 16,
    **named: object,
) -> tuple[bool, str]:
    """Whether a call ran here, and what the record says of it. float32 has no chunks on a GPU."""
    given = arguments(name, tokens, device, dtype, channels)
    found = getattr(sys.modules["fla.layers"], name)(**given, **named)
    assert found in (("ran here", None), f"FLA's own {name}")
    ((function, sentence),) = fla.calls
    assert function == name
    return found == ("ran here", None), sentence


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("tokens", [1, 63])
def test_short_calls_run_here(name, tokens):
    assert call(name, tokens) == (True, "cula")


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("tokens", [64, 5000])
def test_long_calls_are_left_to_fla(name, tokens):
    assert fla.TOKENS_LEFT_TO_FLA == 64
    sentence = (
        "on a GPU calls of 64 tokens or more are left to FLA, which works in chunks: cula takes float32, and "
        "K below 16 or above 128, token by token"
    )
    assert call(name, tokens) == (False, sentence)


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("channels", [15, 129])
def test_long_calls_that_have_no_chunks_are_left_to_fla(name, channels):
    ran_here, sentence = call(name, 64, dtype=torch.bfloat16, channels=channels)
    assert not ran_here
    assert sentence.startswith("on a GPU calls of 64 tokens or more are left to FLA")


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [16, 64, 128])
def test_long_calls_that_have_chunks_run_here(name, dtype, channels):
    assert call(name, 5000, dtype=dtype, channels=channels) == (True, "cula")


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("tokens", [9, 5000])
def test_ranks_decide_alike(name, tokens):
    """They may have different numbers of tokens, and one that ran here would wait for the others for ever."""
    ran_here, sentence = call(name, tokens, cp_context=SimpleNamespace(cu_seqlens=torch.tensor([0, tokens])))
    assert not ran_here
    assert sentence.startswith("on a GPU calls with cp_context are left to FLA")


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_calls_of_any_length_run_here(name):
    """FLA's go token by token, too."""
    assert call(name, 5000) == (True, "cula")


@pytest.mark.parametrize("name", [*CHUNKED, *RECURRENT])
def test_on_a_cpu_all_calls_run_here(name):
    assert call(name, 5000, "cpu") == (True, "cula")


def test_the_drop_in_itself_takes_long_calls():
    assert cula.rwkv7.chunk_rwkv7(**arguments("chunk_rwkv7", 5000)) == ("ran here", None)
