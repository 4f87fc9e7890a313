# SPDX-License-Identifier: Apache-2.0
"""A case's inputs as the arguments of the functions of `cula.api`."""

from __future__ import annotations

import cula
from cula_testing.cases import DELTA, PRODUCT, Inputs
from cula_testing.passes import backend_of

# algorithm: (function of cula.api, mode of cula_decode)
FUNCTIONS = {row.name: (getattr(cula, f"cula_{row.mode}"), row.mode) for row in cula.algorithms().values()}


def common(inputs: Inputs, pass_name: str) -> dict:
    """Named arguments that every function takes: how the state decays and is written, and the target."""
    case = inputs.case
    named = {
        "g": inputs.g,
        "beta": inputs.beta,
        "erase": inputs.erase,
        "a_key": inputs.a_key,
        "b_key": inputs.b_key,
        "decay": inputs.decay,
        "A_log": inputs.A_log,
        "dt_bias": inputs.dt_bias,
    }
    given = {name for name, tensor in named.items() if tensor is not None}
    if case.algorithm in PRODUCT:
        given.add("g")  # None says that there is no decay
    named = {name: tensor for name, tensor in named.items() if name in given}
    if case.gate != "log_decay":
        named["use_gate_in_kernel"] = True
    if case.gate == "bounded":
        named["lower_bound"] = case.lower_bound
    if case.algorithm in DELTA:
        named["use_beta_sigmoid_in_kernel"] = case.beta_is_logit
        named["allow_neg_eigval"] = case.allow_neg_eigval
    named |= {"use_qk_l2norm_in_kernel": case.qk_l2norm, "scale": case.scale}
    return {**named, "backend": backend_of(inputs, pass_name) or None}


def prefill(inputs: Inputs, **options):
    """The function of the algorithm: (o, final state)."""
    function, _ = FUNCTIONS[inputs.case.algorithm]
    named = {
        **common(inputs, "prefill"),
        **inputs.states(),
        "cu_seqlens": inputs.cu_seqlens,
        "output_final_state": True,
    }
    return function(inputs.q, inputs.k, inputs.v, **{**named, **options})


def decode(inputs: Inputs, state, **options):
    _, mode = FUNCTIONS[inputs.case.algorithm]
    return cula.cula_decode(
        inputs.q, inputs.k, inputs.v, state, mode=mode, **{**common(inputs, "decode"), **options}
    )


def verify(inputs: Inputs, state, **options):
    _, mode = FUNCTIONS[inputs.case.algorithm]
    named = {**common(inputs, "verify"), "cu_seqlens": inputs.cu_seqlens}
    return cula.cula_verify(inputs.q, inputs.k, inputs.v, state, mode=mode, **{**named, **options})


def segment(inputs: Inputs, **options):
    _, mode = FUNCTIONS[inputs.case.algorithm]
    named = {**common(inputs, "segment"), "cu_seqlens": inputs.cu_seqlens}
    del named["scale"]
    return cula.cula_segment(inputs.q, inputs.k, inputs.v, mode=mode, **{**named, **options})
