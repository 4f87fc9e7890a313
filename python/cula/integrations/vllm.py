# SPDX-License-Identifier: Apache-2.0
"""These kernels in vLLM: prefill, decode and verification of drafts of GDN and KDA.

vLLM loads its plug-ins itself (entry point group `vllm.general_plugins`), in each of its processes: where
this library is installed beside vLLM, nothing has to be called. `VLLM_PLUGINS` chooses among plug-ins, and

    CULA_VLLM=0               switches this one off
    CULA_VLLM=prefill,verify  leaves what is not named (here: decode) to vLLM's kernels

Both are read when vLLM starts. What is not taken runs on vLLM's own kernels, and `calls` has the sentence, in
each process for itself; vLLM's log has it once. Read from vLLM 0.33.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from . import _vllm_functions as functions
from . import _vllm_layers as layers
from ._calls import Calls
from ._functions import Substitute, around, rebind
from ._on_import import when_imported

__all__ = ["calls", "register", "unregister"]

# Below vLLM's own logger, whose handlers it so has.
_log = logging.getLogger("vllm.cula")


def _say(function: str, ran: str) -> None:
    if ran == "cula":
        _log.info("%s runs on cula", function)
    else:
        _log.info("%s runs on vLLM's own kernels: %s", function, ran)


calls = Calls(_say)

_VARIABLE = "CULA_VLLM"
_OPERATORS = "vllm.third_party.flash_linear_attention.ops"
_KIMI = "vllm.models.kimi_k3.nvidia"
_GLM = "vllm.models.glm5next.nvidia"
_GDN_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"

# vLLM's functions, by the module that has them, and those here.
_FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    _OPERATORS: {
        "chunk_gated_delta_rule": functions.chunk_gated_delta_rule,
        "fused_recurrent_gated_delta_rule": functions.fused_recurrent_gated_delta_rule,
        "fused_recurrent_gated_delta_rule_packed_decode": (
            functions.fused_recurrent_gated_delta_rule_packed_decode
        ),
        "fused_sigmoid_gating_delta_rule_update": functions.fused_sigmoid_gating_delta_rule_update,
    },
    f"{_OPERATORS}.kda": {
        "chunk_kda": functions.log_decay_chunk,
        "fused_recurrent_kda": functions.log_decay_recurrent,
        "fused_recurrent_kda_fwd": functions.log_decay_recurrent_fwd,
    },
    f"{_KIMI}.ops.third_party.kda": {
        "chunk_kda_with_fused_gate": functions.kimi_chunk,
        "fused_recurrent_kda": functions.kimi_recurrent,
        "fused_recurrent_kda_packed_decode": functions.kimi_packed_decode,
    },
    f"{_KIMI}.kda": {"_flashkda_prefill": functions.kimi_flashkda},
    f"{_GLM}.ops.third_party.kda": {
        "chunk_kda_with_fused_gate": functions.glm_chunk,
        "fused_recurrent_kda": functions.glm_recurrent,
    },
}

_lock = threading.RLock()
_registered = False
_waiting: list[Callable[[], None]] = []
_replaced: list[tuple[object, object]] = []
_classes: dict[str, type] = {}


def register() -> tuple[str, ...]:
    """Puts this library behind vLLM's functions of linear attention and its layer of GDN, where vLLM has
    imported them, and as soon as it imports them elsewhere. Layers that are made after it are ours; functions
    are replaced under every name. Calling it again is harmless.

    Returns the names of what is replaced so far, none with CULA_VLLM=0. Raises ImportError where vLLM is not
    installed, and ValueError for a CULA_VLLM that names no pass.
    """
    global _registered
    passes = _passes(os.environ.get(_VARIABLE, "1"))
    with _lock:
        if not passes:
            return ()
        if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
            raise ImportError("cula.integrations.vllm: vLLM is not installed", name="vllm")
        if not _registered:
            _registered = True
            functions.enabled.clear()
            functions.enabled.update(passes)
            for path in _FUNCTIONS:
                _waiting.append(when_imported(path, functools.partial(_replace_in, path)))
            _waiting.append(when_imported(_GDN_LAYER, _replace_layer))
        names = [f"{each.__module__}.{each.__name__}" for each, _ in _replaced]  # type: ignore[attr-defined]
        return tuple(sorted((*names, *(f"{_GDN_LAYER}.{name}" for name in _classes))))


def plug_in() -> None:
    """`register` as vLLM calls it. vLLM starts without this library where that fails, with a warning."""
    try:
        register()
    except Exception as error:
        warnings.warn(f"cula.integrations.vllm: not registered: {error}", stacklevel=2)


def unregister() -> None:
    """Takes out what `register` put there: every function, under every name, and the classes. Layers that
    have been made stay what they are. Does nothing where nothing is registered. `calls` stays."""
    global _registered
    with _lock:
        for forget in _waiting:
            forget()
        _waiting.clear()
        rebind([(ours, theirs) for theirs, ours in _replaced])
        _replaced.clear()
        if _classes:
            registry = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
            for name, ours in _classes.items():
                if registry.get(name) is ours:
                    del registry[name]
            _classes.clear()
        _registered = False


def _passes(value: str) -> tuple[str, ...]:
    """The passes that the environment variable names."""
    words = tuple(word.strip() for word in value.lower().split(",") if word.strip())
    if words in ((), ("0",), ("off",), ("false",), ("no",)):
        return ()
    if words in (("1",), ("on",), ("true",), ("yes",)):
        return functions.PASSES
    if unknown := [word for word in words if word not in functions.PASSES]:
        raise ValueError(
            f"{_VARIABLE} must be 0, 1 or some of {', '.join(functions.PASSES)}, got {unknown[0]!r}"
        )
    return words


def _replace_in(path: str) -> None:
    module = importlib.import_module(path)
    with _lock:
        if not _registered:
            return
        made = []
        for name, ours in _FUNCTIONS[path].items():
            theirs = getattr(module, name, None)
            if theirs is not None:  # else of another version
                made.append((theirs, around(theirs, Substitute(name, theirs, ours, calls), lambda: True)))
        rebind(made)
        _replaced.extend(made)


def _replace_layer() -> None:
    gdn, custom_op = (importlib.import_module(path) for path in (_GDN_LAYER, "vllm.model_executor.custom_op"))
    with _lock:
        if not _registered:
            return
        if absent := layers.missing(gdn):
            warnings.warn(
                f"cula.integrations.vllm: the layer of GDN stays vLLM's, since this version has no "
                f"{absent[0]}",
                stacklevel=2,
            )
            return
        for name, base, make in (
            (layers.OPERATOR, custom_op.CustomOp, layers.make_operator),
            (layers.LAYER, custom_op.PluggableLayer, layers.make_layer),
        ):
            if name in custom_op.op_registry_oot:
                warnings.warn(
                    f"cula.integrations.vllm: another plug-in stands for {name}: it stays", stacklevel=2
                )
                continue
            _classes[name] = base.register_oot(name=name)(make(gdn, calls))
