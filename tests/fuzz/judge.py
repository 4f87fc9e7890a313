# SPDX-License-Identifier: Apache-2.0
"""The error rule of `compare.py` on a call: over each result as a whole, and over each sequence's part of it.

The budget is the naive recurrence's, on the same numbers with plain dense states, so that slots, null rows,
layouts and trees of the call under test have no part in it. A sequence is judged alone too because it is a
call of its own: rows of large numbers must not hide what small ones got.

One run of the naive recurrence is one sample of what its roundings do. Where a few numbers decide about an
error (a sequence of one head whose largest output is all that counts), the sample may be small by luck. So
what breaks the rule is judged again: the budget is then the largest of the problem's and of its neighbours'
(`neighbour`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from cula_testing import gradients, operators
from cula_testing.compare import BUDGET, Errors, bits, errors, floor
from fuzz.call import Found
from fuzz.case import FLOAT8, OF_TOKENS, Case
from fuzz.classes import DEFAULT, FEWEST, bound, keys_stand_still
from fuzz.gradients import Gradients
from fuzz.oracle import Expected, write_strength
from fuzz.values import Values

OF_PARAMETERS = ("A_log", "dt_bias")

# What is smaller than this part of the largest state or value may be zero: decay factors of 2^-126 and less
# are zero, whatever they multiply, and a result is a product of a few.
VANISHING = 2.0**-110

FEW_TOKENS = 8

# Budgets of a sequence's part of gradients, which the rule judges whole. That of a gate may be one number,
# since its derivative spreads over many powers of ten; the number a sum of a few that cancel.
OF_ONE_SEQUENCE = 4.0

# What a backward pass in chunks on a GPU takes for smaller write strengths; and in float16, below which
# strength d_beta may be off, and by how much of its size (docs/api.md).
LEAST_STRENGTHS = {"bfloat16": 2.0**-40, "float16": 2.0**-12}
SMALL_STRENGTH, OFF = 2.0**-6, 7e-3
LARGEST_FLOAT16 = 65504.0

# Gates that hardly decay, and how many times what the rule allows their gradients are off in chunks on a GPU
# where keys are of one direction (docs/api.md).
HARDLY_DECAYS, ALIKE_KEYS = ("tiny", "zero", "slow"), 10.0

NEIGHBOURS = 16
HOPELESS = 6.0  # budgets: what is wrong by more is wrong, whatever the neighbours say


class Naive:
    """`reference:naive` on dense states: o [B, T, HV, V], states by (sequence, tokens done), m and b; or
    gradients."""

    def __init__(self, case: Case, values: Values) -> None:
        self.case = case
        N, HV, K, V = case.sequences, case.value_heads, case.key_dim, case.value_dim
        self.dtype = torch.float64 if case.dtype == "float64" else torch.float32
        self.states: dict[tuple[int, int], torch.Tensor] = {}
        tensors = {name: x.contiguous() for name, x in values.tensors.items()}
        if "decay" in tensors:
            tensors["decay"] = -tensors["decay"].abs()
        if case.packed:
            tensors["cu_seqlens"] = torch.tensor([0, *(end for _, _, end in case.spans())])
        base = None
        if case.state != "none" and case.pass_name != "segment":
            base = values.base.to(self.dtype).clone()
            base[[n for n in range(N) if case.has_initial is not None and not case.has_initial[n]]] = 0
        tensors |= {
            "algorithm": "gdn" if case.gate_per_head else case.algorithm,
            "scale": K**-0.5 if case.scale is None else case.scale,
            "gate": case.gate,
            "lower_bound": case.lower_bound if case.gate == "bounded" else 0.0,
            "qk_l2norm": case.qk_l2norm,
            "beta_is_logit": case.beta_is_logit,
            "allow_neg_eigval": case.allow_neg_eigval,
            "backend": "reference:naive",
        }
        if case.pass_name == "segment":
            self.m, self.b = (
                self._empty(N, HV, K, K) if case.mixes else self._empty(N, HV, K),
                self._empty(N, HV, V, K),
            )
            operators.call("segment", **{**tensors, "m": self.m, "b": self.b, "null_index": -1})
            if not case.keep:
                return
        if case.pass_name == "backward":
            if base is not None:
                tensors["initial_state"] = base
            if case.has_initial is not None:
                tensors["has_initial_state"] = torch.tensor(case.has_initial, dtype=torch.bool)
            self._backward(tensors, values)
            return
        shape = (case.batch, case.tokens, case.value_heads, case.value_dim)
        self.o = torch.zeros(shape, dtype=getattr(torch, case.out or case.dtype))
        tensors |= {"o": self.o, "initial_state": base}
        if case.pass_name == "verify":
            self._verify(tensors)
        else:
            self._prefill(tensors)
        for n, (b, begin, end) in enumerate(case.spans()):
            if case.skipped(n):
                self.o[b, begin:end] = 0

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype)

    def _prefill(self, tensors: dict) -> None:
        case = self.case
        final = self._empty(case.sequences, case.value_heads, case.value_dim, case.key_dim)
        rows = sorted({(n, t) for n, t, slot in case.plan or () if slot >= 0})
        tensors |= {"final_state": final, "null_index": -1}
        if rows:
            kept = self._empty(len(rows), *final.shape[1:])
            plan = [(n, t, slot) for slot, (n, t) in enumerate(rows)]
            tensors |= {"checkpoints": kept, "checkpoint_plan": torch.tensor(plan, dtype=torch.int32)}
        places = []
        if case.chunk_size:
            for n, length in enumerate(case.lengths):
                places += [(n, t) for t in range(0, length, case.chunk_size)]
            most = len(places) if case.packed else -(-case.tokens // case.chunk_size)
            chunks = self._empty(case.batch, most, *final.shape[1:])
            tensors |= {"chunk_states": chunks, "chunk_tokens": case.chunk_size}
        operators.call("prefill", **tensors)
        self.states = {(n, length): final[n] for n, length in enumerate(case.lengths)}
        if rows:
            self.states |= dict(zip(rows, kept, strict=True))
        if places:
            self.states |= dict(zip(places, chunks.flatten(0, 1), strict=True))

    def _verify(self, tensors: dict) -> None:
        case = self.case
        room = self._empty(case.sequences, case.longest, case.value_heads, case.value_dim, case.key_dim)
        tensors |= {"snapshots": room, "null_index": -1}
        if case.parents is not None:
            shape = (case.sequences, len(case.parents[0]) if case.parents else 0)
            tensors["parents"] = torch.tensor(case.parents, dtype=torch.int32).reshape(shape)
        operators.call("verify", **tensors)
        self.states = {(n, t + 1): room[n, t] for n, length in enumerate(case.lengths) for t in range(length)}

    def _backward(self, named: dict, values: Values) -> None:
        """At most 256 value channels at a time, in parts of which what they share is summed."""
        case, at = self.case, {"v": 3, "d_o": 3, "initial_state": 2, "d_final_state": 2}
        if case.beta_per_value:
            at["beta"] = 3
        if values.d_final is not None:
            named["d_final_state"] = values.d_final
        made: dict[str, list[torch.Tensor]] = {name: [] for name in case.differentiable()}
        for first in range(0, case.value_dim, 256):
            count = min(256, case.value_dim - first)
            part = {name: x.narrow(at[name], first, count) if name in at else x for name, x in named.items()}
            for name, each in made.items():
                dtype = self.dtype if name == "initial_state" else getattr(torch, case.gradient_dtype(name))
                each.append(torch.zeros(part[name].shape, dtype=dtype))
            operators.call("backward", **part, **{f"d_{name}": each[-1] for name, each in made.items()})
        for name, parts in made.items():
            whole = torch.cat(parts, at[name]) if name in at else sum(x.double() for x in parts)
            setattr(self, f"d_{name}", whole.to(parts[0].dtype))

    def finite(self) -> bool:
        """Whether there is a budget: the naive recurrence may leave the range that a wider one keeps to."""
        names = ("o", "m", "b", *(f"d_{name}" for name in self.case.differentiable()))
        tensors = [getattr(self, name) for name in names if hasattr(self, name)]
        return all(bool(x.isfinite().all()) for x in (*tensors, *self.states.values()))


class Problem:
    """The numbers of one problem: as they are in float64, and as the naive recurrence has them."""

    def __init__(self, case: Case, values: Values) -> None:
        self.case = case
        self.values = values
        self.expected = Gradients(values) if case.pass_name == "backward" else Expected(values)
        self.usable = self.expected.in_range()
        if self.usable:
            self.naive = Naive(case, values)
            self.budgeted = self.naive.finite()

    def tensor(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(getattr(self.expected, name)), getattr(self.naive, name)

    def states(self, kind: str, places: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of sequences after so many tokens."""
        oracle = torch.stack([self._state(kind, *place) for place in places])
        return oracle, torch.stack([self.naive.states[place] for place in places])

    def _state(self, kind: str, n: int, t: int) -> torch.Tensor:
        expected = self.expected
        if kind in ("table", "snapshots"):
            return torch.from_numpy(expected.snapshots[n, t - 1])
        if kind == "final":
            return torch.from_numpy(expected.final[n])
        return torch.from_numpy(expected.passing[n, t])

    def beside(self, what: str, x: torch.Tensor) -> torch.Tensor | None:
        """What else counts as the size of a result: of a map the one that changes nothing, of gradients what
        `gradients.beside` says."""
        if what == "m":
            return torch.ones(1) if x.ndim == 3 else torch.eye(x.shape[-1])
        if what.removeprefix("d_") in OF_PARAMETERS:
            size = torch.from_numpy(self.expected.beside[what.removeprefix("d_")])
            return size.clamp(min=gradients.VANISHING)
        return torch.tensor(gradients.VANISHING) if what.startswith("d_") else None

    def moved(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(
            moved(self.values, *pair) for pair in zip(self.tensor("m"), self.tensor("b"), strict=True)
        )


def moved(values: Values, m: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A map applied to states: M S + B."""
    states, m = values.base.double(), m.double()
    product = m[:, :, None, :] * states if m.ndim == 3 else torch.einsum("nhij,nhvj->nhvi", m, states)
    return product + b.double()


def neighbour(values: Values, number: int) -> Values:
    """The same problem in other numbers: v and the states times one factor, q times another, gates that
    differ from token to token a little off, and the key channels in another order.

    Outputs and states scale with what goes in, so that errors relative to them are of the same kind. Keys and
    write strengths stay: they decide what is taken away of a state, and whether something is left of it. So
    do decays that are the same for all tokens: the rounding of such a decay is no sample among many, it is in
    every one.
    """
    random = np.random.default_rng([values.case.seed, number])
    (inputs, queries), gates = random.uniform(0.7, 1.0, 2), random.uniform(0.98, 1.0)
    return changed(values, inputs, queries, gates if varied(values.case) else 1.0, random)


def varied(case: Case) -> bool:
    """Whether gates differ from token to token."""
    return case.decay not in ("zero", "tiny", "extreme") and "g" not in dict(case.expanded)


def changed(
    values: Values, inputs: float, queries: float, gates: float, random: np.random.Generator
) -> Values:
    """A problem with v and the states, q and the gates times factors, and its key channels in another
    order."""
    factors = {"v": inputs, "q": queries, "g": gates}
    other = copy.copy(values)
    other.tensors = {name: (x * factors.get(name, 1.0)).to(x.dtype) for name, x in values.tensors.items()}
    order = torch.from_numpy(random.permutation(values.case.key_dim))
    # g and dt_bias of one number per head have fewer dimensions, and no channels.
    dimensions_of = {**dict.fromkeys(("q", "k", "g", "erase", "a_key", "b_key"), 4), "dt_bias": 2}
    for name, dimensions in dimensions_of.items():
        x = other.tensors.get(name)
        if x is not None and x.ndim == dimensions:
            other.tensors[name] = x[..., order]
    other.base = (values.base * inputs).to(values.base.dtype)[..., order]
    if values.d_final is not None:
        other.d_final = values.d_final[..., order]
    return other


def with_strengths(values: Values, least: float) -> Values:
    """The same problem with no write strength below `least`, and without their gradients."""
    other, case = copy.copy(values), values.case
    wanted = tuple(name for name in case.wanted if name != "beta")
    other.case = dataclasses.replace(case, beta_dtype="float64", wanted=wanted)
    beta = values.tensors["beta"].double()
    if case.beta_is_logit:
        least = least / 2 if case.allow_neg_eigval else least
        least = np.log(least / (1 - least))
    other.tensors = {**values.tensors, "beta": beta.clamp(min=least)}
    return other


# The oracle's numbers of a problem and the naive ones, for one result.
Wanted = Callable[[Problem], tuple[torch.Tensor, torch.Tensor]]


class Judge:
    """What one case has to give, and the sentences about what a backend gave instead."""

    def __init__(
        self, case: Case, values: Values, classes: frozenset[str] = DEFAULT, device: str = "cpu"
    ) -> None:
        self.case, self.values, self.classes, self.device = case, values, classes, device
        self.problem = Problem(case, values)
        self.bound = bound(case, classes)
        self.usable = self.problem.usable
        if not self.usable:
            return
        self.budgeted = self.problem.budgeted
        self.inputs = getattr(torch, case.dtype)
        self.budgets: dict[tuple, tuple[float, float]] = {}  # of the parts of the results, for all backends
        self.excused = 0.0  # budgets: the largest error that only neighbours allow, of all verdicts

    def neighbours(self) -> Iterator[Problem]:
        """Those that have a budget: a result may leave the range where the problem's own is close to it."""
        for number in range(NEIGHBOURS):
            problem = Problem(self.case, neighbour(self.values, number))
            if problem.usable and problem.budgeted:
                yield problem

    def verdict(self, found: Found, backend: str | None) -> list[str]:
        """One sentence for each result that breaks the rule; nothing where all is well."""
        wrong, exact = list(found.broken), backend == "reference"
        if self.bound is None or (backend == "reference:naive" and not self.budgeted):
            return wrong
        for name, x in found.tensors.items():
            parts = []
            if name == "o" or name.removeprefix("d_") in OF_TOKENS:
                parts = [(n, (b, slice(begin, end))) for n, (b, begin, end) in enumerate(self.case.spans())]
            elif name.removeprefix("d_") not in OF_PARAMETERS:
                parts = [(n, (n,)) for n in range(self.case.sequences)]
            broken = self._rule(name, x, lambda problem, name=name: problem.tensor(name), parts, exact)
            excused = broken and (
                self._of_small_strengths(name, x, backend)
                or self._of_alike_keys(name, x, backend)
                or self._beyond_float16(x, backend)
            )
            if excused:
                self.excused = max(self.excused, 1.0)
            else:
                wrong += broken
        for kind, states in found.states.items():
            if not states:
                continue
            places = list(states)
            x = torch.stack([states[place] for place in places])
            rows = sorted({n for n, _ in places})
            parts = [(n, ([i for i, p in enumerate(places) if p[0] == n],)) for n in rows]
            asked = {"kind": kind, "places": places}
            wrong += self._rule(
                kind, x, lambda problem, asked=asked: problem.states(**asked), parts, exact, places
            )
        if self.case.pass_name == "segment" and "m" in found.tensors:
            x = moved(self.values, found.tensors["m"], found.tensors["b"]).to(self.problem.naive.dtype)
            wrong += self._rule("m applied to a state, plus b", x, Problem.moved, [], exact)
        return wrong

    def _rule(
        self,
        what: str,
        x: torch.Tensor,
        wanted: Wanted,
        parts: list[tuple[int, tuple]],
        exact: bool,
        places: list[tuple[int, int]] | None = None,
    ) -> list[str]:
        """parts: a sequence, and where its numbers are in x."""
        oracle, _ = wanted(self.problem)
        if x.shape != oracle.shape:
            return [f"{what}: shape {list(x.shape)}, wanted {list(oracle.shape)}"]
        beside = self.problem.beside(what, x)
        backward = self.case.pass_name == "backward"
        times = gradients.BUDGET if backward else BUDGET
        eight = self.case.state_dtype == FLOAT8 and what in self._kept_in_the_pool()
        stored = torch.float8_e4m3fn if eight else x.dtype
        for n, index in [(None, (...,)), *(parts if len(parts) > 1 else [])]:
            name = what if n is None else f"{what} of sequence {n}"

            def budget(problem: Problem, n: int | None = n, index: tuple = index) -> tuple[float, float]:
                right, naive = wanted(problem)
                beside = problem.beside(what, x)
                # The float64 reference has no budget but one rounding of what it stores.
                naive = (right if exact else naive).to(x.dtype)
                allowed, least = errors(naive[index], right[index], beside), floor(stored, self.inputs)
                if not exact:
                    least += self._luck(n, x.dtype)
                wider = self.bound * (1.0 if n is None or not backward else OF_ONE_SEQUENCE)
                return tuple(wider * (times * each + least) for each in (allowed.rms, allowed.max))

            broken = self._broken((name, x.dtype, exact), x[index], oracle[index], beside, budget)
            if broken and not vanishes(x[index], oracle[index], self.problem.expected.size):
                return [f"{name}: {broken} {self._where(what, x, oracle, places)}"]
        return []

    def _kept_in_the_pool(self) -> tuple[str, ...]:
        """The states that have the pool's dtype."""
        return ("final", "table") if self.case.state == "pool" else ()

    def _in_chunks_on_a_gpu(self, backend: str | None) -> bool:
        chunks = backend is None or (backend.startswith(("sm80", "sm90")) and backend != "sm80:step")
        return chunks and self.device == "cuda" and self.case.key_dim >= FEWEST

    def _beyond_float16(self, x: torch.Tensor, backend: str | None) -> bool:
        """Whether gradients are not finite as docs/api.md says of float16 in chunks on a GPU: products of
        values or states with what comes back, summed over value channels, are beyond its numbers."""
        case, values = self.case, self.values
        if case.pass_name != "backward" or case.dtype != "float16" or not self._in_chunks_on_a_gpu(backend):
            return False

        def largest(*found: torch.Tensor | None) -> float:
            return max(
                (float(y.double().abs().max()) for y in found if y is not None and y.numel()), default=0.0
            )

        inputs = largest(values.tensors["v"], values.base)
        upstream = largest(values.tensors.get("d_o"), values.d_final)
        return not x.isfinite().all() and inputs * upstream * case.value_dim > LARGEST_FLOAT16

    def _of_small_strengths(self, name: str, x: torch.Tensor, backend: str | None) -> bool:
        """Whether a gradient is wrong as docs/api.md says of chunks on a GPU: they take a least strength for
        every write strength nearer to zero, and in float16 the gradient of such a strength is itself off."""
        case = self.case
        if (
            not (case.pass_name == "backward" and case.delta and self._in_chunks_on_a_gpu(backend))
            or case.dtype not in LEAST_STRENGTHS
            or case.beta_per_value
            or case.erases
            or not x.isfinite().all()
        ):
            return False
        least, smallest = LEAST_STRENGTHS[case.dtype], write_strength(self.values).min(initial=1.0)
        if name == "d_beta":
            found = errors(x, self.problem.tensor(name)[0])
            return case.dtype == "float16" and smallest < SMALL_STRENGTH and max(found.rms, found.max) <= OFF
        if not smallest < least:
            return False
        values = with_strengths(self.values, least)
        other = Judge(values.case, values, self.classes)
        return other.usable and not other.verdict(Found({name: x}), backend)

    def _of_alike_keys(self, name: str, x: torch.Tensor, backend: str | None) -> bool:
        """Whether a gradient of gates is wrong as docs/api.md says of chunks on a GPU, where keys are of one
        direction and gates hardly decay."""
        case = self.case
        if (
            not (case.pass_name == "backward" and case.delta and self._in_chunks_on_a_gpu(backend))
            or case.dtype not in LEAST_STRENGTHS
            or name not in ("d_g", "d_A_log", "d_dt_bias")
            or not (keys_stand_still(case) and case.decay in HARDLY_DECAYS)
        ):
            return False
        other = Judge(case, self.values, self.classes)
        other.bound = ALIKE_KEYS
        return other.usable and not other.verdict(Found({name: x}), backend)

    def _broken(
        self,
        key: tuple[str, torch.dtype, bool],
        x: torch.Tensor,
        oracle: torch.Tensor,
        beside: torch.Tensor | None,
        budget: Callable[[Problem], tuple[float, float]],
    ) -> str:
        """How the rule is broken; the budget is the same for all backends."""
        if not x.isfinite().all():
            return f"{int((~x.isfinite()).sum())} of {x.numel()} values are not finite"
        exact = key[2]
        if not (exact or self.budgeted):
            return ""
        if key not in self.budgets:
            self.budgets[key] = budget(self.problem)
        found = errors(x, oracle, beside)
        broken = over(found, self.budgets[key])
        if not broken or exact or over(found, [HOPELESS * limit for limit in self.budgets[key]]):
            return broken
        rms, most = self.budgets[key]
        worst = max(found.rms / rms, found.max / most)
        for problem in self.neighbours():
            limits = budget(problem)
            rms, most = max(rms, limits[0]), max(most, limits[1])
            if not over(found, (rms, most)):
                self.excused = max(self.excused, worst)
                return ""
        return over(found, (rms, most))

    def _luck(self, n: int | None, result: torch.dtype) -> float:
        """What the naive recurrence may have been spared by luck, where there is little that could even it
        out.

        A token is four steps: decay, read, write, output. After few tokens a result has little more than the
        roundings of one behind it, and those of the naive recurrence may all happen to be small; another form
        makes four, too, and `compare.floor` has one of them.
        """
        tokens = self.case.longest if n is None else self.case.lengths[n]
        return (
            3 * max(torch.finfo(result).eps, torch.finfo(self.inputs).eps) / 2
            if tokens <= FEW_TOKENS
            else 0.0
        )

    def _where(self, what: str, x: torch.Tensor, oracle: torch.Tensor, places: list | None) -> str:
        """The first place that is wrong by a hundredth of the largest number, or the one that is most
        wrong."""
        difference = (x.double() - oracle).abs().nan_to_num(nan=float("inf"))
        size = oracle.abs().max() + torch.finfo(torch.float32).tiny
        wrong = (difference > size / 100).nonzero()
        index = wrong[0].tolist() if len(wrong) else list(_unravel(int(difference.argmax()), x.shape))
        names = {"o": "row token head value", "m": "row head i j", "b": "row head value key"}
        names |= {f"d_{name}": "row token head channel" for name in OF_TOKENS}
        names |= {f"d_{name}": "head channel" for name in OF_PARAMETERS}
        words = names.get(what, "row head value key").split()
        place = list(zip(words, index, strict=False))
        if places is not None:
            n, t = places[index[0]]
            place = [("sequence", n), ("tokens", t), *place[1:]]
        at = ", ".join(f"{word} {i}" for word, i in place)
        values = f"{float(x[tuple(index)]):.6g} for {float(oracle[tuple(index)]):.6g}"
        found = errors(x, oracle)
        return f"(at {at}: {values}; {len(wrong)} of {x.numel()} off by 1 %; rms {found.rms:.2e})"


def over(found: Errors, budget: Sequence[float]) -> str:
    """What of the errors is above the budget of (rms, max)."""
    for measure, limit in zip(("rms", "max"), budget, strict=True):
        error = getattr(found, measure)
        if not error <= limit:
            return f"relative {measure} error {error:.3e} is above the budget {limit:.3e}"
    return ""


def vanishes(x: torch.Tensor, oracle: torch.Tensor, size: float) -> bool:
    """Whether all that is left of numbers up to size is what kernels may flush to zero on the way."""
    return (
        bool(x.isfinite().all()) and max(float(x.abs().max()), float(oracle.abs().max())) < VANISHING * size
    )


def _unravel(position: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        index.append(position % size)
        position //= size
    return tuple(reversed(index))


def same_bits(one: Found, two: Found) -> list[str]:
    """Sentences about what differs between two runs of one call."""
    pairs = [(name, x, two.tensors[name]) for name, x in one.tensors.items()]
    for kind, states in one.states.items():
        pairs += [(f"{kind} {place}", x, two.states[kind][place]) for place, x in states.items()]
    return [f"{name} differs between two runs" for name, x, y in pairs if not torch.equal(bits(x), bits(y))]
