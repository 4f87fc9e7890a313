# SPDX-License-Identifier: Apache-2.0
"""One function per pass: allocates the outputs, lays the states out V-first and calls the operator. No
numerics.

Everything above (Level 1, the drop-ins) is names and defaults; everything below (checks of shapes, dtypes,
strides and indices, dispatch) is C++. What a call has besides its tokens travels in three small objects:
`Gate`, `States` and `Outputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from . import _new_states, _ops
from ._names import OF_DENSE, POOL, STATE, named
from ._ops import Operator
from ._slots import first_slots

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

TensorOrNone = TypeVar("TensorOrNone", Tensor, Tensor | None)


@dataclass(slots=True)
class Gate:
    """What makes the log decay of g."""

    kind: str = "log_decay"  # gate_of()
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None


LOG_DECAY = Gate()


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


@dataclass(slots=True)
class States:
    """Where sequences start from and end in, as the user gave it (`cula.api` says what each is)."""

    initial: Tensor | None = None
    pool: Tensor | None = None
    initial_indices: Tensor | None = None
    final_indices: Tensor | None = None
    has_initial: Tensor | None = None
    null_index: int = -1
    v_first: bool = True
    scales: Tensor | None = None
    names: Mapping[str, str] | None = None  # of a pool and its indices, if not as in `cula.api`


@dataclass(slots=True)
class Outputs:
    """What a call makes or writes besides a pool."""

    o: Tensor | None = None
    final_state: bool = False
    checkpoints: Checkpoints | None = None
    chunk_states: bool = False
    chunk_size: int = 64


NO_STATES, NO_OUTPUTS = States(), Outputs()

_BITS = ("in_place", "k_first", "make_final_state", "keep", "save")
IN_PLACE, _K_FIRST, _FINAL_STATE, _KEEP, _SAVE = map(_ops.bit, _BITS)
_MAPS = _ops.bit("make_m") + _ops.bit("make_b")


def dense(initial: Tensor | None, v_first: bool = True) -> States:
    """A state for each sequence. By position, since keywords cost a class half a microsecond."""
    return States(initial, None, None, None, None, -1, v_first)


def forward(
    op: Operator,
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
    states: States = NO_STATES,
    outputs: Outputs = NO_OUTPUTS,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    device: torch.device | str | None = None,
    kept: Tensor | None = None,
    decay: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    disable_recompute: bool = False,
    erase: Tensor | None = None,
    a_key: Tensor | None = None,
    b_key: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs `_ops.prefill` or `_ops.decode`; returns o, the final state or the pool, and the states at chunk
    starts. disable_recompute: of a prefill; without effect where there are no gradients."""
    A_log, dt_bias, lower_bound = gate.A_log, gate.dt_bias, gate.lower_bound
    initial_state, pool, v_first = states.initial, states.pool, states.v_first
    null_index, scales = states.null_index, states.scales
    wants_state, wants_chunk_states = outputs.final_state, outputs.chunk_states
    # By identity: type() takes four times as long.
    if not (
        (wants_state is False or wants_state is True)
        and (v_first is True or v_first is False)
        and (wants_chunk_states is False or wants_chunk_states is True)
        and (disable_recompute is False or disable_recompute is True)
    ):
        check_flags(
            output_final_state=wants_state is not None and wants_state,  # FLA's layers hand None on
            state_v_first=v_first, return_intermediate_states=wants_chunk_states,
            disable_recompute=disable_recompute,
        )  # fmt: skip
    initial_indices, final_indices = states.initial_indices, states.final_indices
    chunk_size, out, checkpoints = outputs.chunk_size, outputs.o, outputs.checkpoints
    options = pack(
        algorithm, gate.kind, qk_l2norm, beta_is_logit, allow_neg_eigval, scale, lower_bound, null_index,
        backend, deterministic, chunk_size,
    )  # fmt: skip
    dense = pool is None and initial_indices is None and final_indices is None
    if pool is not None:
        options |= IN_PLACE
    elif dense and wants_state:
        options |= _FINAL_STATE if v_first else _FINAL_STATE | _K_FIRST
    if device is not None:
        check_inputs(op, q, k, v, device)
    if not v_first:
        initial_state = as_v_first(op, "initial_state", initial_state)
    null = None if null_index == -1 else null_index
    # The usual calls, apart from the others because a keyword costs Python a tenth of a microsecond.
    if dense and kept is None and checkpoints is None and scales is None and not wants_chunk_states:
        if out is None:
            if disable_recompute:
                options |= _SAVE
            o, final_state = op.make(
                q, k, v, options, g=g, beta=beta, decay=decay, A_log=A_log, dt_bias=dt_bias,
                lower_bound=lower_bound, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
                has_initial_state=states.has_initial, erase=erase, a_key=a_key, b_key=b_key,
                null_index=null, backend=backend,
            )  # fmt: skip
            return o, final_state, None
        try:
            _, final_state = op.write(
                q, k, v, options, o=out, g=g, beta=beta, decay=decay, A_log=A_log, dt_bias=dt_bias,
                lower_bound=lower_bound, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
                has_initial_state=states.has_initial, erase=erase, a_key=a_key, b_key=b_key, null_index=null,
                backend=backend,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise named(error, OF_DENSE) from None
        return out, final_state, None

    final_state = returned = pool
    if pool is not None:
        if initial_state is not None:
            raise ValueError(
                f"{op.name}: initial_state must be left out with state_pool, which holds it, got both"
            )
    elif final_indices is not None:
        raise ValueError(f"{op.name}: final_state_indices must come with state_pool, got indices alone")
    elif wants_state and not dense:
        check_room(op, q, k, v, cu_seqlens)
        final_state, final_indices, returned = _new_states.of_sequences(q, v, cu_seqlens, states, null)
    if not v_first:
        final_state = as_v_first(op, "state_pool", final_state)
    if out is None and final_state is None and not wants_chunk_states and checkpoints is None:
        out = empty_o(op, q, k, v)  # `write` would write nothing
    of_initial, of_final = (scales, None) if pool is None else (None, scales)
    names = OF_DENSE if pool is None else states.names or POOL
    if op is _ops.decode:
        try:
            o, made_state = op.write(
                q, k, v, options, o=out, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
                lower_bound=lower_bound, final_state=final_state, initial_state_indices=initial_indices,
                initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale, decay=decay, erase=erase,
                has_initial_state=states.has_initial, final_state_indices=final_indices, null_index=null,
                a_key=a_key, b_key=b_key, initial_scales=of_initial, final_scales=of_final, backend=backend,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise named(error, names) from None
        return o if out is None else out, made_state if returned is None else returned, None
    checkpoint_states = plan = chunk_states = chunk_states_v_first = None
    if checkpoints is not None:
        checkpoint_states, plan = checkpoints_of(checkpoints)
    if wants_chunk_states:
        check_room(op, q, k, v, cu_seqlens)
        if cu_seqlens_cpu is not None and cu_seqlens is not None:
            check_host_lengths(op, cu_seqlens, cu_seqlens_cpu)
        chunk_states = _new_states.of_chunks(q, k, v, cu_seqlens, cu_seqlens_cpu, chunk_size, v_first)
        chunk_states_v_first = chunk_states if v_first else chunk_states.transpose(-1, -2)
    if not v_first:
        checkpoint_states = as_v_first(op, "checkpoints.states", checkpoint_states)
    try:
        o, made_state = op.write(
            q, k, v, options, o=out, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
            final_state=final_state, initial_state_indices=initial_indices, initial_state=initial_state,
            cu_seqlens=cu_seqlens, scale=scale, decay=decay, has_initial_state=states.has_initial,
            final_state_indices=final_indices, erase=erase, a_key=a_key, b_key=b_key, null_index=null,
            checkpoints=checkpoint_states, checkpoint_plan=plan, chunk_states=chunk_states_v_first, kept=kept,
            initial_scales=of_initial, final_scales=of_final, backend=backend,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise named(error, names) from None
    return o if out is None else out, made_state if returned is None else returned, chunk_states


def verify(
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gate: Gate,
    states: States,
    *,
    erase: Tensor | None = None,
    a_key: Tensor | None = None,
    b_key: Tensor | None = None,
    decay: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_is_logit: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    update_state: bool = False,
    state_indices: Tensor | None = None,
    num_accepted: Tensor | None = None,
    snapshots: Tensor | None = None,
    snapshot_indices: Tensor | None = None,
    parents: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """`states.pool` is only read unless `update_state`."""
    op, pool, v_first, scales = _ops.verify, states.pool, states.v_first, states.scales
    initial_indices, null_index = states.initial_indices, states.null_index
    check_inputs(op, q, k, v, device)
    if cu_seqlens is not None:
        check_lengths(op, "cu_seqlens", cu_seqlens)
    check_flags(state_v_first=v_first)
    if state_indices is None and initial_indices is None and _ops.is_dense(pool) and pool.dim() == 4:
        pool = pool[: _sequences(q, cu_seqlens)]
        scales = first_slots(scales, pool.shape[0])
    if not v_first:
        pool = as_v_first(op, "state", pool)
        snapshots = as_v_first(op, "snapshots", snapshots, 5)
    A_log, dt_bias, lower_bound = gate.A_log, gate.dt_bias, gate.lower_bound
    options = pack(
        algorithm, gate.kind, qk_l2norm, beta_is_logit, allow_neg_eigval, scale, lower_bound, null_index,
        backend, deterministic,
    )  # fmt: skip
    if update_state:
        options |= IN_PLACE
    null = None if null_index == -1 else null_index
    names = states.names or STATE
    if out is None and not update_state and snapshots is None and snapshot_indices is None:
        try:
            o: Tensor = op.make(
                q, k, v, options, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
                initial_state_indices=initial_indices, initial_state=pool, cu_seqlens=cu_seqlens, scale=scale,
                decay=decay, erase=erase, a_key=a_key, b_key=b_key, has_initial_state=states.has_initial,
                state_indices=state_indices, num_accepted=num_accepted, parents=parents,
                initial_scales=scales, null_index=null, backend=backend,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise named(error, names) from None
        return o
    final_state, initial_state = (pool, None) if update_state else (None, pool)
    of_final, of_initial = (scales, None) if update_state else (None, scales)
    try:
        made = op.write(
            q, k, v, options, o=out, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
            final_state=final_state, initial_state_indices=initial_indices, initial_state=initial_state,
            cu_seqlens=cu_seqlens, scale=scale, decay=decay, has_initial_state=states.has_initial,
            erase=erase, a_key=a_key, b_key=b_key, state_indices=state_indices, num_accepted=num_accepted,
            snapshots=snapshots, snapshot_indices=snapshot_indices, parents=parents,
            initial_scales=of_initial, final_scales=of_final, null_index=null, backend=backend,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise named(error, names) from None
    return made if out is None else out


def segment(
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gate: Gate,
    *,
    erase: Tensor | None = None,
    a_key: Tensor | None = None,
    b_key: Tensor | None = None,
    decay: Tensor | None,
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
    op = _ops.segment
    check_inputs(op, q, k, v, device)
    check_flags(state_v_first=state_v_first, keep=keep)
    check_room(op, q, k, v, cu_seqlens)
    if out is not None and (not isinstance(out, tuple | list) or len(out) != 2):
        raise TypeError(f"segment: out must be a pair (m, b), got {_ops.type_name(out)}")
    A_log, dt_bias, lower_bound = gate.A_log, gate.dt_bias, gate.lower_bound
    options = pack(
        algorithm, gate.kind, qk_l2norm, beta_is_logit, allow_neg_eigval, scale, lower_bound, -1, backend,
        deterministic,
    )  # fmt: skip
    if keep:
        options |= _KEEP
    if out is None:
        options |= _MAPS if state_v_first else _MAPS | _K_FIRST
    m, b = (None, None) if out is None else out
    if m is None and b is None:  # `write` would write nothing
        m, b, kept = op.make(
            q, k, v, options, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
            cu_seqlens=cu_seqlens, scale=scale, decay=decay, erase=erase, a_key=a_key, b_key=b_key,
            backend=backend,
        )  # fmt: skip
        return (m, b, kept) if keep else (m, b)
    kept = op.write(
        q, k, v, options, m=m, b=b if state_v_first else as_v_first(op, "b", b), g=g, beta=beta,
        A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, cu_seqlens=cu_seqlens, scale=scale,
        decay=decay, erase=erase, a_key=a_key, b_key=b_key, backend=backend,
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


def returned(
    made: tuple[Tensor, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    o, final_state, h = made
    return (o, final_state) if h is None else (o, final_state, h)


def given_gate(
    use_gate_in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Gate:
    if use_gate_in_kernel is False and A_log is None and dt_bias is None and lower_bound is None:
        return LOG_DECAY
    return Gate(gate_of(use_gate_in_kernel, lower_bound), A_log, dt_bias, lower_bound)


def require_tensor(argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument} must be a tensor, got {_ops.type_name(value)}")


def has_rows(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() >= 2


def check_flags(**flags: object) -> None:
    for argument, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{argument} must be of type bool, got {_ops.type_name(value)}")


def chunk_size_of(function: str, kwargs: dict[str, Any]) -> int:
    """The spacing of h, which is all that `kwargs` may hold. What was given, of any type: `pack` looks at
    that."""
    chunk_size = kwargs.pop("chunk_size", 64)
    refuse_unknown(function, kwargs)
    return chunk_size


def refuse_unknown(function: str, kwargs: Mapping[str, object]) -> None:
    if kwargs:
        raise TypeError(f"{function}() got an unexpected keyword argument {next(iter(kwargs))!r}")


def refuse_context() -> None:
    raise NotImplementedError(
        "cp_context: context parallelism has functions of its own, as cula.dist.cula_kda_cp, "
        "which take a group"
    )


def check_inputs(
    op: Operator, q: Tensor, k: Tensor, v: Tensor, device: torch.device | str | None = None
) -> None:
    """What must hold before shapes can be read; everything else is checked in C++."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _ops.refuse_types(op.default, (q, k, v))
    if q.dim() != 4 or v.dim() != 4:
        _ops.check_dims(op, q, v)
    if device is not None:
        try:
            wanted = torch.device(device)
        except (RuntimeError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{op.name}: device must be a device of PyTorch, got {device!r}") from None
        if wanted.type != q.device.type or wanted.index not in (None, q.device.index):
            raise ValueError(f"{op.name}: device must be q's device, {q.device}, got {wanted}")


def _fits(q: Tensor, v: Tensor) -> bool:
    """Whether outputs of their shapes are no larger than the inputs lead one to expect."""
    try:
        (batch, tokens, _, key_dim), (rows, length, _, _) = q.shape, v.shape
        dense = q.layout is v.layout is torch.strided and not (q.is_quantized or v.is_quantized)
        return dense and batch == rows and _ops.may_have_rows(tokens, length) and key_dim <= 256
    except (AttributeError, RuntimeError, ValueError):
        return False  # what is wrong, check_room() says


def check_room(op: Operator, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> None:
    """What must hold before outputs are made here: those of inputs that C++ refuses could be larger than the
    memory. It asks for all that `check_inputs` does but the device."""
    if cu_seqlens is None and _fits(q, v) and isinstance(k, Tensor):
        return
    if not (_ops.is_dense(q) and _ops.is_dense(k) and _ops.is_dense(v)):
        _ops.refuse_types(op.default, (q, k, v))
    if q.dim() != 4 or v.dim() != 4:
        _ops.check_dims(op, q, v)
    if q.shape[0] != v.shape[0] or not _ops.may_have_rows(q.shape[1], v.shape[1]):
        batch, tokens = q.shape[:2]
        raise ValueError(
            f"{op.name}: v must have shape [B, T, HV, V] = [{batch}, {tokens}, HV, V], got {list(v.shape)}"
        )
    if q.shape[3] > 256:
        raise ValueError(f"{op.name}: q must have a key dimension K from 1 to 256, got {q.shape[3]}")
    if cu_seqlens is not None:
        check_lengths(op, "cu_seqlens", cu_seqlens)


def check_lengths(op: Operator, argument: str, lengths: Tensor) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{op.name}: {argument} must be a tensor or None, got {_ops.type_name(lengths)}")
    if not _ops.is_dense(lengths) or lengths.dim() != 1:
        raise ValueError(f"{op.name}: {argument} must have shape [N + 1], got {_ops.described(lengths)}")
    if lengths.shape[0] == 0:
        raise ValueError(f"{op.name}: {argument} must have N + 1 >= 1 elements, got 0")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op.name}: {argument} must have dtype int32 or int64, got {lengths.dtype}")
    if lengths.shape[0] > 1 and lengths.stride(0) != 1:
        raise ValueError(f"{op.name}: {argument} must be contiguous, got stride {lengths.stride(0)}")


def check_host_lengths(op: Operator, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor) -> None:
    """`cu_seqlens_cpu` holds what `cu_seqlens` does, as far as the host can read that without waiting."""
    check_lengths(op, "cu_seqlens_cpu", cu_seqlens_cpu)
    if cu_seqlens_cpu.shape[0] != (count := cu_seqlens.shape[0]):
        raise ValueError(
            f"{op.name}: cu_seqlens_cpu must have as many elements as cu_seqlens, {count}, "
            f"got {cu_seqlens_cpu.shape[0]}"
        )
    if torch.compiler.is_compiling() or not (cu_seqlens.is_cpu and cu_seqlens_cpu.is_cpu):
        return
    if wrong := (cu_seqlens_cpu != cu_seqlens).nonzero().flatten().tolist():
        n = wrong[0]
        raise ValueError(
            f"{op.name}: cu_seqlens_cpu must have the values of cu_seqlens, got cu_seqlens_cpu[{n}] = "
            f"{cu_seqlens_cpu[n]} beside cu_seqlens[{n}] = {cu_seqlens[n]}"
        )


def empty_o(op: Operator, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    check_room(op, q, k, v)
    if q.shape[1] != v.shape[1]:
        return v.new_empty((*q.shape[:2], *v.shape[2:]))
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def pack(
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
    chunk_size: int = 64,
) -> int:
    """The `options` of an operator, after a look at the types of all that is no tensor."""
    if not (
        (qk_l2norm is True or qk_l2norm is False)
        and (beta_is_logit is False or beta_is_logit is True)
        and (allow_neg_eigval is False or allow_neg_eigval is True)
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
    return _ops.pack(
        algorithm, gate=gate, qk_l2norm=qk_l2norm, beta_is_logit=beta_is_logit,
        allow_neg_eigval=allow_neg_eigval,
        batch_invariant=deterministic is not None and is_batch_invariant(deterministic),
        chunk_tokens=chunk_size,
    )  # fmt: skip


def is_batch_invariant(deterministic: bool | str | None) -> bool:
    if deterministic is None or deterministic is True:
        return False
    if not isinstance(deterministic, str) or deterministic != "batch_invariant":
        raise ValueError(f'deterministic must be None, True or "batch_invariant", got {deterministic!r}')
    return True


def as_v_first(op: Operator, argument: str, states: TensorOrNone, ndim: int = 4) -> TensorOrNone:
    """The V-first view of K-first states: the operators take any strides, so no layout needs a copy."""
    if states is None or not _ops.is_dense(states):
        return states  # absent, or refused with the other types
    if states.dim() != ndim:
        raise ValueError(f"{op.name}: {argument} must have {ndim} dimensions, got {list(states.shape)}")
    return states.transpose(-1, -2)


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def checkpoints_of(checkpoints: Checkpoints) -> Checkpoints:
    if not isinstance(checkpoints, tuple | list) or len(checkpoints) != 2:
        raise TypeError(
            f"prefill: checkpoints must be Checkpoints(states, plan), got {_ops.type_name(checkpoints)}"
        )
    return Checkpoints(*checkpoints)
