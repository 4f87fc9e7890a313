# SPDX-License-Identifier: Apache-2.0
"""One call of every kind, with all that it writes allocated beforehand: for tests of what surrounds a
call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cula_testing import passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits

DRAFTS = 4


@dataclass(frozen=True)
class Kind:
    run: Callable[..., passes.Result]
    lengths: tuple[tuple[int, ...], ...]  # variants that fit the same tensors
    outputs: Callable[[Inputs], dict]  # arguments of `run`
    fields: dict

    def case(self, algorithm: str, seed: int = 0, **more) -> Case:
        lengths = self.lengths[seed % len(self.lengths)]
        return Case(algorithm, **{"lengths": lengths, "seed": seed, **self.fields, **more})


def _o(inputs: Inputs) -> dict:
    return {"o": passes.empty_o(inputs)}


def _dense(inputs: Inputs) -> dict:
    return {**_o(inputs), "final_state": passes.empty_states(inputs, inputs.case.sequences)}


def _in_place(inputs: Inputs) -> dict:
    return {**_o(inputs), "in_place": True}


def _forks(inputs: Inputs) -> dict:
    """All sequences start from the first one's slot, and end in the slots that they had."""
    ends = inputs.initial_state_indices.clone()
    inputs.initial_state_indices[:] = ends[0]
    return {**_in_place(inputs), "final_state_indices": ends}


def _on_the_way(inputs: Inputs) -> dict:
    """Checkpoints after 64 tokens and at the end of every sequence, and the states of every chunk."""
    case = inputs.case
    ends = [*((n, 64) for n in range(case.sequences)), *enumerate(case.lengths)]
    plan = torch.tensor(
        [(n, t, slot) for slot, (n, t) in enumerate(ends)], dtype=torch.int32, device=inputs.q.device
    )
    chunks = -(-case.tokens // 64)
    rooms = passes.empty_states(inputs, case.batch * chunks).unflatten(0, (case.batch, chunks))
    return {
        **_dense(inputs),
        "checkpoints": passes.empty_states(inputs, len(ends)),
        "checkpoint_plan": plan,
        "chunk_states": rooms,
    }


def _snapshots(inputs: Inputs) -> dict:
    N = inputs.case.sequences
    return {**_o(inputs), "snapshots": passes.empty_states(inputs, N * DRAFTS).unflatten(0, (N, DRAFTS))}


def _tree(inputs: Inputs) -> dict:
    draw = torch.Generator().manual_seed(inputs.case.seed)
    draws = torch.randint(1 << 30, (inputs.case.sequences, DRAFTS), generator=draw, device="cpu")
    parents = draws % (torch.arange(DRAFTS, device="cpu") + 1) - 1
    return {**_snapshots(inputs), "parents": parents.to(torch.int32).to(inputs.q.device)}


def _map(inputs: Inputs) -> dict:
    return passes.empty_map(inputs)


PACKED = ((130, 0, 65, 5), (0, 0, 200, 0), (1, 198, 1, 0), (64, 64, 64, 8))
ROWS = ((DRAFTS,) * 3,)
KINDS = {
    "prefill": Kind(passes.prefill, ((200, 200),), _dense, {}),
    "varlen": Kind(passes.prefill, PACKED, _dense, {"packed": True}),
    "pool": Kind(passes.prefill, PACKED, _in_place, {"packed": True, "pool": True}),
    "forks": Kind(passes.prefill, PACKED, _forks, {"packed": True, "pool": True}),
    "states on the way": Kind(passes.prefill, ((200, 200),), _on_the_way, {}),
    "recurrent": Kind(passes.decode, PACKED, _dense, {"packed": True}),
    "decode": Kind(passes.decode, ((1,) * 5,), _in_place, {"pool": True}),
    "forked decode": Kind(passes.decode, ((1,) * 5,), _forks, {"pool": True}),
    "verify": Kind(passes.verify, ROWS, _snapshots, {}),
    "tree": Kind(passes.verify, ROWS, _tree, {}),
    "segment": Kind(passes.segment, PACKED, _map, {"packed": True, "state": False}),
}


@dataclass
class Call:
    kind: Kind
    inputs: Inputs
    named: dict  # outputs and what goes with them

    def __call__(self, **more) -> passes.Result:
        return self.kind.run(self.inputs, **self.named, **more)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that the call touches."""
        everything = {**self.inputs.tensors(), **self.inputs.states(), **self.named}
        return {name: value for name, value in everything.items() if isinstance(value, torch.Tensor)}

    def results(self) -> dict[str, torch.Tensor]:
        """All that it wrote; a pool in place whole."""
        written = {
            name: value for name, value in self.named.items() if name in passes.Result.__dataclass_fields__
        }
        return written | ({"pool": self.inputs.initial_state} if "in_place" in self.named else {})

    def overwrite(self, other: Call) -> None:
        """The values of another call of the same shapes in this one's memory, and outputs that nothing
        wrote."""
        for name, tensor in self.tensors.items():
            tensor.copy_(other.tensors[name])


def ready(name: str, algorithm: str, seed: int = 0, **fields) -> Call:
    inputs = make(KINDS[name].case(algorithm, seed, **fields))
    return Call(KINDS[name], inputs, KINDS[name].outputs(inputs))


def assert_same_results(what: str, one: Call, two: Call) -> None:
    for name, tensor in one.results().items():
        assert_same_bits(f"{what}: {name}", tensor, two.results()[name])
