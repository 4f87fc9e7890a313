# SPDX-License-Identifier: Apache-2.0
"""Level 1: the passes that take the algorithm as `mode`. `cula.api`, which has them too, explains the words
that all functions share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _decays, _names, _ops, _passes, _slots
from ._family import FAMILY
from ._passes import States

# A tensor, or None: which a call has, its algorithm says.
Maybe = Any
# What the operator's arguments are called in cula_decode.
_DECODE_NAMES = {**_names.STATE, "initial_state_indices": "state_indices"}


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
    erase: Tensor | None = None,
    a_key: Tensor | None = None,
    b_key: Tensor | None = None,
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

    q, k: `[N, 1, H, K]` or `[1, N, H, K]`, and v, g, beta, erase, a_key and b_key likewise: a token is a row
        of its own, whichever of the two dimensions holds the rows. `[N, T, H, K]` with both above 1 is
        refused: several tokens of a sequence are for the prefill functions (with `state_pool`) or
        `cula_verify`.
    state: the pool `[P, HV, V, K]` of any slot stride, and of any dtype that `initial_state` may have.
    state_indices: int32 or int64 `[N]`, the slot of each row, row n if None; `final_state_indices` where a
        row ends in another slot. A negative or `null_index` slot skips the row: its o is zero.
    mode: kda, gdn, gdn2, gdp, gla, simple_gla, lightning, delta or rwkv7. kda, gdn and gdp take g and beta,
        gdn2 also erase, gla and simple_gla g, delta beta, lightning `decay`, rwkv7 g, a_key and b_key, as in
        the functions of those names.
        gdp has n rows of k, v and beta for each token: `[N, n, ..]`, or `[1, N n, ..]`.
    use_gate_in_kernel: g is the raw gate; True if None and A_log or lower_bound is given.

    Returns (o in q's layout, state itself).
    """
    if kwargs:
        _passes.refuse_unknown("cula_decode", kwargs)
    if use_gate_in_kernel is None:
        use_gate_in_kernel = A_log is not None or lower_bound is not None
    algorithm, g, dt_bias, decay = _decays.decay_of(mode, q, g, dt_bias, decay)
    several_writes = FAMILY[algorithm].takes_several_writes
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
        tokens = q.shape[1]
        q, g, out, a_key, b_key = (_rows_first(x, tokens) for x in (q, g, out, a_key, b_key))
        k, v, beta, erase = (_rows_first(x, tokens, several_writes) for x in (k, v, beta, erase))
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
    try:
        o, _ = _ops.decode.write(
            q, k, v, options | _passes.IN_PLACE, o=out, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
            lower_bound=lower_bound, final_state=pool, initial_state_indices=state_indices, scale=scale,
            decay=decay, has_initial_state=has_initial_state, final_state_indices=final_state_indices,
            final_scales=state_scales, erase=erase, a_key=a_key, b_key=b_key,
            null_index=None if null_index == -1 else null_index,
            backend=backend,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise _names.named(error, _DECODE_NAMES) from None
    o = o if out is None else out
    return (o.transpose(0, 1) if packed else o), state


def _rows_first(x: Maybe, tokens: int, several_writes: bool = False) -> Maybe:
    """`[1, N, ..]` as `[N, 1, ..]`, and the writes `[1, N n, ..]` of N tokens as `[N, n, ..]`. What is no
    such tensor is refused with the other arguments."""
    if not _passes.has_rows(x):
        return x
    if several_writes and x.shape[0] == 1 and x.shape[1] > 0 and x.shape[1] % tokens == 0:
        return x[0].view(tokens, x.shape[1] // tokens, *x.shape[2:])
    return x.transpose(0, 1)


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
    erase: Tensor | None = None,
    a_key: Tensor | None = None,
    b_key: Tensor | None = None,
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
        erase=erase, a_key=a_key, b_key=b_key, decay=decay, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
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
    erase: Tensor | None = None,
    a_key: Tensor | None = None,
    b_key: Tensor | None = None,
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
    out: (m, b) to write to, in the shapes and of the dtype that are returned otherwise, one of the last two
        dimensions contiguous (of a diagonal m the last), no memory in common. `(None, b)` makes B alone,
        which says that no state is before the tokens: what this call keeps is for a prefill without
        `initial_state`, and where M was left out of it another is refused. `(None, None)` makes what `keep`
        asks for alone. What is not made is returned as None.

    Returns float32 (m, b): m `[N, HV, K, K]` for the delta rules, the diagonal `[N, HV, K]` for the additive
    ones; b in the layout of a state, `[N, HV, V, K]`, or `[N, HV, K, V]` with `state_v_first=False`.
    """
    if use_gate_in_kernel is None:
        use_gate_in_kernel = A_log is not None or lower_bound is not None
    algorithm, g, dt_bias, decay = _decays.decay_of(mode, q, g, dt_bias, decay)
    return _passes.segment(
        algorithm, q, k, v, g, beta, _passes.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound),
        erase=erase, a_key=a_key, b_key=b_key, decay=decay, qk_l2norm=use_qk_l2norm_in_kernel,
        beta_is_logit=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, cu_seqlens=cu_seqlens, state_v_first=state_v_first,
        backend=backend, deterministic=deterministic, device=device, scale=scale, keep=keep, out=out,
    )  # fmt: skip
