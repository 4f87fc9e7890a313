# SPDX-License-Identifier: Apache-2.0
"""Level 1: one function per member of the family, on whatever device its tensors are.

Shapes: B batch, T tokens, N sequences, H query/key heads, HV value heads (HV % H == 0; value head hv reads
query/key head hv // (HV / H)), K (up to 256) and V the key and value dimensions. q and k are `[B, T, H, K]`,
v is `[B, T, HV, V]`, in one dtype: bfloat16, float16 or float32 (float64 for the oracle). Every stride is
free; q, k, v and g are copied where their last dimension is not contiguous.

Words that all functions share:

scale: applied to q, `K ** -0.5` if None.
cu_seqlens: int32 or int64 `[N + 1]` on q's device; B is 1 and sequence n holds the tokens from
    `cu_seqlens[n]` to `cu_seqlens[n + 1]`. Empty sequences are legal, tokens beyond the last one get zeros.
    Without it N is B.
initial_state: `[N, HV, V, K]`, float32, bfloat16 or float16, or float8_e4m3fn with `state_scales`; zero if
    None. With `initial_state_indices` a pool `[slots, HV, V, K]` that is only read.
output_final_state: return the final state, a new float32 `[N, HV, V, K]`.
state_pool: `[slots, HV, V, K]` with any slot stride, read and written in place and returned as the final
    state. Its dtype is one of those of `initial_state`.
state_scales: float32 `[slots, HV, V]`, of float8_e4m3fn states: one for a row of K (docs/api.md,
    "States in eight bits"). Written with the states.
initial_state_indices, final_state_indices: int32 or int64 `[N]`, the slot that a sequence starts from and
    ends in (the same if the second is None). A sequence whose index is negative or `null_index` is skipped:
    its output is zero, nothing is stored for it. Slots that no index names are not touched.
has_initial_state: bool `[N]`; False starts from zero whatever the slot holds.
state_v_first: False for states `[..., K, V]` (FLA's layout). Both layouts are views of the same kernels,
    never copies.
checkpoints: `Checkpoints(states, plan)`, states to keep on the way.
return_intermediate_states: return h as a third value: the state at the start of every chunk of `chunk_size`
    (16, 32 or 64) tokens, `[B, NT, HV, V, K]` in k's dtype. The chunks of packed sequences follow each other
    along NT, which is their number where the lengths can be read without waiting (on the CPU, not under
    torch.compile) and else the most that it could be, with zeros beyond.
backend: a target by name (`"cpu"`, `"cpu:avx2"`, `"reference"`, see `cula.explain()`); None for the best.
deterministic: results are bit-equal from run to run in any case; `"batch_invariant"` also gives a sequence
    the same bits whatever else is in the batch.
out: a preallocated o, `[B, T, HV, V]`.
device: q's device, checked if given.

Gradients: what a call returns is differentiable by q, k, v, g, beta, `A_log`, `dt_bias` and
`initial_state`, but not by `decay`, nor where the call writes into what it is given (`state_pool`,
`checkpoints`, `out`; a decode's and a draft's states), reads slots, float8 or `kept`, or returns h. So do
drop-ins. docs/guide/training.md has examples.

Errors, before anything is written: `ValueError` names the argument, what was expected and what was given;
`TypeError` for an unknown option or a wrong type; `NotImplementedError` for a gradient that is not built.
The published signatures are those of cuLA's unified interface (inclusionAI/cuLA, issue 50).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _decays, _ops, _passes, _slots
from ._passes import Checkpoints, Outputs, States

__all__ = [
    "Checkpoints",
    "cula_decode",
    "cula_delta",
    "cula_gdn",
    "cula_gla",
    "cula_kda",
    "cula_lightning",
    "cula_segment",
    "cula_simple_gla",
    "cula_verify",
]


def cula_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    device: torch.device | str | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    checkpoints: Checkpoints | None = None,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    kept: Tensor | None = None,
    cp_context: object | None = None,
    state_scales: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention (arXiv:2510.26692): a delta rule whose state decays per token and key channel.

    g: the log decay `[B, T, HV, K]`, any floating dtype, as low as -1000; or `[B, T, HV]`, one decay for all
        channels. With `use_gate_in_kernel` the raw gate: `-exp(A_log) * softplus(g + dt_bias)`, or with
        `lower_bound` (negative) `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`.
    beta: the write strength `[B, T, HV]`, or `[B, T, HV, V]` for one per value channel; a logit with
        `use_beta_sigmoid_in_kernel`, whose sigmoid `allow_neg_eigval` doubles.
    A_log, dt_bias: HV and HV * K values of any shape.
    use_qk_l2norm_in_kernel: normalise q and k, `x * rsqrt(sum(x * x) + 1e-6)`.
    safe_gate: a promise that the log decay lies in [-5, 0), which no kernel here needs; other bounds are
        refused.
    disable_recompute: keep for the backward pass what it would compute again; without effect where no kernel
        does (docs/guide/training.md, "Memory").
    kwargs: `chunk_size`, the spacing of h.

    Returns (o `[B, T, HV, V]` in q's dtype, final state or None), and h if asked for. Everything else:
    `cula.api`.
    """
    if cp_context is not None:
        _passes.refuse_context()
    chunk_size = _passes.chunk_size_of("cula_kda", kwargs) if kwargs else 64
    if not (type(safe_gate) is type(disable_recompute) is bool):
        _passes.check_flags(safe_gate=safe_gate, disable_recompute=disable_recompute)
    if use_gate_in_kernel is True:
        _decays.check_gate(A_log, lower_bound, safe_gate)
    algorithm, gate, dt_bias = _decays.kda_decay(q, g, dt_bias)
    return _passes.returned(_passes.forward(
        _ops.prefill, algorithm, q, k, v, gate, beta,
        _passes.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound), scale, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens,
        States(
            initial_state, state_pool, initial_state_indices, final_state_indices, has_initial_state,
            null_index, state_v_first, state_scales,
        ),
        Outputs(out, output_final_state, checkpoints, return_intermediate_states, chunk_size),
        backend, deterministic, device, kept, disable_recompute=disable_recompute,
    ))  # fmt: skip


