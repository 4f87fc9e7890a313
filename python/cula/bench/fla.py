# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention (FLA) as a peer: each call as FLA is fastest at it, its states as its own layers lay
them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import training
from .cases import TRAINING_PASSES, Case, Inputs
from .eager import log_decay
from .impls import Bind, Impl, keywords, verify_slots
from .measure import Call

# chunk_kda would hand its calls to FlashKDA, which is a peer of its own.
os.environ.setdefault("FLA_FLASH_KDA", "0")


def _strengths(inputs: Inputs, named: dict[str, Any]) -> list[torch.Tensor]:
    """b and w of GDN-2, whose functions know no logits of either."""
    logits = named.pop("use_beta_sigmoid_in_kernel", False)
    return [x.sigmoid() if logits else x for x in (inputs.erase, inputs.beta)]


def _fla_product(inputs: Inputs, **named: Any) -> Call:
    """Gated DeltaProduct: it knows neither raw gates, nor logits of beta, nor states V-first."""
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    case, g = inputs.case, log_decay(inputs)
    beta = inputs.beta.sigmoid() if case.beta_is_logit else inputs.beta
    named = {**named, "num_householder": case.writes, "use_qk_l2norm_in_kernel": case.qk_l2norm}
    del named["state_v_first"]

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        o, state = chunk_gated_delta_product(inputs.q, inputs.k, inputs.v, g, beta, **named)
        return o, None if state is None else state.mT

    return call


def _fla_low_rank(inputs: Inputs, **named: Any) -> Call:
    """RWKV-7: it knows no raw gates, and states K-first alone."""
    from fla.ops.rwkv7 import chunk_rwkv7

    x, g = inputs, log_decay(inputs)
    del named["state_v_first"]

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        o, state = chunk_rwkv7(x.q, g, x.k, x.v, x.a_key, x.b_key, **named)
        return o, None if state is None else state.mT

    return call


def _fla_chunk(inputs: Inputs, **more: Any) -> Call:
    """State V-first as FLA's own layers ask for it."""
    case, q, k, v = inputs.case, inputs.q, inputs.k, inputs.v
    common = {
        "state_v_first": True,
        "cu_seqlens": inputs.cu_seqlens,
        "scale": case.options["scale"],
        **more,
    }
    if case.algorithm == "kda":
        from fla.ops.kda import chunk_kda

        named = {**common, **keywords(inputs), "safe_gate": case.gate == "bounded"}
        named["dt_bias"] = inputs.dt_bias.flatten()  # as its gradient is
        return lambda: chunk_kda(q, k, v, inputs.g, inputs.beta, **named)
    if case.algorithm == "gdn2":
        from fla.ops.gdn2 import chunk_gdn2

        named = {**common, **keywords(inputs), "safe_gate": case.gate == "bounded"}
        named["dt_bias"] = inputs.dt_bias.flatten()  # as its gradient is
        strengths = _strengths(inputs, named)
        return lambda: chunk_gdn2(q, k, v, inputs.g, *strengths, **named)
    if case.algorithm == "gdn":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        named = {**common, **keywords(inputs)}
        return lambda: chunk_gated_delta_rule(q, k, v, inputs.g, inputs.beta, **named)
    if case.algorithm == "gdp":
        return _fla_product(inputs, **common)
    if case.algorithm == "rwkv7":
        return _fla_low_rank(inputs, **common)
    if case.algorithm == "delta":
        from fla.ops.delta_rule import chunk_delta_rule

        # It knows neither logits of beta nor states V-first, and is asked for no state.
        beta = inputs.beta.sigmoid() if case.beta_is_logit else inputs.beta
        named = {**common, "use_qk_l2norm_in_kernel": case.qk_l2norm}
        del named["state_v_first"]
        return lambda: chunk_delta_rule(q, k, v, beta, **named)
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
    # The others know no pool: dense states in, new ones out, and nobody has to gather or scatter them.
    states = inputs.initial_state[slots.long()]
    named = {**common, "initial_state": states, "output_final_state": True}
    if case.algorithm == "gdn2":
        from fla.ops.gdn2 import fused_recurrent_gdn2

        strengths = _strengths(inputs, named)
        return lambda: fused_recurrent_gdn2(q, k, v, g, *strengths, **named)
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return lambda: fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **named)


def _fla(**of_training: Any) -> Bind:
    def bind(pass_name: str, inputs: Inputs) -> Call:
        if inputs.cu_seqlens is not None:
            inputs = inputs.but(cu_seqlens=inputs.cu_seqlens.long())
        if pass_name in TRAINING_PASSES:
            return training.bind(pass_name, inputs, lambda given: _fla_chunk(given, **of_training)()[0])
        if pass_name == "prefill":
            return _fla_chunk(inputs, output_final_state=True)
        if pass_name == "decode":
            return _fla_decode(inputs, inputs.initial_state_indices)
        # A row starts from the slot of its first draft token and leaves that token's state there.
        slots = verify_slots(inputs)
        inputs.initial_state[slots[:, 0].long()] = inputs.initial_state[inputs.initial_state_indices.long()]
        return _fla_decode(inputs, slots)

    return bind


def _fla_takes(pass_name: str, case: Case) -> bool:
    prefilled = ("kda", "gdn", "gla", "lightning", "gdn2", "gdp")
    known = {"prefill": (*prefilled, "rwkv7"), "decode": ("kda", "gdn", "gdn2"), "verify": ("kda",)}
    if pass_name in ("decode", "verify") and (case.reads_only or case.state_dtype != torch.float32):
        return False  # its verification keeps states, and its layers' states are float32
    return case.algorithm in known.get(pass_name, (*prefilled, "delta", "rwkv7"))


def _fla_keeps(pass_name: str, case: Case) -> bool:
    """KDA's backward pass recomputes most of the forward pass, unless it is told to keep that."""
    return pass_name in TRAINING_PASSES and case.algorithm == "kda"


FLA = Impl("fla", _fla(), _fla_takes)
FLA_KEEPS = Impl("fla:disable_recompute", _fla(disable_recompute=True), _fla_keeps)
MODULE = "fla.ops"


def importable(rows: Iterable[tuple[str, Impl]], say: Callable[[str], object] = print) -> list[Impl]:
    """Of modules and what is measured of each, the latter where the module can be imported; of one that is
    installed and cannot be, `say` is told why."""
    found = []
    for module, impl in rows:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # a peer that cannot be loaded here is left out, whatever the reason
            say(f"{impl.name} is left out: importing {module}: {error}")
            continue
        found.append(impl)
    return found


def prepare() -> None:
    """From now on FLA's own kernels run, where cula.integrations.fla is registered too. Triton times a
    candidate for 20 ms, not for 100: it chooses as well, and a run has thousands."""
    os.environ["FLA_CULA"] = "0"
    if importlib.util.find_spec("triton") is not None:
        testing: Any = importlib.import_module("triton.testing")
        testing.do_bench = functools.partial(testing.do_bench, warmup=5, rep=20)
