# SPDX-License-Identifier: Apache-2.0
"""What FLA's functions refuse beside what FLA's own sentences say: options that change nothing here but are
none, lengths on the host that are others, heads that no kernel takes."""

from __future__ import annotations

import re

import pytest
import torch

import cula
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits

X = make(Case("kda", (4,), key_dim=16, value_dim=16, state=False))
ROWS = {"q": X.q, "k": X.k, "v": X.v}
KDA = {**ROWS, "g": X.g, "beta": X.beta}
GDN = {**KDA, "g": X.g[..., 0]}
GDN2 = {**ROWS, "g": X.g, "b": X.k.abs(), "w": X.v.abs()}
LIGHTNING = {**ROWS, "layer_idx": 1, "num_layers": 4}
RWKV7 = {"r": X.q, "w": X.g, "k": X.k, "v": X.v, "a": -X.k, "b": X.k}
LAYER = {"r": X.q, "w": X.g, "k": X.k, "v": X.v, "kk": X.k, "a": X.k}
NO_HEADS = {"q": X.q[:, :, :0], "k": X.k[:, :, :0]}
NAN = float("nan")

CHUNK_KDA, CHUNK_GDN, CHUNK_GDN2 = cula.kda.chunk_kda, cula.gdn.chunk_gated_delta_rule, cula.gdn2.chunk_gdn2
RECURRENT_GDN, MUL = cula.gdn.fused_recurrent_gated_delta_rule, cula.rwkv7.fused_mul_recurrent_rwkv7
SIMPLE, RETENTION = cula.simple_gla.chunk_simple_gla, cula.retention.chunk_retention
CHUNK_LIGHTNING, CHUNK_LINEAR = cula.lightning.chunk_lightning_attn, cula.linear_attn.chunk_linear_attn

REFUSALS = [
    (CHUNK_KDA, KDA, {"safe_gate": "yes"}, TypeError, "safe_gate must be of type bool, got str"),
    (CHUNK_KDA, KDA, {"disable_recompute": "yes"}, TypeError, "disable_recompute must be of type bool, got"),
    (CHUNK_KDA, KDA, {"transpose_state_layout": "no"}, TypeError,
     "transpose_state_layout must be of type bool, got str"),
    (cula.kda.kda_prefill_hopper, KDA, {"safe_gate": 1}, TypeError, "safe_gate must be of type bool, got"),
    (CHUNK_GDN2, GDN2, {"safe_gate": 1}, TypeError, "safe_gate must be of type bool, got int"),
    (CHUNK_GDN2, GDN2, {"disable_recompute": None}, TypeError, "disable_recompute must be of type bool, got"),
    (CHUNK_GDN, GDN, {"head_first": True}, DeprecationWarning, "head_first has been removed."),
    (CHUNK_GDN, GDN, {"head_first": False}, DeprecationWarning, "head_first has been removed."),
    (CHUNK_GDN, GDN, NO_HEADS, ValueError, "q must have at least one head, got [1, 4, 0, 16]"),
    (CHUNK_KDA, KDA, NO_HEADS, ValueError, "q must have at least one head, got [1, 4, 0, 16]"),
    (CHUNK_LIGHTNING, LIGHTNING, NO_HEADS, ValueError, "q must have at least one head, got [1, 4, 0, 16]"),
    (RECURRENT_GDN, GDN, {"gk": X.g, "g": X.g}, ValueError, "g must have shape [B, T, HV] = [1, 4, 2], got"),
    (RECURRENT_GDN, GDN, {"gk": X.g.long()}, ValueError, "gk must have a floating-point dtype, got"),
    (RECURRENT_GDN, GDN, {"gk": X.g, "g": X.g[..., 0].long()}, ValueError,
     "g must have a floating-point dtype, got torch.int64"),
    (SIMPLE, ROWS, {"chunk_size": 3}, ValueError, "`chunk_size` must be a power of 2, got 3."),
    (SIMPLE, ROWS, {"chunk_size": 0}, ValueError, "`chunk_size` must be a power of 2, got 0."),
    (SIMPLE, ROWS, {"chunk_size": "x"}, TypeError, "chunk_simple_gla: chunk_size must be of type int, got"),
    (RETENTION, ROWS, {"chunk_size": -4}, ValueError, "`chunk_size` must be a power of 2, got -4."),
    (RETENTION, ROWS, {"chunk_size": True}, TypeError, "chunk_retention: chunk_size must be of type int"),
    (CHUNK_LIGHTNING, LIGHTNING, {"chunk_size": 48}, ValueError, "`chunk_size` must be a power of 2, got 48"),
    (CHUNK_LINEAR, ROWS, {"v": X.v.repeat(1, 1, 2, 1)}, AssertionError, "v must be of shape"),
    (CHUNK_LINEAR, ROWS, {"k": X.k[..., :8]}, AssertionError, "q and k must have the same shape"),
    (cula.rwkv7.chunk_rwkv7, RWKV7, {"lower_bound": NAN}, ValueError, "`lower_bound` must be negative"),
    (MUL, LAYER, {"kk": X.k[..., :1]}, AssertionError, "kk must have r's shape, [1, 4, 2, 16], got"),
    (MUL, LAYER, {"a": X.k[..., :3]}, AssertionError, "a must have r's shape, [1, 4, 2, 16], got"),
    (MUL, LAYER, {"kk": X.k.long()}, AssertionError, "kk must have a floating dtype, got torch.int64"),
    (MUL, LAYER, {"a": X.k > 0}, AssertionError, "a must have a floating dtype, got torch.bool"),
    (MUL, LAYER, {"kk": None}, TypeError, "kk must be a tensor, got NoneType"),
    (MUL, LAYER, {"a": 0.5}, TypeError, "a must be a tensor, got float"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "base", "wrong", "error", "words"), REFUSALS)