def cula_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    lower_bound: float | None = None,
    return_intermediate_states: bool = False,
    device: torch.device | str | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    checkpoints: Checkpoints | None = None,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    kept: Tensor | None = None,
    state_scales: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Gated DeltaNet (arXiv:2412.06464): a delta rule whose state decays per token.

    g: the log decay `[B, T, HV]`, or the raw gate with `use_gate_in_kernel`, as in `cula_kda`.
    A_log, dt_bias: HV values each. beta and everything else as in `cula_kda` and `cula.api`.
    """
    chunk_size = _passes.chunk_size_of("cula_gdn", kwargs) if kwargs else 64
    if use_gate_in_kernel is True:
        _decays.check_gate(A_log, lower_bound)
    return _passes.returned(_passes.forward(
        _ops.prefill, "gdn", q, k, v, g, beta,
        _passes.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound), scale, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens,
        States(
            initial_state, state_pool, initial_state_indices, final_state_indices, has_initial_state,
            null_index, state_v_first, state_scales,
        ),
        Outputs(out, output_final_state, checkpoints, return_intermediate_states, chunk_size),
        backend, deterministic, device, kept,
    ))  # fmt: skip


def cula_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    return_intermediate_states: bool = False,
    device: torch.device | str | None = None,
    state_v_first: bool = True,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    checkpoints: Checkpoints | None = None,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    kept: Tensor | None = None,
    state_scales: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Gated linear attention (arXiv:2312.06635): an additive update, decay per token and key channel.

    g: the log decay `[B, T, HV, K]`, any floating dtype. Everything else: `cula.api`.
    """
    chunk_size = _passes.chunk_size_of("cula_gla", kwargs) if kwargs else 64
    return _passes.returned(_passes.forward(
        _ops.prefill, "gla", q, k, v, g, None, _passes.LOG_DECAY, scale, use_qk_l2norm_in_kernel, False,
        False, cu_seqlens,
        States(
            initial_state, state_pool, initial_state_indices, final_state_indices, has_initial_state,
            null_index, state_v_first, state_scales,
        ),
        Outputs(out, output_final_state, checkpoints, return_intermediate_states, chunk_size),
        backend, deterministic, device, kept,
    ))  # fmt: skip


