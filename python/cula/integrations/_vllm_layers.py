# SPDX-License-Identifier: Apache-2.0
"""vLLM's layer and operator of GDN (Qwen3-Next, Qwen3.5), subclassed: what stands in for them where a model
is made.

vLLM's layer projects, runs its short convolution, and calls functions of its own for the rest. This one takes
the rest: the states of prompts are read and written in the pool, where vLLM gathers, casts and scatters them;
gates and logits go to the kernels raw; q, k and v are views of the convolution's rows; o is written where the
layer wants it; and checkpoints of prompts go to their blocks in the same pass.

Read from vLLM 0.33.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import api
from .._passes import Checkpoints
from .._plans import one_state_each
from . import _vllm_functions as functions
from ._calls import Calls
from ._functions import REFUSALS, Substitute
from ._vllm_functions import NULL_BLOCK

LAYER, OPERATOR = "QwenGatedDeltaNetAttention", "ChunkGatedDeltaRule"

# A prompt's states are kept at multiples of so many tokens.
ALIGNMENT = 64


class Kept(Protocol):
    """What is to be kept of prompts: for each request that is no draft the tokens of this call after which
    its states are (0: not), and the block for them."""

    checkpoint_offsets: Tensor
    state_indices: Tensor


class Metadata(Protocol):
    """What `GDNAttentionMetadata` has."""

    num_actual_tokens: int
    num_prefills: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    checkpoint: Kept | None
    has_initial_state: Tensor | None
    non_spec_query_start_loc: Tensor
    non_spec_state_indices_tensor: Tensor
    non_spec_token_indx: Tensor
    prefill_query_start_loc: Tensor
    prefill_state_indices: Tensor
    prefill_has_initial_state: Tensor
    spec_sequence_masks: Tensor | None
    spec_query_start_loc: Tensor
    spec_state_indices_tensor: Tensor
    spec_token_indx: Tensor
    num_accepted_tokens: Tensor


class Layer(Protocol):
    """What `QwenGatedDeltaNetAttention` has that says which problem it is."""

    num_k_heads: int
    num_v_heads: int
    tp_size: int
    head_k_dim: int
    head_v_dim: int
    A_log: Tensor
    dt_bias: Tensor

    def get_state_dtype(self) -> tuple[torch.dtype, ...]: ...


_NAMES = (
    OPERATOR,
    LAYER,
    "GDNAttentionMetadata",
    "MambaPrefillCheckpointExporter",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "get_forward_context",
    "is_conv_state_dim_first",
)


def missing(gdn: ModuleType) -> list[str]:
    """What the layer here needs of vLLM's module and metadata, and another version does not have."""
    if names := [name for name in _NAMES if not hasattr(gdn, name)]:
        return names
    known = tuple(inspect.signature(getattr(gdn, LAYER)._forward_core).parameters)
    if known != ("self", "mixed_qkv", "b", "a", "core_attn_out"):
        return [f"{LAYER}._forward_core(mixed_qkv, b, a, core_attn_out)"]
    fields = {field.name for field in dataclasses.fields(gdn.GDNAttentionMetadata)}
    return [f"GDNAttentionMetadata.{name}" for name in Metadata.__annotations__ if name not in fields]


def make_operator(gdn: ModuleType, calls: Calls) -> type:
    """A subclass of `ChunkGatedDeltaRule`, vLLM's operator of a prefill on dense states."""

    class CulaChunkGatedDeltaRule(gdn.ChunkGatedDeltaRule):  # type: ignore[misc, name-defined]
        _forward_method: Callable[..., Any]

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            theirs = self._forward_method
            substitute = Substitute(OPERATOR, theirs, functions.chunk_gated_delta_rule, calls)

            def forward(*args: Any, **kwargs: Any) -> object:
                if substitute.accepts(args, kwargs)[0]:
                    return substitute.run(args, kwargs)
                return theirs(*args, **kwargs)

            self._forward_method = forward

    return CulaChunkGatedDeltaRule


