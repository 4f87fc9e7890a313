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

# The numbers among the options, and the types that they may have, the usual one first.
_NUMBERS = {
    "scale": (float, int, torch.SymFloat, torch.SymInt),
    "lower_bound": (float, int),
    "use_qk_l2norm_in_kernel": (bool,),
    "use_beta_sigmoid_in_kernel": (bool,),
    "allow_neg_eigval": (bool,),
    "null_index": (int, torch.SymInt),
    "chunk_size": (int,),
}
_USUAL = tuple(types[0] for types in _NUMBERS.values())

# What a schema calls a type.
_TYPES = {
    "Tensor": Tensor,
    "str": str,
    "bool": bool,
    "int": (int, torch.SymInt),
    "float": (float, int, torch.SymFloat, torch.SymInt),
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
    check_inputs(op, q, k, v, device)
    o = output(v, out)
    in_place, returned = state_pool is not None, state_pool
    if in_place:
        if initial_state is not None:
            raise ValueError(f"{op_name(op)}: initial_state must be left out with state_pool, which holds it, got both")
        final_state = state_pool
    else:
        if final_state_indices is not None:
            raise ValueError(f"{op_name(op)}: final_state_indices must come with state_pool, got indices alone")
        final_state = None
        if output_final_state:
            final_state, final_state_indices, returned = _new_final_state(
                q, v, cu_seqlens, state_v_first, initial_state_indices is not None, null_index
            )
    if not state_v_first:
        initial_state = v_first(op, "initial_state", initial_state)
        final_state = v_first(op, "state_pool", final_state)
    chosen = options(
        algorithm, q, scale, gate, lower_bound, qk_l2norm, beta_is_logit, allow_neg_eigval, null_index, deterministic,
        backend, in_place, chunk_size,
    )  # fmt: skip
    if op is _ops.decode:
        call(
            op, q, k, v, g, decay, beta, per_head(q, A_log), per_head(q, dt_bias), cu_seqlens, initial_state,
            initial_state_indices, final_state_indices, has_initial_state, o, final_state, *chosen,
        )  # fmt: skip
        return o, returned, None

    kept, plan = (None, None) if checkpoints is None else checkpoints
    chunk_states = states_at_chunks = None
    if return_chunk_states:
        chunk_states = _new_chunk_states(q, k, v, cu_seqlens, cu_seqlens_cpu, chunk_size, state_v_first)
        states_at_chunks = chunk_states if state_v_first else chunk_states.transpose(-1, -2)
    if not state_v_first:
        kept = v_first(op, "checkpoints.states", kept)
    call(
        op, q, k, v, g, decay, beta, per_head(q, A_log), per_head(q, dt_bias), cu_seqlens, initial_state,
        initial_state_indices, final_state_indices, has_initial_state, o, final_state, kept, plan,
        states_at_chunks, *chosen,
    )  # fmt: skip
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
    check_inputs(_ops.verify, q, k, v, device)
    o = output(v, out)
    if state is not None and state_indices is None and initial_state_indices is None:
        state = state[: _sequences(q, cu_seqlens)]
    if not state_v_first:
        state = v_first(_ops.verify, "state", state)
        snapshots = v_first(_ops.verify, "snapshots", snapshots, 5)
    call(
        _ops.verify, q, k, v, g, decay, beta, per_head(q, A_log), per_head(q, dt_bias), cu_seqlens,
        None if update_state else state, initial_state_indices, None, has_initial_state, o,
        state if update_state else None, state_indices, num_accepted, snapshots, snapshot_indices, parents,
        *options(
            algorithm, q, scale, gate, lower_bound, qk_l2norm, beta_is_logit, allow_neg_eigval, null_index,
            deterministic, backend, update_state
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
    check_inputs(_ops.segment, q, k, v, device)
    sequences, heads, key_dim, value_dim = _sequences(q, cu_seqlens), v.shape[2], q.shape[3], v.shape[3]
    dtype = _state_dtype(q)
    m_shape = (sequences, heads, key_dim, key_dim) if beta is not None else (sequences, heads, key_dim)
    m = q.new_empty(m_shape, dtype=dtype)
    b = q.new_empty((sequences, heads, *_matrix(value_dim, key_dim, state_v_first)), dtype=dtype)
    call(
        _ops.segment, q, k, v, g, decay, beta, per_head(q, A_log), per_head(q, dt_bias), cu_seqlens, m,
        b if state_v_first else b.transpose(-1, -2),
        *options(
            algorithm, q, 1.0, gate, lower_bound, qk_l2norm, beta_is_logit, allow_neg_eigval, -1, deterministic, backend
        ),
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


def output(v: Tensor, out: Tensor | None) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out


def per_head(q: Tensor, parameter: Tensor | None) -> Tensor | None:
    """A gate's parameter as the operators want it: one dimension, float32 (float64 beside float64 inputs)."""
    if not isinstance(parameter, Tensor):
        return parameter  # absent, or refused with the other types
    if parameter.dim() != 1:
        parameter = parameter.reshape(-1)
    dtype = parameter.dtype
    exact = dtype is torch.float32 or (dtype is torch.float64 and q.dtype is torch.float64)
    return parameter if exact else parameter.float()


def check_inputs(
    op: torch._ops.OpOverload, q: Tensor, k: Tensor, v: Tensor, device: torch.device | str | None = None
) -> None:
    """What must hold before shapes can be read; everything else is checked in C++."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        refuse_types(op, (q, k, v))
    if q.dim() != 4 or v.dim() != 4:
        argument, tensor, shape = ("q", q, "[B, T, H, K]") if q.dim() != 4 else ("v", v, "[B, T, HV, V]")
        raise ValueError(f"{op_name(op)}: {argument} must have shape {shape}, got {list(tensor.shape)}")
    if device is not None:
        wanted = torch.device(device)
        if wanted.type != q.device.type or wanted.index not in (None, q.device.index):
            raise ValueError(f"{op_name(op)}: device must be q's device, {q.device}, got {wanted}")


def call(op: torch._ops.OpOverload, *arguments: object) -> None:
    """Calls the operator; by position, because a keyword costs PyTorch more than the argument itself."""
    if torch.is_grad_enabled():
        _refuse_gradients(op, arguments)
    try:
        op(*arguments)
    except Exception:
        refuse_types(op, arguments)  # PyTorch says it less well, and turns a number into a tensor first
        raise


def op_name(op: torch._ops.OpOverload) -> str:
    return op._schema.name.removeprefix("cula::")


def refuse_types(op: torch._ops.OpOverload, arguments: tuple[object, ...]) -> None:
    """TypeError for the first argument that is not of the type in the schema."""
    for declared, value in zip(op._schema.arguments, arguments, strict=False):
        kind = str(declared.type)
        wanted = kind.removeprefix("Optional[").removesuffix("]")
        if isinstance(value, _TYPES[wanted]) or (value is None and kind != wanted):
            continue
        described = "a tensor" if wanted == "Tensor" else f"of type {wanted}"
        described += " or None" if kind != wanted else ""
        raise TypeError(f"{op_name(op)}: {declared.name} must be {described}, got {type(value).__name__}")


def _refuse_gradients(op: torch._ops.OpOverload, arguments: tuple[object, ...]) -> None:
    for position, value in enumerate(arguments):
        if isinstance(value, Tensor) and value.requires_grad:
            raise NotImplementedError(
                f"{op_name(op)}: {op._schema.arguments[position].name} requires gradients, and the backward pass is "
                "not built yet; call under torch.no_grad() or torch.inference_mode()"
            )


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
    in_place: bool = False,
    chunk_size: int = 64,
) -> tuple[int, float, float, int, str]:
    """The last arguments of every operator."""
    batch_invariant = False
    if deterministic is not None:
        if deterministic not in (True, "batch_invariant"):
            raise ValueError(f'deterministic must be None, True or "batch_invariant", got {deterministic!r}')
        batch_invariant = deterministic == "batch_invariant"
    if scale is None:
        scale = q.shape[3] ** -0.5
    if lower_bound is None:
        lower_bound = 0.0
    given = (scale, lower_bound, qk_l2norm, beta_is_logit, allow_neg_eigval, null_index, chunk_size)
    if tuple(map(type, given)) != _USUAL:
        for (argument, types), value in zip(_NUMBERS.items(), given, strict=True):
            if not isinstance(value, types):
                raise TypeError(f"{argument} must be of type {types[0].__name__}, got {type(value).__name__}")
    flags = _ops.pack(
        algorithm, gate, qk_l2norm, beta_is_logit, allow_neg_eigval, batch_invariant, in_place, chunk_size
    )
    return flags, scale, lower_bound, null_index, "" if backend is None else backend


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _matrix(value_dim: int, key_dim: int, state_v_first: bool) -> tuple[int, int]:
    return (value_dim, key_dim) if state_v_first else (key_dim, value_dim)


def v_first(op: torch._ops.OpOverload, argument: str, states: Tensor | None, ndim: int = 4) -> Tensor | None:
    """The V-first view of K-first states: the operators take any strides, so no layout needs a copy."""
    if not isinstance(states, Tensor):
        return states  # absent, or refused with the other types
    if states.dim() != ndim:
        raise ValueError(f"{op_name(op)}: {argument} must have {ndim} dimensions, got {list(states.shape)}")
    return states.transpose(-1, -2)


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _new_final_state(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, state_v_first: bool, gathered: bool, null_index: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The memory of a dense final state, the indices of the call's rows in it, and those rows.

    Indices are needed where the initial states are gathered by index, and none of them may be the null slot: rows up
    to that one are allocated and left unused. The rows of skipped sequences stay zero.
    """
    batch, _, heads, value_dim = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (heads, *_matrix(value_dim, q.shape[3], state_v_first))
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
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"prefill: chunk_size must be 16, 32 or 64, got {chunk_size}")
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
