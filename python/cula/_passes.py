# SPDX-License-Identifier: Apache-2.0
"""One function per pass: allocates the outputs, lays the states out V-first and calls the operator. No numerics.

Everything above (Level 1, the drop-ins) is names and defaults; everything below (checks of shapes, dtypes, strides and
indices, dispatch) is C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cula import _ops

# What an operator calls an option: what callers call it, and its types.
_OPTIONS = {
    "algorithm": ("algorithm", (str,)),
    "scale": ("scale", (float, int, torch.SymFloat, torch.SymInt)),
    "gate": ("gate", (str,)),
    "lower_bound": ("lower_bound", (float, int)),
    "qk_l2norm": ("use_qk_l2norm_in_kernel", (bool,)),
    "beta_is_logit": ("use_beta_sigmoid_in_kernel", (bool,)),
    "allow_neg_eigval": ("allow_neg_eigval", (bool,)),
    "null_index": ("null_index", (int, torch.SymInt)),
    "batch_invariant": ("deterministic", (bool,)),
    "backend": ("backend", (str,)),
}


class Checkpoints(NamedTuple):
    """States to keep on the way through a prefill.

    states: `[slots, HV, V, K]` (`[slots, HV, K, V]` with `state_v_first=False`), float32, bfloat16 or float16.
    plan: int32 `[M, 3]` rows (sequence, tokens, slot): the state after that many tokens of the sequence, a multiple of
        64 or the sequence's length, goes to `states[slot]`; a negative slot skips the row.
    """

    states: Tensor
    plan: Tensor


def forward(
    op: Callable[..., None],
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate: str = "log_decay",
    lower_bound: float | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_is_logit: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = True,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    checkpoints: Checkpoints | None = None,
    return_chunk_states: bool = False,
    chunk_size: int = 64,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs `_ops.prefill` or `_ops.decode`; returns o, the final state or the pool, and the states at chunk starts."""
    name = "prefill" if op is _ops.prefill else "decode"
    kept, plan = (None, None) if checkpoints is None else checkpoints
    check(
        name, q, k, v, device, g=g, decay=decay, beta=beta, A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens,
        initial_state=initial_state, state_pool=state_pool, initial_state_indices=initial_state_indices,
        final_state_indices=final_state_indices, has_initial_state=has_initial_state, out=out,
        checkpoint_states=kept, checkpoint_plan=plan,
    )  # fmt: skip
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"{name}: chunk_size must be 16, 32 or 64, got {chunk_size}")
    o = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    in_place, returned = state_pool is not None, None
    if in_place:
        if initial_state is not None:
            raise ValueError(f"{name}: initial_state must be left out with state_pool, which holds it, got both")
        final_state = returned = state_pool
    else:
        if final_state_indices is not None:
            raise ValueError(f"{name}: final_state_indices must come with state_pool, got indices alone")
        final_state = None
        if output_final_state:
            final_state, final_state_indices, returned = _new_final_state(
                q, v, sequences, state_v_first, initial_state_indices is not None, null_index
            )

    states = (
        _v_first(name, "initial_state", initial_state, state_v_first),
        initial_state_indices,
        final_state_indices,
        has_initial_state,
        o,
        _v_first(name, "state_pool" if in_place else "final_state", final_state, state_v_first),
        in_place,
    )
    A_log, dt_bias = gate_parameters(name, algorithm, q, v, A_log, dt_bias)
    inputs = (q, k, v, g, decay, beta, A_log, dt_bias, cu_seqlens)
    chosen = options(
        algorithm, q, scale, gate, lower_bound, qk_l2norm, beta_is_logit, allow_neg_eigval, null_index, deterministic,
        backend,
    )  # fmt: skip
    if name == "decode":
        op(*inputs, *states, **chosen)
        return o, returned, None

    chunk_states = None
    if return_chunk_states:
        chunk_states = _new_chunk_states(q, k, v, cu_seqlens, cu_seqlens_cpu, chunk_size, state_v_first)
    op(
        *inputs,
        *states,
        _v_first(name, "checkpoints.states", kept, state_v_first),
        plan,
        _v_first(name, "chunk_states", chunk_states, state_v_first, 5),
        **chosen,
        chunk_tokens=chunk_size,
    )
    return o, returned, chunk_states