def make_layer(gdn: ModuleType, calls: Calls) -> type:
    """A subclass of `QwenGatedDeltaNetAttention`. `gdn` is vLLM's module of it."""

    class CulaQwenGatedDeltaNetAttention(gdn.QwenGatedDeltaNetAttention):  # type: ignore[misc, name-defined]
        _checkpoint_alignment: int | None
        kv_cache: tuple[Tensor, ...]

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._cula_refusals: dict[tuple[object, ...], str | None] = {}
            # vLLM's own layer keeps states of prompts only where FlashInfer runs. Elsewhere a promise to keep
            # them binds this one, since vLLM's kernels could not.
            self._cula_alone_keeps = False
            config = self.vllm_config
            # A batch may hold every pass beside the prompt whose state is kept.
            passes = ["prefill", "decode", "checkpoints"]
            if getattr(config, "speculative_config", True) is not None:
                passes.insert(1, "verify")
            if (
                config.cache_config.mamba_cache_mode == "align"
                and self._checkpoint_alignment is None
                and self._cula_refuses(*passes, dtype=config.model_config.dtype) is None
            ):
                self._cula_alone_keeps = True
                self._checkpoint_alignment = ALIGNMENT
                self._max_num_batched_tokens = config.scheduler_config.max_num_batched_tokens
                self._checkpoint_exporter = gdn.MambaPrefillCheckpointExporter(
                    state_len=self.conv_kernel_size - 1
                )

        def _warmup_prefill_kernels(self, qkv_or_qkvz: Tensor, v_dim: int) -> None:
            """Nothing is tuned or compiled here, and FlashInfer's workspace is not needed."""
            if self._cula_refuses("prefill", "checkpoints", dtype=qkv_or_qkvz.dtype) is not None:
                super()._warmup_prefill_kernels(qkv_or_qkvz, v_dim)

        def _can_use_fused_gdn_mtp_decode(self, attn_metadata: Metadata) -> bool:
            """vLLM's kernel of verification and norm, where this library does not verify."""
            if self._cula_refuses("verify", dtype=self.vllm_config.model_config.dtype) is None:
                return False
            return bool(super()._can_use_fused_gdn_mtp_decode(attn_metadata))

        def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
            metadata = gdn.get_forward_context().attn_metadata
            metadata = metadata.get(self.prefix) if isinstance(metadata, dict) else None
            if metadata is None:  # a profiling run
                super()._forward_core(mixed_qkv, b, a, core_attn_out)
                return
            passes = _passes_of(metadata)
            reason = self._cula_refuses(*passes, dtype=mixed_qkv.dtype)
            every = self._checkpoint_alignment
            if metadata.checkpoint is not None and every is not None and every % ALIGNMENT != 0:
                reason = f"states are kept after multiples of {ALIGNMENT} tokens, and asked for after {every}"
            if reason is None:
                self._cula_core(metadata, mixed_qkv, b, a, core_attn_out)
                calls.add(LAYER, "cula")
                return
            if metadata.checkpoint is not None and self._cula_alone_keeps:
                raise RuntimeError(
                    f"{LAYER}: vLLM was promised checkpoints that its own kernels cannot keep, and cula "
                    f"declines the call: {reason}. Set CULA_VLLM=0"
                )
            calls.add(LAYER, reason)
            super()._forward_core(mixed_qkv, b, a, core_attn_out)

        def _cula_refuses(self, *passes: str, dtype: torch.dtype) -> str | None:
            """Why this library would not take such a batch, or None. It is asked once for a layer, by calls
            without tokens: they are checked and find a kernel like any other, and write nothing. A pool that
            is not bound yet is taken for a dense one."""
            states: tuple[Tensor, ...] = getattr(self, "kv_cache", ())
            states = states if len(states) > 1 else ()
            key = passes, dtype, self.A_log.device, len(states)
            if key not in self._cula_refusals:
                self._cula_refusals[key] = _refusal(self, states, passes, dtype)
            return self._cula_refusals[key]

        def _cula_core(
            self, metadata: Metadata, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
        ) -> None:
            total = metadata.num_actual_tokens
            rows, gates = mixed_qkv[:total], (a[:total], b[:total])
            out = core_attn_out[:total]
            if metadata.spec_sequence_masks is None:
                self._cula_plain(metadata, rows, gates, out)
                return
            if metadata.num_prefills == 0 and metadata.num_decodes == 0:
                self._cula_verify(metadata, rows, gates, out)
                return
            for run, tokens in (
                (self._cula_verify, metadata.spec_token_indx),
                (self._cula_plain, metadata.non_spec_token_indx),
            ):
                part, raw, logits = (x.index_select(0, tokens) for x in (rows, *gates))
                own = out.new_empty((part.shape[0], *out.shape[1:]))
                run(metadata, part, (raw, logits), own)
                out.index_copy_(0, tokens, own)

        def _cula_verify(
            self, metadata: Metadata, rows: Tensor, gates: tuple[Tensor, Tensor], out: Tensor
        ) -> None:
            sequences, table = metadata.num_spec_decodes, metadata.spec_state_indices_tensor
            rows = gdn.causal_conv1d_update(
                rows, *self._cula_convolution(), conv_state_indices=table[:sequences, 0],
                num_accepted_tokens=metadata.num_accepted_tokens,
                query_start_loc=metadata.spec_query_start_loc, max_query_len=table.size(-1),
                validate_data=False,
            )  # fmt: skip
            q, k, v = self._cula_heads(rows)
            api.cula_verify(
                q[None], k[None], v[None], self.kv_cache[1], state_indices=table[:sequences],
                num_accepted=metadata.num_accepted_tokens[:sequences],
                cu_seqlens=metadata.spec_query_start_loc[: sequences + 1], out=out[None],
                **_named(self, gates, 0, self.kv_cache), mode="gdn",
            )  # fmt: skip

        def _cula_plain(
            self, metadata: Metadata, rows: Tensor, gates: tuple[Tensor, Tensor], out: Tensor
        ) -> None:
            """Decodes, or prefills, or both: the decodes come first, of a token each."""
            slots, raw = metadata.non_spec_state_indices_tensor, rows
            if metadata.num_prefills == 0:
                rows = gdn.causal_conv1d_update(
                    rows, *self._cula_convolution(), conv_state_indices=slots[: rows.shape[0]],
                    validate_data=False,
                )  # fmt: skip
                self._cula_decode(rows, gates, slots, out)
                return
            conv_state, weight, bias, activation = self._cula_convolution()
            rows = gdn.causal_conv1d_fn(
                rows.transpose(0, 1), weight, bias, activation=activation, conv_states=conv_state,
                has_initial_state=metadata.has_initial_state, cache_indices=slots,
                query_start_loc=metadata.non_spec_query_start_loc, metadata=metadata,
            ).transpose(0, 1)  # fmt: skip
            first = metadata.num_decode_tokens  # none beside drafts, which make prefills of them
            if first > 0:
                before = gates[0][:first], gates[1][:first]
                self._cula_decode(rows[:first], before, slots, out[:first])
            rows, gates, out = rows[first:], (gates[0][first:], gates[1][first:]), out[first:]
            q, k, v = self._cula_heads(rows)
            pool, checkpoints = self.kv_cache[1], None
            if metadata.checkpoint is not None:
                checkpoints = Checkpoints(pool, _plan_of(metadata))
            api.cula_gdn(
                q[None], k[None], v[None], cu_seqlens=metadata.prefill_query_start_loc, state_pool=pool,
                initial_state_indices=metadata.prefill_state_indices,
                has_initial_state=metadata.prefill_has_initial_state, checkpoints=checkpoints,
                out=out[None], **_named(self, gates, 0, self.kv_cache),
            )  # fmt: skip
            if checkpoints is not None:
                self._checkpoint_exporter.export(
                    metadata.checkpoint, raw_qkv=raw, conv_state=conv_state,
                    cu_seqlens=metadata.non_spec_query_start_loc,
                )  # fmt: skip

        def _cula_decode(
            self, rows: Tensor, gates: tuple[Tensor, Tensor], slots: Tensor, out: Tensor
        ) -> None:
            q, k, v = (x.unsqueeze(1) for x in self._cula_heads(rows))
            api.cula_decode(
                q, k, v, self.kv_cache[1], mode="gdn", state_indices=slots[: rows.shape[0]],
                out=out.unsqueeze(1), **_named(self, gates, 1, self.kv_cache),
            )  # fmt: skip

        def _cula_convolution(self) -> tuple[Tensor, Tensor, Tensor | None, str]:
            """The convolution's states `[.., dim, width - 1]`, weights, bias and activation."""
            state = self.kv_cache[0]
            weight = self.conv1d.weight
            return (
                state if gdn.is_conv_state_dim_first() else state.transpose(-1, -2),
                weight.view(weight.size(0), weight.size(2)), self.conv1d.bias, self.activation,
            )  # fmt: skip

        def _cula_heads(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return functions.heads_of(
                rows, self.num_v_heads // self.tp_size, self.head_k_dim, self.head_v_dim
            )

    return CulaQwenGatedDeltaNetAttention


def _named(layer: Layer, gates: tuple[Tensor, Tensor], at: int, cache: tuple[Tensor, ...]) -> dict[str, Any]:
    """What every pass has: raw gates and logits `[T, HV]`, with a dimension more at `at`, how they are
    meant, and the scales of a pool of float8."""
    return {
        "g": gates[0].unsqueeze(at), "beta": gates[1].unsqueeze(at), "A_log": layer.A_log,
        "dt_bias": layer.dt_bias, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True, "null_index": NULL_BLOCK, "state_scales": _scales_of(cache),
    }  # fmt: skip


def _scales_of(cache: tuple[Tensor, ...]) -> Tensor | None:
    """The scales of a pool of float8, the third tensor of a cache: float32, one for each row and all key
    channels, `[slots, HV, V, 1]` (vLLM's pull requests 40012 and 52962) or `[slots, HV, V]`. Others are
    refused by the call."""
    if len(cache) < 3 or cache[1].dtype != torch.float8_e4m3fn:
        return None
    scales = cache[2]
    return scales.squeeze(-1) if scales.dim() == 4 and scales.shape[-1] == 1 else scales


def _passes_of(metadata: Metadata) -> tuple[str, ...]:
    wanted = {
        "prefill": metadata.num_prefills > 0, "verify": metadata.spec_sequence_masks is not None,
        "decode": metadata.num_decodes > 0, "checkpoints": metadata.checkpoint is not None,
    }  # fmt: skip
    return tuple(name for name, is_there in wanted.items() if is_there)


def _plan_of(metadata: Metadata) -> Tensor:
    """vLLM's offsets and blocks of checkpoints, a row for each request that is no draft, of which the last
    are those of the prefill. Made once for all layers: they share the metadata."""
    plan: Tensor | None = getattr(metadata, "_cula_plan", None)
    if plan is None:
        assert metadata.checkpoint is not None
        rows = metadata.prefill_query_start_loc.shape[0] - 1
        offsets, blocks = metadata.checkpoint.checkpoint_offsets, metadata.checkpoint.state_indices
        tokens = offsets[offsets.shape[0] - rows :]
        tokens = tokens.masked_fill(tokens <= 0, -1)  # 0 is none
        plan = one_state_each(tokens, blocks[blocks.shape[0] - rows :], NULL_BLOCK)
        vars(metadata)["_cula_plan"] = plan
    return plan


def _refusal(
    layer: Layer, cache: tuple[Tensor, ...], passes: tuple[str, ...], dtype: torch.dtype
) -> str | None:
    """`cache`: of the layer, or empty where none is bound yet."""
    H, HV = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size
    K, V, place = layer.head_k_dim, layer.head_v_dim, layer.A_log.device
    if place.type == "meta":
        return "the layer's parameters are on no device yet"
    if not cache:
        kinds = layer.get_state_dtype()
        shapes = ((1,), (1, HV, V, K), (1, HV, V))
        cache = tuple(
            torch.empty(shape, dtype=kind, device=place) for shape, kind in zip(shapes, kinds, strict=False)
        )
    pool = cache[1]
    none = torch.zeros(0, dtype=torch.int32, device=place)
    starts, table = torch.zeros(1, dtype=torch.int32, device=place), none.view(0, 1)
    width = 2 * H * K + HV * V
    mixed, gate = (torch.empty((0, size), dtype=dtype, device=place) for size in (width, HV))
    out = torch.empty((0, HV, V), dtype=dtype, device=place)
    q, k, v = functions.heads_of(mixed, HV, K, V)
    named = _named(layer, (gate, gate), 0, cache)
    try:
        functions.require(*(name for name in passes if name != "checkpoints"))
        if "prefill" in passes:
            kept = Checkpoints(pool, none.view(0, 3)) if "checkpoints" in passes else None
            api.cula_gdn(
                q[None], k[None], v[None], cu_seqlens=starts, state_pool=pool, initial_state_indices=none,
                has_initial_state=none.bool(), checkpoints=kept, out=out[None],
                **named,
            )  # fmt: skip
        if "verify" in passes:
            api.cula_verify(
                q[None], k[None], v[None], pool, mode="gdn", state_indices=table, num_accepted=none,
                cu_seqlens=starts, out=out[None], **named,
            )  # fmt: skip
        if "decode" in passes:
            named = _named(layer, (gate, gate), 1, cache)
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
            api.cula_decode(q, k, v, pool, mode="gdn", state_indices=none, out=out.unsqueeze(1), **named)
    except REFUSALS as refusal:
        return str(refusal) or type(refusal).__name__
    return None
