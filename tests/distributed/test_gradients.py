# SPDX-License-Identifier: Apache-2.0
"""Gradients through cula.dist: those of N ranks, joined, are those of one rank, by the error rule, and on
CPUs to 1e-12 where the ranks compute in float64 by the reference. Those of an input that several ranks have
add up, and so does what they say of a result that several have."""

from __future__ import annotations

import functools
from itertools import pairwise, product
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import conv1d

from cula_testing import gradients
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_exact
from cula_testing.ranks import RankError
from cula_testing.trainers import TRAINERS

METHODS = ("scan", "ring")
TOKENS = ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key")
WANTED = {*TOKENS, "A_log", "dt_bias", "initial_state"}

# A state lives on through a rank's tokens, so that their map counts.
SMALL = {"key_dim": 32, "value_dim": 16, "decay": "slow"}

# Packed: empty sequences first, in between and last, one over all of four ranks, others whole.
PACKED = (0, 30, 0, 120, 5, 20, 0)
LAYOUTS = {
    "two ranks": ((90, 90), False, (0, 37, 90)),
    "packed over two": (PACKED, True, (0, 80, 175)),
    "an empty rank in between": ((90,), False, (0, 17, 60, 60, 90)),
    "empty ranks at the ends": ((90,), False, (0, 0, 65, 90, 90)),
    "packed over four": (PACKED, True, (0, 40, 80, 120, 175)),
    "packed, two that cross": ((90, 85), True, (0, 30, 60, 120, 175)),
    "packed, cut at a border": (PACKED, True, (0, 30, 150, 175)),
    "packed, empty ranks": (PACKED, True, (0, 0, 38, 38, 175)),
}


class Whole(NamedTuple):
    """A case on one rank."""

    inputs: Inputs
    d_o: torch.Tensor
    d_final_state: torch.Tensor
    oracle: gradients.Gradients
    naive: gradients.Gradients


@functools.lru_cache(maxsize=4)
def one_rank(case: Case) -> Whole:
    inputs = make(case)
    ds = gradients.upstream(inputs)
    naive = gradients.through_autograd(inputs, *ds, backend="reference:naive")
    wide = [x.double() for x in ds]
    oracle = gradients.through_autograd(inputs.double(), *wide, backend="reference")
    return Whole(inputs, *ds, oracle, naive)


def assert_same(case: Case, found: gradients.Gradients) -> None:
    whole = one_rank(case)
    assert found.keys() == {name for name in WANTED if getattr(whole.inputs, name) is not None}
    assert_right(whole.inputs, found, whole.oracle, whole.naive)


def assert_right(
    inputs: Inputs, found: gradients.Gradients, oracle: gradients.Gradients, naive: gradients.Gradients
) -> None:
    """By the error rule, or exactly what was computed in float64."""
    exact = {name for name, x in found.items() if x.dtype == torch.float64}
    for name in exact:
        assert_exact(f"d_{name}", found[name], oracle[name])
    gradients.assert_near(inputs, {name: x for name, x in found.items() if name not in exact}, oracle, naive)


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0, dtype=torch.float64).to(parts[0].dtype)


def joined(answers: list[tuple], dims: dict[str, int] | None = None) -> gradients.Gradients:
    """Of tokens, or along `dims`, one after the other; of the others the sum."""
    dims = dict.fromkeys(TOKENS, 1) if dims is None else dims
    by_name = {name: [found[name] for _, found in answers] for name in answers[0][1]}
    return {
        name: torch.cat(parts, dims[name]) if name in dims else total(parts)
        for name, parts in by_name.items()
    }


def cut(case: Case, splits: tuple[int, ...], d_finals: list | None = None) -> list[tuple]:
    """What a loss says of each rank's results: of final states to the last rank, or as given."""
    whole, size = one_rank(case), len(splits) - 1
    d_finals = [None] * (size - 1) + [whole.d_final_state] if d_finals is None else d_finals
    return [(whole.d_o[:, splits[r] : splits[r + 1]], d_finals[r]) for r in range(size)]


