# SPDX-License-Identifier: Apache-2.0
"""The fuzzer (docs/fuzzing.md): a bounded run over fixed seeds, and a judge that finds what is planted."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from cula import _ops
from cula_testing import device
from fuzz import malformed
from fuzz.call import Call, Found
from fuzz.case import FAMILY, PASSES, Case
from fuzz.classes import BOUNDS, CLASSES, DEFAULT, bound
from fuzz.draw import GATES, draw
from fuzz.judge import Judge, Problem, changed, with_strengths
from fuzz.oracle import log_decay
from fuzz.run import Options, Tally, backends, expected_refusal, one, seeds_of
from fuzz.values import Values
from fuzz.workers import shared

SEED = 30  # of the bounded run
SECONDS = {"cpu": 25.0, "cuda": 60.0}
CASES = {"cpu": 560, "cuda": 2000}
SHARES = 4


@pytest.fixture(autouse=True)
def on_the_cpu_by_one_thread():
    """The fuzzer says itself where its tensors lie and how many threads a call has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.device("cpu"):
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("share", range(SHARES))
def test_bounded_run(share, request):
    """Always the same cases; on a slow machine only as many of them as the time allows."""
    kind = request.config.getoption("--device")
    options, tally, start = Options(device=kind), Tally(), time.monotonic()
    seeds = seeds_of(SEED, share, SHARES)
    for _ in range(CASES[kind] // SHARES):
        tally.add(one(draw(next(seeds), options.classes), options))
        if time.monotonic() - start > SECONDS[kind] / SHARES:
            break
    assert not tally.failures, "\n".join(
        f"{failure['reproduce']}: {failure['wrong'][0]}" for failure in tally.failures
    )
    assert tally.calls > 20


def sample(pass_name: str, **fields) -> Case:
    """A plain case of a few sequences with several results."""
    plain = {
        "prefill": {"lengths": (70, 3, 20), "packed": True, "state": "dense", "slots": 3, "chunk_size": 32},
        "decode": {"lengths": (1, 1, 1), "packed": False, "state": "pool", "slots": 5, "initial": (4, 0, 2)},
        "verify": {
            "lengths": (3, 3, 3), "packed": False, "state": "pool", "slots": 10,
            "table": ((0, 1, 2), (3, 4, 5), (6, 7, 8)), "parents": ((-1, 0, 0), (-1, -1, 1), (-1, 0, 1)),
        },
        "segment": {"lengths": (20, 5, 9), "packed": True, "decay": "slow"},
        "split": {"lengths": (40, 40), "packed": False, "state": "dense", "slots": 2, "cut": 17},
        "backward": {
            "lengths": (70, 3, 20), "packed": True, "state": "dense", "slots": 3, "through": "out",
            "gate": "softplus", "A_log": (-1.0, 1.0), "dt_bias": 1.0, "d_o": "float32", "d_final": "float32",
            "wanted": tuple(name for name in _ops.GRADIENTS if name not in ("erase", "a_key", "b_key")),
        },
    }[pass_name]  # fmt: skip
    shape = {"slack": 0, "heads": 2, "ratio": 2, "key_dim": 24, "value_dim": 20, "qk_l2norm": True}
    call = {"seed": 5, "pass_name": pass_name, "algorithm": "kda", "dtype": "bfloat16"}
    return Case(**{**call, **shape, **plain, **fields})


def judged(case: Case) -> tuple[Judge, Found]:
    values = Values(case)
    return Judge(case, values), Call(case, values, "cpu").run(None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("pass_name", PASSES)
def test_what_is_planted_is_found(pass_name, dtype):
    """Every result, in one sequence at a time: a sign, another sequence's values, a NaN, a token left out."""
    case = sample(pass_name, dtype=dtype)
    judge, right = judged(case)
    assert judge.verdict(right, None) == []
    for name, x in right.tensors.items():
        of_tokens = name == "o" or (name.startswith("d_") and x.shape[:2] == (case.batch, case.tokens))
        places = (
            [(b, begin) for b, begin, _ in case.spans()]
            if of_tokens
            else [(n,) for n in range(case.sequences)]
        )
        for place, other in zip(places, places[1:] + places[:1], strict=True):
            for value in (
                -x[place],
                x[other],
                torch.full_like(x[place], float("nan")),
                torch.zeros_like(x[place]),
            ):
                wrong = x.clone()
                wrong[place] = value
                found = Found({**right.tensors, name: wrong}, right.states)
                assert judge.verdict(found, None), f"{name} at {place}"
    for kind, states in right.states.items():
        for place, other in zip(states, [*list(states)[1:], next(iter(states))], strict=True):
            for value in (-states[place], states[other], states[place] * 1.1):
                found = Found(right.tensors, {**right.states, kind: {**states, place: value}})
                assert judge.verdict(found, None), f"{kind} at {place}"


def test_small_rows_do_not_hide_behind_large_ones():
    """A wrong sequence whose numbers are a thousandth of the others' is within the rule of all of them
    together."""
    case = sample("prefill", state="none", chunk_size=0, slots=0)
    values = Values(case)
    values.tensors["v"][:, 73:] /= 1000
    judge, right = Judge(case, values), Call(case, values, "cpu").run(None)
    assert judge.verdict(right, None) == []
    right.tensors["o"][:, 80] *= -1
    (sentence,) = judge.verdict(right, None)
    assert sentence.startswith("o of sequence 2: ")


@pytest.mark.parametrize("algorithm", FAMILY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])  # float32's floor is as much
def test_neighbours_excuse_luck_alone(dtype, algorithm):
    """Four times the naive recurrence's error is wrong, where many numbers are judged; what is right stays
    right."""
    case = sample("prefill", dtype=dtype, lengths=(120, 80), state="none", slots=0, chunk_size=0, key_dim=64)
    for seed in range(2):
        values = Values(case.but(algorithm=algorithm, seed=seed))
        judge = Judge(values.case, values)
        oracle, naive = judge.problem.tensor("o")
        oracle, naive = oracle.float(), naive.float()
        assert judge.verdict(Found({"o": 2 * naive - oracle}, {}), None) == []
        (sentence,) = judge.verdict(Found({"o": 4 * (naive - oracle) + oracle}, {}), None)
        assert "above the budget" in sentence


def assert_same_gradients(problem: Problem, other: Problem, order: torch.Tensor) -> None:
    """Those of `other` are those of the problem, their key channels in another order."""
    for name in problem.case.differentiable():
        if problem.usable:
            x, y = (torch.from_numpy(getattr(each.expected, f"d_{name}")) for each in (problem, other))
            in_channels = name in ("q", "k", "erase", "a_key", "b_key", "initial_state") or (
                name in ("g", "dt_bias") and x.ndim == {"g": 4, "dt_bias": 2}[name]
            )
            x = x[..., order] if in_channels else x
            torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-10 * float(x.abs().max()) if x.numel() else 0)


