# SPDX-License-Identifier: Apache-2.0
"""These kernels behind the functions of flash-linear-attention (FLA), forward and backward.

    import cula.integrations.fla
    cula.integrations.fla.register()  # or CULA_FLA=1 in the environment

FLA's layers and models then run on this library, where it takes a call. Where it does not, FLA's own code
runs, and `calls` has the sentence. `FLA_CULA=0` switches it off, and is read at every call. Read from FLA
0.5.2 and 0.6.0.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import (
    api,
    delta_rule,
    gated_delta_product,
    gdn,
    gdn2,
    generalized_delta_rule,
    gla,
    kda,
    lightning,
    linear_attn,
    retention,
    rwkv7,
    simple_gla,
)
from . import _fla_cpu
from ._calls import Calls
from ._fla_registries import Registries, enabled
from ._functions import Substitute, around, rebind

__all__ = ["calls", "register", "unregister"]

calls = Calls()

_lock = threading.RLock()
_registries: Registries | None = None
_registered: dict[str, str] = {}
_wrapped: list[tuple[object, object]] = []


def _paged_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd` with a pool of states: decode, and verification
    of draft tokens. Row n starts from slot `ssm_state_indices[n, num_accepted_tokens[n] - 1]`, and the state
    after its token t goes to slot `ssm_state_indices[n, t]`."""
    named = {"use_gate_in_kernel": use_gate_in_kernel, "lower_bound": lower_bound, "out": out}
    return _paged(
        "fused_recurrent_kda_fwd", "kda", q, k, v, g, beta, A_log, dt_bias, initial_state,
        inplace_final_state, ssm_state_indices, num_accepted_tokens, cu_seqlens=cu_seqlens, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, **named,
    )  # fmt: skip


def _paged_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`fla.ops.gdn2.fused_recurrent.fused_recurrent_gdn2_fwd` with a pool of states, as `_paged_kda`."""
    named = {"use_gate_in_kernel": use_gate_in_kernel, "lower_bound": lower_bound, "out": out}
    return _paged(
        "fused_recurrent_gdn2_fwd", "gdn2", q, k, v, g, w, A_log, dt_bias, initial_state, inplace_final_state,
        ssm_state_indices, num_accepted_tokens, cu_seqlens=cu_seqlens, scale=scale, erase=b,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first, **named,
    )  # fmt: skip


def _paged(
    name: str,
    mode: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor | None,
    in_place: bool,
    slots: Tensor | None,
    num_accepted: Tensor | None,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    if slots is None or pool is None or not in_place:
        raise NotImplementedError(
            f"{name} runs here where a pool is updated in place: ssm_state_indices, "
            "initial_state and inplace_final_state=True"
        )
    if not named["use_gate_in_kernel"]:  # FLA does not look at the gate's parameters then
        A_log = dt_bias = named["lower_bound"] = None
    elif A_log is None and named["lower_bound"] is None:
        A_log = g.new_ones(v.shape[2], dtype=torch.float32)
    o, _ = api.cula_verify(
        q, k, v, pool, mode=mode, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, num_accepted=num_accepted,
        state_indices=slots if slots.dim() == 2 else slots.unsqueeze(1), **named,
    )  # fmt: skip
    return o, pool


# From so many tokens on, those calls of chunk_rwkv7 and chunk_dplr_delta_rule on a GPU that have no chunks
# here are left to FLA, whose kernels work in chunks: float32 inputs, and K below 16 or above 128. It is the
# number from which FLA's own layer calls chunk_rwkv7 in inference. From how many tokens on FLA is in fact
# faster has not been measured on a GPU.
TOKENS_LEFT_TO_FLA = 64


def _in_chunks_on_gpus(ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, but calls on a GPU of TOKENS_LEFT_TO_FLA tokens or more are refused where they have no chunks;
    tokens of packed sequences are counted together, since their lengths lie on the device. With a cp_context
    they are refused whatever their length: ranks may have different numbers of tokens, and have to decide
    alike."""
    query = next(iter(inspect.signature(ours).parameters))

    @functools.wraps(ours)
    def call(**given: object) -> object:
        q = given.get(query)
        if (
            isinstance(q, Tensor)
            and q.is_cuda
            and q.dim() == 4
            and (q.dtype == torch.float32 or not 16 <= q.shape[3] <= 128)
        ):
            calls_of = ""
            if given.get("cp_context") is not None:
                calls_of = "calls with cp_context"
            elif q.shape[1] >= TOKENS_LEFT_TO_FLA:
                calls_of = f"calls of {TOKENS_LEFT_TO_FLA} tokens or more"
            if calls_of:
                raise NotImplementedError(
                    f"on a GPU {calls_of} are left to FLA, which works in chunks: cula takes float32, and K "
                    "below 16 or above 128, token by token"
                )
        return ours(**given)

    return call


