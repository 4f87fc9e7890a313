# SPDX-License-Identifier: Apache-2.0
"""One function per pass: allocates the outputs, lays the states out V-first and calls the operator. No
numerics.

Everything above (Level 1, the drop-ins) is names and defaults; everything below (checks of shapes, dtypes,
strides and indices, dispatch) is C++.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from cula import _ops
from cula._family import FAMILY
from cula._ops import op_name

# The options that are no tensors, and the types that they may have, the one to name first.
_PLAIN = {
    "scale": (float, int, torch.SymFloat, torch.SymInt, type(None)),
    "lower_bound": (float, int, type(None)),
    "use_qk_l2norm_in_kernel": (bool,),
    "use_beta_sigmoid_in_kernel": (bool,),
    "allow_neg_eigval": (bool,),
    "null_index": (int, torch.SymInt),
    "backend": (str, type(None)),
    "chunk_size": (int,),
}

# What makes the log decay of g: gate_of(), A_log, dt_bias and lower_bound.
Gate = tuple[str, Tensor | None, Tensor | None, float | None]
LOG_DECAY: Gate = ("log_decay", None, None, None)

States = TypeVar("States", Tensor, Tensor | None)
Made = TypeVar("Made")


class Checkpoints(NamedTuple):
    """States to keep on the way through a prefill.

    states: `[slots, HV, V, K]` (`[slots, HV, K, V]` with `state_v_first=False`), float32, bfloat16 or
        float16.
    plan: int32 or int64 `[M, 3]` rows (sequence, tokens, slot): the state after that many tokens of the
        sequence, a multiple of 64 or the sequence's length, goes to `states[slot]`; a negative slot skips the
        row. No slot may be one that a sequence of the same call starts from: it is written while that state
        may still be read.
    """

    states: Tensor
    plan: Tensor


def forward(
    op: torch._ops.OpOverloadPacket,
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Gate = LOG_DECAY,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_is_logit: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
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
    kept: Tensor | None = None,
    decay: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs `_ops.prefill` or `_ops.decode`; returns o, the final state or the pool, and the states at chunk
    starts.

    Level 1 calls it by position, with thirty arguments at the most: keywords cost Python more than a
    microsecond, and more than thirty arguments, which go through a list, a third of one.
    """
    in_place = state_pool is not None
    kind, A_log, dt_bias, lower_bound = gate
    if not (type(output_final_state) is type(state_v_first) is type(return_chunk_states) is bool):
        check_flags(
            output_final_state=output_final_state is not None
            and output_final_state,  # FLA's layers hand None on
            state_v_first=state_v_first,
            return_intermediate_states=return_chunk_states,
        )
    flags = options(
        algorithm, kind, qk_l2norm, beta_is_logit, allow_neg_eigval, scale, lower_bound, null_index, backend,
        deterministic, in_place, chunk_size, not state_v_first,
    )  # fmt: skip
    if device is not None:
        check_inputs(op, q, k, v, device)
    if not state_v_first:
        initial_state = v_first(op, "initial_state", initial_state)
    null = None if null_index == -1 else null_index
    dense = not in_place and initial_state_indices is None and final_state_indices is None
    if (
        dense
        and checkpoints is None
        and kept is None
        and not return_chunk_states
        and (out is None or output_final_state)
    ):
        rest = (
            flags, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, scale, decay,
            has_initial_state, null, backend,
        )  # fmt: skip
        if out is not None:
            return out, call(op.into, (q, k, v, out, *rest)), None
        made = call(op.dense if output_final_state else op.alone, (q, k, v, *rest))
        return (*made, None) if output_final_state else (made, None, None)

    final_state = returned = state_pool
    if in_place:
        if initial_state is not None:
            raise ValueError(
                f"{op_name(op)}: initial_state must be left out with state_pool, which holds it, got both"
            )
    elif final_state_indices is not None:
        raise ValueError(f"{op_name(op)}: final_state_indices must come with state_pool, got indices alone")
    elif output_final_state:
        check_room(op, q, k, v, cu_seqlens)
        final_state, final_state_indices, returned = _new_final_state(
            q, v, cu_seqlens, state_v_first, initial_state_indices is not None, null
        )
    if not state_v_first:
        final_state = v_first(op, "state_pool", final_state)
    if op is _ops.decode:
        o = call_for_o(
            op, out, final_state,
            (q, k, v, flags, g, beta, A_log, dt_bias, lower_bound, final_state, initial_state_indices,
             initial_state, cu_seqlens, scale, decay, has_initial_state, final_state_indices, null, backend),
        )  # fmt: skip
        return o, returned, None

    states = plan = None
    if checkpoints is not None:
        if not isinstance(checkpoints, tuple | list) or len(checkpoints) != 2:
            raise TypeError(
                f"prefill: checkpoints must be Checkpoints(states, plan), got {_ops.type_name(checkpoints)}"
            )
        states, plan = checkpoints
    chunk_states = states_at_chunks = None
    if return_chunk_states:
        check_room(op, q, k, v, cu_seqlens)
        if cu_seqlens_cpu is not None and cu_seqlens is not None:
            check_lengths(op, "cu_seqlens_cpu", cu_seqlens_cpu)
        chunk_states = _new_chunk_states(q, k, v, cu_seqlens, cu_seqlens_cpu, chunk_size, state_v_first)
        states_at_chunks = chunk_states if state_v_first else chunk_states.transpose(-1, -2)
    if not state_v_first:
        states = v_first(op, "checkpoints.states", states)
    o = call_for_o(
        op, out, final_state,
        (q, k, v, flags, g, beta, A_log, dt_bias, lower_bound, final_state, initial_state_indices,
         initial_state, cu_seqlens, scale, decay, has_initial_state, final_state_indices, states, plan,
         states_at_chunks, kept, null, backend),
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
    gate: Gate,
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
    if cu_seqlens is not None:
        check_lengths(_ops.verify, "cu_seqlens", cu_seqlens)
    check_flags(state_v_first=state_v_first)
    if state_indices is None and initial_state_indices is None and _ops.is_dense(state) and state.dim() == 4:
        state = state[: _sequences(q, cu_seqlens)]
    if not state_v_first:
        state = v_first(_ops.verify, "state", state)
        snapshots = v_first(_ops.verify, "snapshots", snapshots, 5)
    kind, A_log, dt_bias, lower_bound = gate
    flags = options(
        algorithm, kind, qk_l2norm, beta_is_logit, allow_neg_eigval, scale, lower_bound, null_index, backend,
        deterministic, update_state,
    )  # fmt: skip
    final_state, initial_state = (state, None) if update_state else (None, state)
    return call_for_o(
        _ops.verify, out, final_state,
        (q, k, v, flags, g, beta, A_log, dt_bias, lower_bound, final_state, initial_state_indices,
         initial_state, cu_seqlens, scale, decay, has_initial_state, None, state_indices, num_accepted,
         snapshots, snapshot_indices, parents, None if null_index == -1 else null_index, backend),
    )  # fmt: skip


def segment(
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None,
    decay: Tensor | None,
    beta: Tensor | None,
    gate: Gate,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    backend: str | None,
    deterministic: bool | str | None,
    device: torch.device | str | None,
    scale: float | None,
    keep: bool,
    out: tuple[Tensor | None, Tensor | None] | None,
) -> tuple[Tensor | None, ...]:
    check_inputs(_ops.segment, q, k, v, device)
    check_flags(state_v_first=state_v_first, keep=keep)
    check_room(_ops.segment, q, k, v, cu_seqlens)
    sequences, heads, key_dim, value_dim = _sequences(q, cu_seqlens), v.shape[2], q.shape[3], v.shape[3]
    dtype = _state_dtype(q)
    m_shape: tuple[int, ...] = (sequences, heads, key_dim)
    if not FAMILY[algorithm].has_diagonal_map:
        m_shape = (*m_shape, key_dim)
    b_shape = (sequences, heads, *_matrix(value_dim, key_dim, state_v_first))
    if out is None:
        out = q.new_empty(m_shape, dtype=dtype), q.new_empty(b_shape, dtype=dtype)
    elif not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(f"segment: out must be a pair (m, b), got {_ops.type_name(out)}")
    m, b = out
    written_m, written_b = m, b
    if m is None and b is None and keep and torch.compiler.is_compiling():
        # Inductor cannot lower an operator that may write into its arguments, returns a tensor, and writes
        # into none. B alone would keep less.
        written_m, written_b = q.new_empty(m_shape, dtype=dtype), q.new_empty(b_shape, dtype=dtype)
    kind, A_log, dt_bias, lower_bound = gate
    flags = options(
        algorithm,
        kind,
        qk_l2norm,
        beta_is_logit,
        allow_neg_eigval,
        scale,
        lower_bound,
        -1,
        backend,
        deterministic,
    )
    kept = call(
        _ops.segment.keep if keep else _ops.segment.packed,
        (q, k, v, flags, written_b if state_v_first or written_b is None else written_b.transpose(-1, -2),
         written_m, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, scale, decay, None, backend),
    )  # fmt: skip
    return (m, b, kept) if keep else (m, b)


def gate_of(use_gate_in_kernel: bool, lower_bound: float | None) -> str:
    """How the operators call the gate: a bound alone selects the bounded form."""
    if use_gate_in_kernel is True:
        return "softplus" if lower_bound is None else "bounded"
    if use_gate_in_kernel is not False:
        check_flags(use_gate_in_kernel=use_gate_in_kernel)
    if lower_bound is not None:
        raise ValueError(f"lower_bound must be left out when g is the log decay, got {lower_bound!r}")
    return "log_decay"


def check_flags(**flags: object) -> None:
    for argument, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{argument} must be of type bool, got {_ops.type_name(value)}")


def refuse_context() -> None:
    raise NotImplementedError(
        "cp_context: context parallelism has functions of its own, as cula.dist.cula_kda_cp, "
        "which take a group"
    )


def check_inputs(
    op: torch._ops.OpOverloadPacket, q: Tensor, k: Tensor, v: Tensor, device: torch.device | str | None = None
) -> None:
    """What must hold before shapes can be read; everything else is checked in C++."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _ops.refuse_types(op.packed, (q, k, v))
    if q.dim() != 4 or v.dim() != 4:
        _ops.check_dims(op, q, v)
    if device is not None:
        try:
            wanted = torch.device(device)
        except (RuntimeError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{op_name(op)}: device must be a device of PyTorch, got {device!r}") from None
        if wanted.type != q.device.type or wanted.index not in (None, q.device.index):
            raise ValueError(f"{op_name(op)}: device must be q's device, {q.device}, got {wanted}")


def check_room(
    op: torch._ops.OpOverloadPacket, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None
) -> None:
    """What must hold before outputs are made here: those of inputs that C++ refuses could be larger than the
    memory. It asks for all that `check_inputs` does but the device."""
    if not (_ops.is_dense(q) and _ops.is_dense(k) and _ops.is_dense(v)):
        _ops.refuse_types(op.packed, (q, k, v))
    if q.dim() != 4 or v.dim() != 4:
        _ops.check_dims(op, q, v)
    if q.shape[:2] != v.shape[:2]:
        batch, tokens = q.shape[:2]
        raise ValueError(
            f"{op_name(op)}: v must have shape [B, T, HV, V] = [{batch}, {tokens}, HV, V], "
            f"got {list(v.shape)}"
        )
    if q.shape[3] > 256:
        raise ValueError(f"{op_name(op)}: q must have a key dimension K from 1 to 256, got {q.shape[3]}")
    if cu_seqlens is not None:
        check_lengths(op, "cu_seqlens", cu_seqlens)


def check_lengths(op: torch._ops.OpOverloadPacket, argument: str, lengths: Tensor) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{op_name(op)}: {argument} must be a tensor or None, got {_ops.type_name(lengths)}")
    if not _ops.is_dense(lengths) or lengths.dim() != 1:
        raise ValueError(f"{op_name(op)}: {argument} must have shape [N + 1], got {_ops.described(lengths)}")
    if lengths.shape[0] == 0:
        raise ValueError(f"{op_name(op)}: {argument} must have N + 1 >= 1 elements, got 0")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op_name(op)}: {argument} must have dtype int32 or int64, got {lengths.dtype}")
    if lengths.shape[0] > 1 and lengths.stride(0) != 1:
        raise ValueError(f"{op_name(op)}: {argument} must be contiguous, got stride {lengths.stride(0)}")


def call_for_o(
    op: torch._ops.OpOverloadPacket,
    out: Tensor | None,
    final_state: Tensor | None,
    arguments: tuple[Any, ...],
) -> Tensor:
    """Calls the operator with `out`, or with a new o, and returns it. `arguments` are those of `fresh`.

    Only a call that writes a state gets its o from there: Inductor cannot lower an operator that may write
    into its arguments, returns a tensor, and writes into none of them.
    """
    if out is None and final_state is not None:
        return call(op.fresh, arguments)
    q, k, v, *others = arguments
    if out is None:
        check_room(op, q, k, v)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    call(op.packed, (q, k, v, out, *others))
    return out


def call(op: torch._ops.OpOverload[..., Made], arguments: tuple[Any, ...]) -> Made:
    """Calls the operator by position, up to the last argument that is given: PyTorch takes longer over a None
    than over a tensor, and longer still over a keyword."""
    count = len(arguments)
    while arguments[count - 1] is None:
        count -= 1
    arguments = arguments[:count]
    if is_compiling():
        return op(*arguments)
    if forward_ad._current_level >= 0:
        _ops.refuse_derivatives(op, arguments)
    elif is_grad_enabled():
        for value in arguments:
            if value is not None and isinstance(value, Tensor) and value.requires_grad:
                _ops.refuse_derivatives(op, arguments)
    run, written = _ops.unchecked[id(op)]
    try:
        made: Made = run(*arguments)
    except Exception:
        _ops.refuse_types(op, arguments)  # PyTorch says it less well, and turns a number into a tensor first
        raise
    for position in written:
        if position < count and arguments[position] is not None:
            increment_version(arguments[position])
    return made


def options(
    algorithm: str,
    gate: str,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    scale: float | None,
    lower_bound: float | None,
    null_index: int,
    backend: str | None,
    deterministic: bool | str | None = None,
    in_place: bool = False,
    chunk_size: int = 64,
    k_first: bool = False,
) -> int:
    """The `options` of an operator, after a look at the types of all that is no tensor."""
    if not (
        type(qk_l2norm) is type(beta_is_logit) is type(allow_neg_eigval) is bool
        and type(null_index) is type(chunk_size) is int
        and (scale is None or type(scale) is float)
        and (lower_bound is None or type(lower_bound) is float)
        and backend is None
    ):
        given = (
            scale,
            lower_bound,
            qk_l2norm,
            beta_is_logit,
            allow_neg_eigval,
            null_index,
            backend,
            chunk_size,
        )
        for (argument, types), value in zip(_PLAIN.items(), given, strict=True):
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise TypeError(
                    f"{argument} must be of type {types[0].__name__}, got {_ops.type_name(value)}"
                )
    if chunk_size != 64 and chunk_size not in (16, 32):
        raise ValueError(f"chunk_size must be 16, 32 or 64, got {chunk_size}")
    batch_invariant = False if deterministic is None else is_batch_invariant(deterministic)
    return _ops.pack(
        algorithm,
        gate,
        qk_l2norm,
        beta_is_logit,
        allow_neg_eigval,
        batch_invariant,
        in_place,
        chunk_size,
        k_first,
    )


def is_batch_invariant(deterministic: bool | str | None) -> bool:
    if deterministic is None or deterministic is True:
        return False
    if not isinstance(deterministic, str) or deterministic != "batch_invariant":
        raise ValueError(f'deterministic must be None, True or "batch_invariant", got {deterministic!r}')
    return True


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _matrix(value_dim: int, key_dim: int, state_v_first: bool) -> tuple[int, int]:
    return (value_dim, key_dim) if state_v_first else (key_dim, value_dim)


def v_first(op: torch._ops.OpOverloadPacket, argument: str, states: States, ndim: int = 4) -> States:
    """The V-first view of K-first states: the operators take any strides, so no layout needs a copy."""
    if states is None or not _ops.is_dense(states):
        return states  # absent, or refused with the other types
    if states.dim() != ndim:
        raise ValueError(f"{op_name(op)}: {argument} must have {ndim} dimensions, got {list(states.shape)}")
    return states.transpose(-1, -2)


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _new_final_state(
    q: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    gathered: bool,
    null_index: int | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The memory of a dense final state, the indices of the call's rows in it, and those rows.

    Indices are needed where the initial states are gathered by index, and none of them may be the null slot:
    where that is among them, the rows up to it are left unused. The rows of skipped sequences stay zero.
    """
    batch, _, heads, value_dim = v.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (heads, *_matrix(value_dim, q.shape[3], state_v_first))
    if not gathered:
        final_state = q.new_empty((sequences, *shape), dtype=_state_dtype(q))
        return final_state, None, final_state
    first = null_index + 1 if null_index is not None and 0 <= null_index < sequences else 0
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
    """The states at chunk starts in k's dtype: one per chunk where the lengths can be read on the host
    without waiting, else room for the most chunks that the lengths could make, zero beyond those they do
    make."""
    batch, tokens = q.shape[:2]
    shape = (v.shape[2], *_matrix(v.shape[3], q.shape[3], state_v_first))
    if cu_seqlens is None:
        return k.new_empty((batch, -(-tokens // chunk_size), *shape))
    lengths = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    chunks = tokens // chunk_size + cu_seqlens.shape[0] - 1
    if lengths.is_cpu and not torch.compiler.is_compiling():
        chunks = min(chunks, int((-(-lengths.diff() // chunk_size)).clamp(min=0).sum()))
    return k.new_zeros((batch, chunks, *shape))