@pytest.mark.parametrize("pass_name", PASSES)
def test_a_neighbour_is_the_same_problem(pass_name):
    """With factors of 1 it is the problem itself, its key channels in another order."""
    for seed in range(20):
        values = Values(draw(seed, pass_name=pass_name, dtype="float32"))
        case, state = values.case, np.random.default_rng(seed)
        problem, other = (Problem(case, each) for each in (values, changed(values, 1.0, 1.0, 1.0, state)))
        order = torch.from_numpy(np.random.default_rng(seed).permutation(case.key_dim))
        if pass_name == "backward":
            assert_same_gradients(problem, other, order)
            continue
        for name in ("o", "final", "b", "m"):
            if problem.usable and hasattr(problem.expected, name):
                x, y = (torch.from_numpy(getattr(each.expected, name)) for each in (problem, other))
                x = x if name == "o" else x[..., order]
                x = x[..., order, :] if name == "m" and case.mixes else x
                torch.testing.assert_close(
                    x, y, rtol=1e-9, atol=1e-12 * float(x.abs().max()) if x.numel() else 0
                )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["d_q", "d_g", "d_initial_state"])
def test_gradients_have_three_times_the_naive_error(dtype, name):
    case = sample("backward", dtype=dtype, lengths=(70, 30), slots=2)
    values = Values(case)
    judge = Judge(case, values)
    oracle, naive = (x.float() for x in judge.problem.tensor(name))
    assert judge.verdict(Found({name: 2.5 * (naive - oracle) + oracle}), None) == []
    (sentence,) = judge.verdict(Found({name: 8 * (naive - oracle) + oracle}), None)
    assert "above the budget" in sentence


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 2.0**-40), ("float16", 2.0**-12)])
def test_small_strengths_of_gpus_are_excused_and_nothing_else(dtype, least):
    """Chunks there write with the least strength what has none; float16's d_beta may be a little off."""
    case = sample("backward", dtype=dtype, lengths=(20, 9), beta="zero", state="none", A_log=(-1.0, 0.0))
    values = Values(case)
    other = Problem(case, with_strengths(values, least))
    found = {name: other.tensor(name)[1] for name in ("d_q", "d_k")}
    d_beta = Problem(case, values).tensor("d_beta")[0].float()
    for kind, backend, excused in (
        ("cuda", "sm80", True), ("cuda", None, True), ("cuda", "sm80:step", False), ("cpu", None, False),
    ):  # fmt: skip
        judge = Judge(case, values, device=kind)
        for name in found:
            assert (judge.verdict(Found({name: found[name]}), backend) == []) == excused, (name, backend)
            assert judge.verdict(Found({name: -found[name]}), backend)
        assert judge.verdict(Found({"d_beta": 1.1 * d_beta}), backend)
        if dtype == "float16":
            assert (judge.verdict(Found({"d_beta": 1.006 * d_beta}), backend) == []) == excused, backend