# FLA's packages below fla.ops, each with the functions that it has, and those here.
_OPERATORS: dict[str, tuple[Callable[..., Any], ...]] = {
    "kda": (kda.chunk_kda, kda.fused_recurrent_kda),
    "gated_delta_rule": (gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule),
    "gdn2": (gdn2.chunk_gdn2, gdn2.fused_recurrent_gdn2),
    "gated_delta_product": (gated_delta_product.chunk_gated_delta_product,),
    "rwkv7": (
        _in_chunks_on_gpus(rwkv7.chunk_rwkv7),
        rwkv7.fused_recurrent_rwkv7,
        rwkv7.fused_mul_recurrent_rwkv7,
    ),
    "generalized_delta_rule.dplr": (
        _in_chunks_on_gpus(generalized_delta_rule.chunk_dplr_delta_rule),
        generalized_delta_rule.fused_recurrent_dplr_delta_rule,
    ),
    "gla": (gla.chunk_gla, gla.fused_recurrent_gla),
    "simple_gla": (
        simple_gla.chunk_simple_gla,
        simple_gla.fused_chunk_simple_gla,
        simple_gla.fused_recurrent_simple_gla,
    ),
    "delta_rule": (delta_rule.chunk_delta_rule, delta_rule.fused_recurrent_delta_rule),
    "lightning_attn": (lightning.chunk_lightning_attn, lightning.fused_recurrent_lightning_attn),
    "linear_attn": (
        linear_attn.chunk_linear_attn,
        linear_attn.fused_chunk_linear_attn,
        linear_attn.fused_recurrent_linear_attn,
    ),
    "retention": (
        retention.chunk_retention,
        retention.fused_chunk_retention,
        retention.fused_recurrent_retention,
    ),
}


def register() -> dict[str, str]:
    """Puts this library behind FLA's functions; where it was before, nothing changes.

    Returns, by FLA's name of the function, how calls get here: "dispatched", since FLA asks its backends
    itself; "wrapped" in FLA's own dispatch, in every module that had imported the function; or "plain
    PyTorch", for the parts of FLA's layers that this library has no kernel for, on machines without an
    accelerator, where short convolutions and RMSNorms are wrapped too.

    Raises ImportError where FLA, or Triton, which FLA's operators need, cannot be imported. Warns and does
    nothing where FLA was imported with FLA_DISABLE_BACKEND_DISPATCH=1.
    """
    global _registries
    with _lock:
        try:
            importlib.import_module("fla")  # which may call this, with CULA_FLA=1
            if _registries is not None:
                return dict(_registered)
            registries = Registries()
            for operation in _OPERATORS:
                _import_operators(operation)
        except ImportError as error:
            raise ImportError(
                "cula.integrations.fla needs flash-linear-attention 0.5 or later, and Triton, which its "
                f"operators import: {error}",
                name=error.name,
            ) from error
        if registries.disabled:
            warnings.warn(
                "FLA_DISABLE_BACKEND_DISPATCH=1 was set when fla was imported: cula is not registered",
                stacklevel=2,
            )
            return {}
        _registries = registries
        try:
            for operation, functions in _OPERATORS.items():
                for ours in functions:
                    _put(f"fla.ops.{operation}", operation, ours.__name__, ours)
            _put("fla.ops.kda.fused_recurrent", "kda", "fused_recurrent_kda_fwd", _paged_kda)
            _put("fla.ops.gdn2.fused_recurrent", "gdn2", "fused_recurrent_gdn2_fwd", _paged_gdn2)
            if not torch.accelerator.is_available():
                for (path, name), ours in _fla_cpu.FUNCTIONS.items():
                    _put(path, "modules", name, ours, "cula" if name in _fla_cpu.KERNELS else "PyTorch")
            rebind(_wrapped)
        except BaseException:
            unregister()
            raise
        return dict(_registered)


def unregister() -> None:
    """Leaves FLA as `register()` found it: its registries, and every function under every name. Does nothing
    where nothing is registered. `calls` stays."""
    global _registries
    with _lock:
        rebind([(made, theirs) for theirs, made in _wrapped])
        _wrapped.clear()
        if _registries is not None:
            _registries.restore()
        _registries = None
        _registered.clear()


def _import_operators(operation: str) -> None:
    try:
        importlib.import_module(f"fla.ops.{operation}")
    except ModuleNotFoundError as error:
        if error.name != f"fla.ops.{operation}":
            raise  # else FLA is of a version that has not all of them


def _put(path: str, operation: str, name: str, ours: Callable[..., Any], runs_as: str = "cula") -> None:
    """Puts `ours` behind one function, if FLA has it."""
    assert _registries is not None
    try:
        theirs = getattr(importlib.import_module(path), name, None)
    except ModuleNotFoundError:  # of another version
        return
    if theirs is None:
        return
    substitute = Substitute(name, theirs, ours, calls, runs_as)
    how = "dispatched"
    if not _registries.enter(theirs, operation, substitute):
        made = _registries.dispatch(theirs, operation, substitute)
        if made is None:
            registries = _registries
            made = around(theirs, substitute, lambda: _registries is registries and enabled())
        _wrapped.append((theirs, made))
        how = "wrapped"
    _registered[name] = how if runs_as == "cula" else "plain PyTorch"
