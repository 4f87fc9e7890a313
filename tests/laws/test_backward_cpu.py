# SPDX-License-Identifier: Apache-2.0
"""The chunked backward pass of the CPU targets: gradients by an error rule, and calls that must agree in
their bits.

The rule is that of compare.py, against autograd's recurrence in float64 (the backend `reference`), with three
times the error of `reference:naive` as the budget: a gradient passes through two recurrences.
"""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cula
from cula import _ops
from cula_testing import device, gradients
from cula_testing.cases import DELTA, FAMILY, GATED, Case, Inputs, make, strided
from cula_testing.compare import assert_same_bits, errors, floor
from cula_testing.gradients import Gradients, assert_rule
from cula_testing.strategies import cases

pytestmark = pytest.mark.cpu_only("guards the CPU targets")

NAN = float("nan")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KEY_DIMS = (16, 31, 32, 60, 64, 96, 100, 128)


def takes(target: str, case: Case) -> bool:
    return target in device.able(case.dtype, "backward", key_dim=case.key_dim)


def outer(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Gradients of the outputs."""
    return dict(zip(("d_o", "d_final_state"), gradients.upstream(inputs), strict=True))


def run(
    inputs: Inputs, target: str, of: dict[str, torch.Tensor], wanted: tuple[str, ...] | None = None
) -> Gradients:
    return gradients.backward(inputs, of.get("d_o"), of.get("d_final_state"), backend=target, wanted=wanted)


@given(data=st.data())
def test_generated(target, algorithm, data):
    dtype = data.draw(
        st.sampled_from([dtype for dtype in DTYPES if target in device.able(dtype, "backward")])
    )
    fixed = {
        "pool": False,
        "beta_per_value": False,
        "key_dim": data.draw(st.sampled_from(KEY_DIMS)),
        "backend": "",
    }
    # float32: test_collinear_keys_in_float32.
    if dtype == torch.float32:
        fixed |= {"keys": "random"}
    assert_rule(make(data.draw(cases(algorithm, dtype=dtype, **fixed))), target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_length(target, algorithm, dtype):
    for length in (*range(1, 18), 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 200):
        case = Case(algorithm, (length,), key_dim=32, value_dim=32, dtype=dtype)
        if takes(target, case):
            assert_rule(make(case), target)


@pytest.mark.parametrize("name", DELTA)
def test_collinear_keys_in_float32(target, name):
    """Keys of one direction, and queries along them, read and write what nearly cancels. In chunks the errors
    of 64 writes add up, and float32 keeps fewer digits than the naive recurrence, though more than that has
    in bfloat16."""
    case = Case(name, (200,), key_dim=64, keys="collinear", decay="slow", beta_is_logit=True, qk_l2norm=True)
    if not takes(target, case.but(dtype=torch.float32)):
        return
    narrow, wide = make(case), make(case.but(dtype=torch.float32))
    of, of_wide = outer(narrow), outer(wide)
    found, exact = run(wide, target, of_wide), gradients.exact(wide, **of_wide)
    naive, exact_narrow = run(narrow, "reference:naive", of), gradients.exact(narrow, **of)
    for each, x in found.items():
        error, limit = errors(x, exact[each]), errors(naive[each].double(), exact_narrow[each])
        assert error.rms <= limit.rms / 8 + floor(x.dtype, torch.float32), each


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("keys", ["random", "collinear"])
def test_masked_tokens_and_full_writes(target, name, keys):
    """beta of 0, 1 and 2 among the others. A token of beta = 0 has a gradient of beta, and none of v."""
    inputs = make(Case(name, (150,), key_dim=64, keys=keys))
    for i in range(3 if keys == "random" else 2):
        inputs.beta[:, i::5] = i
    assert_rule(inputs, target)
    found = run(inputs, target, outer(inputs))
    assert not found["v"][:, ::5].any()
    inputs.beta[:] = 0
    assert_rule(inputs, target)


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decays_that_forget(target, name, dtype):
    inputs = make(Case(name, (200,), key_dim=64, dtype=dtype))
    if not takes(target, inputs.case):
        return
    rare = torch.rand(inputs.g.shape, generator=torch.Generator().manual_seed(2)) < 0.05
    for change in (
        lambda g: g.masked_fill(rare, -1000.0),
        lambda g: torch.full_like(g, -1000.0),
        lambda g: g.clone().index_fill_(1, torch.tensor([0, 16, 31, 63, 64, 128]), -1000.0),
        torch.zeros_like,
        lambda g: (g / 64).index_fill_(-1, torch.arange(0, g.shape[-1], 2), -5.0),
    ):
        assert_rule(inputs.but(g=change(inputs.g)), target)


def test_gradients_near_the_smallest_normal_numbers(target):
    """d_A_log of 1e-35 is a sum of subnormal terms, which count as zero."""
    case = Case("gdp", (5,), heads=1, value_heads=1, key_dim=16, value_dim=32, householders=16, seed=244)
    gate = {"gate": "softplus", "decay": "strong", "A_log": True, "dt_bias": False}
    assert_rule(make(case.but(state=False, **gate)), target)


@pytest.mark.parametrize("name", GATED)
def test_gates_far_out(target, name):
    for gate in ("softplus", "bounded"):
        inputs = make(Case(name, (100,), key_dim=64, gate=gate, dtype=torch.bfloat16))
        inputs.g[:, ::3], inputs.g[:, 1::3] = 80.0, -80.0
        assert_rule(inputs, target)


def test_zero_rows_and_tokens_of_other_sizes(target, algorithm):
    inputs = make(Case(algorithm, (150,), key_dim=64, qk_l2norm=True))
    inputs.q[:, ::7], inputs.k[:, 3::5] = 0, 0
    assert_rule(inputs, target)
    inputs.v[:, 40:50] *= 100
    assert_rule(inputs, target)


@pytest.mark.parametrize("name", ["kda", "gdn", "lightning"])
def test_a_sequence_of_many_chunks(target, name):
    """More than 1,024 chunks: most states are made twice."""
    case = Case(name, (65700,), heads=1, value_heads=1, key_dim=16, value_dim=1, decay="slow")
    inputs = make(case)
    of = outer(inputs)
    exact = gradients.exact(inputs, **of)
    found = run(inputs, target, of)
    for each, x in found.items():
        assert errors(x, exact[each]).rms <= 2e-2, each


# Calls that agree in their bits.

TYPICAL = Case("kda", (150, 0, 17), packed=True, tail=5, heads=2, value_heads=4, key_dim=60, value_dim=100,
               gate="softplus", beta_is_logit=True, qk_l2norm=True)  # fmt: skip


def typical(name: str) -> Inputs:
    decay, _ = FAMILY[name]
    return make(
        TYPICAL.but(
            algorithm=name,
            gate="softplus" if decay in ("token", "channel") else "log_decay",
            beta_is_logit=name in DELTA,
        )
    )


def assert_same(found: Gradients, wanted: Gradients) -> None:
    for name, x in found.items():
        assert_same_bits(f"d{name}", x, wanted[name])


def test_subsets(target, algorithm):
    inputs = typical(algorithm)
    of, names = outer(inputs), [name for name in _ops.GRADIENTS if getattr(inputs, name) is not None]
    everything = run(inputs, target, of)
    for name in names:
        assert_same(run(inputs, target, of, (name,)), everything)
        assert_same(run(inputs, target, of, tuple(set(names) - {name})), everything)
    run(inputs, target, of, ())


def test_threads(target, algorithm):
    inputs, threads = typical(algorithm), torch.get_num_threads()
    of = outer(inputs)
    try:
        torch.set_num_threads(1)
        one = run(inputs, target, of)
        torch.set_num_threads(2)
        assert_same(run(inputs, target, of), one)
    finally:
        torch.set_num_threads(threads)


def test_what_the_workspace_holds(target, algorithm):
    """The call before leaves NaN wherever it can."""
    inputs = typical(algorithm)
    of = outer(inputs)
    before = run(inputs, target, of)
    run(inputs.but(k=inputs.k * NAN, v=inputs.v * NAN), target, of)
    assert_same(run(inputs, target, of), before)


def test_nan_stays_in_its_sequence(target, algorithm):
    inputs = typical(algorithm).but(cu_seqlens=torch.tensor([0, 100, 133, 167]))
    inputs = inputs.but(initial_state=inputs.initial_state.clone())
    of = outer(inputs)
    before = run(inputs, target, of)
    for name in ("q", "k", "v"):
        getattr(inputs, name)[:, inputs.span(name, 100, 133)] = NAN
    of["d_o"][:, 100:133] = NAN
    after = run(inputs, target, of)
    for name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key"):
        for part in (inputs.span(name, 0, 100), inputs.span(name, 133, inputs.case.tokens)):
            if name in after:
                assert_same_bits(name, after[name][:, part], before[name][:, part])
    for n in (0, 2):
        assert_same_bits("initial_state", after["initial_state"][n], before["initial_state"][n])


def test_layouts_and_absent_gradients(target, algorithm):
    inputs = typical(algorithm)
    of = outer(inputs)
    plain = run(inputs, target, of)
    scattered = {
        "d_o": strided(of["d_o"]),
        "d_final_state": of["d_final_state"].transpose(-1, -2).contiguous().transpose(-1, -2),
    }
    k_first = inputs.but(case=inputs.case.but(k_first=True))
    assert_same(run(k_first, target, scattered), plain)
    row = of["d_o"][:, :1, :1]
    assert_same(
        run(inputs, target, {"d_o": row.expand_as(of["d_o"])}),
        run(inputs, target, {"d_o": row.expand_as(of["d_o"]).contiguous()}),
    )
    zero = {name: torch.zeros_like(x) for name, x in of.items()}
    for name in of:
        assert_same(
            run(inputs, target, {**of, name: zero[name]}),
            run(inputs, target, {n: x for n, x in of.items() if n != name}),
        )


def test_sequences_without_tokens_or_state(target, algorithm):
    inputs = typical(algorithm)
    of = outer(inputs)
    found = run(inputs, target, of)
    assert torch.equal(found["initial_state"][1], of["d_final_state"][1])
    for name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key"):
        beyond = inputs.span(name, 167, inputs.case.tokens)
        assert name not in found or not found[name][:, beyond].any()
    starts = inputs.but(has_initial_state=torch.tensor([False, False, True]))
    assert_rule(starts, target)
    assert not run(starts, target, of)["initial_state"][:2].any()
    nothing = make(inputs.case.but(lengths=(0, 0), tail=3))
    for name, x in run(nothing, target, outer(nothing)).items():
        assert name == "initial_state" or not x.any()


def test_packed_is_batch(target, algorithm):
    inputs = make(Case(algorithm, (70, 70), key_dim=64, value_heads=4))
    of, packed = outer(inputs), Case(algorithm, (70, 70), packed=True, key_dim=64, value_heads=4)
    joined = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key")}
    joined = {name: x.flatten(0, 1)[None] for name, x in joined.items() if x is not None}
    one = inputs.but(case=packed, cu_seqlens=torch.tensor([0, 70, 140]), **joined)
    found = run(one, target, {**of, "d_o": of["d_o"].flatten(0, 1)[None]})
    for name, x in run(inputs, target, of).items():
        assert_same_bits(name, x.reshape(found[name].shape), found[name])


@functools.cache
def verdict(target: str, **problem) -> str:
    rows = cula.explain(pass_name="backward", device="cpu", **problem)
    return next(row.reason for row in rows if row.target == target)


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        ({"key_dim": 15}, "takes K from 16"),
        ({"value_dim": 257}, "takes V up to 256"),
        ({"beta_per_value": True}, "one beta per token"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_what_it_declines(target, problem, sentence):
    assert sentence in verdict(target, **{"dtype": torch.bfloat16, **problem})
