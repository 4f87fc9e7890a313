# SPDX-License-Identifier: Apache-2.0
"""A package `sglang` that has what `cula.integrations.sglang` meets of SGLang: hooks, lists of choices, the
dispatchers of GDN and KDA, and Triton kernels, which are those of `engine_kernels`.

Written from what version 0.5.23 does, not from its text.
"""

# ruff: noqa: ARG002, ARG003  (methods have the whole signature of SGLang's)

from __future__ import annotations

import contextvars
import enum
import functools
import importlib
import pkgutil
from itertools import pairwise
from types import SimpleNamespace
from typing import Annotated, Any, Optional

import pytest
import torch

from cula_testing import engine_kernels as kernels
from cula_testing import packages

LINEAR = "sglang.srt.layers.attention.linear"
H, HV, K, V = 2, 4, 64, 32


class HookType(enum.Enum):
    BEFORE, AFTER, AROUND, REPLACE = "before", "after", "around", "replace"


def hook_registry() -> type:
    class HookRegistry:
        hooks: list[tuple[str, Any]] = []  # noqa: RUF012  (one for each class that is made)
        patched: set[str] = set()  # noqa: RUF012

        @classmethod
        def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None) -> None:
            assert hook_type is HookType.AROUND
            cls.hooks.append((target, hook))

        @classmethod
        def apply_hooks(cls) -> None:
            for target, hook in cls.hooks:
                if target in cls.patched:
                    continue
                cls.patched.add(target)
                path, _, name = target.rpartition(".")
                owner = pkgutil.resolve_name(path)
                setattr(owner, name, _wrapped(getattr(owner, name), hook))

    return HookRegistry


def _wrapped(original, hook):
    return functools.wraps(original)(lambda *args, **kwargs: hook(original, *args, **kwargs))


class LinearAttnKernelBackend(enum.Enum):
    TRITON, FLASHINFER, CUSTOM = "triton", "flashinfer", "custom"

    @classmethod
    def _missing_(cls, value):
        return cls.CUSTOM

    def is_triton(self) -> bool:
        return self is LinearAttnKernelBackend.TRITON

    def is_custom(self) -> bool:
        return self is LinearAttnKernelBackend.CUSTOM


def _null(slot: int) -> bool:
    return slot < 0


def _gates(algorithm, a, b, A_log, dt_bias, lower_bound, tokens):
    shape = (tokens, HV, K) if algorithm == "kda" else (tokens, HV)
    bias = dt_bias.reshape(shape[1:])
    g = kernels.softplus_gate(a.reshape(shape), A_log, bias, lower_bound)
    return g[None], b.reshape(1, tokens, HV).float().sigmoid()


def _run(name: str, *args, **kwargs):
    kernels.ran.append(name)
    return kernels.on_pool(*args, null=_null, **kwargs)


class _Triton:
    algorithm: str
    uses_state_checkpoints = supports_track_state_snapshot = False
    supports_packed_decode = supports_fused_chain_verify = True

    def decode(
        self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, lower_bound=None,
        **kwargs,
    ):  # fmt: skip
        g, beta = _gates(self.algorithm, a, b, A_log, dt_bias, lower_bound, q.shape[1])
        return _run("decode", q, k, v, g, beta, ssm_states, query_start_loc, cache_indices)

    def packed_decode(
        self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim,
        lower_bound=None, **kwargs,
    ):  # fmt: skip
        rows = len(mixed_qkv)
        q, k, v = mixed_qkv.split((H * K, H * K, HV * V), 1)
        q, k, v = (x.unflatten(1, (n, -1))[None] for x, n in ((q, H), (k, H), (v, HV)))
        g, beta = _gates(self.algorithm, a, b, A_log, dt_bias, lower_bound, rows)
        return _run(
            "packed_decode", q, k, v, g, beta, ssm_states, torch.arange(rows + 1), cache_indices, scale=scale
        )

    def target_verify(
        self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc,
        intermediate_states_buffer, intermediate_state_indices, cache_steps, retrieve_parent_token,
        lower_bound=None, **kwargs,
    ):  # fmt: skip
        kernels.ran.append("target_verify")
        g, beta = _gates(self.algorithm, a, b, A_log, dt_bias, lower_bound, q.shape[1])
        o, lengths = torch.zeros_like(v), query_start_loc.tolist()
        for n, (start, end) in enumerate(pairwise(lengths)):
            if cache_indices[n] < 0:
                continue
            base, states = ssm_states[cache_indices[n]], []
            for t in range(end - start):
                parent = t - 1 if retrieve_parent_token is None else int(retrieve_parent_token[n, t])
                before = base if t == 0 or parent < 0 else states[parent]
                part = (x[0, start + t : start + t + 1] for x in (q, k, v, g, beta))
                own, (state,) = kernels.recurrence(*part, before)
                o[0, start + t] = own[0].to(o.dtype)
                states.append(state)
                if intermediate_states_buffer is not None:
                    intermediate_states_buffer[intermediate_state_indices[n], t] = state
        return o

    def _extend(self, q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, inplace_update=True):
        """o, and h: the states at the start of every 64 tokens."""
        kernels.ran.append("extend")
        o, h, lengths = torch.zeros_like(v), [], query_start_loc.tolist()
        for n, (start, end) in enumerate(pairwise(lengths)):
            slot = int(cache_indices[n])
            state = ssm_states[max(slot, 0)].clone()
            part = [x[0, start:end] for x in (q, k, v, g, beta)]
            own, states = kernels.recurrence(*part, state)
            h += [[state, *states][t] for t in range(0, end - start, 64)]
            if slot >= 0:
                o[0, start:end] = own.to(o.dtype)
                if inplace_update and states:
                    ssm_states[slot] = states[-1].to(ssm_states.dtype)
        return o, torch.stack(h)[None].to(k.dtype)


