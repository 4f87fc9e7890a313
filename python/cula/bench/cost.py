# SPDX-License-Identifier: Apache-2.0
"""The bytes and the floating-point operations that a call cannot do without."""

from __future__ import annotations

from . import training
from .cases import FAMILY, Case, Inputs

CHUNK = 64


def state_bytes(case: Case) -> int:
    return case.value_heads * case.key_dim * case.value_dim * case.state_dtype.itemsize


def drafts(case: Case) -> int:
    """The states that a verification writes."""
    return 0 if case.reads_only else sum(case.lengths)


def moved_bytes(pass_name: str, inputs: Inputs) -> int:
    """Every input read once, every output written once; those of a step by each of its two passes."""
    case = inputs.case
    streams = sum(x.nbytes for x in inputs.tensors().values() if x is not None)
    output = inputs.v.nbytes
    if isinstance(inputs, training.Step):
        gradients = sum(getattr(inputs, name).nbytes for name in training.names(inputs))
        ahead = streams - inputs.d_o.nbytes + output
        return streams + gradients + (ahead if pass_name == "train" else 0)
    read = 0 if inputs.initial_state is None else case.sequences
    written = drafts(case) if pass_name == "verify" else case.sequences
    return streams + output + (read + written) * state_bytes(case)


def flops(pass_name: str, case: Case) -> int:
    """Multiplications and additions of the products: those of a prefill and of a backward pass in the
    64-token chunk form, else the recurrence's."""
    if pass_name == "train":
        return flops("prefill", case) + flops("backward", case)
    K, V = case.key_dim, case.value_dim
    delta = {"additive": False, "delta": True, "erase": True}[FAMILY[case.algorithm][1]]
    if pass_name == "backward":
        products = _backward_products(K, V, delta)
    else:
        products = K * V * (3 if delta else 2)  # read (delta), carry, and the query's part of output
        if pass_name == "prefill":
            products += (
                CHUNK * (K + V) * (2 if delta else 1)
            )  # score and the scores' part of output; L and solve (delta)
    return 2 * products * sum(case.lengths) * case.value_heads


def _backward_products(K: int, V: int, delta: bool) -> int:
    """Of one token, with what is computed again of the forward pass."""
    again = K * V + CHUNK * K  # carry, score
    carry = 2 * K * V  # of the states' gradient
    of_states = 2 * K * V  # their parts of dq and dk
    of_scores = CHUNK * 2 * (K + V)  # dA and its parts of dq and dk, and of dv
    if not delta:
        return again + carry + of_states + of_scores
    again += K * V + CHUNK * (2 * K + V)  # read, L, solve
    carry += K * V  # read, the other way
    of_states += K * V  # dW
    solve = CHUNK * (2 * (K + V) + 2 * CHUNK)
    return again + carry + of_states + of_scores + solve + CHUNK * 2 * K  # dL and its parts of dk
