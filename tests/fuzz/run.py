# SPDX-License-Identifier: Apache-2.0
"""Seeds, one after the other: each case on every backend that takes it, judged and counted."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

import cula
from cula_testing.device import is_strategy
from fuzz.call import Call
from fuzz.case import Case
from fuzz.classes import DEFAULT
from fuzz.draw import draw
from fuzz.judge import Judge, same_bits
from fuzz.malformed import Watched, refusal_of, refused, several_tokens
from fuzz.values import Values

REFERENCES = ("reference", "reference:naive")
MALFORMED = 4  # one case in so many is also called with wrong values


@dataclass
class Tally:
    calls: int = 0
    cases: int = 0
    by_backend: Counter = field(default_factory=Counter)
    by_pass: Counter = field(default_factory=Counter)
    by_algorithm: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)  # why a case or a call was not judged
    excused: Counter = field(
        default_factory=Counter
    )  # calls above the rule that neighbours allow, by backend
    worst_excused: float = 0.0  # of those, in budgets of the rule
    failures: list[dict] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.calls += other.calls
        self.cases += other.cases
        for name in ("by_backend", "by_pass", "by_algorithm", "skipped", "excused"):
            getattr(self, name).update(getattr(other, name))
        self.worst_excused = max(self.worst_excused, other.worst_excused)
        self.failures += other.failures

    def count(self, case: Case, backend: str | None, pass_name: str = "") -> None:
        self.calls += 1
        self.by_backend[backend or "auto"] += 1
        self.by_pass[pass_name or case.pass_name] += 1
        self.by_algorithm[case.algorithm] += 1

    def fail(self, case: Case, backend: str | None, options: Options, wrong: list[str]) -> None:
        line = options.reproduce(case.seed, backend)
        failure = {"seed": case.seed, "backend": backend or "auto", "reproduce": line, "wrong": wrong}
        self.failures.append(failure | {"case": case.brief()})

    def write(self, path: str, device: str, seed: int) -> None:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        content = {"device": name, "torch": torch.__version__, "seed": seed, **vars(self)}
        with open(path, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")


@dataclass(frozen=True)
class Options:
    device: str = "cpu"
    backend: str = ""  # this one alone; a family's name stands for all of it
    classes: frozenset[str] = DEFAULT
    fixed: tuple[tuple[str, str], ...] = ()  # pass_name, algorithm or dtype that every case has
    references: bool = True  # call the references by name too

    def reproduce(self, seed: int, backend: str | None) -> str:
        """The command line that makes one call again."""
        words = [f"python -m fuzz --only {seed} --device {self.device} --backend {backend or 'auto'}"]
        words += [f"--{name.removesuffix('_name')} {value}" for name, value in self.fixed]
        words += [f"--with {name}" for name in sorted(self.classes - DEFAULT)]
        words += [f"--without {name}" for name in sorted(DEFAULT - self.classes)]
        return " ".join(words)


# Ways to run a backward pass, for calls of which the forward pass may have none of the name.
OF_ONE_DIRECTION = ("whole", "segments", "three_walks")


def backends(case: Case, options: Options) -> list[str | None]:
    """The targets of the registry that take the case; None is the library's own choice."""
    if options.device == "cuda" and case.dtype == "float64":
        return []  # for the CPU's targets alone
    pass_name = "prefill" if case.pass_name == "split" else case.pass_name
    rows = cula.explain(
        "gdn" if case.gate_per_head else case.algorithm,
        pass_name,
        batch=case.batch,
        tokens=case.tokens,
        sequences=case.sequences,
        heads=case.heads,
        value_heads=case.value_heads,
        key_dim=case.key_dim,
        writes=case.householders,
        value_dim=min(case.value_dim, 256),
        dtype=getattr(torch, case.dtype),
        state_dtype=getattr(torch, case.state_dtype),
        gate=case.gate,
        use_qk_l2norm_in_kernel=case.qk_l2norm,
        lower_bound=case.lower_bound,
        varlen=case.packed,
        beta_per_value=case.beta_per_value,
        checkpoints=case.plan is not None,
        chunk_states=bool(case.chunk_size),
        tree=case.parents is not None,
        chunk_size=case.chunk_size or 64,
        deterministic=case.deterministic,
        device=options.device,
    )
    names = [row.target for row in rows if row.verdict != "no" and row.target not in REFERENCES]
    if case.pass_name == "backward" and case.through in ("autograd", "kept"):  # of both directions
        names = [name for name in names if name.partition(":")[2] not in OF_ONE_DIRECTION]
    if case.pass_name == "backward" and case.d_o not in ("", case.dtype):  # explain() does not ask about d_o
        names = [name for name in names if not name.endswith(":three_walks")]
    if case.pass_name == "split":  # its pieces may be too short for a strategy that the whole call allows
        names = [name for name in names if not is_strategy(name) or name.endswith(":fused")]
    if options.device == "cpu" and options.references:
        names += REFERENCES
    if options.backend == "auto":
        return [None]
    if options.backend:
        wanted = [options.backend] if options.backend in REFERENCES else names
        return [name for name in wanted if name == options.backend or name.startswith(f"{options.backend}:")]
    return [*names, None] if case.automatic and names else names