def cula_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    return_intermediate_states: bool = False,
    device: torch.device | str | None = None,
    state_v_first: bool = True,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    checkpoints: Checkpoints | None = None,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    kept: Tensor | None = None,
    state_scales: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Gated linear attention with one decay per token and head (also the form of Mamba-2, arXiv:2405.21060).

    g: the log decay `[B, T, HV]`. decay: a constant per head `[HV]`, as in `cula_lightning`, on top of g or
    alone, and not differentiable. With neither it is plain linear attention (arXiv:2006.16236). Everything
    else: `cula.api`.
    """
    chunk_size = _passes.chunk_size_of("cula_simple_gla", kwargs) if kwargs else 64
    return _passes.returned(_passes.forward(
        _ops.prefill, _decays.algorithm_of("simple_gla", g, decay), q, k, v, g, None, _passes.LOG_DECAY,
        scale, use_qk_l2norm_in_kernel, False, False, cu_seqlens,
        States(
            initial_state, state_pool, initial_state_indices, final_state_indices, has_initial_state,
            null_index, state_v_first, state_scales,
        ),
        Outputs(out, output_final_state, checkpoints, return_intermediate_states, chunk_size),
        backend, deterministic, device, kept, _decays.log_decay(decay),
    ))  # fmt: skip


def cula_lightning(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    chunk_size: int = 64,
    device: torch.device | str | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = True,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    checkpoints: Checkpoints | None = None,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    kept: Tensor | None = None,
    state_scales: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Lightning attention (arXiv:2401.04658), RetNet (arXiv:2307.08621): additive, with a constant decay per
    head.

    decay: `[HV]`, in log space: a token shrinks the state by `exp(-abs(decay))`. A state never grows, so the
        positive slopes of MiniMax and cuLA and the negative log decays of FLA mean the same. It is never
        derived from a layer index here. Not differentiable by `decay`: a decay to be learned is the g of
        `cula_simple_gla`.
    Everything else: `cula.api`.
    """
    if kwargs:
        _passes.refuse_unknown("cula_lightning", kwargs)
    return _passes.returned(_passes.forward(
        _ops.prefill, "lightning", Q, K, V, None, None, _passes.LOG_DECAY, scale, use_qk_l2norm_in_kernel,
        False, False, cu_seqlens,
        States(
            initial_state, state_pool, initial_state_indices, final_state_indices, has_initial_state,
            null_index, state_v_first, state_scales,
        ),
        Outputs(out, output_final_state, checkpoints, return_intermediate_states, chunk_size),
        backend, deterministic, device, kept, _decays.log_decay(decay),
    ))  # fmt: skip


def cula_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    return_intermediate_states: bool = False,
    device: torch.device | str | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    checkpoints: Checkpoints | None = None,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    kept: Tensor | None = None,
    state_scales: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """DeltaNet (arXiv:2406.06484): the delta rule without decay, or with a constant `decay` per head `[HV]`.

    beta and everything else as in `cula_kda` and `cula.api`. Not differentiable by `decay`.
    """
    chunk_size = _passes.chunk_size_of("cula_delta", kwargs) if kwargs else 64
    return _passes.returned(_passes.forward(
        _ops.prefill, _decays.algorithm_of("delta", None, decay), q, k, v, None, beta, _passes.LOG_DECAY,
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens,
        States(
            initial_state, state_pool, initial_state_indices, final_state_indices, has_initial_state,
            null_index, state_v_first, state_scales,
        ),
        Outputs(out, output_final_state, checkpoints, return_intermediate_states, chunk_size),
        backend, deterministic, device, kept, _decays.log_decay(decay),
    ))  # fmt: skip


