# SPDX-License-Identifier: Apache-2.0
"""SGLang's kernels of linear attention (`LinearAttnKernelBase`), subclassed: of GDN and of KDA.

A kernel here is a subclass of SGLang's Triton kernel of the same algorithm, which runs what this library
declines, and for which SGLang itself takes it where it asks. States are `[slots, HV, V, K]`, updated in
place; a row with a negative slot gives zeros and stores nothing. Read from SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import api, kda
from .._passes import Checkpoints
from .._plans import one_state_each
from ._calls import Calls
from ._functions import REFUSALS
from ._vllm_functions import heads_of

# Tokens between the states that SGLang counts in `track_chunk_idx` and returns in h.
CHUNK = 64

NO_RING = "ReplaySSM's rings are not built: states are kept, not the tokens that make them"


def decode(
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor | None,
    lower_bound: float | None = None,
) -> Tensor:
    """q, k `[1, B, H, K]` and v `[1, B, HV, V]`, a the raw gate and b the logits of beta, a token a row."""
    return kda.fused_sigmoid_gating_delta_rule_update(
        A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, ssm_states, cache_indices, use_qk_l2norm_in_kernel=True,
        cu_seqlens=query_start_loc, is_kda=algorithm == "kda", lower_bound=lower_bound,
    )  # fmt: skip


def packed_decode(
    algorithm: str,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    ssm_states: Tensor,
    cache_indices: Tensor,
    num_v_heads: int,
    head_v_dim: int,
    lower_bound: float | None = None,
    replayssm_d: Tensor | None = None,
    replayssm_k: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_write_pos: Tensor | None = None,
    replayssm_force_flush: Tensor | None = None,
) -> Tensor:
    """`decode` with q, k and v as views of the convolution's rows `[B, 2 * H * K + HV * V]`. Returns
    `[1, B, HV, V]`."""
    if replayssm_d is not None:
        raise NotImplementedError(NO_RING)
    rows, key_dim = mixed_qkv.shape[0], ssm_states.shape[-1]
    q, k, v = (x.unsqueeze(0) for x in heads_of(mixed_qkv, num_v_heads, key_dim, head_v_dim))
    gate = (1, rows, num_v_heads, key_dim) if algorithm == "kda" else (1, rows, num_v_heads)
    o, _ = api.cula_decode(
        q, k, v, ssm_states, mode=algorithm, state_indices=cache_indices, scale=scale, g=a.reshape(gate),
        beta=b.reshape(1, rows, num_v_heads), A_log=A_log.flatten(), dt_bias=dt_bias.flatten(),
        lower_bound=lower_bound, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    return o


def verify(
    algorithm: str,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor | None,
    intermediate_state_indices: Tensor | None,
    cache_steps: int | None,
    retrieve_parent_token: Tensor | None,
    lower_bound: float | None = None,
    cache_ring: bool = False,
) -> Tensor:
    """Drafts, a chain or a tree a row, with the states after them in the buffer; the pool is only read."""
    if cache_ring:
        raise NotImplementedError(NO_RING)
    return kda.fused_sigmoid_gating_delta_rule_update(
        A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, ssm_states, cache_indices, use_qk_l2norm_in_kernel=True,
        cu_seqlens=query_start_loc, is_kda=algorithm == "kda", lower_bound=lower_bound,
        disable_state_update=True, intermediate_states_buffer=intermediate_states_buffer,
        intermediate_state_indices=intermediate_state_indices, cache_steps=cache_steps,
        retrieve_parent_token=retrieve_parent_token,
    )  # fmt: skip


def extend(
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    inplace_update: bool = True,
    wants_h: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Prompts, packed `[1, T, ..]`. g is the log decay, or with `A_log` the raw gate; beta the write
    strength, or with `beta_is_raw` its logit. Returns (o, h), h only with `wants_h`.

    track_state, track_chunk_idx: float32 `[N, HV, V, K]` and `[N]`: the state of sequence n after
        `track_chunk_idx[n]` chunks of 64 tokens goes to `track_state[n]`; -1 leaves it. The plan is made on
        the device, and the states are stored in the same pass.
    """
    if (track_state is None) != (track_chunk_idx is None):
        raise ValueError("track_state and track_chunk_idx must be given together, got one of them")
    checkpoints = None
    if track_state is not None and track_chunk_idx is not None:
        after = (track_chunk_idx * CHUNK).masked_fill(track_chunk_idx < 0, -1)
        checkpoints = Checkpoints(track_state, one_state_each(after))
    named: dict[str, Any] = {"state_pool" if inplace_update else "initial_state": ssm_states}
    if A_log is not None:
        named |= {
            "use_gate_in_kernel": True, "A_log": A_log.flatten(), "lower_bound": lower_bound,
            "dt_bias": None if dt_bias is None else dt_bias.flatten(),
        }  # fmt: skip
    run = api.cula_kda if algorithm == "kda" else api.cula_gdn
    o, *rest = run(
        q, k, v, g, beta, initial_state_indices=cache_indices, cu_seqlens=query_start_loc,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=beta_is_raw, checkpoints=checkpoints,
        return_intermediate_states=wants_h, **named,
    )  # fmt: skip
    return o, rest[1] if wants_h else None


