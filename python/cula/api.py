# SPDX-License-Identifier: Apache-2.0
"""Level 1: one function per member of the family, on whatever device its tensors are.

Shapes: B batch, T tokens, N sequences, H query/key heads, HV value heads (HV % H == 0; value head hv reads
query/key head hv // (HV / H)), K (up to 256) and V the key and value dimensions. q and k are `[B, T, H, K]`,
v is `[B, T, HV, V]`, in one dtype: bfloat16, float16 or float32 (float64 for the oracle). Every stride is
free; q, k, v, g, erase, a_key and b_key are copied where their last dimension is not contiguous.

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
disable_recompute: of `cula_kda`, `cula_gdn`, `cula_gdn2`, `cula_gdp`, `cula_gla` and `cula_delta`: keep for
    the backward pass what it would compute again; without effect where no kernel does
    (docs/guide/training.md, "Memory").
backend: a target by name (`"cpu"`, `"cpu:avx2"`, `"reference"`, see `cula.explain()`); None for the best.
deterministic: results are bit-equal from run to run in any case; `"batch_invariant"` also gives a sequence
    the same bits whatever else is in the batch.
out: a preallocated o, `[B, T, HV, V]`.
device: q's device, checked if given.

Gradients: what a call returns is differentiable by q, k, v, g, beta, erase, a_key, b_key, `A_log`, `dt_bias`
and `initial_state`, but not by `decay`, nor where the call writes into what it is given (`state_pool`,
`checkpoints`, `out`; a decode's and a draft's states), reads slots, float8 or `kept`, or returns h. So do
drop-ins. docs/guide/training.md has examples.

Errors, before anything is written: `ValueError` names the argument, what was expected and what was given;
`TypeError` for an unknown option or a wrong type; `NotImplementedError` for a gradient that is not built.
The published signatures are those of cuLA's unified interface (inclusionAI/cuLA, issue 50).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _decays, _ops, _passes
from ._by_mode import cula_decode, cula_segment, cula_verify
from ._passes import Checkpoints, Outputs, States

__all__ = [
    "Checkpoints",
    "cula_decode",
    "cula_delta",
    "cula_gdn",
    "cula_gdn2",
    "cula_gdp",
    "cula_gla",
    "cula_kda",
    "cula_lightning",
    "cula_rwkv7",
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
    kwargs: `chunk_size`, the spacing of h.

    Returns (o `[B, T, HV, V]` in q's dtype, final state or None), and h if asked for. Everything else:
    `cula.api`.
    """
    if cp_context is not None:
        _passes.refuse_context()
    chunk_size = _passes.chunk_size_of("cula_kda", kwargs) if kwargs else 64
    if type(safe_gate) is not bool:
        _passes.check_flags(safe_gate=safe_gate)
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
        backend, deterministic, device, kept, disable_recompute=disable_recompute,
    ))  # fmt: skip


