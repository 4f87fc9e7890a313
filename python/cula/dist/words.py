# SPDX-License-Identifier: Apache-2.0
"""The keywords of the functions of `cula.dist`, alike for all of one kind of parallelism.

A function hands its `**words` to `tensor_parallel`, `context_parallel` or `hybrid_parallel`, whose signature
has the defaults. Type checkers read the words in a `TypedDict` of this file, help() and inspect in what
`words_of` writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from .. import Checkpoints
from .groups import GroupLike


class _Options(TypedDict, total=False):
    """Options of Level 1 that mean something however a call is cut. Some algorithms have fewer."""

    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    cu_seqlens: Tensor | None
    safe_gate: bool
    lower_bound: float | None
    disable_recompute: bool
    device: torch.device | str | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    backend: str | None
    deterministic: bool | str | None
    out: Tensor | None
    chunk_size: int


class _Heads(TypedDict, total=False):
    """How heads are cut."""

    tp_size: int | None
    tp_rank: int | None
    gather_output: bool
    full_inputs: bool
    full_qk: bool


class TensorWords(_Options, _Heads, total=False):
    """How heads are cut, and all options of Level 1."""

    tp_group: GroupLike | None
    return_intermediate_states: bool
    state_pool: Tensor | None
    initial_state_indices: Tensor | None
    final_state_indices: Tensor | None
    has_initial_state: Tensor | None
    null_index: int
    checkpoints: Checkpoints | None
    kept: Tensor | None
    cp_context: object | None
    state_scales: Tensor | None


class ContextWords(_Options, total=False):
    """How tokens are cut, and the options of Level 1 but those that name slots or keep states on the way."""

    sp_size: int | None
    sp_rank: int | None
    sp_mode: str
    sp_splits: Sequence[int] | None
    method: str | None
    final_state_on: str | None
    nvshmem_backend: bool


class HybridWords(ContextWords, _Heads, total=False):
    """How tokens and heads are cut, and the options of Level 1 as with tokens alone."""


Function = TypeVar("Function", bound=Callable[..., Any])


def words_of(form: Callable[..., object]) -> Callable[[Function], Function]:
    """Shows the keywords of `form` as those of a function that hands it its `**words`."""
    parameters = inspect.signature(form).parameters.values()
    words = [each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]

    def show(function: Function) -> Function:
        written = inspect.signature(function)
        own = [each for each in written.parameters.values() if each.kind is not each.VAR_KEYWORD]
        shown = written.replace(parameters=[*own, *words])
        annotations = {name: each.annotation for name, each in shown.parameters.items()}
        function.__annotations__ = {**annotations, "return": shown.return_annotation}
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return show