class TritonGDNKernel(_Triton):
    algorithm = "gdn"

    def extend(
        self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, inplace_update=True, **kwargs
    ):
        o, h = self._extend(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, inplace_update)
        return o, None, h


class TritonKDAKernel(_Triton):
    algorithm = "kda"
    supports_track_state_snapshot = True

    def extend(
        self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, A_log=None, dt_bias=None,
        lower_bound=None, beta_is_raw=False, return_intermediate_states=False, **kwargs,
    ):  # fmt: skip
        if A_log is not None:
            g = kernels.softplus_gate(g[0], A_log, dt_bias.view(HV, K), lower_bound)[None]
        beta = beta.float().sigmoid() if beta_is_raw else beta
        before = ssm_states.clone()
        o, h = self._extend(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc)
        if kwargs.get("track_state") is not None:
            for n, chunk in enumerate(kwargs["track_chunk_idx"].tolist()):
                start, slot = int(query_start_loc[n]), int(cache_indices[n])
                part = [x[0, start : start + 64 * chunk] for x in (q, k, v, g, beta)]
                if chunk >= 0:
                    state = before[slot].float()
                    kwargs["track_state"][n] = [state, *kernels.recurrence(*part, state)[1]][-1]
        return (o, h) if return_intermediate_states else o


class _Dispatcher:
    triton: type

    def __init__(self, decode_backend, prefill_backend, verify_backend=None) -> None:
        for backend in (decode_backend, prefill_backend, verify_backend):
            if backend is not None and not backend.is_triton():
                raise ValueError(f"Unsupported backend: {backend}")
        self.decode_kernel = self.extend_kernel = self.verify_kernel = self.triton()
        self.supports_packed_decode = True


class GDNKernelDispatcher(_Dispatcher):
    triton = TritonGDNKernel

    def __init__(self, *backends) -> None:
        super().__init__(*backends)
        self.tree_verify_kernel = self.verify_kernel


class KDAKernelDispatcher(_Dispatcher):
    triton = TritonKDAKernel
    supports_packed_decode_safe_gate = False

    def __init__(self, *backends) -> None:
        super().__init__(*backends)


def install(monkeypatch: pytest.MonkeyPatch, imported: tuple[str, ...] = ()) -> SimpleNamespace:
    """The package is there afterwards; returns the options that were given to the engine."""
    kernels.ran.clear()
    options = SimpleNamespace(
        linear_attn_backend="triton", linear_attn_decode_backend=None, linear_attn_prefill_backend=None,
        linear_attn_verify_backend=None,
    )  # fmt: skip
    choices = ["triton", "flashinfer"]

    class ServerArgs:
        __annotations__ = {
            "linear_attn_verify_backend": Annotated[
                Optional[str], SimpleNamespace(choices=[*choices, "nv_cutedsl"], help="")  # noqa: UP045
            ]
        }

    for dispatcher in (GDNKernelDispatcher, KDAKernelDispatcher):
        monkeypatch.setattr(dispatcher, "__init__", dispatcher.__init__)  # a hook stays in the class
    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": hook_registry(), "HookType": HookType,
            "_current_plugin_source": contextvars.ContextVar("source", default=None),
        },
        "sglang.srt.arg_groups.choices": {
            "LINEAR_ATTN_KERNEL_BACKEND_CHOICES": choices,
            "add_linear_attn_kernel_backend_choices": choices.extend,
        },
        "sglang.srt.server_args": {"ServerArgs": ServerArgs},
        f"{LINEAR}.utils": {"get_exec": lambda: SimpleNamespace(mamba=options)},
        f"{LINEAR}.gdn_backend": {
            "GDNKernelDispatcher": GDNKernelDispatcher, "TritonGDNKernel": TritonGDNKernel
        },
        f"{LINEAR}.kda_backend": {
            "KDAKernelDispatcher": KDAKernelDispatcher, "TritonKDAKernel": TritonKDAKernel
        },
    }  # fmt: skip
    packages.install(monkeypatch, contents)
    for path in imported:
        importlib.import_module(path)
    return options