def verify(
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    *,
    g: Tensor | None,
    decay: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate: str,
    lower_bound: float | None,
    scale: float | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    update_state: bool,
    initial_state_indices: Tensor | None,
    state_indices: Tensor | None,
    num_accepted: Tensor | None,
    has_initial_state: Tensor | None,
    snapshots: Tensor | None,
    snapshot_indices: Tensor | None,
    parents: Tensor | None,
    null_index: int,
    backend: str | None,
    deterministic: bool | str | None,
    out: Tensor | None,
    device: torch.device | str | None,
) -> Tensor:
    check(
        "verify", q, k, v, device, g=g, decay=decay, beta=beta, A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens,
        state=state, initial_state_indices=initial_state_indices, state_indices=state_indices,
        num_accepted=num_accepted, has_initial_state=has_initial_state, snapshots=snapshots,
        snapshot_indices=snapshot_indices, parents=parents, out=out,
    )  # fmt: skip
    o = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    if state is not None and state_indices is None and initial_state_indices is None:
        state = state[: q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1]
    base = _v_first("verify", "state", state, state_v_first)
    A_log, dt_bias = gate_parameters("verify", algorithm, q, v, A_log, dt_bias)
    _ops.verify(
        q, k, v, g, decay, beta, A_log, dt_bias, cu_seqlens,
        None if update_state else base, initial_state_indices, None, has_initial_state, o, base if update_state else
        None, update_state, state_indices, num_accepted, _v_first("verify", "snapshots", snapshots, state_v_first, 5),
        snapshot_indices, parents,
        **options(
            algorithm, q, scale, gate, lower_bound, qk_l2norm, beta_is_logit, allow_neg_eigval, null_index,
            deterministic, backend
        ),
    )  # fmt: skip
    return o


