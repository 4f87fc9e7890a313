# SPDX-License-Identifier: Apache-2.0
"""Prints a hash of every result of a set of calls (a helper of tests/laws, run in processes of its own)."""

from __future__ import annotations

import hashlib

import torch

from cula_testing import passes
from cula_testing.cases import ALGORITHMS, Case, make
from cula_testing.compare import bits


def calls():
    for algorithm in ALGORITHMS:
        for dtype in (torch.bfloat16, torch.float32):
            inputs = make(
                Case(algorithm, (3, 130, 0, 64), packed=True, tail=2, dtype=dtype, key_dim=60, value_dim=100)
            )
            yield f"{algorithm} {dtype} prefill", passes.prefill(inputs)
            yield f"{algorithm} {dtype} decode", passes.decode(inputs)
            yield f"{algorithm} {dtype} segment", passes.segment(inputs.but(initial_state=None))
            rows = make(Case(algorithm, (4, 4), dtype=dtype))
            room = passes.empty_states(rows, 8).unflatten(0, (2, 4))
            yield f"{algorithm} {dtype} verify", passes.verify(rows, snapshots=room)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, result in calls():
        for output, tensor in result.items():
            print(name, output, hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest())