def test_gates_of_alike_keys_on_gpus_are_excused_and_nothing_else():
    """Their gradients, up to ten times the budget, in chunks, where gates hardly decay."""
    case = sample(
        "backward", dtype="bfloat16", lengths=(40, 30), keys="collinear", decay="tiny", A_log=(-1.0, 0.0)
    )
    values = Values(case)
    for kind, backend, decay, name, excused in (
        ("cuda", "sm80", "tiny", "d_A_log", True), ("cuda", None, "tiny", "d_g", True),
        ("cuda", "sm80:step", "tiny", "d_A_log", False), ("cpu", None, "tiny", "d_A_log", False),
        ("cuda", "sm80", "strong", "d_A_log", False), ("cuda", "sm80", "tiny", "d_k", False),
    ):  # fmt: skip
        judge = Judge(case.but(decay=decay), values, device=kind)
        oracle, naive = (x.float() for x in judge.problem.tensor(name))
        wrong = [Found({name: times * (naive - oracle) + oracle}) for times in (2.5, 10, 400)]
        assert judge.verdict(wrong[0], backend) == []
        assert (judge.verdict(wrong[1], backend) == []) == excused, (kind, backend, decay, name)
        assert judge.verdict(wrong[2], backend), name


class Careless(Call):
    """A library that writes where nothing names a place."""

    def _prefill(self, backend, made):
        found = super()._prefill(backend, made)
        made["states"].flatten()[0] = 1.0
        self.inputs["q"].flatten()[0] += 1
        return found


def test_bytes_that_nothing_names_are_watched():
    case = sample("prefill", state="readonly", slots=5, initial=(1, 2, 3))
    broken = Careless(case, Values(case), "cpu").run(None).broken
    assert broken == ["q, an input, has changed", "states: 1 elements that nothing names have changed"]


