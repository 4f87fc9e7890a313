# SPDX-License-Identifier: Apache-2.0
"""The family of algorithms, as the library lists it (`kAlgorithms` of include/cula/algorithm.h)."""

from __future__ import annotations

from typing import NamedTuple

from . import _ops


class Algorithm(NamedTuple):
    """A pair of a decay and an update."""

    name: str
    mode: str  # the function that takes it, `cula_<mode>`; and the `mode` of decode, verify and segment
    decay: str  # none, head, token or channel: what the decay is constant over, or varies with
    update: str  # additive, delta, erase, product or dplr
    takes_beta: bool
    takes_erase: bool  # an erase strength per key channel, and beta writes alone
    takes_low_rank: bool  # two more keys, a_key and b_key
    takes_several_writes: bool  # k, v and beta may have several rows for each token
    has_diagonal_map: bool  # M of a segment's map is a diagonal `[K]`, not a matrix `[K, K]`


def _read(line: str) -> Algorithm:
    name, mode, decay, update, *answers = line.split("\t")
    return Algorithm(name, mode, decay, update, *(answer == "yes" for answer in answers))


FAMILY = {row.name: row for row in map(_read, _ops.algorithms().splitlines())}
MODES = tuple(dict.fromkeys(row.mode for row in FAMILY.values()))


def algorithms() -> dict[str, Algorithm]:
    """All algorithms by name, with what tells them apart: `algorithm` of `explain` takes these names, and
    `mode` of the functions their modes."""
    return dict(FAMILY)
