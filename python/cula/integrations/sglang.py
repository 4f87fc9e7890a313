# SPDX-License-Identifier: Apache-2.0
"""These kernels in SGLang: prefill, decode and verification of drafts of GDN and KDA.

SGLang loads its plug-ins itself (entry point group `sglang.srt.plugins`), in each of its processes, and its
hooks import SGLang's backends of GDN and KDA with them. No kernel is another until this plug-in is chosen,
for all passes or for some:

    sglang serve --model-path ... --linear-attn-backend cula --linear-attn-verify-backend cula

    --linear-attn-decode-backend, --linear-attn-prefill-backend, --linear-attn-verify-backend

`SGLANG_PLUGINS` chooses among plug-ins, and `CULA_SGLANG=0` switches this one off; both are read when SGLang
starts. What is not taken runs on SGLang's Triton kernels, and `calls` has the sentence. Read from SGLang
0.5.23.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, get_type_hints

from ._calls import Calls
from ._sglang_kernels import make_kernel

__all__ = ["calls", "register", "unregister"]

NAME = "cula"

_log = logging.getLogger(__name__)


def _say(function: str, ran: str) -> None:
    if ran == "cula":
        _log.info("%s runs on cula", function)
    else:
        _log.info("%s runs on SGLang's Triton kernel: %s", function, ran)


calls = Calls(_say)

_LINEAR = "sglang.srt.layers.attention.linear"
_CHOICES = "sglang.srt.arg_groups.choices"
# Of each algorithm the class that chooses its kernels, and the Triton kernel that ours extends.
_DISPATCHERS = {
    "gdn": (f"{_LINEAR}.gdn_backend", "GDNKernelDispatcher", "TritonGDNKernel"),
    "kda": (f"{_LINEAR}.kda_backend", "KDAKernelDispatcher", "TritonKDAKernel"),
}

_lock = threading.RLock()
_registered = False
_hooked: object = None  # the registry that has the hooks: it has no way to take them out again


class _Dispatcher(Protocol):
    """What SGLang's dispatchers have."""

    decode_kernel: object
    extend_kernel: object
    verify_kernel: object
    tree_verify_kernel: object
    supports_packed_decode: bool
    supports_packed_decode_safe_gate: bool


class _Backend(Protocol):
    def is_custom(self) -> bool: ...


def register() -> tuple[str, ...]:
    """Makes "cula" a choice of `--linear-attn-backend` and of its three relatives, and puts this library's
    kernels where SGLang's dispatchers are made for it. Calling it again is harmless.

    SGLang applies hooks once its plug-ins have run; a call outside of that applies them at once.

    Returns the options that have the choice, none with CULA_SGLANG=0. Raises ImportError where SGLang is not
    installed.
    """
    global _registered, _hooked
    with _lock:
        if os.environ.get("CULA_SGLANG", "1") in ("", "0"):
            return ()
        if "sglang" not in sys.modules and importlib.util.find_spec("sglang") is None:
            raise ImportError("cula.integrations.sglang: SGLang is not installed", name="sglang")
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        for choices in _lists():
            if NAME not in choices:
                choices.append(NAME)
        _registered = True
        if _hooked is not hooks.HookRegistry:
            _hooked = hooks.HookRegistry
            for algorithm, (path, dispatcher, _) in _DISPATCHERS.items():
                target = f"{path}.{dispatcher}.__init__"
                hooks.HookRegistry.register(target, _around(algorithm), hooks.HookType.AROUND)
        if hooks._current_plugin_source.get() is None:
            hooks.HookRegistry.apply_hooks()
        passes = ("", "decode-", "prefill-", "verify-")
        return tuple(f"--linear-attn-{name}backend {NAME}" for name in passes)


def unregister() -> None:
    """Takes the choice out again; a dispatcher that is made from then on is SGLang's own, and one that has
    been made stays what it is. `calls` stays."""
    global _registered
    with _lock:
        if _registered:
            for choices in _lists():
                while NAME in choices:
                    choices.remove(NAME)
        _registered = False


# Not by SGLang's add_linear_attn_kernel_backend_choices: it extends the first of these lists whether or not
# the name is in it, does not reach the second, and has no counterpart that takes a name out again.
def _lists() -> list[list[str]]:
    """SGLang's list of choices, and that of verification, which SGLang makes of it on import."""
    lists = [importlib.import_module(_CHOICES).LINEAR_ATTN_KERNEL_BACKEND_CHOICES]
    arguments = sys.modules.get("sglang.srt.server_args")
    if arguments is not None:
        hint = get_type_hints(arguments.ServerArgs, include_extras=True)["linear_attn_verify_backend"]
        lists += [each.choices for each in hint.__metadata__ if getattr(each, "choices", None) is not None]
    return lists


def _names() -> tuple[str | None, str | None, str | None]:
    """What was chosen for decode, prefill and verification, by name: to SGLang's dispatchers every plug-in is
    CUSTOM."""
    chosen = importlib.import_module(f"{_LINEAR}.utils").get_exec().mamba
    base = chosen.linear_attn_backend
    return (
        chosen.linear_attn_decode_backend or base,
        chosen.linear_attn_prefill_backend or base,
        chosen.linear_attn_verify_backend,
    )


def _triton(backend: object) -> object:
    kind: Any = type(backend)  # LinearAttnKernelBackend
    return kind("triton")


def _around(algorithm: str) -> Callable[..., None]:
    """Makes a dispatcher with Triton in the place of this library's kernels, and puts those there."""
    path, _, triton = _DISPATCHERS[algorithm]

    def around(original: Callable[..., None], dispatcher: _Dispatcher, *args: Any, **kwargs: Any) -> None:
        names = ("decode_backend", "prefill_backend", "verify_backend")
        given = [args[at] if at < len(args) else kwargs.get(name) for at, name in enumerate(names)]
        ours = [False] * 3
        if _registered and any(each is not None and each.is_custom() for each in given):
            ours = [
                each is not None and each.is_custom() and name == NAME
                for each, name in zip(given, _names(), strict=True)
            ]
        # By place: every plug-in's backend is one and the same object.
        plain = [_triton(each) if own else each for each, own in zip(given, ours, strict=True)]
        named = {name: plain[at] for at, name in enumerate(names) if name in kwargs}
        original(dispatcher, *plain[: len(args)], *args[3:], **{**kwargs, **named})
        if not any(ours):
            return
        kernel = make_kernel(algorithm, getattr(importlib.import_module(path), triton), calls)()
        if ours[0]:
            dispatcher.decode_kernel = kernel
            dispatcher.supports_packed_decode = dispatcher.supports_packed_decode_safe_gate = True
        if ours[1]:
            dispatcher.extend_kernel = kernel
        if ours[2]:
            dispatcher.verify_kernel = kernel
            if hasattr(dispatcher, "tree_verify_kernel"):
                dispatcher.tree_verify_kernel = kernel
        passes = (name for name, mine in zip(("decode", "prefill", "verify"), ours, strict=True) if mine)
        _log.info("%s: cula runs %s", algorithm.upper(), ", ".join(passes))

    return around