def test_null_rows_have_zeros():
    case = sample("decode", initial=(4, -1, 2))
    judge, found = judged(case)
    assert judge.verdict(found, None) == []

    class Busy(Call):
        def _o(self, o, made):
            o[1, 0, 0, 0] = 1.0
            return super()._o(o, made)

    assert any("null rows" in sentence for sentence in Busy(case, Values(case), "cpu").run(None).broken)


@pytest.mark.parametrize("index", [(4, 0, 9), (4, 4, 2)])
def test_wrong_values_that_nobody_refuses_are_found(monkeypatch, index):
    """A library that takes indices as they come."""
    case = sample("decode")
    monkeypatch.setattr(malformed.Watched, "_decode", lambda _call, _backend, made: made["states"].zero_())
    monkeypatch.setattr(malformed, "wrongs", lambda *_: [("state_indices", "initial", [((2,), index[2])])])
    ((_, sentence),) = malformed.refused(case, [None], DEFAULT)
    assert "bytes have changed; nothing was raised" in sentence


def test_a_seed_is_a_case():
    for seed in range(200):
        assert draw(seed) == draw(seed)
    one_case = draw(7)
    first, second = Values(one_case), Values(one_case)
    for name, x in first.tensors.items():
        assert torch.equal(x, second.tensors[name])


def test_everything_is_drawn():
    cases = [draw(seed, frozenset(CLASSES) - {"one_kernel"}) for seed in range(1500)]
    assert {case.pass_name for case in cases} == set(PASSES)
    assert {case.algorithm for case in cases} == set(FAMILY)
    assert {case.state for case in cases} == {"none", "dense", "pool", "readonly"}
    assert {case.key_dim for case in cases} >= {1, 64, 128, 256}
    assert any(case.value_dim > 256 for case in cases)
    for what in (Case.forks, Case.chained, lambda case: any(map(case.skipped, range(case.sequences)))):
        assert any(what(case) for case in cases)
    for name in (
        "plan",
        "chunk_size",
        "parents",
        "accepted",
        "snapshot_indices",
        "has_initial",
        "final",
        "repeat",
        "wide_gradients",
        "d_final",
    ):
        assert any(getattr(case, name) for case in cases), name
    backwards = [case for case in cases if case.pass_name == "backward"]
    assert {case.through for case in backwards} == {"out", "default", "autograd", "kept"}
    assert {name for case in backwards for name in case.wanted} == set(_ops.GRADIENTS)
    assert any(not case.d_o and case.d_final for case in backwards)
    assert any(case.wanted != case.differentiable() for case in backwards)
    assert any(name == "d_o" for case in backwards for name, _ in case.expanded)


def test_a_decode_has_one_token_per_row():
    decodes = [draw(seed, pass_name="decode") for seed in range(300)]
    assert all(case.tokens in (0, 1) for case in decodes)
    assert any(case.rows_along_tokens and case.sequences > 1 for case in decodes)


def test_several_tokens_of_a_decode_that_are_taken_are_found(monkeypatch):
    case = sample("decode")
    ((_, sentence),) = malformed.several_tokens(case, [None], "cpu")
    assert sentence == ""
    monkeypatch.setattr(malformed.Watched, "_decode", lambda _call, _backend, made: made["states"].zero_())
    ((_, sentence),) = malformed.several_tokens(case, [None], "cpu")
    assert sentence == "q of several tokens: bytes have changed; nothing was raised"


def test_one_kernel_keeps_to_its_limits():
    classes = DEFAULT | {"one_kernel"}
    cases = [draw(seed, classes) for seed in range(200)]
    assert not any(
        case.edge or case.mixed_sizes or case.decay in ("strong", "extreme", "bursts") for case in cases
    )
    for case in [case for case in cases if case.gate == "softplus" and case.tokens][:40]:
        assert np.min(log_decay(Values(case)), initial=0.0) > -29.75 * np.log(2)
    assert {case.decay for case in [draw(seed, classes | {"fused_limits"}) for seed in range(200)]} == set(
        GATES
    )


