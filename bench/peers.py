# SPDX-License-Identifier: Apache-2.0
"""The GPU libraries that ours is measured beside, each where it can be imported.

Each gets the call that it is fastest at: everything that it can do in its kernels is done there, and its
states lie as it likes them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable

import torch

from bench.impls import Impl, keywords, verify_slots
from bench.measure import Call
from cula_testing.cases import Case, Inputs

# chunk_kda would hand its calls to FlashKDA, which is a peer of its own.
os.environ.setdefault("FLA_FLASH_KDA", "0")


def _fla_prefill(inputs: Inputs) -> Call:
    """State V-first as FLA's own layers ask for it."""
    case, q, k, v = inputs.case, inputs.q, inputs.k, inputs.v
    cu = None if inputs.cu_seqlens is None else inputs.cu_seqlens.long()
    common = {
        "output_final_state": True,
        "state_v_first": True,
        "cu_seqlens": cu,
        "scale": case.options["scale"],
    }
    if case.algorithm == "kda":
        from fla.ops.kda import chunk_kda

        named = {**common, **keywords(inputs), "safe_gate": case.gate == "bounded"}
        return lambda: chunk_kda(q, k, v, inputs.g, inputs.beta, **named)
    if case.algorithm == "gdn":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        named = {**common, **keywords(inputs)}
        return lambda: chunk_gated_delta_rule(q, k, v, inputs.g, inputs.beta, **named)
    if case.algorithm == "gla":
        from fla.ops.gla import chunk_gla

        return lambda: chunk_gla(q, k, v, inputs.g, **common)
    # chunk_lightning_attn makes g_gamma from the layer's number and calls this.
    from fla.ops.simple_gla import chunk_simple_gla

    return lambda: chunk_simple_gla(q, k, v, g_gamma=inputs.decay, **common)


def _fla_decode(inputs: Inputs, slots: torch.Tensor) -> Call:
    case, q, k, v, g, beta = inputs.case, inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    common = {**keywords(inputs), "state_v_first": True, "scale": case.options["scale"]}
    if case.algorithm == "kda":
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        named = {
            **common,
            "initial_state": inputs.initial_state,
            "ssm_state_indices": slots,
            "inplace_final_state": True,
            "out": torch.empty_like(v),
        }
        return lambda: fused_recurrent_kda_fwd(q, k, v, g, beta, **named)
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    # It knows no pool: dense states in, new ones out, and nobody has to gather or scatter them.
    states = inputs.initial_state[slots.long()]
    named = {**common, "initial_state": states, "output_final_state": True}
    return lambda: fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **named)


def _fla(pass_name: str, inputs: Inputs) -> Call:
    if pass_name == "prefill":
        return _fla_prefill(inputs)
    if pass_name == "decode":
        return _fla_decode(inputs, inputs.initial_state_indices)
    # A row starts from the slot of its first draft token and leaves that token's state there.
    slots = verify_slots(inputs)
    inputs.initial_state[slots[:, 0].long()] = inputs.initial_state[inputs.initial_state_indices.long()]
    return _fla_decode(inputs, slots)


def _fla_takes(pass_name: str, case: Case) -> bool:
    known = {"prefill": ("kda", "gdn", "gla", "lightning"), "decode": ("kda", "gdn"), "verify": ("kda",)}
    return case.algorithm in known[pass_name]


def _flash_kda(_pass_name: str, inputs: Inputs) -> Call:
    import flash_kda

    case, q = inputs.case, inputs.q
    cu = None if inputs.cu_seqlens is None else inputs.cu_seqlens.long()
    o = torch.empty_like(inputs.v)
    shape = (case.sequences, case.value_heads, case.value_dim, case.key_dim)
    state = torch.empty(shape, dtype=torch.float32, device=q.device)
    named = {"A_log": inputs.A_log, "dt_bias": inputs.dt_bias, "lower_bound": case.lower_bound}

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        flash_kda.fwd(
            q, inputs.k, inputs.v, inputs.g, inputs.beta, case.options["scale"], o,
            **named, final_state=state, cu_seqlens=cu,
        )  # fmt: skip
        return o, state

    return call


def _flash_kda_takes(pass_name: str, case: Case) -> bool:
    shape = case.key_dim == case.value_dim == 128 and case.heads == case.value_heads
    return pass_name == "prefill" and case.algorithm == "kda" and case.gate == "bounded" and shape


def tune_briefly() -> None:
    """From now on Triton times a candidate for 20 ms, not for 100: it chooses as well, and a run has
    thousands."""
    if importlib.util.find_spec("triton") is not None:
        testing = importlib.import_module("triton.testing")
        testing.do_bench = functools.partial(testing.do_bench, warmup=5, rep=20)


PEERS: dict[str, tuple[str, Callable, Callable]] = {
    "flash_kda": ("flash_kda", _flash_kda, _flash_kda_takes),
    "fla": ("fla.ops", _fla, _fla_takes),
}


def peers() -> list[Impl]:
    found = []
    for name, (module, bind, takes) in PEERS.items():
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # a peer that cannot be loaded here is left out, whatever the reason
            print(f"{name} is left out: importing {module}: {error}")
            continue
        found.append(Impl(name, bind, takes))
    return found