def fill_tracked(track_state: Tensor, track_chunk_idx: Tensor, h: Tensor, query_start_loc: Tensor) -> None:
    """Writes the states that are tracked where a kernel has returned h alone, `[1, NT, HV, V, K]`."""
    chunks = (query_start_loc.diff() + CHUNK - 1) // CHUNK
    first = chunks.cumsum(0) - chunks
    states = h[0, (first + track_chunk_idx).clamp(0, h.shape[1] - 1)].to(track_state.dtype)
    tracked = (track_chunk_idx >= 0).view(-1, 1, 1, 1)
    track_state.copy_(torch.where(tracked, states, track_state))


# What SGLang hands to kernels that plan themselves, which says nothing to these.
_PLANS = (
    "extend_prefix_lens",
    "extend_seq_lens_cpu",
    "is_spec_decode",
    "layer_id",
    "num_state_checkpoints",
    "output",
    "stable_rows",
    "state_checkpoint_cu_starts",
    "state_checkpoint_every_n_tokens",
    "state_checkpoint_indices",
    "track_ssm_h_batch_src",
    "chunk_indices",
    "chunk_offsets",
    "replayssm_rawv",
    "replayssm_rawk",
    "replayssm_g",
    "replayssm_beta",
)


def _asked(named: dict[str, Any], *more: str) -> dict[str, Any]:
    return {key: value for key, value in named.items() if key not in _PLANS and key not in more}


def make_kernel(algorithm: str, triton: type, calls: Calls) -> type:
    """A subclass of SGLang's `TritonGDNKernel` or `TritonKDAKernel`."""
    label = f"{algorithm}.{{}}"

    def either(name: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> object:
        """`ours` refuses before it has run or written anything."""
        try:
            made = ours()
        except REFUSALS as refusal:
            calls.add(label.format(name), str(refusal) or type(refusal).__name__)
            return theirs()
        calls.add(label.format(name), "cula")
        return made

    class CulaKernel(triton):  # type: ignore[misc]
        uses_state_checkpoints = supports_fused_chain_verify = False
        supports_packed_decode = supports_packed_decode_safe_gate = True
        supports_strided_target_verify_qkv = supports_track_state_snapshot = True

        def decode(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **named: Any) -> object:
            return either(
                "decode",
                lambda: decode(algorithm, q, k, v, a, b, **_asked(named)),
                lambda: super(CulaKernel, self).decode(q, k, v, a, b, **named),
            )

        def packed_decode(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, **named: Any) -> object:
            return either(
                "packed_decode",
                lambda: packed_decode(algorithm, mixed_qkv, a, b, **named),
                lambda: super(CulaKernel, self).packed_decode(mixed_qkv, a, b, **named),
            )

        def target_verify(
            self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
            **named: Any,
        ) -> object:  # fmt: skip
            tensors = A_log, dt_bias, q, k, v, a, b
            return either(
                "target_verify",
                lambda: verify(algorithm, *tensors, **_asked(named)),
                lambda: super(CulaKernel, self).target_verify(*tensors, **named),
            )

        def extend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **named: Any) -> object:
            """GDN returns (o, None, h), KDA o, or (o, h) with `return_intermediate_states`."""
            tracked, source = named.get("track_state"), named.get("track_ssm_h_src")
            asked = bool(named.get("return_intermediate_states", False))
            # SGLang asks for h to take states out of it. Those that are tracked have a place of their own.
            wants_h = asked and tracked is None and (source is None or source.numel() > 0)
            options = _asked(named, "return_intermediate_states", "track_ssm_h_src")

            def ours() -> object:
                o, h = extend(algorithm, q, k, v, g, beta, wants_h=wants_h, **options)
                if algorithm == "gdn":
                    return o, None, h
                return (o, h) if asked else o

            def theirs() -> object:
                made = super(CulaKernel, self).extend(q, k, v, g, beta, **named)
                if algorithm == "gdn" and tracked is not None:  # TritonGDNKernel does not know of it
                    fill_tracked(tracked, named["track_chunk_idx"], made[2], named["query_start_loc"])
                return made

            return either("extend", ours, theirs)

    CulaKernel.__name__ = CulaKernel.__qualname__ = f"Cula{algorithm.upper()}Kernel"
    return CulaKernel
