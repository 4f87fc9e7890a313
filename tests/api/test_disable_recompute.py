# SPDX-License-Identifier: Apache-2.0
"""`disable_recompute` where no kernel keeps anything for the backward pass: the call runs as without it. What
is kept on a GPU is in tests/gpu/test_saved_for_backward.py."""

from __future__ import annotations

import pytest
import torch

import cula
import cula.kda
from cula import _autograd, _ops
from cula_testing import device, gradients, level1
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits

SMALL = Case("kda", (20,), heads=1, value_heads=2, key_dim=16, value_dim=16, dtype=torch.float32)
OTHERS = [SMALL.but(algorithm=name) for name in ("gdn", "gdn2", "gdp", "gla", "delta")]


def saved_by(function, case: Case = SMALL, **options) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """What autograd keeps of a call, and the gradients."""
    inputs = make(case)
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in gradients.names(inputs)}
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        made = function(inputs.but(**leaves), **options)
    found = torch.autograd.grad(made, leaves.values(), gradients.upstream(inputs))
    return saved, dict(zip(leaves, found, strict=True))


def drop_in(inputs, **options):
    return cula.kda.chunk_kda(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, initial_state=inputs.initial_state,
        output_final_state=True, state_v_first=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("function", "case"),
    [(level1.prefill, SMALL), (drop_in, SMALL)] + [(level1.prefill, case) for case in OTHERS],
    ids=["level 1", "drop-in"] + [case.algorithm for case in OTHERS],
)
def test_a_call_that_nothing_is_kept_of_runs_as_without(function, case):
    """float32 has no chunks on a GPU, and CPUs compute all again."""
    plain, wanted = saved_by(function, case)
    kept, found = saved_by(function, case, disable_recompute=True)
    assert [x.shape for x in kept] == [x.shape for x in plain]
    for name, gradient in wanted.items():
        assert_same_bits(name, gradient, found[name])


@pytest.mark.parametrize("case", [SMALL, *OTHERS], ids=lambda case: case.algorithm)
def test_it_is_a_flag(case):
    with pytest.raises(TypeError, match="disable_recompute must be of type bool, got str"):
        level1.prefill(make(case), disable_recompute="yes")


def test_without_gradients_it_changes_nothing():
    inputs = make(SMALL)
    for one, two in zip(level1.prefill(inputs), level1.prefill(inputs, disable_recompute=True), strict=True):
        assert_same_bits("result", one, two)
    pool = inputs.initial_state.clone()
    level1.prefill(inputs.but(initial_state=None), state_pool=pool, disable_recompute=True)
    o = torch.empty_like(inputs.v)
    level1.prefill(inputs, out=o, disable_recompute=True)
    assert_same_bits("out", level1.prefill(inputs)[0], o)


def test_compiled():
    function = torch.compile(level1.prefill, fullgraph=True, dynamic=True, backend="aot_eager")
    for name, gradient in saved_by(level1.prefill)[1].items():
        assert_same_bits(name, gradient, saved_by(function, disable_recompute=True)[1][name])


def test_explain_says_that_nothing_is_kept():
    for pass_name in ("prefill", "backward"):
        found = cula.explain("kda", pass_name, device="cpu", disable_recompute=True)
        assert found.chosen is None
        assert all(row.saving is None for row in found)
        assert "nothing is kept: the backward pass computes all again" in repr(found)
    assert "saves nothing that a backward would compute" in repr(
        cula.explain("kda", device="cpu", disable_recompute=True)
    )
    for pass_name in ("decode", "verify", "segment"):
        with pytest.raises(ValueError, match="disable_recompute must be False for"):
            cula.explain("kda", pass_name, disable_recompute=True)
    with pytest.raises(TypeError, match="disable_recompute must be of type bool, got str"):
        cula.explain("kda", disable_recompute="yes")


@pytest.mark.skipif("sm80" not in str(cula.explain(device="sm_80").chosen), reason="built without CUDA")
def test_explain_says_what_is_kept():
    for name, target in (("sm_80", "sm80"), ("sm_90", "sm90")):
        found = cula.explain("kda", device=name, tokens=8192, heads=64, disable_recompute=True)
        assert found.chosen == target
        row = next(row for row in found if row.target == target)
        assert row.saving.chunk_tokens == 64
        whole = 128 * 64 * row.saving.bytes / 2**20
        assert f"{target}: {row.saving.bytes / 1024:.1f} KiB are kept" in repr(found)
        assert f"{whole:.0f} MiB in all" in repr(found)
        assert (
            cula.explain("kda", device=name, tokens=8192 * 9, heads=64, disable_recompute=True).chosen is None
        )
        reads = cula.explain("kda", "backward", device=name, disable_recompute=True)
        assert reads.chosen == target
        assert next(row for row in reads if row.target == "sm80:step").verdict == "no"


def test_the_operators_refuse_what_no_kernel_of_the_device_writes_or_reads():
    inputs = make(SMALL)
    if device.kind() != "cpu":
        pytest.skip("a GPU's kernels do")
    named = {name: value for name, value in inputs.tensors().items() if value is not None}
    memory = torch.empty(64, dtype=torch.int32)
    saved = memory[-memory.data_ptr() % 128 // 4 :][:8].view(1, 2, 4)
    for pass_name, more, message in (
        ("prefill", {}, "saves nothing that a backward would compute"),
        ("backward", {"d_v": torch.empty_like(inputs.v)}, "computes all itself, and takes no saved"),
    ):
        op = getattr(torch.ops.cula, pass_name).out
        with pytest.raises(ValueError, match=message):
            op(**named, **more, options=_ops.pack("kda"), saved=saved)
        for wrong, words in (
            (saved.float(), "saved must have dtype int32"),
            (saved[0], r"saved must have shape \[chunks, HV, words\]"),
            (saved[:, :1], r"saved must have shape \[chunks, HV, words\] = \[chunks, 2, words\]"),
        ):
            with pytest.raises(ValueError, match=words):
                op(**named, **more, options=_ops.pack("kda"), saved=wrong)


def test_room_is_counted_by_chunks():
    """Of a batch every row is rounded up; packed sequences have at most one chunk more each."""
    saver = _autograd.Saver("some", chunk_tokens=64, words=5, most_chunks=9)
    q = torch.empty((3, 130, 1, 16))
    given = {"q": q, "k": q, "v": torch.empty((3, 130, 2, 16))}
    assert saver.room(given).shape == (9, 2, 5)
    for tokens in (193, 0):
        x = torch.empty((3, tokens, 1, 16))
        assert saver.room({**given, "q": x, "k": x}) is None
    packed = {**{name: x[:1] for name, x in given.items()}, "cu_seqlens": torch.tensor([0, 1, 65, 130])}
    assert saver.room(packed).shape == (5, 2, 5)