def cula_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    erase: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
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
    state_scales: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Gated DeltaNet 2: KDA whose erase strength and write strength are two, and vectors.

    A token reads the state with the erase key `erase * k` and writes `beta * v` less what it has read, along
    k (ALGORITHM.md, "Erase strengths").

    beta: the write strength `[B, T, HV, V]`, or `[B, T, HV]` for one of all value channels.
    erase: the erase strength `[B, T, HV, K]`, any floating dtype. With `use_beta_sigmoid_in_kernel` both are
        logits, and `allow_neg_eigval` doubles the sigmoid of erase alone.
    g `[B, T, HV, K]`, A_log, dt_bias and everything else as in `cula.api`.
    """
    chunk_size = _passes.chunk_size_of("cula_gdn2", kwargs) if kwargs else 64
    if use_gate_in_kernel is True:
        _decays.check_gate(A_log, lower_bound)
    return _passes.returned(_passes.forward(
        _ops.prefill, "gdn2", q, k, v, g, beta,
        _passes.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound), scale, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens,
        States(
            initial_state, state_pool, initial_state_indices, final_state_indices, has_initial_state,
            null_index, state_v_first, state_scales,
        ),
        Outputs(out, output_final_state, checkpoints, return_intermediate_states, chunk_size),
        backend, deterministic, device, kept, erase=erase, disable_recompute=disable_recompute,
    ))  # fmt: skip


def cula_gdp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
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
    state_scales: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Gated DeltaProduct (arXiv:2502.10297): GDN whose tokens write n times, one write after another.

    A token decays the state once, writes n times by the delta rule, each time into what the write before it
    left, and then reads. With n = 1 it is GDN.

    k, v, beta: n rows for each row of q, `[B, T n, H, K]`, `[B, T n, HV, V]` and `[B, T n, HV]` or
        `[B, T n, HV, V]`; write j of token t is row t n + j, and n is what the shapes say.
    g: `[B, T, HV]` as in `cula_gdn`; None for DeltaProduct, which has no decay.
    cu_seqlens, checkpoints and h count tokens, as T does.
    A_log, dt_bias and everything else as in `cula_gdn`, `cula_kda` and `cula.api`. ValueError names k where
    its rows are no multiple of q's.
    """
    chunk_size = _passes.chunk_size_of("cula_gdp", kwargs) if kwargs else 64
    if use_gate_in_kernel is True:
        _decays.check_gate(A_log, lower_bound)
    return _passes.returned(_passes.forward(
        _ops.prefill, _decays.algorithm_of("gdp", g, None), q, k, v, g, beta,
        _passes.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound), scale, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens,
        States(
            initial_state, state_pool, initial_state_indices, final_state_indices, has_initial_state,
            null_index, state_v_first, state_scales,
        ),
        Outputs(out, output_final_state, checkpoints, return_intermediate_states, chunk_size),
        backend, deterministic, device, kept, disable_recompute=disable_recompute,
    ))  # fmt: skip


def cula_rwkv7(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    a_key: Tensor,
    b_key: Tensor,
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
    """RWKV-7 (arXiv:2503.14456), and any rule whose transition is a diagonal plus a matrix of rank one.

    A token reads the state with a_key before it decays, writes what it has read along b_key, and v along k:
    `S_t = diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T`. q is the r of RWKV-7, g its log decay
    w, and a_key and b_key are what its kernels call a and b, `-kk` and `kk * a` of a layer.

    g: the log decay `[B, T, HV, K]`, or the raw gate with `use_gate_in_kernel`, as in `cula_kda`: RWKV-7's is
        the bounded one without A_log, of `lower_bound=-exp(-0.5)`.
    a_key, b_key: `[B, T, HV, K]`, any floating dtype. No option normalises them. All three by name: they have
        one shape, and other libraries another order of arguments.
    scale: `K ** -0.5` if None, as everywhere here; RWKV-7 has none, which is 1.
    A_log, dt_bias and everything else as in `cula_kda` and `cula.api`. CPUs go token by token; GPUs have
    chunks for bfloat16 and float16 and K from 16 to 128, which round a_key and b_key to the dtype of q.
    """
    chunk_size = _passes.chunk_size_of("cula_rwkv7", kwargs) if kwargs else 64
    if use_gate_in_kernel is True:
        _decays.check_gate(A_log, lower_bound)
    return _passes.returned(_passes.forward(
        _ops.prefill, "rwkv7", q, k, v, g, None,
        _passes.given_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound), scale, use_qk_l2norm_in_kernel,
        False, False, cu_seqlens,
        States(
            initial_state, state_pool, initial_state_indices, final_state_indices, has_initial_state,
            null_index, state_v_first, state_scales,
        ),
        Outputs(out, output_final_state, checkpoints, return_intermediate_states, chunk_size),
        backend, deterministic, device, kept, a_key=a_key, b_key=b_key,
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
    disable_recompute: bool = False,
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
        backend, deterministic, device, kept, disable_recompute=disable_recompute,
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
    disable_recompute: bool = False,
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
        backend, deterministic, device, kept, _decays.log_decay(decay), disable_recompute=disable_recompute,
    ))  # fmt: skip
