# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention under the names and conventions of FLA (`fla.ops.kda`), cuLA and SGLang.

Each function keeps its upstream signature, defaults and state layout, so that adoption is one changed import
line. All are differentiable as `cula.api` says, but where they write a pool or `out`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _fla, _names, _ops, _passes
from ._passes import Gate, Outputs, States, dense

__all__ = [
    "chunk_kda",
    "fused_recurrent_kda",
    "fused_sigmoid_gating_delta_rule_update",
    "kda_decode",
    "kda_prefill_hopper",
]

# What the operators' arguments are called where a pool is `initial_state_source`.
_SOURCE_NAMES = {
    "initial_state": "initial_state_source",
    "final_state": "initial_state_source",
    "snapshots": "intermediate_states_buffer",
    "snapshot_indices": "intermediate_state_indices",
    "parents": "retrieve_parent_token",
    "o": "out",
}


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`fla.ops.kda.chunk_kda` (and cuLA's of that name): a whole prompt.

    q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]` the log decay or, with `use_gate_in_kernel`, the
    raw gate (softplus, or bounded where `lower_bound` is given), beta `[B, T, HV]`. `A_log` and `dt_bias`
    hold HV and HV * K values. States are float32 `[N, HV, K, V]`, `[N, HV, V, K]` with `state_v_first`; h,
    the states at chunk starts, is `[B, NT, HV, K, V]` in k's dtype and needs `torch.inference_mode()`.
    `use_graph` and `max_num_seqs` change nothing: no call reads lengths on the host. `disable_recompute` is
    that of `cula.api`, and changes nothing with `cp_context`. Tokens of no sequence give zeros. With
    `cp_context` the tokens are the rank's, as in `cula.dist.cula_kda_cp`. Errors are FLA's.
    """
    try:
        state_v_first = _fla.state_layout(kwargs, state_v_first)
        _fla.options("chunk_kda", kwargs)
        if not (type(safe_gate) is type(disable_recompute) is bool):
            _passes.check_flags(safe_gate=safe_gate, disable_recompute=disable_recompute)
        if cp_context is not None:
            cu_seqlens = _fla.cu_seqlens_of(cp_context, initial_state, output_final_state)
        _fla.sequences(q, cu_seqlens, initial_state)
        _fla.float32_state(initial_state)
        if chunk_size not in (32, 64):
            raise ValueError(f"`chunk_size` must be either 32 or 64 for KDA, got {chunk_size}.")
        _fla.gate(use_gate_in_kernel, A_log, lower_bound, safe_gate)
        _fla.beta(use_beta_sigmoid_in_kernel, allow_neg_eigval)
        _check_shapes(q, k, v, g, beta)
        if return_intermediate_states:
            allowed = torch.is_inference_mode_enabled()
            _fla.require(allowed, "return_intermediate_states is only allowed in inference mode")
            _fla.require(
                not disable_recompute, "return_intermediate_states must be used with disable_recompute=False"
            )
            _fla.require(cp_context is None, "return_intermediate_states is not supported for CP")
        gate = _fla.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound)
        if cp_context is not None:
            return _fla.along(
                "chunk_kda", "kda", cp_context, q, k, v, g, beta, gate, scale, use_qk_l2norm_in_kernel,
                use_beta_sigmoid_in_kernel, allow_neg_eigval,
            )  # fmt: skip
        o, final_state, h = _passes.forward(
            _ops.prefill, "kda", q, k, v, g, beta, gate, scale, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens, dense(initial_state, state_v_first),
            Outputs(None, output_final_state, None, return_intermediate_states, chunk_size),
            cu_seqlens_cpu=cu_seqlens_cpu, disable_recompute=disable_recompute,
        )  # fmt: skip
        return (o, final_state) if h is None else (o, final_state, h)
    except Exception as error:
        _fla.refuse_types(chunk_kda, locals(), error)
        raise


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.kda.fused_recurrent_kda`: token after token, made for a few tokens per sequence.

    As `chunk_kda`, but beta may be `[B, T, HV, V]` and the initial state of any floating dtype. A raw gate
    with neither `A_log` nor `lower_bound` is `-e * softplus(g + dt_bias)`, as in FLA. An empty sequence
    returns its initial state. q, k and v may differ in dtype; o has that of v.
    """
    try:
        state_v_first = _fla.state_layout(kwargs, state_v_first)
        _fla.options("fused_recurrent_kda", kwargs)
        if use_gate_in_kernel and A_log is None and lower_bound is None:
            A_log = g.new_ones(v.shape[2], dtype=torch.float32)
        dtype = v.dtype
        q, k, v = _fla.one_dtype(q, k, v)
        o, final_state, _ = _passes.forward(
            _ops.decode, "kda", q, k, v, g, beta,
            _fla.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound), scale, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens, dense(initial_state, state_v_first),
            Outputs(None, output_final_state),
        )  # fmt: skip
        return o.to(dtype), final_state
    except Exception as error:
        _fla.refuse_types(fused_recurrent_kda, locals(), error)
        raise


def kda_prefill_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """cuLA's `kda_prefill_hopper`, on any device: states float32 `[N, H, V, K]`, beta already a sigmoid.

    Every gate is taken; `safe_gate` only adds its check of `lower_bound`. `chunk_indices` is not needed.
    """
    try:
        _fla.options("kda_prefill_hopper", kwargs)
        if type(safe_gate) is not bool:
            _passes.check_flags(safe_gate=safe_gate)
        _fla.sequences(q, cu_seqlens, initial_state)
        _fla.float32_state(initial_state)
        _fla.gate(use_gate_in_kernel, A_log, lower_bound, safe_gate)
        _check_shapes(q, k, v, g, beta)
        o, final_state, _ = _passes.forward(
            _ops.prefill, "kda", q, k, v, g, beta,
            _fla.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound), scale, use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens, states=dense(initial_state),
            outputs=Outputs(None, output_final_state),
        )  # fmt: skip
        return o, final_state
    except Exception as error:
        _fla.refuse_types(kda_prefill_hopper, locals(), error)
        raise


def kda_decode(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor | None,
    initial_state_indices: Tensor | None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    out: Tensor | None = None,
    state_layout: str = "vk",
) -> Tensor:
    """cuLA's `kda_decode`: one token per sequence, the state pool updated in place.

    q, k `[N, 1, H, K]` or `[1, N, H, K]`, v and the result likewise with HV and V; a `[N, 1, HV, K]` the raw
    gate and b `[N, 1, HV]` the logit of beta, each also without the 1 and flattened; A_log HV values, dt_bias
    HV * K. The gate is `-exp(A_log) * softplus(a + dt_bias)`. The pool is float32 `[P, HV, V, K]`,
    `[P, HV, K, V]` with `state_layout="kv"`; None starts from zero and keeps nothing. Rows with a negative
    index get zeros. `cu_seqlens` has no effect, as upstream.
    """
    try:
        return _decode(
            "kda", A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, scale,
            use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, out, state_layout,
        )  # fmt: skip
    except Exception as error:
        _fla.refuse_types(kda_decode, locals(), error)
        raise


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor | None,
    initial_state_indices: Tensor | None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    match_cutedsl_decode: bool = False,
    *,
    out: Tensor | None = None,
    state_layout: str = "vk",
) -> Tensor:
    """SGLang's decode and verification of KDA, with `is_kda`, and of GDN; the signature of SGLang 0.5.23.

    q, k `[B, T, H, K]`, or `[1, T, H, K]` with `cu_seqlens` for rows of different length; v and the result
    likewise with HV and V; a the raw gate, HV * K values a token (KDA) or HV (GDN), b the logit of beta, HV
    values a token, in any shape that holds them in this order; A_log HV values, dt_bias as many as a has a
    token. The gate is `-exp(A_log) * softplus(a + dt_bias)`, with `lower_bound`
    `lower_bound * sigmoid(exp(A_log) * (a + dt_bias))`. Without `cu_seqlens`, `[1, T, ..]` is T rows of one
    token where there are T indices (cuLA's reading), else one row.

    Row n starts from slot `initial_state_indices[n]` of the pool `[P, HV, V, K]`, and its tokens run in
    order. The state after the last goes back to that slot unless `disable_state_update`; the one after token
    t goes to `intermediate_states_buffer[intermediate_state_indices[n], t]` where that buffer is given,
    `[slots, S, HV, V, K]`. `retrieve_parent_token` `[N, S]` makes the row a tree: token t > 0 continues the
    state after that earlier token. A negative index skips the row: its result is zero here. Indices of more
    rows than there are may be given. The buffer has its number of steps in its shape, and `cache_steps` may
    not exceed it. ReplaySSM's rings (`cache_ring`) and the rounding of another kernel
    (`match_cutedsl_decode`) are refused.

    out: where to write the result. state_layout: `"kv"` for pools and buffers `[.., HV, K, V]`.
    """
    if not (
        type(cache_ring) is type(match_cutedsl_decode) is type(is_kda) is type(disable_state_update) is bool
    ):
        _passes.check_flags(
            cache_ring=cache_ring, match_cutedsl_decode=match_cutedsl_decode, is_kda=is_kda,
            disable_state_update=disable_state_update,
        )  # fmt: skip
    if cache_ring or match_cutedsl_decode:
        name = "cache_ring" if cache_ring else "match_cutedsl_decode"
        raise NotImplementedError(
            f"{name}=True is not built: states are kept, and rounded where they are stored"
        )
    algorithm = "kda" if is_kda else "gdn"
    if lower_bound is not None and not is_kda:
        raise ValueError(f"lower_bound must be left out with is_kda=False, got {lower_bound}")
    if cache_steps is not None and (not isinstance(cache_steps, int) or isinstance(cache_steps, bool)):
        raise TypeError(f"cache_steps must be of type int, got {_ops.type_name(cache_steps)}")
    decodes = (
        not disable_state_update and intermediate_states_buffer is None and retrieve_parent_token is None
    )
    by_token = False
    try:
        if initial_state_indices is not None:
            initial_state_indices, by_token = _indices_of(q, k, v, cu_seqlens, initial_state_indices, decodes)
        if decodes:
            return _decode(
                algorithm, A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, scale,
                use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, out, state_layout, lower_bound,
                cu_seqlens, by_token,
            )  # fmt: skip
        return _verify(
            algorithm, A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, scale,
            use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, out, state_layout, lower_bound,
            cu_seqlens, not disable_state_update, intermediate_states_buffer, intermediate_state_indices,
            cache_steps, retrieve_parent_token,
        )  # fmt: skip
    except Exception as error:
        _fla.refuse_types(fused_sigmoid_gating_delta_rule_update, locals(), error)
        raise


def _indices_of(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, indices: Tensor, decodes: bool
) -> tuple[Tensor, bool]:
    """The indices of a call's rows, and whether they say that its tokens are rows."""
    try:
        count, rows = indices.shape[0], q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if decodes and cu_seqlens is None and rows == 1 and count == q.shape[1]:
            return indices, True
        return indices if count == rows else indices[:rows], False
    except (AttributeError, IndexError):
        _passes.check_inputs(_ops.decode, q, k, v)
        _check_tensors(initial_state_indices=(indices, 1), cu_seqlens=(cu_seqlens, 1))
        raise


def _check_engine(
    heads: int,
    key_dim: int,
    value_dim: int,
    A_log: Tensor,
    dt_bias: Tensor,
    source: Tensor | None,
    scale: float | None,
    softplus_beta: float,
    softplus_threshold: float,
    state_layout: str,
) -> None:
    _check_gate(A_log, dt_bias, scale, softplus_beta, softplus_threshold)
    if state_layout not in ("vk", "kv"):
        raise ValueError(f'state_layout must be "vk" or "kv", got {state_layout!r}')
    if source is None:
        return
    if not isinstance(source, Tensor):
        _check_tensors(initial_state_source=(source, 4))
    matrix = (value_dim, key_dim) if state_layout == "vk" else (key_dim, value_dim)
    if source.shape[1:] != (heads, *matrix):
        raise ValueError(
            f"State layout mismatch: initial_state_source must be [pool, {heads}, {matrix[0]}, {matrix[1]}] "
            f"for state_layout={state_layout!r}, got {list(source.shape)}"
        )


def _check_gate(
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    slope: float,
    threshold: float,
    names: tuple[str, str] = ("softplus_beta", "softplus_threshold"),
) -> None:
    """`names`: what the engine calls the two parameters of softplus."""
    if A_log is None or dt_bias is None:
        raise TypeError(f"{'A_log' if A_log is None else 'dt_bias'} must be a tensor, got NoneType")
    if scale is not None and not scale > 0:
        raise _fla.ArgumentError(f"scale must be positive, got {scale}")
    if type(slope) is type(threshold) is float and slope == 1.0 and threshold == 20.0:
        return
    for name, value in zip(names, (slope, threshold), strict=True):
        if not isinstance(value, float | int) or isinstance(value, bool):
            raise TypeError(f"{name} must be of type float, got {_ops.type_name(value)}")
    if (slope, threshold) != (1, 20):
        raise NotImplementedError(
            f"the gate is the exact softplus: {names[0]} must be 1 and {names[1]} 20, "
            f"got {slope} and {threshold}"
        )


def _sizes(op: _ops.Operator, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """B, T, HV, K, V."""
    try:
        batch, tokens, _, key_dim = q.shape
        _, _, heads, value_dim = v.shape
    except (AttributeError, ValueError):
        _passes.check_inputs(op, q, k, v)
        raise
    return batch, tokens, heads, key_dim, value_dim


def _raw(
    algorithm: str, a: Tensor, b: Tensor, batch: int, tokens: int, heads: int, key_dim: int
) -> tuple[Tensor, Tensor]:
    """The raw gate and the logits of beta in the shapes of Level 1."""
    try:
        if algorithm == "kda":
            return a.reshape(batch, tokens, heads, key_dim), b.reshape(batch, tokens, heads)
        return a.reshape(batch, tokens, heads), b.reshape(batch, tokens, heads)
    except (AttributeError, RuntimeError):
        for name, x in (("a", a), ("b", b)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, got {_ops.type_name(x)}") from None
        for name, x, last in (("a", a, key_dim if algorithm == "kda" else 1), ("b", b, 1)):
            if x.numel() != batch * tokens * heads * last:
                raise ValueError(
                    f"{name} must hold {heads * last} values for each of {batch * tokens} tokens, "
                    f"got {list(x.shape)}"
                ) from None
        raise


def _check_tensors(**named: tuple[object, int | None]) -> None:
    """Each is None or a tensor, and of so many dimensions where the number is given."""
    for name, (value, dims) in named.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {_ops.type_name(value)}")
        if value is not None and dims not in (None, value.dim()):
            raise ValueError(f"{name} must have {dims} dimension{'s' * (dims > 1)}, got {list(value.shape)}")


def _decode(
    algorithm: str,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    source: Tensor | None,
    indices: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    softplus_beta: float,
    softplus_threshold: float,
    out: Tensor | None,
    state_layout: str,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    by_token: bool = True,
) -> Tensor:
    """`by_token`: the rows of `[1, T, ..]` are its tokens."""
    batch, tokens, heads, key_dim, value_dim = _sizes(_ops.decode, q, k, v)
    _check_engine(
        heads, key_dim, value_dim, A_log, dt_bias, source, scale, softplus_beta, softplus_threshold,
        state_layout,
    )  # fmt: skip
    packed = by_token and batch == 1 and tokens > 1
    if packed:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = None if out is None else out.transpose(0, 1)
        batch, tokens = tokens, 1
    g, beta = _raw(algorithm, a, b, batch, tokens, heads, key_dim)
    if source is None:
        indices = None
    elif indices is None:
        _check_tensors(cu_seqlens=(cu_seqlens, 1))
        source = source[: batch if cu_seqlens is None else cu_seqlens.shape[0] - 1]
    kind = "softplus" if lower_bound is None else "bounded"
    if source is None:
        o, _, _ = _passes.forward(
            _ops.decode, algorithm, q, k, v, g, beta, Gate(kind, A_log, dt_bias, lower_bound), scale,
            qk_l2norm, True, False, cu_seqlens, outputs=Outputs(out),
        )  # fmt: skip
        return o.transpose(0, 1) if packed else o
    if state_layout == "kv":
        source = _passes.as_v_first(_ops.decode, "initial_state_source", source)
    options = _passes.pack(algorithm, kind, qk_l2norm, True, False, scale, lower_bound, -1, None)
    try:
        o, _ = _ops.decode.write(
            q, k, v, options | _passes.IN_PLACE, o=out, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
            lower_bound=lower_bound, final_state=source, initial_state_indices=indices, cu_seqlens=cu_seqlens,
            scale=scale,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise _names.named(error, _SOURCE_NAMES) from None
    o = o if out is None else out
    return o.transpose(0, 1) if packed else o


def _verify(
    algorithm: str,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    source: Tensor | None,
    indices: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    softplus_beta: float,
    softplus_threshold: float,
    out: Tensor | None,
    state_layout: str,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
    update_state: bool,
    snapshots: Tensor | None,
    snapshot_indices: Tensor | None,
    steps: int | None,
    parents: Tensor | None,
) -> Tensor:
    batch, tokens, heads, key_dim, value_dim = _sizes(_ops.verify, q, k, v)
    _check_engine(
        heads, key_dim, value_dim, A_log, dt_bias, source, scale, softplus_beta, softplus_threshold,
        state_layout,
    )  # fmt: skip
    _check_tensors(
        cu_seqlens=(cu_seqlens, 1), intermediate_states_buffer=(snapshots, 5),
        intermediate_state_indices=(snapshot_indices, 1), retrieve_parent_token=(parents, 2),
    )  # fmt: skip
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if snapshots is None:
        snapshot_indices = None
    elif steps is not None and steps > snapshots.shape[1]:
        raise ValueError(
            f"cache_steps must be at most the {snapshots.shape[1]} steps of intermediate_states_buffer, "
            f"got {steps}"
        )
    elif snapshot_indices is not None and snapshot_indices.shape[0] > rows:
        snapshot_indices = snapshot_indices[:rows]
    if parents is not None:
        parents = _tree(parents[:rows])
    table = None
    update_state = update_state and source is not None
    if update_state:
        if indices is None:
            indices = torch.arange(rows, dtype=torch.int32, device=q.device)
        table = _last_slots(indices, tokens, cu_seqlens)
    g, beta = _raw(algorithm, a, b, batch, tokens, heads, key_dim)
    return _passes.verify(
        algorithm, q, k, v, g, beta,
        Gate(_passes.gate_of(True, lower_bound), A_log, dt_bias, lower_bound),
        States(
            None, source, None if source is None else indices, None, None, -1, state_layout == "vk",
            names=_SOURCE_NAMES,
        ),
        scale=scale, qk_l2norm=qk_l2norm, beta_is_logit=True, cu_seqlens=cu_seqlens,
        update_state=update_state, state_indices=table, snapshots=snapshots,
        snapshot_indices=snapshot_indices, parents=parents, out=out,
    )  # fmt: skip


def _tree(parents: Tensor) -> Tensor:
    """SGLang leaves the parent of a row's first token unset. A CUDA kernel takes no parent that is not before
    its token; where the host reads them, such a parent is an error."""
    if not parents.is_cpu:
        return parents
    parents = parents.clone()
    parents[:, :1] = -1
    return parents


def _last_slots(slots: Tensor, tokens: int, cu_seqlens: Tensor | None) -> Tensor:
    """`[N, tokens]`: a row's slot at its last token, and -1 at the others, whose states go to no slot."""
    step = torch.arange(tokens, device=slots.device)
    last = tokens - 1 if cu_seqlens is None else cu_seqlens.diff().unsqueeze(1) - 1
    return torch.where(step == last, slots.unsqueeze(1), -1)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    shape, HV = q.shape, v.shape[2]
    B, T, H, K = shape
    # Not by `require`, which is handed its words in any case: a microsecond for the five.
    if k.shape != shape:
        raise _fla.ArgumentError(f"q and k must have the same shape, got q={shape} vs k={k.shape}")
    if K > 256:
        raise _fla.ArgumentError(f"Currently we only support key headdim <=256 for KDA, got {K}.")
    if H and HV % H != 0:
        raise _fla.ArgumentError(
            f"For GVA, num_v_heads (HV={HV}) must be evenly divisible by num_qk_heads (H={H}), "
            f"but got HV % H = {HV % H}"
        )
    if (given := g.shape) != (B, T, HV, K):
        raise _fla.ArgumentError(f"g must have shape [B, T, HV, K]={[B, T, HV, K]}, got {list(given)}")
    if (given := beta.shape) != (B, T, HV):
        raise _fla.ArgumentError(f"beta must have shape [B, T, HV]={[B, T, HV]}, got {list(given)}")
