# SPDX-License-Identifier: Apache-2.0
"""Lightning attention under the names and conventions of cuLA (decay as positive slopes, states V-first) and
of `fla.ops.lightning_attn` (decay derived from the layer's index, states K-first).

The functions for prompts are differentiable as `cula.api` says, but not by `decay`, nor with a `state_pool`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _decays, _fla, _ops, _passes
from ._passes import Outputs, States, dense
from .simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

__all__ = [
    "LinearAttentionChunkwiseDecay",
    "chunk_lightning_attn",
    "fused_recurrent_lightning_attn",
    "lightning_attn_fwd",
    "lightning_attn_fwd_varlen",
    "linear_attention_decode",
]

# What the operators' arguments are called in linear_attention_decode.
_DECODE_NAMES = {"initial_state": "s", "final_state": "s", "o": "out"}


def lightning_attn_fwd(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """cuLA's `lightning_attn_fwd`: a whole prompt for each row of the batch.

    Q, K, V `[B, T, H, D]`; decay float32 `[H]`, slopes s >= 0, a token shrinks the state by exp(-s); states
    float32 `[B, H, V, K]`. `chunk_size` changes nothing here.
    """
    try:
        o, final_state, _ = _passes.forward(
            _ops.prefill, "lightning", Q, K, V, decay=-_decays.floating("decay", decay), scale=scale,
            states=dense(initial_state), outputs=Outputs(None, output_final_state, chunk_size=chunk_size),
        )  # fmt: skip
        return o, final_state
    except Exception as error:
        _fla.refuse_types(lightning_attn_fwd, locals(), error)
        raise


def lightning_attn_fwd_varlen(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float = 1.0,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    chunk_size: int = 64,
    persistent: bool = True,
) -> tuple[Tensor, Tensor]:
    """cuLA's `lightning_attn_fwd_varlen`: packed sequences `[1, T, H, D]`.

    The pool `[P, H, V, K]` is updated in place and returned. Without a pool the sequences start from zero and
    their final states `[N, H, V, K]` are returned. `persistent` is a choice of schedule upstream; the result
    is the same.
    """
    try:
        if cu_seqlens is None:
            raise TypeError("cu_seqlens must be a tensor, got NoneType")
        o, final_state, _ = _passes.forward(
            _ops.prefill, "lightning", Q, K, V, decay=-_decays.floating("decay", decay), scale=scale,
            cu_seqlens=cu_seqlens, states=States(pool=state_pool, initial_indices=initial_state_indices),
            outputs=Outputs(None, True, chunk_size=chunk_size),
        )  # fmt: skip
        assert final_state is not None  # it was asked for
        return o, final_state
    except Exception as error:
        _fla.refuse_types(lightning_attn_fwd_varlen, locals(), error)
        raise


def linear_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    out: Tensor,
    softmax_scale: float,
    stride_q: int,
    stride_k: int,
    stride_v: int,
    stride_s: int,
    stride_o: int,
    s_offsets: Tensor | None,
    decay_scales: Tensor,
    HEAD_DIM: int,
    K_SPLIT_DIM: int,
    V_SPLIT_DIM: int,
) -> None:
    """cuLA's `linear_attention_decode`: one token for each of B rows; writes `out` and updates `s`.

    q, k, v, out `[B, H, D]`; s float32 `[B * H, V, K]` or `[B, H, V, K]`; decay_scales `[H]`, slopes >= 0.
    The strides come from the tensors, and row b always works on state b: the stride arguments and `s_offsets`
    are ignored, as upstream.
    """
    try:
        _fla.require(
            K_SPLIT_DIM == HEAD_DIM, "K_SPLIT_DIM must equal HEAD_DIM, got {} and {}", K_SPLIT_DIM, HEAD_DIM
        )
        if not q.dim() == k.dim() == v.dim() == out.dim() == 3:
            raise ValueError(
                f"q, k, v and out must have shape [B, H, D], got {[list(x.shape) for x in (q, k, v, out)]}"
            )
        if s.dim() not in (3, 4) or s.shape[0] % (q.shape[1] if s.dim() == 3 else 1):
            raise ValueError(f"s must have shape [B * H, V, K] or [B, H, V, K], got {list(s.shape)}")
        states = s.unflatten(0, (-1, q.shape[1])) if s.dim() == 3 else s
        q, k, v, o = (x.unsqueeze(1) for x in (q, k, v, out))
        _passes.forward(
            _ops.decode,
            "lightning",
            q,
            k,
            v,
            decay=-_decays.floating("decay_scales", decay_scales),
            scale=softmax_scale,
            states=States(pool=states[: q.shape[0]], names=_DECODE_NAMES),
            outputs=Outputs(o),
        )
    except Exception as error:
        _fla.refuse_types(linear_attention_decode, locals(), error, 3)
        raise


class LinearAttentionChunkwiseDecay:
    """cuLA's kernel class, as a configured call on torch tensors.

    The kernel is compiled ahead of time for every configuration, so the constructor only keeps what changes
    the result; upstream's remaining parameters (types, sizes, schedule) are accepted and follow from the
    tensors.
    """

    def __init__(
        self,
        chunk_size: int = 64,
        acc_dtype: object = None,
        io_dtype: object = None,
        has_initial_state: bool = False,
        output_final_state: bool = False,
        H: int = 64,
        K: int = 128,
        V: int = 128,
        scale: float = 1.0,
        is_varlen: bool = False,
        persistent: bool = True,
        use_fast_math: bool = True,
    ) -> None:
        flags = {"has_initial_state": has_initial_state, "output_final_state": output_final_state}
        _passes.check_flags(**flags, is_varlen=is_varlen)
        _passes.pack(
            "lightning", "log_decay", False, False, False, scale, None, -1, None, chunk_size=chunk_size
        )
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}")
        self.chunk_size = chunk_size
        self.has_initial_state = has_initial_state
        self.output_final_state = output_final_state
        self.scale = scale
        self.is_varlen = is_varlen

    def __call__(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        decay: Tensor,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        initial_state_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `lightning_attn_fwd`, or with `is_varlen` as `lightning_attn_fwd_varlen` (`initial_state` is the
        pool)."""
        state = initial_state if self.has_initial_state else None
        if not self.is_varlen:
            return lightning_attn_fwd(
                Q, K, V, decay, self.scale, state, self.output_final_state, self.chunk_size
            )
        return lightning_attn_fwd_varlen(
            Q,
            K,
            V,
            decay,
            cu_seqlens,  # type: ignore[arg-type]  # None is refused there, by name
            self.scale,
            state,
            initial_state_indices,
        )


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.lightning_attn.chunk_lightning_attn`: a whole prompt; states `[N, H, K, V]`.

    FLA's own decay: head h shrinks by exp(-(8 / H) (1 - layer_idx / num_layers) h) per token. It is not the
    slope of MiniMax's or Ring's checkpoints; for those give the slopes to `cula.cula_lightning`.
    """
    try:
        _fla.options("chunk_lightning_attn", kwargs, ("chunk_size",))
        _fla.chunk_size("chunk_lightning_attn", kwargs)
        decay = _fla_decay(q, layer_idx, num_layers)
        return chunk_simple_gla(
            q, k, v, None, decay, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
        )
    except Exception as error:
        _fla.refuse_types(chunk_lightning_attn, locals(), error)
        raise


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.lightning_attn.fused_recurrent_lightning_attn`: token after token, with FLA's own decay."""
    try:
        decay = _fla_decay(q, layer_idx, num_layers)
        return fused_recurrent_simple_gla(
            q,
            k,
            v,
            None,
            decay,
            scale,
            initial_state,
            output_final_state,
            reverse,
            False,
            cu_seqlens,
            **kwargs,
        )
    except Exception as error:
        _fla.refuse_types(fused_recurrent_lightning_attn, locals(), error)
        raise


def _fla_decay(q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    for name, value in (("layer_idx", layer_idx), ("num_layers", num_layers)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be of type int, got {_ops.type_name(value)}")
    if not 0 <= layer_idx < num_layers < 2**31:
        raise ValueError(
            f"layer_idx must be from 0 to num_layers - 1, got {layer_idx} of num_layers {num_layers}"
        )
    heads = q.shape[2]
    per_head = torch.arange(heads, dtype=torch.float32, device=q.device)
    return per_head * (-8 / max(heads, 1) * (1 - layer_idx / num_layers))