def segment(
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None,
    decay: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate: str,
    lower_bound: float | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    backend: str | None,
    deterministic: bool | str | None,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:
    check("segment", q, k, v, device, g=g, decay=decay, beta=beta, A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads, key_dim, value_dim = v.shape[2], q.shape[3], v.shape[3]
    dtype = _state_dtype(q)
    m_shape = (sequences, heads, key_dim, key_dim) if beta is not None else (sequences, heads, key_dim)
    m = q.new_empty(m_shape, dtype=dtype)
    b = q.new_empty((sequences, heads, *_matrix(value_dim, key_dim, state_v_first)), dtype=dtype)
    A_log, dt_bias = gate_parameters("segment", algorithm, q, v, A_log, dt_bias)
    _ops.segment(
        q, k, v, g, decay, beta, A_log, dt_bias, cu_seqlens, m, _v_first("segment", "b", b, state_v_first),
        **options(algorithm, q, 1.0, gate, lower_bound, qk_l2norm, beta_is_logit, allow_neg_eigval, -1, deterministic,
        backend),
    )  # fmt: skip
    return m, b


def gate_of(use_gate_in_kernel: bool, lower_bound: float | None) -> str:
    """How the operators call the gate: a bound alone selects the bounded form."""
    if not use_gate_in_kernel:
        return "log_decay"
    return "softplus" if lower_bound is None else "bounded"


def refuse_context(cp_context: object | None) -> None:
    if cp_context is not None:
        raise NotImplementedError(
            "cp_context: context parallelism is not built yet; cula.cula_segment gives the affine maps it exchanges"
        )


def per_head(q: Tensor, parameter: Tensor | None) -> Tensor | None:
    """A parameter with one value per head as the operators want it: `[HV]`, float32 (float64 beside float64 inputs)."""
    if parameter is None:
        return None
    if parameter.dim() != 1:
        parameter = parameter.reshape(-1)
    exact = parameter.dtype == torch.float32 or (parameter.dtype == torch.float64 and q.dtype == torch.float64)
    return parameter if exact else parameter.float()


def gate_parameters(
    name: str, algorithm: str, q: Tensor, v: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    A_log, dt_bias = per_head(q, A_log), per_head(q, dt_bias)
    if dt_bias is not None and algorithm in ("kda", "gla"):
        heads, key_dim = v.shape[2], q.shape[3]
        if dt_bias.shape[0] != heads * key_dim:
            raise ValueError(f"{name}: dt_bias must hold HV * K = {heads * key_dim} values, got {dt_bias.shape[0]}")
        dt_bias = dt_bias.view(heads, key_dim)
    return A_log, dt_bias


def check(
    name: str, q: Tensor, k: Tensor, v: Tensor, device: torch.device | str | None = None, **others: Tensor | None
) -> None:
    """What must hold before shapes can be read; everything else is checked in C++."""
    for argument, tensor, dims in (("q", q, "[B, T, H, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name}: {argument} must have shape {dims}, got {list(tensor.shape)}")
    for argument, tensor in others.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor or None, got {type(tensor).__name__}")
    if torch.is_grad_enabled():
        for argument, tensor in (("q", q), ("k", k), ("v", v), *others.items()):
            if tensor is not None and tensor.requires_grad:
                raise NotImplementedError(
                    f"{name}: {argument} requires gradients, and the backward pass is not built yet; "
                    "call under torch.no_grad() or torch.inference_mode()"
                )
    if device is not None:
        wanted = torch.device(device)
        if wanted.type != q.device.type or wanted.index not in (None, q.device.index):
            raise ValueError(f"{name}: device must be q's device, {q.device}, got {wanted}")


def options(
    algorithm: str,
    q: Tensor,
    scale: float | None,
    gate: str = "log_decay",
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    beta_is_logit: bool = False,
    allow_neg_eigval: bool = False,
    null_index: int = -1,
    deterministic: bool | str | None = None,
    backend: str | None = None,
) -> dict[str, object]:
    if deterministic not in (None, True, "batch_invariant"):
        raise ValueError(f'deterministic must be None, True or "batch_invariant", got {deterministic!r}')
    chosen = {
        "algorithm": algorithm,
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "gate": gate,
        "lower_bound": 0.0 if lower_bound is None else lower_bound,
        "qk_l2norm": qk_l2norm,
        "beta_is_logit": beta_is_logit,
        "allow_neg_eigval": allow_neg_eigval,
        "null_index": null_index,
        "batch_invariant": deterministic == "batch_invariant",
        "backend": "" if backend is None else backend,
    }
    for option, value in chosen.items():
        argument, types = _OPTIONS[option]
        if not isinstance(value, types):
            raise TypeError(f"{argument} must be of type {types[0].__name__}, got {type(value).__name__}")
    return chosen


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _matrix(value_dim: int, key_dim: int, state_v_first: bool) -> tuple[int, int]:
    return (value_dim, key_dim) if state_v_first else (key_dim, value_dim)


def _v_first(name: str, argument: str, states: Tensor | None, state_v_first: bool, ndim: int = 4) -> Tensor | None:
    """The V-first view: the operators take any strides, so the K-first layout needs no copy."""
    if states is None or state_v_first:
        return states
    if states.dim() != ndim:
        raise ValueError(f"{name}: {argument} must have {ndim} dimensions, got {list(states.shape)}")
    return states.transpose(-1, -2)


def _new_final_state(
    q: Tensor, v: Tensor, sequences: int, state_v_first: bool, gathered: bool, null_index: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The memory of a dense final state, the indices of the call's rows in it, and those rows.

    Indices are needed where the initial states are gathered by index, and none of them may be the null slot: rows up
    to that one are allocated and left unused. The rows of skipped sequences stay zero.
    """
    shape = (v.shape[2], *_matrix(v.shape[3], q.shape[3], state_v_first))
    if not gathered:
        final_state = q.new_empty((sequences, *shape), dtype=_state_dtype(q))
        return final_state, None, final_state
    first = max(0, null_index + 1)
    memory = q.new_zeros((first + sequences, *shape), dtype=_state_dtype(q))
    return memory, torch.arange(first, first + sequences, dtype=torch.int32, device=q.device), memory[first:]


def _new_chunk_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_size: int,
    state_v_first: bool,
) -> Tensor:
    """The states at chunk starts in k's dtype: one per chunk where the lengths can be read on the host without waiting,
    else room for the most chunks that the lengths could make, zero beyond those they do make."""
    batch, tokens = q.shape[:2]
    shape = (v.shape[2], *_matrix(v.shape[3], q.shape[3], state_v_first))
    if cu_seqlens is None:
        return k.new_empty((batch, -(-tokens // chunk_size), *shape))
    lengths = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if lengths.is_cpu and not torch.compiler.is_compiling():
        chunks = int((-(-lengths.diff() // chunk_size)).clamp(min=0).sum())
    else:
        chunks = tokens // chunk_size + cu_seqlens.shape[0] - 1
    return k.new_zeros((batch, chunks, *shape))
