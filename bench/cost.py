# SPDX-License-Identifier: Apache-2.0
"""The bytes and the floating-point operations that a call cannot do without."""

from __future__ import annotations

from cula_testing.cases import FAMILY, Case, Inputs

CHUNK = 64


def state_bytes(case: Case) -> int:
    return case.value_heads * case.key_dim * case.value_dim * case.state_dtype.itemsize


def moved_bytes(pass_name: str, inputs: Inputs) -> int:
    """Every input read once, every output written once."""
    case = inputs.case
    streams = sum(x.numel() * x.element_size() for x in inputs.tensors().values() if x is not None)
    output = inputs.v.numel() * inputs.v.element_size()
    read = 0 if inputs.initial_state is None else case.sequences
    written = sum(case.lengths) if pass_name == "verify" else case.sequences
    return streams + output + (read + written) * state_bytes(case)


def flops(pass_name: str, case: Case) -> int:
    """Multiplications and additions of the products: a prefill's in the 64-token chunk form, else the
    recurrence's."""
    K, V = case.key_dim, case.value_dim
    delta = {"additive": False, "delta": True}[FAMILY[case.algorithm][1]]
    products = K * V * (3 if delta else 2)  # read (delta), carry, and the query's part of output
    if pass_name == "prefill":
        products += (
            CHUNK * (K + V) * (2 if delta else 1)
        )  # score and the scores' part of output; L and solve (delta)
    return 2 * products * sum(case.lengths) * case.value_heads
