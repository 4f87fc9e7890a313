# SPDX-License-Identifier: Apache-2.0
"""vLLM's functions of linear attention, with the signatures of vLLM 0.33, on these kernels.

Each raises before it runs or writes anything where it does not take a call. States are V-first, pools are
updated in place, and slot 0 or below is vLLM's null block: such a row gives zeros and stores nothing.
"""

from __future__ import annotations

from torch import Tensor

from .. import _names, _ops, _passes, api
from .._passes import LOG_DECAY, Gate, Outputs, States
from ..compat import vllm as compat

NULL_BLOCK = 0
PASSES = ("prefill", "decode", "verify")

# What vLLM leaves to this library; `cula.integrations.vllm.register` sets it.
enabled: set[str] = set(PASSES)


def require(*passes: str) -> None:
    for name in passes:
        if name not in enabled:
            raise NotImplementedError(f"CULA_VLLM={','.join(sorted(enabled))} leaves {name} to vLLM")


def _kind(indices: Tensor | None, accepted: Tensor | None) -> str:
    several = isinstance(indices, Tensor) and indices.dim() == 2 and indices.shape[1] > 1
    return "verify" if several or accepted is not None else "decode"


def recurrent(
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor | None,
    cu_seqlens: Tensor | None,
    indices: Tensor | None,
    accepted: Tensor | None,
    *,
    gate: Gate = LOG_DECAY,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_is_logit: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode, or verification of draft tokens, on a pool.

    q, k, v, g, beta: `[B, T, ..]`, or packed `[1, T, ..]` with `cu_seqlens`.
    indices: `[N]`, the slot of each row, or `[N, S]`, the slots of the states after its tokens.
    accepted: `[N]`, with `[N, S]`: the row starts from slot `indices[n, accepted[n] - 1]`.

    Indices and counts of more rows than there are may be given.
    """
    require(_kind(indices, accepted))
    if pool is None or indices is None:
        raise NotImplementedError("a pool and ssm_state_indices are needed, got one of them or neither")
    _passes.check_inputs(_ops.verify, q, k, v)
    if cu_seqlens is not None:
        _passes.check_lengths(_ops.verify, "cu_seqlens", cu_seqlens)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if indices.dim() == 1:
        if accepted is not None:
            raise ValueError("num_accepted_tokens must come with ssm_state_indices of shape [N, S]")
        o, _, _ = _passes.forward(
            _ops.decode, algorithm, q, k, v, g, beta, gate, scale, qk_l2norm, beta_is_logit,
            cu_seqlens=cu_seqlens, states=States(
                None, pool, indices[:rows], None, None, NULL_BLOCK, names=compat.NAMES
            ),
            outputs=Outputs(out),
        )  # fmt: skip
        return o, pool
    o = _passes.verify(
        algorithm, q, k, v, g, beta, gate,
        States(None, pool, None, None, None, NULL_BLOCK, names=compat.NAMES), scale=scale,
        qk_l2norm=qk_l2norm, beta_is_logit=beta_is_logit, cu_seqlens=cu_seqlens, update_state=True,
        state_indices=indices[:rows], num_accepted=None if accepted is None else accepted[:rows], out=out,
    )  # fmt: skip
    return o, pool


def heads_of(
    mixed_qkv: Tensor, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k `[T, H, K]` and v `[T, HV, V]` as views of the rows that the convolution makes."""
    if mixed_qkv.dim() != 2:
        raise ValueError(f"mixed_qkv must have shape [T, 2 * H * K + HV * V], got {list(mixed_qkv.shape)}")
    width, of_values = mixed_qkv.shape[1], value_heads * value_dim
    keys, rest = divmod(width - of_values, 2 * key_dim)
    if rest or keys <= 0:
        raise ValueError(
            f"mixed_qkv must have 2 * H * K + HV * V = 2 * H * {key_dim} + {of_values} columns, got {width}"
        )
    q, k, v = mixed_qkv.split((keys * key_dim, keys * key_dim, of_values), dim=1)
    return q.unflatten(1, (keys, key_dim)), k.unflatten(1, (keys, key_dim)), v.unflatten(1, (value_heads, -1))


# vllm.third_party.flash_linear_attention.ops


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
    aiter_prefill_metadata: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """GDN's prefill: q, k `[1, T, H, K]`, v `[1, T, HV, V]`, g the log decay, dense states `[N, HV, V, K]`.
    The plans of other kernels (chunk_indices, chunk_offsets, aiter_prefill_metadata) have no effect. The
    first numbers of `core_attn_out` become o, as upstream."""
    require("prefill")
    out = None
    if core_attn_out is not None:
        if not core_attn_out.is_contiguous() or core_attn_out.numel() < v.numel():
            raise ValueError(
                f"core_attn_out must be contiguous and hold {v.numel()} numbers, "
                f"got shape {list(core_attn_out.shape)} with strides {list(core_attn_out.stride())}"
            )
        out = core_attn_out.view(-1)[: v.numel()].view(v.shape)
    try:
        o, state, *_ = api.cula_gdn(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, out=out,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise _names.named(error, {"out": "core_attn_out"}) from None
    return o, state


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """GDN's decode and verification with g the log decay and beta the write strength."""
    _check_recurrent(inplace_final_state, beta)
    assert beta is not None
    return recurrent(
        "gdn", q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens,
        scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip


def _check_recurrent(inplace_final_state: bool, beta: Tensor | None) -> None:
    if inplace_final_state is not True:
        raise NotImplementedError(
            "inplace_final_state=False, a new state for every token, is not built: give cula.cula_verify "
            "snapshots"
        )
    if beta is None:
        raise NotImplementedError("beta=None is not built: give the write strengths")


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """GDN's decode: q, k and v are views of the convolution's rows `[B, 2 * H * K + HV * V]`, a and b
    `[B, HV]` the raw gate and the logits of beta, out `[B, 1, HV, V]`."""
    require("decode")
    _, heads, value_dim, key_dim = initial_state.shape
    q, k, v = (x.unsqueeze(1) for x in heads_of(mixed_qkv, heads, key_dim, value_dim))
    api.cula_decode(
        q, k, v, initial_state, mode="gdn", state_indices=ssm_state_indices, scale=scale, g=a.unsqueeze(1),
        beta=b.unsqueeze(1), A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, null_index=NULL_BLOCK, out=out,
    )  # fmt: skip
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`cula.compat.vllm`'s function of this name."""
    require(_kind(ssm_state_indices, num_accepted_tokens))
    return compat.fused_sigmoid_gating_delta_rule_update(
        A_log, a, b, dt_bias, q, k, v, beta, threshold, scale, initial_state, inplace_final_state,
        cu_seqlens, ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel, is_kda,
    )  # fmt: skip


# vllm.models.kimi_k3.nvidia.ops.third_party.kda, which Kimi-Linear uses too


def kimi_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda_with_fused_gate`: KDA's prefill, raw gate `[1, T, H, K]` and logits of beta `[1, T, H]`."""
    require("prefill")
    o, state, *_ = api.cula_kda(
        q, k, v, raw_g, raw_beta, scale=scale, initial_state=initial_state, A_log=A_log, dt_bias=g_bias,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, cu_seqlens=cu_seqlens,
        lower_bound=lower_bound, out=out,
    )  # fmt: skip
    return o, state


def kimi_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused_recurrent_kda`: KDA's decode and verification. The gate is always computed in the kernel."""
    return recurrent(
        "kda", q, k, v, raw_g, raw_beta, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens,
        gate=_kda_gate(A_log, dt_bias, lower_bound), qk_l2norm=True, beta_is_logit=True, out=out,
    )  # fmt: skip


def _kda_gate(A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Gate:
    return Gate("softplus" if lower_bound is None else "bounded", A_log, dt_bias, lower_bound)


def kimi_packed_decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused_recurrent_kda_packed_decode`: KDA's decode on the convolution's rows `[B, 3 * H * K]`, with the
    raw gate `[1, B, H, K]`, logits of beta `[1, B, H]` and o `[1, B, H, V]`."""
    require("decode")
    _, heads, value_dim, key_dim = initial_state.shape
    q, k, v = (x.unsqueeze(0) for x in heads_of(mixed_qkv, heads, key_dim, value_dim))
    o, _ = api.cula_decode(
        q, k, v, initial_state, mode="kda", state_indices=state_indices, scale=scale, g=raw_g,
        beta=raw_beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, null_index=NULL_BLOCK, out=out,
    )  # fmt: skip
    return o, initial_state


def kimi_flashkda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    final_state: Tensor,
    workspace: Tensor,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`vllm.models.kimi_k3.nvidia.kda._flashkda_prefill`: Kimi-K3's prefill with a bounded gate."""
    require("prefill")
    if checkpoint_state is not None or checkpoint_offsets is not None:
        raise NotImplementedError(
            "checkpoint_offsets are multiples of 16 tokens, and checkpoints here are kept at multiples of 64"
        )
    _passes.check_inputs(_ops.prefill, q, k, v)
    for name, x in (("out", out), ("final_state", final_state)):
        _passes.require_tensor(name, x)  # the operator would make what is left out
    options = _passes.pack("kda", "bounded", True, True, False, None, lower_bound, -1, None)
    _ops.prefill.write(
        q, k, v, options, o=out, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        final_state=final_state, initial_state=initial_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return out, final_state


# vllm.models.glm5next.nvidia.ops.third_party.kda


def glm_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda_with_fused_gate` of GLM 5.3: beta is the write strength, and the gate bounded with
    `safe_gate` alone."""
    require("prefill")
    o, state, *_ = api.cula_kda(
        q, k, v, raw_g, beta, scale=scale, initial_state=initial_state, A_log=A_log, dt_bias=g_bias,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=True, cu_seqlens=cu_seqlens, lower_bound=lower_bound if safe_gate else None,
    )  # fmt: skip
    return o, state


def glm_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
) -> tuple[Tensor, Tensor]:
    """`fused_recurrent_kda` of GLM 5.3: g is the log decay, or with `compute_gate` the raw gate of the
    bounded form."""
    _check_recurrent(inplace_final_state, beta)
    assert beta is not None
    if compute_gate and lower_bound is None:
        raise ValueError("compute_gate computes the bounded gate: lower_bound must be given")
    return recurrent(
        "kda", q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens,
        gate=_kda_gate(a_log, g_bias, lower_bound) if compute_gate else LOG_DECAY, scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel, beta_is_logit=sigmoid_beta, out=out,
    )  # fmt: skip


# vllm.third_party.flash_linear_attention.ops.kda: g is the log decay and beta the write strength. The models
# hand `safe_gate` and `lower_bound` on, which have no effect there either.


def log_decay_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda`."""
    require("prefill")
    o, state, *_ = api.cula_kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return o, state


def log_decay_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused_recurrent_kda`."""
    return log_decay_recurrent_fwd(
        q, k, v, g, beta, scale, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, None,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip


def log_decay_recurrent_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """`fused_recurrent_kda_fwd`."""
    _check_recurrent(inplace_final_state, beta)
    assert beta is not None
    return recurrent(
        "kda", q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens,
        scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