def cula_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    mode: str = "kda",
    state_indices: Tensor | None = None,
    scale: float | None = None,
    device: torch.device | str | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    state_scales: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """One token for each of N sequences; the state is updated in place.

    q, k: `[N, 1, H, K]` or `[1, N, H, K]`, and v, g, beta likewise: a token is a row of its own, whichever of
        the two dimensions holds the rows. `[N, T, H, K]` with both above 1 is refused: several tokens of a
        sequence are for the prefill functions (with `state_pool`) or `cula_verify`.
    state: the pool `[P, HV, V, K]` of any slot stride, and of any dtype that `initial_state` may have.
    state_indices: int32 or int64 `[N]`, the slot of each row, row n if None; `final_state_indices` where a
        row ends in another slot. A negative or `null_index` slot skips the row: its o is zero.
    mode: kda, gdn, gla, simple_gla, lightning or delta. kda and gdn take g and beta, gla and simple_gla take
        g, delta takes beta, lightning takes `decay`, as in the functions of those names.
    use_gate_in_kernel: g is the raw gate; True if None and A_log or lower_bound is given.

    Returns (o in q's layout, state itself).
    """
    if kwargs:
        _passes.refuse_unknown("cula_decode", kwargs)
    if use_gate_in_kernel is None:
        use_gate_in_kernel = A_log is not None or lower_bound is not None
    algorithm, g, dt_bias, decay = _decays.decay_of(mode, q, g, dt_bias, decay)
    _passes.require_tensor("state", state)
    _passes.check_inputs(_ops.decode, q, k, v, device)
    packed = False
    if q.shape[1] > 1 and (rows := q.shape[0]):
        if rows > 1:
            raise ValueError(
                "decode: q must have one token per row, [N, 1, H, K] or [1, N, H, K] (several tokens of a "
                f"sequence are for cula_verify, or for cula_{mode} with state_pool), got {list(q.shape)}"
            )
        packed = True
        q, v = q.transpose(0, 1), v.transpose(0, 1)
        k = k.transpose(0, 1) if _passes.has_rows(k) else k
        g, beta, out = (x.transpose(0, 1) if _passes.has_rows(x) else x for x in (g, beta, out))
    pool = state
    if state_indices is None and state.dim() == 4 and state.shape[0] > q.shape[0] and _ops.is_dense(state):
        pool, state_scales, state_indices = _slots.of(q, state, state_scales, final_state_indices, null_index)
    if state_v_first is not True:
        _passes.check_flags(state_v_first=state_v_first)
    if not state_v_first:
        pool = _passes.as_v_first(_ops.decode, "state", pool)
    options = _passes.pack(
        algorithm, _passes.gate_of(use_gate_in_kernel, lower_bound), use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, scale, lower_bound, null_index, backend, deterministic,
    )  # fmt: skip
    o, _ = _ops.decode.write(
        q, k, v, options | _passes.IN_PLACE, o=out, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, final_state=pool, initial_state_indices=state_indices, scale=scale,
        decay=decay, has_initial_state=has_initial_state, final_state_indices=final_state_indices,
        final_scales=state_scales, null_index=None if null_index == -1 else null_index, backend=backend,
    )  # fmt: skip
    o = o if out is None else out
    return (o.transpose(0, 1) if packed else o), state


