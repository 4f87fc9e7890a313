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
    output = inputs.v.nbytes // case.writes
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
    update = FAMILY[case.algorithm][1]
    if update == "dplr":
        return _low_rank_flops(pass_name, case)
    delta = {"additive": False, "delta": True, "erase": True, "product": True}[update]
    of_token, of_write = (_backward_products if pass_name == "backward" else _forward_products)(K, V, delta)
    if pass_name in ("decode", "verify"):
        of_token, of_write = K * V, K * V * (2 if delta else 1)
    return 2 * (of_token + case.writes * of_write) * sum(case.lengths) * case.value_heads


def _low_rank_flops(pass_name: str, case: Case) -> int:
    """Of rules with low-rank keys, by tokens, which is how they are computed: four products of K V numbers
    forwards, and eight backwards after the forward pass has been computed again."""
    products = {"prefill": 4, "decode": 4, "verify": 4, "backward": 3 + 8}[pass_name]
    return 2 * products * case.key_dim * case.value_dim * sum(case.lengths) * case.value_heads


def _forward_products(K: int, V: int, delta: bool) -> tuple[int, int]:
    """Of the query of a token, and of each of its writes."""
    of_token = K * V + CHUNK * (K + V)  # the query's part of output; score, and the scores' part of output
    of_write = K * V  # carry
    return of_token, of_write + (K * V + CHUNK * (K + V) if delta else 0)  # read; L, solve


def _backward_products(K: int, V: int, delta: bool) -> tuple[int, int]:
    """The same, with what is computed again of the forward pass."""
    of_token = CHUNK * K  # score
    of_token += 2 * K * V  # the part of do in the states' gradient; the states' part of dq
    of_token += CHUNK * 2 * (K + V)  # dA and its parts of dq and dk, and of dv
    of_write = K * V  # carry
    of_write += 2 * K * V  # the states' gradient in dv, and in dk
    if not delta:
        return of_token, of_write
    of_write += K * V + CHUNK * (2 * K + V)  # read, L, solve
    of_write += 2 * K * V  # read, the other way; dW
    of_write += CHUNK * (2 * (K + V) + 2 * CHUNK)  # solve
    return of_token, of_write + CHUNK * 2 * K  # dL and its parts of dk
