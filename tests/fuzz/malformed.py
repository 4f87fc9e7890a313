# SPDX-License-Identifier: Apache-2.0
"""Wrong shapes and values in calls that are right otherwise: a ValueError that names the argument, no byte
changed.

Wrong values are for CPU tensors. On a GPU they are not read by the host (tests/gpu/test_malformed_values.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random

import torch

from fuzz.call import Call
from fuzz.case import Case
from fuzz.memory import fresh, whole
from fuzz.values import Values

INT_MAX = 2**31 - 1

# The argument that the error names, the tensor, and what is put where in it.
Wrong = tuple[str, str, list[tuple[tuple[int, ...], int]]]


def wrongs(case: Case, random: Random, classes: frozenset[str]) -> Iterator[Wrong]:
    """Everything that may be wrong in the values of a case's lengths, slots and counts."""
    N, T = case.sequences, case.tokens
    if case.packed:
        bounds = [0, *(end for _, _, end in case.spans())]
        at = random.randint(0, N)
        far = (INT_MAX, -INT_MAX) if "far_lengths" in classes or not case.chunk_size else ()
        yield "cu_seqlens", "cu_seqlens", [((0,), random.choice((1, -1, *far)))]
        yield "cu_seqlens", "cu_seqlens", [((N,), random.choice((T + 1, -1, *far)))]
        if 0 < at < N and bounds[at + 1] < T:
            yield "cu_seqlens", "cu_seqlens", [((at,), bounds[at + 1] + 1)]
    if N == 0:
        return
    n, slots = random.randrange(N), case.slots
    beyond = random.choice((slots, slots + 1, INT_MAX))
    if beyond == case.null_index:
        beyond += 1
    in_place = case.state == "pool" and (case.pass_name in ("prefill", "decode"))
    if case.initial is not None and case.state != "none":
        # state_indices of cula_decode; elsewhere initial_state_indices, which contains that.
        yield "state_indices", "initial", [((n,), beyond)]
    if in_place and case.final is not None:
        yield "final_state_indices", "final", [((n,), beyond)]
    written = "final" if case.final is not None else "initial"
    if in_place and getattr(case, written) is not None:
        named = [m for m in range(N) if not case.is_null(getattr(case, written)[m])]
        if len(named) > 1:
            one, two = random.sample(named, 2)
            yield "state_indices", written, [((one,), getattr(case, written)[two])]
    if case.table is not None:
        columns = len(case.table[0])
        if columns == 0:  # refused as it is
            return
        column = random.randrange(columns)
        yield "state_indices", "table", [((n, column), beyond)]
        mine = case.table[n][column]
        others = [slot for row in case.table for slot in row if not case.is_null(slot) and slot != mine]
        if not case.disable_update and others:
            yield "state_indices", "table", [((n, column), random.choice(others))]
        if case.accepted is not None:
            yield "num_accepted", "accepted", [((n,), random.choice((0, -1, columns + 1, INT_MAX)))]
    if case.parents is not None and case.lengths[n]:
        t = random.randrange(case.lengths[n])
        yield "parents", "parents", [((n, t), random.choice((t, t + 1, INT_MAX)))]
    if case.snapshot_indices is not None:
        beyond = case.snapshot_slots[0] + (case.snapshot_slots[0] == case.null_index)
        yield "snapshot_indices", "snapshot_indices", [((n,), beyond)]
        named = [m for m in range(N) if not case.is_null(case.snapshot_indices[m])]
        if len(named) > 1:
            one, two = random.sample(named, 2)
            yield "snapshot_indices", "snapshot_indices", [((one,), case.snapshot_indices[two])]
    if case.plan:
        yield from _wrong_plans(case, random)


def _wrong_plans(case: Case, random: Random) -> Iterator[Wrong]:
    used = [row for row, (_, _, slot) in enumerate(case.plan) if slot >= 0]
    if not used:
        return
    row = random.choice(used)
    length = case.lengths[case.plan[row][0]]
    offsets = [t for t in (-1, 1, 63, 65, length - 1, length + 1, length + 64) if t % 64 and t != length]
    yield "checkpoints.plan", "plan", [((row, 0), random.choice((case.sequences, -1, INT_MAX)))]
    yield "checkpoints.plan", "plan", [((row, 1), random.choice((*offsets, -64)))]
    yield "checkpoints.plan", "plan", [((row, 2), random.choice((case.checkpoint_slots, INT_MAX)))]
    if len(used) > 1:
        other = random.choice([one for one in used if one != row])
        yield "checkpoints.plan", "plan", [((row, 2), case.plan[other][2])]


class Watched(Call):
    """A call whose tensors are hashed when it starts and after it has ended."""

    def run(self, backend: str | None) -> str:
        made = {name: fresh(x, self.device) for name, x in self.poisoned.items()}
        before = self._hash(made)
        try:
            getattr(self, f"_{self.case.pass_name}")(backend, made)
        except Exception as raised:
            outcome = f"{type(raised).__name__}: {raised}"
        else:
            outcome = "nothing was raised"
        return outcome if self._hash(made) == before else f"bytes have changed; {outcome}"

    def _hash(self, made: dict[str, torch.Tensor]) -> str:
        digest = hashlib.blake2b()
        for name, x in sorted({**self.inputs, **{f"out {name}": x for name, x in made.items()}}.items()):
            digest.update(name.encode())
            digest.update(whole(x).contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()


def refused(
    case: Case, backends: list[str | None], classes: frozenset[str]
) -> Iterator[tuple[str | None, str]]:
    """For every wrong value a call: its backend, and a sentence unless it was refused as it has to be."""
    random, values = Random(case.seed), Values(case)
    for argument, name, changes in wrongs(case, random, classes):
        call = Watched(case, values, "cpu")
        call.inputs[name] = call.inputs[name].clone()
        for index, value in changes:
            call.inputs[name][index] = value
        backend = random.choice(backends)
        outcome = call.run(backend)
        sentence = refusal_of(outcome, argument)
        yield backend, sentence and f"{name} with {changes}: {sentence}"


def several_tokens(case: Case, backends: list[str | None], device: str) -> Iterator[tuple[str | None, str]]:
    """A decode of [N, T] with both above 1, which could be read in two ways, on either device."""
    if case.pass_name == "decode" and case.sequences > 1:
        random = Random(case.seed)
        case = case.but(lengths=(random.randint(2, 6),) * case.sequences, rows_along_tokens=False)
        backend = random.choice(backends)
        sentence = refusal_of(Watched(case, Values(case), device).run(backend), "decode: q")
        yield backend, sentence and f"q of several tokens: {sentence}"


def refusal_of(outcome: str, argument: str) -> str:
    """ "" if the outcome is a ValueError that names the argument, else the outcome."""
    head = outcome.partition(" must ")[0]
    return "" if outcome.startswith("ValueError") and argument in head else outcome