def test_refusal(function, base, wrong, error, words):
    with pytest.raises(error, match=re.escape(words)):
        function(**{**base, **wrong})


@pytest.mark.parametrize("size", [None, 1, 16, 64, 128])
def test_a_power_of_2_changes_nothing(size):
    for function, base in ((SIMPLE, ROWS), (RETENTION, ROWS), (CHUNK_LIGHTNING, LIGHTNING)):
        assert_same_bits("o", function(**base)[0], function(**base, chunk_size=size)[0])


def test_without_a_normaliser_heads_may_be_grouped():
    v = X.v.repeat(1, 1, 2, 1)
    o, _ = CHUNK_LINEAR(X.q, X.k, v, normalize=False)
    assert_same_bits("o", SIMPLE(X.q, X.k, v)[0], o)


@pytest.mark.parametrize(("function", "rows"), [(CHUNK_KDA, KDA), (CHUNK_GDN2, GDN2)], ids=["kda", "gdn2"])
def test_lengths_on_the_host_are_those_of_the_call(function, rows):
    ends = torch.tensor([0, 1, 4])
    named = {**rows, "cu_seqlens": ends, "return_intermediate_states": True}
    with torch.inference_mode():
        wanted = function(**named)
        for found, one in zip(function(**named, cu_seqlens_cpu=ends.int().cpu()), wanted, strict=True):
            assert one is found is None or torch.equal(one[:, : found.shape[1]], found)
        with pytest.raises(ValueError, match="cu_seqlens_cpu must have as many elements as cu_seqlens, 3"):
            function(**named, cu_seqlens_cpu=torch.tensor([0, 4]))


@pytest.mark.cpu_only("lengths of a GPU are not read")
def test_values_of_lengths_on_the_host_are_those_of_the_call():
    named = {**KDA, "cu_seqlens": torch.tensor([0, 1, 2]), "return_intermediate_states": True}
    with torch.inference_mode(), pytest.raises(
        ValueError,
        match=re.escape("cu_seqlens_cpu must have the values of cu_seqlens, got cu_seqlens_cpu[1] = 0 beside "
                        "cu_seqlens[1] = 1"),
    ):  # fmt: skip
        CHUNK_KDA(**named, cu_seqlens_cpu=torch.tensor([0, 0, 0]))