def test_classes_that_are_left_out_have_a_bound():
    assert {name for name, drawn in CLASSES.items() if not drawn} == {*BOUNDS, "one_kernel"}
    for seed in range(500):
        assert bound(draw(seed)) == 1.0
    for name in BOUNDS.keys() - {"fused_limits", "fp16_scores"}:
        cases = [draw(seed, DEFAULT | {name}) for seed in range(1000)]
        assert any(bound(case) == BOUNDS[name] for case in cases), name


def test_results_without_a_budget_are_finite(monkeypatch):
    """Where the naive recurrence leaves the range that the oracle keeps to."""
    monkeypatch.setattr("fuzz.judge.Naive.finite", lambda _: False)
    judge, right = judged(sample("decode"))
    assert judge.verdict(Found({"o": right.tensors["o"] * 2}), None) == []
    wrong = Found({"o": torch.full_like(right.tensors["o"], float("nan"))})
    assert "values are not finite" in judge.verdict(wrong, None)[0]
    assert judge.verdict(wrong, "reference:naive") == []


PIECES = "q, k, v, g and o must be bfloat16 and lie in whole pieces of 16 bytes"


@pytest.mark.parametrize(
    ("reason", "fields", "expected"),
    [
        (PIECES, {}, False),
        (PIECES, {"gate_dtype": "float32"}, True),
        (PIECES, {"layouts": (("q", "odd"),)}, True),
        (PIECES, {"value_dim": 20}, True),
        ("it normalizes q and k (qk_l2norm)", {}, False),
        ("it normalizes q and k (qk_l2norm)", {"qk_l2norm": False}, True),
        ("it takes scale up to 256, got 300.000000", {"scale": 300.0}, True),
        ("it takes scale up to 256, got 3.000000", {"scale": 3.0}, False),
        ("it is tired", {"scale": 300.0}, False),
    ],
)
def test_what_may_be_declined(reason, fields, expected):
    """A target that refuses a call which `explain` has promised fails, but for what `explain` cannot know."""
    plain = {"gate": "softplus", "gate_dtype": "bfloat16", "value_dim": 24}
    case = sample("prefill", **(plain | fields))
    call = Call(case, Values(case), "cpu")
    for way in ("fused", "joined"):
        raised = ValueError(f'prefill: backend "sm90:{way}" does not take this call: {reason}')
        assert bool(expected_refusal(call, raised)) == expected
    assert not expected_refusal(
        call, ValueError(f'prefill: backend "sm90:whole" does not take this call: {reason}')
    )


def test_forks_can_be_left_out():
    classes = DEFAULT - {"forks"}
    assert not any(draw(seed, classes).forks() for seed in range(1500))


@pytest.mark.cpu_only("about the CPU's targets")
def test_every_target_is_called():
    case = sample("prefill")
    assert set(backends(case, Options())) >= {*device.able(torch.bfloat16), "reference", "reference:naive"}


@pytest.mark.cpu_only("about the host")
def test_a_process_that_dies_is_a_failure(capsys):
    """What cannot be drawn ends a worker before it has a result."""
    tally = shared(SEED, 1, 0, 1, Options(fixed=(("dtype", "bfloat17"),)))
    (failure,) = tally.failures
    assert failure["wrong"] == ["the process ended with 1"]
    assert failure["reproduce"] == f"python -m fuzz --only {SEED * 1_000_003} --device cpu --dtype bfloat17"
    assert failure["reproduce"] in capsys.readouterr().out


@pytest.mark.cpu_only("about the host")
def test_a_process_that_hangs_is_a_failure():
    """A worker that has no time at all has begun nothing when it is over."""
    tally = shared(SEED, 1000, 0, 1, Options(), limit=0.01)
    (failure,) = tally.failures
    assert failure["wrong"] == ["no end within 0.01 seconds"]
    assert failure["reproduce"] == f"python -m fuzz --only {SEED * 1_000_003} --device cpu"
