# SPDX-License-Identifier: Apache-2.0
"""What the suites measure beside what every machine has (cula.bench.impls): forced targets, and a limit of
length for all that is compared. bench/peers.py has the libraries of GPUs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import cula
from cula.bench.impls import COPY_STATE, EAGER_CHUNK, EAGER_RECURRENT, OURS, PREFILL, Impl, cula_bind
from cula_testing.cases import TRAINING_PASSES, Case

# Peers and forced backends run up to this length; the longer cases show how our own time grows.
COMPARED_TOKENS = 4096


def _comparable(case: Case) -> bool:
    return sum(case.lengths) <= COMPARED_TOKENS


def _may_keep(pass_name: str, case: Case) -> bool:
    """Whether the function of the algorithm has the option."""
    options = inspect.signature(PREFILL[case.algorithm]).parameters
    return pass_name in TRAINING_PASSES and "disable_recompute" in options


# The backward pass is told what the forward pass knows.
KEEPS = Impl("cula:disable_recompute", cula_bind(None, disable_recompute=True), _may_keep)

# The kernels that every GPU has, where dispatch prefers those of Hopper.
PORTABLE = Impl("cula:sm80", cula_bind("sm80"), lambda p, _case: p == "prefill")

# What dispatch picks for few heads, forced also where it does not.
JOINED = Impl(
    "cula:sm90:joined",
    cula_bind("sm90:joined"),
    lambda p, case: p == "prefill" and case.algorithm == "kda" and case.gate != "log_decay",
)


def cpu_impls() -> list[Impl]:
    """What dispatch picks, each CPU target of this machine by name, and what runs on any machine."""
    rows = cula.explain(device="cpu")
    found = [row.target for row in rows if row.verdict != "no" and not row.target.startswith("reference")]

    def comparable(*pass_names: str) -> Callable[[str, Case], bool]:
        return lambda pass_name, case: pass_name in pass_names and _comparable(case)

    return [
        OURS,
        *(Impl(f"cula:{name}", cula_bind(name), comparable("prefill", "decode", "verify")) for name in found),
        dataclasses.replace(EAGER_CHUNK, takes=comparable("prefill", *TRAINING_PASSES)),
        dataclasses.replace(EAGER_RECURRENT, takes=comparable("prefill", "decode")),
        COPY_STATE,
    ]