def one(case: Case, options: Options) -> Tally:
    """One case on every backend."""
    tally = Tally(cases=1)
    targets = backends(case, options)
    if not targets:
        tally.skipped["no backend takes it"] += 1
        return tally
    values = Values(case)
    if case.chained():
        if options.device == "cuda":
            tally.skipped["chains of forks"] += 1  # sequences inside of one count as null rows there
            return tally
        for backend in targets:
            tally.count(case, backend, "malformed")
            sentence = refusal_of(Watched(case, values, options.device).run(backend), "state_indices")
            if sentence:
                tally.fail(case, backend, options, [f"a chain of forks: {sentence}"])
        return tally
    judge = Judge(case, values, options.classes, options.device)
    if not judge.usable:
        tally.skipped["out of range"] += 1
        return tally
    if not judge.budgeted:
        tally.skipped["no budget: only whether results are finite"] += 1
    call = Call(case, values, options.device)
    for backend in targets:
        wrong = []
        try:
            found = call.run(backend)
            judge.excused = 0.0
            wrong += judge.verdict(found, backend)
            if judge.excused:
                tally.excused[backend or "auto"] += 1
                tally.worst_excused = max(tally.worst_excused, judge.excused)
            if case.repeat:
                wrong += same_bits(found, call.run(backend))
        except Exception as raised:
            refusal = expected_refusal(call, raised)
            if refusal:
                tally.skipped[refusal] += 1
                continue
            wrong.append(f"{type(raised).__name__}: {raised}")
        tally.count(case, backend)
        if wrong:
            tally.fail(case, backend, options, wrong)
    if case.seed % MALFORMED == 0:
        malformed = list(several_tokens(case, targets, options.device))
        if options.device == "cpu":
            malformed += refused(case, targets, options.classes)
        for backend, sentence in malformed:
            tally.count(case, backend, "malformed")
            if sentence:
                tally.fail(case, backend, options, [sentence])
    return tally


def _in_pieces(call: Call) -> bool:
    """Whether q, k, v, g and o are bfloat16 and lie in whole pieces of 16 bytes."""
    rows = [call.inputs[name] for name in "qkvg"] + [
        call.poisoned[name] for name in ("o",) if name in call.poisoned
    ]
    return call.case.out in ("", "bfloat16") and all(
        x.dtype == torch.bfloat16
        and x.stride(-1) == 1
        and all(number % 8 == 0 for number in (*x.stride()[:-1], x.shape[-1], x.storage_offset()))
        for x in rows
    )


# What `sm90:fused` and `sm90:joined` find out when they are called, and `explain`, which knows no tensors,
# does not say; and where it is so.
DECLINED = {
    "it normalizes q and k (qk_l2norm)": lambda call: not call.case.qk_l2norm,
    "it takes scale up to 256, got ": lambda call: abs(call.case.scale or 0) > 256,
    "it takes one beta per token, not of float64": lambda call: (
        call.case.beta_per_value or call.case.beta_dtype == "float64"
    ),
    "its segments take write strengths as logits": lambda call: not call.case.beta_is_logit,
    "q, k, v, g and o must be bfloat16 and lie in whole pieces of 16 bytes": lambda call: (
        not _in_pieces(call)
    ),
}


def expected_refusal(call: Call, raised: Exception) -> str:
    """Why a call may be refused although its case is drawn; "" where it may not."""
    text, case = str(raised), call.case
    if not isinstance(raised, ValueError):
        return ""
    found = re.search(r'backend "sm90:(?:fused|joined)" does not take this call: (.*)', text)
    reason = found[1] if found else ""
    if any(reason.startswith(sentence) and holds(call) for sentence, holds in DECLINED.items()):
        return "declined for its memory, scale, beta or norm"
    if case.table and not case.table[0] and "state_indices" in text:
        return "table without columns refused"
    return ""


def seeds_of(seed: int, worker: int, workers: int) -> Iterator[int]:
    """The seeds of a run, shared out: a run's cases do not depend on how many workers it has."""
    return (seed * 1_000_003 + at for at in itertools.count(worker, workers))


def run(
    seed: int, count: int, seconds: float, options: Options, worker: int = 0, workers: int = 1, current=None
) -> Tally:
    """Cases until `count` calls or `seconds` are over (0: no limit). Failures are printed as they come.

    current: shared memory for the seed of the case that is running.
    """
    tally, start = Tally(), time.monotonic()
    fixed, stamp = dict(options.fixed), start
    for case_seed in seeds_of(seed, worker, workers):
        if current is not None:
            current.value = case_seed
        part = one(draw(case_seed, options.classes, **fixed), options)
        tally.add(part)
        for failure in part.failures:
            print(f"{failure['reproduce']}\n    {failure['wrong'][0]}", flush=True)
        now = time.monotonic()
        if (count and tally.calls >= count) or (seconds and now - start >= seconds):
            break
        if part.failures and options.device == "cuda" and device_is_lost():
            print("the device is lost: this process ends", flush=True)
            break
        if now - stamp > 60:
            stamp = now
            print(f"... {tally.calls} calls, {len(tally.failures)} failures", flush=True)
    return tally


def device_is_lost() -> bool:
    """After a fault in a kernel every later call of the process fails."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
