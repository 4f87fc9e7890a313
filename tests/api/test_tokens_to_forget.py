# SPDX-License-Identifier: Apache-2.0
"""How many tokens a head remembers: against every window of every length in turn."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cula
from cula import _forget
from cula.bench import eager
from cula_testing.cases import Case, make

NAN = float("nan")


def by_hand(log_decays: torch.Tensor, lengths: list[int], bound: float) -> int:
    """Of one head, [T, K]."""
    log_decays = log_decays.cpu()
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    for n in range(1, max(lengths, default=0) + 1):
        windows = [
            log_decays[start : start + n].sum(0)
            for begin, length in zip(begins, lengths, strict=True)
            for start in range(begin, begin + length - n + 1)
        ]
        if all(bool((window < math.log(bound)).all()) for window in windows):
            return n
    return -1


# Multiples of 1/64, whose sums are exact in every order.
DECAYS = st.sampled_from([0.0, -1 / 64, -0.25, -1.0, -3.5, -50.0, -1000.0, -math.inf])


@given(
    lengths=st.lists(st.integers(0, 12), max_size=4),
    tail=st.integers(0, 3),
    channels=st.sampled_from([None, 1, 3]),
    bound=st.sampled_from([2.0**-64, 2.0**-20, 0.3, 0.999]),
    at_once=st.sampled_from([1, 20, 1 << 24]),
    data=st.data(),
)
def test_packed_sequences(lengths, tail, channels, bound, at_once, data):
    heads, tokens = 2, sum(lengths) + tail
    shape = (1, tokens, heads, *([] if channels is None else [channels]))
    count = math.prod(shape)
    drawn = data.draw(st.lists(DECAYS, min_size=count, max_size=count))
    g = torch.tensor(drawn, dtype=torch.float32).view(shape)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_forget, "_AT_ONCE", at_once)
        found = cula.tokens_to_forget(g, bound=bound, cu_seqlens=cu_seqlens)
    wanted = [by_hand(g[0, :, head].reshape(tokens, channels or 1), lengths, bound) for head in range(heads)]
    assert found.tolist() == wanted
    assert (found.dtype, found.device) == (torch.int64, g.device)


@given(
    batch=st.integers(0, 3),
    tokens=st.integers(0, 10),
    heads=st.integers(0, 3),
    data=st.data(),
)
def test_a_batch_is_its_rows_packed(batch, tokens, heads, data):
    count = batch * tokens * heads * 2
    drawn = data.draw(st.lists(DECAYS, min_size=count, max_size=count))
    g = torch.tensor(drawn, dtype=torch.float64).view(batch, tokens, heads, 2)
    packed = g.reshape(1, batch * tokens, heads, 2)
    bounds = torch.arange(batch + 1, dtype=torch.int32) * tokens
    found = cula.tokens_to_forget(g)
    assert torch.equal(found, cula.tokens_to_forget(packed, cu_seqlens=bounds))
    assert found.shape == (heads,)
    if batch == 0 or tokens == 0:
        assert (found == -1).all()


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("algorithm", ["kda", "gdn"])
@pytest.mark.parametrize("decay", ["mild", "strong", "half_lasting"])
def test_raw_gates(algorithm, gate, decay):
    case = Case(algorithm, (60,), heads=3, value_heads=3, key_dim=4, value_dim=4, gate=gate, decay=decay)
    inputs = make(case.but(gate_dtype=torch.bfloat16))
    named = {"A_log": inputs.A_log, "dt_bias": inputs.dt_bias}
    named |= {"lower_bound": case.lower_bound} if gate == "bounded" else {}
    found = cula.tokens_to_forget(inputs.g, bound=1e-3, **named)
    log_decays = eager.log_decay(inputs.map(torch.Tensor.cpu).double())
    wanted = [by_hand(log_decays[0, :, head].reshape(60, -1), [60], 1e-3) for head in range(3)]
    assert found.tolist() == wanted
    assert torch.equal(found, cula.tokens_to_forget(inputs.g, bound=1e-3, use_gate_in_kernel=True, **named))
    assert torch.equal(found.cpu(), cula.tokens_to_forget(log_decays, bound=1e-3))


def test_a_gate_for_all_channels_has_their_biases():
    """As in `cula_kda`, where [B, T, HV] and a bias per channel are a decay per channel."""
    g = torch.zeros(1, 200, 2)
    bias = torch.tensor([[0.0, 1.0, -1.0], [0.25, 0.5, 1.0]])
    A_log = torch.zeros(2)
    found = cula.tokens_to_forget(g, A_log=A_log, dt_bias=bias.flatten())
    slowest = [math.log1p(math.exp(bias)) for bias in (-1.0, 0.25)]
    assert found.tolist() == [math.floor(64 * math.log(2) / rate) + 1 for rate in slowest]
    wide = g.unsqueeze(-1).expand(1, 200, 2, 3)
    assert torch.equal(found, cula.tokens_to_forget(wide, A_log=A_log[:, None, None], dt_bias=bias))


def test_a_constant_is_on_top():
    g = torch.full((1, 100, 3), -0.25)
    decay = torch.tensor([0.0, 0.25, -0.75])
    assert cula.tokens_to_forget(g, bound=math.exp(-10.1), decay=decay).tolist() == [41, 21, 11]


def test_the_bound_itself_is_not_below_it():
    g = torch.full((1, 9, 1), -2.0)
    assert cula.tokens_to_forget(g, bound=math.exp(-8.0)).tolist() == [5]


def test_what_never_forgets_and_what_cannot_be_told():
    g = torch.full((1, 50, 4, 2), -10.0)
    g[:, :, 1, 1] = 0.0  # one channel
    g[:, 20, 2, 0] = NAN
    g[:, :, 3] = 2.0  # counts as 0
    assert cula.tokens_to_forget(g).tolist() == [5, -1, -1, -1]
    behind = torch.tensor([0, 20])
    assert cula.tokens_to_forget(g, cu_seqlens=behind).tolist() == [5, -1, 5, -1]


def test_a_short_sequence_holds_nothing_longer_than_it_is():
    """One of six slow tokens beside one that forgets in five: after seven nothing is left of either."""
    g = torch.full((1, 56, 1), -10.0)
    g[:, :6] = 0.0
    assert cula.tokens_to_forget(g, cu_seqlens=torch.tensor([0, 6, 56])).tolist() == [7]
    assert cula.tokens_to_forget(g).tolist() == [11]


def test_a_long_sequence_is_exact_to_its_end():
    """A million steep tokens before the window that decides."""
    g = torch.full((1, 1 << 20, 1), -1000.0)
    g[:, -60:] = -1.0
    assert cula.tokens_to_forget(g, bound=math.exp(-40.5)).tolist() == [41]


def test_any_strides_and_no_gradient():
    g = torch.rand(2, 3, 40, 4).neg().transpose(1, 2).requires_grad_()
    found = cula.tokens_to_forget(g, bound=1e-3)
    assert torch.equal(found, cula.tokens_to_forget(g.detach().contiguous(), bound=1e-3))
    assert not found.requires_grad


G = torch.zeros(1, 6, 2, 3)
TWO = torch.zeros(2)
BAD = {
    "g must be a tensor, got list": (TypeError, {"g": [0.0]}),
    "g must have shape [B, T, HV, K] or [B, T, HV], got [6, 2]": (ValueError, {"g": G[0, :, :, 0]}),
    "g must have a floating dtype, got torch.int64": (ValueError, {"g": G.long()}),
    "g must be a dense tensor, got a sparse_coo tensor": (ValueError, {"g": G.to_sparse()}),
    "bound must lie between 0 and 1, got 1.0": (ValueError, {"bound": 1.0}),
    "bound must lie between 0 and 1, got 0": (ValueError, {"bound": 0}),
    "bound must lie between 0 and 1, got nan": (ValueError, {"bound": NAN}),
    "bound must be of type float, got str": (TypeError, {"bound": "0.5"}),
    "bound must be of type float, got bool": (TypeError, {"bound": True}),
    "use_gate_in_kernel must be of type bool, got int": (TypeError, {"use_gate_in_kernel": 1}),
    "A_log must be given when use_gate_in_kernel is True and lower_bound is not set, got None": (
        ValueError,
        {"use_gate_in_kernel": True},
    ),
    "A_log must be left out when g is the log decay, got [2]": (
        ValueError,
        {"use_gate_in_kernel": False, "A_log": TWO},
    ),
    "dt_bias must be left out when g is the log decay, got [2]": (ValueError, {"dt_bias": TWO}),
    "lower_bound must be left out when g is the log decay, got -5.0": (
        ValueError,
        {"use_gate_in_kernel": False, "lower_bound": -5.0},
    ),
    "A_log must have 2 values, one for each head, got [3]": (ValueError, {"A_log": torch.zeros(3)}),
    "A_log must be a tensor, got float": (TypeError, {"A_log": 0.5}),
    "decay must have 2 values, one for each head, got []": (ValueError, {"decay": torch.tensor(1.0)}),
    "dt_bias must have 6 values, got [2]": (ValueError, {"A_log": TWO, "dt_bias": TWO}),
    "dt_bias must have a multiple of 2 values, got [5]": (
        ValueError,
        {"g": G[..., 0], "A_log": TWO, "dt_bias": torch.zeros(5)},
    ),
    "lower_bound must be negative and at least -1e30, got 0.0": (ValueError, {"lower_bound": 0.0}),
    "lower_bound must be of type float, got Tensor": (TypeError, {"lower_bound": TWO}),
    "cu_seqlens must have dtype int32 or int64, got torch.int16": (
        ValueError,
        {"cu_seqlens": torch.zeros(2, dtype=torch.int16)},
    ),
    "cu_seqlens must have shape [N + 1], got [0]": (ValueError, {"cu_seqlens": torch.zeros(0).long()}),
    "cu_seqlens must rise from 0 to at most T = 6, got [0, 7]": (
        ValueError,
        {"cu_seqlens": torch.tensor([0, 7])},
    ),
    "cu_seqlens must rise from 0 to at most T = 6, got [0, 4, 2]": (
        ValueError,
        {"cu_seqlens": torch.tensor([0, 4, 2])},
    ),
    "g must have B = 1 with cu_seqlens, got [2, 6, 2, 3]": (
        ValueError,
        {"g": torch.zeros(2, 6, 2, 3), "cu_seqlens": torch.tensor([0, 6])},
    ),
    "A_log must be on g's device, cpu, got meta": (ValueError, {"A_log": TWO.to("meta")}),
}


@pytest.mark.cpu_only("checks that need no device")
@pytest.mark.parametrize("message", BAD)
def test_what_is_refused(message):
    kind, given_ = BAD[message]
    with pytest.raises(kind, match=re.escape(message)):
        cula.tokens_to_forget(**{"g": G, **given_})