def cula_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    *,
    mode: str = "kda",
    state_indices: Tensor | None = None,
    num_accepted: Tensor | None = None,
    parents: Tensor | None = None,
    snapshots: Tensor | None = None,
    snapshot_indices: Tensor | None = None,
    disable_state_update: bool = False,
    initial_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    device: torch.device | str | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    null_index: int = -1,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    state_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A few draft tokens for each of N sequences, with a state per token, so that any prefix can be accepted
    later.

    q, k, v: `[N, S, heads, dim]`, or packed `[1, T, heads, dim]` with `cu_seqlens` for rows of different
        length.
    state: the pool `[P, HV, V, K]` of base states; zero if None.
    state_indices: int32 or int64 `[N, S]` (S at least the tokens of every row). Row n starts from slot
        `state_indices[n, num_accepted[n] - 1]` and the state after its token t is stored in slot
        `state_indices[n, t]` (vLLM's convention). Without it the pool is only read: row n starts from slot
        `initial_state_indices[n]`, or n.
    num_accepted: int32 or int64 `[N]` in 1..S, what the last step accepted; 1 if None.
    initial_state_indices: int32 or int64 `[N]`, the slot to start from instead.
    disable_state_update: only read the pool even with `state_indices`.
    snapshots: `[slots, S, HV, V, K]`; the state after token t goes to `snapshots[snapshot_indices[n], t]`
        (SGLang's convention; `snapshot_indices` int32 or int64 `[N]`, n if None).
    parents: int32 or int64 `[N, S]` for a tree of drafts: token t continues the state after token
        `parents[n, t] < t`, the base state if that is negative.
    mode and the rest as in `cula_decode`.

    Returns (o, state itself).
    """
    if use_gate_in_kernel is None:
        use_gate_in_kernel = A_log is not None or lower_bound is not None
    algorithm, g, dt_bias, decay = _decays.decay_of(mode, q, g, dt_bias, decay)
    _passes.check_flags(disable_state_update=disable_state_update)
    o = _passes.verify(
        algorithm, q, k, v, g, beta, _passes.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound),
        States(None, state, initial_state_indices, None, has_initial_state, null_index, state_v_first,
               state_scales),
        decay=decay, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
        beta_is_logit=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, cu_seqlens=cu_seqlens,
        update_state=state is not None and state_indices is not None and not disable_state_update,
        state_indices=state_indices, num_accepted=num_accepted, snapshots=snapshots,
        snapshot_indices=snapshot_indices, parents=parents, backend=backend, deterministic=deterministic,
        out=out, device=device,
    )  # fmt: skip
    return o, state


def cula_segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mode: str = "kda",
    g: Tensor | None = None,
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = True,
    device: torch.device | str | None = None,
    backend: str | None = None,
    deterministic: bool | str | None = None,
    scale: float | None = None,
    keep: bool = False,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor | None, ...]:
    """What a run of tokens does to any state: the affine map S -> M S + B, with S as `[K, V]`.

    Maps compose, `(M2, B2) after (M1, B1) = (M2 M1, M2 B1 + B2)`, which is what parallelism over the sequence
    needs. Inputs as in `cula_decode` with T tokens a row; q gives the heads and is not read, unless `keep` is
    true.

    keep: also make what a prefill of the same tokens needs and the maps do not, and return it third. A
        prefill with the same inputs, options and `scale` that gets it as `kept` saves most of its work, as
        often as one likes; nothing but its size is checked. It takes 40 to 80 KiB for each 64 tokens and
        value head (K = 128), and is empty where nothing can be saved: on a CPU, or beyond 16 GiB. V is up to
        256 then.
    out: (m, b) to write to, in the shapes and of the dtype that are returned otherwise; any strides, but no
        memory in common. `(None, b)` makes B alone, which says that no state is before the tokens: what this
        call keeps is for a prefill without `initial_state`, and where M was left out of it another is
        refused. `(None, None)` makes what `keep` asks for alone. What is not made is returned as None.

    Returns float32 (m, b): m `[N, HV, K, K]` for the delta rules, the diagonal `[N, HV, K]` for the additive
    ones; b in the layout of a state, `[N, HV, V, K]`, or `[N, HV, K, V]` with `state_v_first=False`.
    """
    if use_gate_in_kernel is None:
        use_gate_in_kernel = A_log is not None or lower_bound is not None
    algorithm, g, dt_bias, decay = _decays.decay_of(mode, q, g, dt_bias, decay)
    return _passes.segment(
        algorithm, q, k, v, g, beta, _passes.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound),
        decay=decay, qk_l2norm=use_qk_l2norm_in_kernel, beta_is_logit=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, cu_seqlens=cu_seqlens, state_v_first=state_v_first,
        backend=backend, deterministic=deterministic, device=device, scale=scale, keep=keep, out=out,
    )  # fmt: skip