def shares(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Multiples that add up to x."""
    weights = [2.0, -1.0, 0.5, -0.5][:size]
    weights[0] += 1 - sum(weights)
    return [x.double() * weight for weight in weights]


def call(pools, size: int, name: str, ds: list[tuple], *arguments, wanted: list[set] | None = None):
    return pools(size).call("differentiated", name, ds, wanted or [WANTED] * size, *arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_split_of_the_tokens_is_one_rank(algorithm, layout, pools, kind):
    lengths, packed, splits = LAYOUTS[layout]
    case = Case(algorithm, lengths, packed=packed, value_heads=4, **SMALL)
    on_cpus, on_gpus = (("scan", True), ("ring", True), ("scan", False)), (("scan", False), ("ring", False))
    for method, exact in on_cpus if kind == "cpu" else on_gpus:
        answers = call(pools, len(splits) - 1, "split", cut(case, splits), case, splits, exact,
                       {"method": method})  # fmt: skip
        assert [required for required, _ in answers[:-1]] == [[True, False]] * (len(splits) - 2)
        assert answers[-1][0] == [True, True]
        assert_same(case, joined(answers))


@pytest.mark.parametrize("how", ["split_as_on_gpus", "split_by_all_gather"])
@pytest.mark.parametrize("algorithm", ["kda", "lightning"])
@pytest.mark.parametrize("layout", ["an empty rank in between", "packed over four"])
def test_scans_that_few_ranks_on_cpus_would_not_make(algorithm, layout, how, pools, exact):
    lengths, packed, splits = LAYOUTS[layout]
    case = Case(algorithm, lengths, packed=packed, **SMALL)
    answers = call(pools, 4, how, cut(case, splits), case, splits, exact, {"method": "scan"})
    assert_same(case, joined(answers))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
def test_more_value_channels_than_a_call_takes(packed, method, pools, exact):
    lengths, splits = ((20, 40) if packed else (60,)), (0, 45, 60)
    case = Case("gdn", lengths, packed=packed, **{**SMALL, "value_dim": 264})
    answers = call(pools, 2, "split", cut(case, splits), case, splits, exact, {"method": method})
    assert_same(case, joined(answers))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("algorithm", ["kda", "gdn"])
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_gates_and_norms_in_the_call(algorithm, gate, method, pools, precisions):
    more = {"gate": gate, "beta_is_logit": True, "qk_l2norm": True, "scale": 0.3, "k_first": True}
    case = Case(algorithm, (90,), **SMALL, dtype=torch.float32, **more)
    splits = (0, 20, 61, 90)
    for exact in precisions:
        answers = call(pools, 3, "split", cut(case, splits), case, splits, exact, {"method": method})
        assert_same(case, joined(answers))


def test_a_write_strength_per_value_goes_around(pools, exact):
    case = Case("kda", (60,), beta_per_value=True, **SMALL)
    splits = (0, 30, 40, 60)
    assert_same(case, joined(call(pools, 3, "split", cut(case, splits), case, splits, exact, {})))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("where", ["all", "end", None])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_final_states_wherever_they_go(packed, where, method, pools, exact):
    lengths, splits = PACKED if packed else (175,), (0, 40, 80, 175)
    case = Case("gdn", lengths, packed=packed, **SMALL, k_first=True)
    whole, options = one_rank(case), {"method": method, "final_state_on": where}
    oracle, naive = whole.oracle, whole.naive
    if where is None:
        options["output_final_state"] = False
        d_finals = [None] * 3
        oracle = gradients.exact(whole.inputs, whole.d_o, None)
        naive = gradients.backward(whole.inputs, whole.d_o, None, backend="reference:naive")
    elif where == "all":
        d_finals = shares(whole.d_final_state, 3)
    elif packed:
        ends = torch.tensor(lengths).cumsum(0)
        rank_of = torch.tensor([next(r for r in range(3) if splits[r + 1] >= end) for end in ends])
        here = [(rank_of == r)[:, None, None, None] for r in range(3)]
        d_finals = [torch.where(mine, whole.d_final_state, float("nan")) for mine in here]
    else:
        d_finals = [None, None, whole.d_final_state]
    answers = call(pools, 3, "split", cut(case, splits, d_finals), case, splits, exact, options)
    assert_right(whole.inputs, joined(answers), oracle, naive)


@pytest.mark.parametrize("splits", [(0, 2, 5, 7), (0, 0, 7, 7)])
@pytest.mark.parametrize("where", [None, "last", "all"])
def test_whole_sequences_per_rank(splits, where, pools, exact):
    case = Case("kda", PACKED, packed=True, **SMALL)
    whole, borders = one_rank(case), tuple(sum(PACKED[:n]) for n in splits)
    d_finals = {
        None: [whole.d_final_state[splits[r] : splits[r + 1]] for r in range(3)],
        "last": [None, None, whole.d_final_state],
        "all": shares(whole.d_final_state, 3),
    }[where]
    options = {"final_state_on": where}
    answers = call(pools, 3, "complete", cut(case, borders, d_finals), case, splits, exact, options)
    assert_same(case, joined(answers))


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("given", ["local", "full", "replicated"])
@pytest.mark.parametrize("algorithm", ["kda", "gla", "lightning"])
def test_heads_over_ranks(algorithm, given, gathers, pools, precisions):
    case = Case(algorithm, (40, 40), heads=4, value_heads=8, **SMALL)
    whole = one_rank(case)
    if gathers:
        ds = list(zip(shares(whole.d_o, 2), shares(whole.d_final_state, 2), strict=True))
    else:
        ds = list(zip(whole.d_o.chunk(2, 2), whole.d_final_state.chunk(2, 1), strict=True))
    options = {"gather_output": True} if gathers else {}
    dims = {**dict.fromkeys(TOKENS, 2), "initial_state": 1}
    apart = {"local": dims, "full": {}, "replicated": {name: dims[name] for name in dims if name not in "qk"}}
    for exact in precisions:
        answers = call(pools, 2, "heads", ds, case, exact, given, options)
        assert_same(case, joined(answers, apart[given]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_heads_and_tokens_over_a_mesh(packed, method, pools, exact):
    lengths = PACKED if packed else (175,)
    case = Case("kda", lengths, packed=packed, heads=2, value_heads=4, gate="softplus", **SMALL)
    whole, splits = one_rank(case), (0, 64, 175)
    d_o = [shares(x, 2) for x in whole.d_o.split((64, 111), 1)]
    d_final = shares(whole.d_final_state, 4)
    ds = [(d_o[rank % 2][rank // 2], d_final[rank]) for rank in range(4)]
    answers = call(pools, 4, "mesh", ds, case, 2, splits, exact, {"method": method})
    by_tokens = [
        ([], {name: total([answers[r][1][name], answers[r + 2][1][name]]) for name in answers[0][1]})
        for r in range(2)
    ]
    assert_same(case, joined(by_tokens))


@pytest.mark.parametrize("lengths", [(176,), (10, 130, 36), (44, 44, 20, 68)])
@pytest.mark.parametrize(
    ("algorithm", "gate"),
    [
        *product(["kda", "gdn", "gdn2"], ["log_decay", "softplus"]),
        *product(["gdp", "delta_product", "rwkv7"], ["log_decay"]),
    ],
)
def test_drop_ins_under_a_context_of_fla(algorithm, gate, lengths, pools):
    case = Case(algorithm, lengths, packed=True, state=False, value_heads=4, gate=gate, **SMALL)
    case = case.but(dtype=torch.float32, beta_per_value=algorithm == "gdn2")
    if algorithm == "rwkv7":
        case = case.but(heads=4)
    inputs = make(case)
    d_o, _ = gradients.upstream(inputs)
    oracle = gradients.exact(inputs, d_o, None)
    naive = gradients.backward(inputs, d_o, None, backend="reference:naive")
    ds = [(x, None) for x in d_o.chunk(4, 1)]
    found = joined(call(pools, 4, "in_context", ds, case, {}))
    assert found.keys() == oracle.keys()
    gradients.assert_near(inputs, found, oracle, naive)


@pytest.mark.parametrize("lengths", [(176,), (10, 130, 36)])
def test_megatrons_call_of_kda_under_a_context_of_fla(lengths, pools):
    """Through `cula.integrations.fla`."""
    trainer = TRAINERS["Megatron KDA, safe gate"]
    case = trainer.case.but(lengths=lengths, packed=True, **SMALL)
    inputs = trainer.prepare(make(case))
    d_o, _ = gradients.upstream(inputs)
    oracle = gradients.exact(inputs, d_o, None)
    naive = gradients.backward(inputs, d_o, None, backend="reference:naive")
    answers = call(pools, 4, "of_megatron", [(x, None) for x in d_o.chunk(4, 1)], case)
    assert [required for required, _ in answers] == [[True, False]] * 4
    found = joined(answers)
    assert found.keys() == oracle.keys()
    gradients.assert_near(inputs, found, oracle, naive)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("wanted", [({"v"}, set(), set()), (set(), {"g", "k"}, set()), (set(), set(), {"q"}),
                                    ({"initial_state"}, set(), {"beta"})])  # fmt: skip
def test_ranks_whose_inputs_do_not_all_require_gradients(wanted, packed, method, pools, exact):
    lengths = (30, 120, 25) if packed else (175,)
    case = Case("kda", lengths, packed=packed, **SMALL)
    splits, whole = (0, 40, 80, 175), one_rank(case)
    answers = call(pools, 3, "split", cut(case, splits), case, splits, exact, {"method": method},
                   wanted=list(wanted))  # fmt: skip
    for rank, (required, found) in enumerate(answers):
        assert required[0]
        assert found.keys() == wanted[rank]
        oracle, naive = {}, {}
        for name in found:
            for of_rank, of_all in ((oracle, whole.oracle), (naive, whole.naive)):
                x = of_all[name]
                of_rank[name] = x[:, splits[rank] : splits[rank + 1]] if name in TOKENS else x
                if packed and name == "initial_state":
                    begun = torch.tensor([True, True, False])
                    of_rank[name] = torch.where(begun[:, None, None, None], x, 0)
        assert_right(whole.inputs, found, oracle, naive)


@pytest.mark.parametrize("gathers", [False, True])
def test_nothing_requires_gradients_where_nobody_asks(gathers, pools):
    case, nothing = Case("kda", (20,), heads=2), [(None, None)] * 2
    name, more = ("heads", ("full",)) if gathers else ("split", ())
    arguments = (case, (0, 7, 20), False) if not gathers else (case, False, *more)
    options = {"gather_output": True} if gathers else {}
    for required, _ in call(pools, 2, name, nothing, *arguments, options, wanted=[set(), set()]):
        assert required == [False, False]


@pytest.mark.parametrize("packed", [False, True])
def test_one_message_in_each_direction(packed, pools):
    case = Case("kda", (30, 120, 25) if packed else (175,), packed=packed, **SMALL)
    options = {"output_final_state": False}
    scan, ring = (pools(3).call("verbs", case, (0, 40, 80, 175), {**options, "method": m}) for m in METHODS)
    there = [["gather_earlier"]] * 3, [["send_next"], ["receive_previous", "send_next"], ["receive_previous"]]
    back = [["gather_later"]] * 3, [["receive_next"], ["receive_next", "send_previous"], ["send_previous"]]
    for found, forward, backward in zip((scan, ring), there, back, strict=True):
        for rank, verbs in enumerate(found):  # first of all, whether anybody wants gradients
            assert verbs == [forward[rank], ["all_gather", *forward[rank]], backward[rank]]


@pytest.mark.parametrize("method", METHODS)
def test_activation_checkpointing_gives_the_same_bits(method, pools):
    case = Case("kda", (60,), **SMALL)
    assert all(pools(3).call("of_recomputed", case, (0, 20, 45, 60), {"method": method}))


LIGHTNING, KDA = (Case(name, (8,), state=False, dtype=torch.float32) for name in ("lightning", "kda"))
REFUSED = {
    "decay": (LIGHTNING, "cula_lightning_cp: decay requires gradients, which are not built"),
    "out": (KDA, "cula_kda_cp: v requires gradients, and a call that writes into out has none"),
    "out of another rank": (KDA, " requires gradients, and a call that writes into out has none"),
    "twice": (KDA, "second derivatives are not built"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_refused_before_anything_is_sent(what, pools):
    case, message = REFUSED[what]
    for answer in pools(2).answers("refused", case, "cp", what):
        assert isinstance(answer, RankError)
        assert (answer.kind, message in answer.message) == ("NotImplementedError", True), answer.message
    assert all(pools(2).call("of_recomputed", KDA, (0, 3, 8), {}))  # the group is usable


def test_second_derivatives_of_gathered_heads_are_refused(pools):
    for answer in pools(2).answers("refused", KDA, "tp", "twice"):
        assert isinstance(answer, RankError)
        assert "second derivatives are not built" in answer.message


@pytest.mark.parametrize("splits", [(0, 5, 12, 20), (0, 1, 2, 20), (0, 6, 6, 20)])
def test_boundary_tokens_of_a_convolution(splits, pools):
    """What a rank's convolution hands back through its boundary reaches those that had the tokens."""
    generator = torch.Generator().manual_seed(0)
    x, weight, d = (torch.randn(shape, generator=generator, dtype=torch.float64)
                    for shape in ((1, 20, 3), (3, 4), (1, 20, 3)))  # fmt: skip

    def convolve(x: torch.Tensor) -> torch.Tensor:
        return conv1d(x.mT, weight[:, None], groups=3).mT

    padded = torch.nn.functional.pad(x, (0, 0, 3, 0)).requires_grad_()
    convolve(padded).backward(d)
    expected = padded.grad[:, 3:]
    own, before = [], []
    for begin, end in pairwise(splits):
        piece = padded.detach()[:, begin : end + 3].requires_grad_()
        grad = torch.zeros_like(piece)
        if end > begin:
            (grad,) = torch.autograd.grad(convolve(piece), piece, d[:, begin:end])
        before.append(grad[:, :3])
        own.append(grad[:, 3:])
    found = pools(3).call("boundary_gradient", x, torch.stack(before), splits, 4)
    assert_exact("d_x", torch.cat([a + b for a, b in zip(own, found, strict=True)], 1), expected)
