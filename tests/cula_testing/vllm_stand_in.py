# SPDX-License-Identifier: Apache-2.0
"""A package `vllm` that has what `cula.integrations.vllm` meets of vLLM: how its classes are replaced, its
layer of GDN with what a batch says of itself, and its functions, which are those of `engine_kernels`.

Written from what version 0.33 does, not from its text.
"""

# ruff: noqa: ARG001, ARG002, ARG004  (functions have the whole signature of vLLM's)

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from cula_testing import engine_kernels as kernels
from cula_testing import packages

OPERATORS = "vllm.third_party.flash_linear_attention.ops"
KIMI = "vllm.models.kimi_k3.nvidia"
GLM = "vllm.models.glm5next.nvidia"
GDN_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"

H, HV, K, V = 2, 4, 64, 32
WIDTH = 2 * H * K + HV * V


# vllm.model_executor.custom_op


class _Replaceable(nn.Module):
    registry: ClassVar[dict[str, type]] = {}

    def __new__(cls, *args, **kwargs):
        return super().__new__(cls.registry.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, made: type | None = None, name: str | None = None):
        def decorate(made: type) -> type:
            key = name or cls.__name__
            assert key not in cls.registry, f"Duplicate name: {key}"
            made.name = key
            cls.registry[key] = made
            return made

        return decorate if made is None else decorate(made)


class CustomOp(_Replaceable):
    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.forward_native

    def forward(self, *args, **kwargs):
        return self._forward_method(*args, **kwargs)


class PluggableLayer(_Replaceable):
    pass


# The functions. Each computes what vLLM's does, and says that it ran.


@kernels.records
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    chunk_indices=None, chunk_offsets=None, use_qk_l2norm_in_kernel=False, core_attn_out=None,
):  # fmt: skip
    o, final = kernels.prefill(
        q, k, v, g, beta, initial_state, cu_seqlens, scale=scale, l2norm=use_qk_l2norm_in_kernel
    )
    if core_attn_out is not None:
        core_attn_out.view(-1)[: o.numel()] = o.flatten()
    return o, final if output_final_state else None


@kernels.records
def fused_recurrent_gated_delta_rule(
    q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, cu_seqlens=None,
    ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False,
):  # fmt: skip
    o = kernels.on_pool(
        q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o, initial_state


@kernels.records
def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices,
    use_qk_l2norm_in_kernel=False,
):  # fmt: skip
    q, k, v = heads(mixed_qkv)
    kernels.on_pool(
        q, k, v, kernels.softplus_gate(a, A_log, dt_bias)[None], b.float().sigmoid()[None], initial_state,
        torch.arange(len(mixed_qkv) + 1), ssm_state_indices, scale=scale, l2norm=use_qk_l2norm_in_kernel,
        out=out.transpose(0, 1),
    )  # fmt: skip
    return out, initial_state


@kernels.records
def fused_sigmoid_gating_delta_rule_update(
    A_log, a, b, dt_bias, q, k, v, beta=1.0, threshold=20.0, scale=None, initial_state=None,
    inplace_final_state=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None,
    use_qk_l2norm_in_kernel=False, is_kda=False,
):  # fmt: skip
    g = a.reshape(-1, v.shape[2], q.shape[3]) if is_kda else a
    o = kernels.on_pool(
        q, k, v, kernels.softplus_gate(g, A_log, dt_bias)[None], b.float().sigmoid()[None], initial_state,
        cu_seqlens, ssm_state_indices, num_accepted_tokens, scale=scale, l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o, initial_state


@kernels.records
def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    return kernels.prefill(
        q, k, v, g, beta, initial_state, cu_seqlens, scale=scale, l2norm=use_qk_l2norm_in_kernel
    )


@kernels.records
def fused_recurrent_kda(
    q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True,
    use_qk_l2norm_in_kernel=True, cu_seqlens=None, ssm_state_indices=None, **kwargs,
):  # fmt: skip
    o = kernels.on_pool(
        q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o, initial_state


@kernels.records
def fused_recurrent_kda_fwd(
    q, k, v, g, beta, scale, initial_state, inplace_final_state=True, cu_seqlens=None,
    ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False,
):  # fmt: skip
    o = kernels.on_pool(
        q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o, initial_state


def _kimi() -> dict[str, Any]:
    @kernels.records
    def chunk_kda_with_fused_gate(
        q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False,
        lower_bound=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, out=None, **kwargs,
    ):  # fmt: skip
        g = kernels.softplus_gate(raw_g[0], A_log, g_bias, lower_bound)[None]
        return kernels.prefill(
            q, k, v, g, raw_beta.float().sigmoid(), initial_state, cu_seqlens, scale=scale,
            l2norm=use_qk_l2norm_in_kernel,
        )  # fmt: skip

    @kernels.records
    def fused_recurrent_kda(
        q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, ssm_state_indices,
        num_accepted_tokens=None, out=None, fuse_gate=None,
    ):  # fmt: skip
        g = kernels.softplus_gate(raw_g[0], A_log, dt_bias, lower_bound)[None]
        o = kernels.on_pool(
            q, k, v, g, raw_beta.float().sigmoid(), initial_state, cu_seqlens, ssm_state_indices,
            num_accepted_tokens, out=out,
        )  # fmt: skip
        return o, initial_state

    @kernels.records
    def fused_recurrent_kda_packed_decode(
        mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices, scale=None,
        out=None,
    ):  # fmt: skip
        _, heads, _, dim = initial_state.shape
        q, k, v = (x.unflatten(1, (heads, -1))[None] for x in mixed_qkv.split(heads * dim, 1))
        g = kernels.softplus_gate(raw_g[0], A_log, dt_bias, lower_bound)[None]
        o = kernels.on_pool(
            q, k, v, g, raw_beta.float().sigmoid(), initial_state, torch.arange(len(mixed_qkv) + 1),
            state_indices, scale=scale, out=out,
        )  # fmt: skip
        return o, initial_state

    return dict(locals())


@kernels.records
def _flashkda_prefill(
    q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, out, final_state, workspace,
    checkpoint_state=None, checkpoint_offsets=None,
):  # fmt: skip
    g = kernels.softplus_gate(g[0], A_log, dt_bias, lower_bound)[None]
    o, final = kernels.prefill(q, k, v, g, beta.float().sigmoid(), initial_state, cu_seqlens)
    out.copy_(o)
    final_state.copy_(final)
    return out, final_state


def _glm() -> dict[str, Any]:
    @kernels.records
    def chunk_kda_with_fused_gate(
        q, k, v, raw_g, beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, safe_gate=False, lower_bound=-5.0, **kwargs,
    ):  # fmt: skip
        g = kernels.softplus_gate(raw_g[0], A_log, g_bias, lower_bound if safe_gate else None)[None]
        return kernels.prefill(
            q, k, v, g, beta, initial_state, cu_seqlens, scale=scale, l2norm=use_qk_l2norm_in_kernel
        )

    @kernels.records
    def fused_recurrent_kda(
        q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None,
        out=None, sigmoid_beta=False, a_log=None, g_bias=None, compute_gate=False, lower_bound=-5.0,
        **kwargs,
    ):  # fmt: skip
        g = kernels.softplus_gate(g[0], a_log, g_bias, lower_bound)[None] if compute_gate else g
        o = kernels.on_pool(
            q, k, v, g, beta.float().sigmoid() if sigmoid_beta else beta, initial_state, cu_seqlens,
            ssm_state_indices, num_accepted_tokens, scale=scale, l2norm=use_qk_l2norm_in_kernel, out=out,
        )  # fmt: skip
        return o, initial_state

    return dict(locals())


def heads(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = rows.split((H * K, H * K, HV * V), 1)
    return q.unflatten(1, (H, K))[None], k.unflatten(1, (H, K))[None], v.unflatten(1, (HV, V))[None]


# The layer's module


@dataclasses.dataclass
class GDNAttentionMetadata:
    num_prefills: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_actual_tokens: int
    checkpoint: SimpleNamespace | None = None
    has_initial_state: Tensor | None = None
    spec_query_start_loc: Tensor | None = None
    non_spec_query_start_loc: Tensor | None = None
    spec_state_indices_tensor: Tensor | None = None
    non_spec_state_indices_tensor: Tensor | None = None
    spec_sequence_masks: Tensor | None = None
    spec_token_indx: Tensor | None = None
    non_spec_token_indx: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    prefill_query_start_loc: Tensor | None = None
    prefill_state_indices: Tensor | None = None
    prefill_has_initial_state: Tensor | None = None


CONTEXT = SimpleNamespace(attn_metadata=None)
CONVOLUTIONS: list[tuple[str, dict[str, Any]]] = []


def get_forward_context() -> SimpleNamespace:
    return CONTEXT


def is_conv_state_dim_first() -> bool:
    return False


def _convolution(
    name: str, x: Tensor, states: Tensor, weight: Tensor, activation: str, named: dict
) -> Tensor:
    """Only its activation and weights: what a convolution mixes, no caller sees."""
    assert activation == "silu"
    assert weight.shape == (WIDTH, 4)
    assert states.shape[1:] == (WIDTH, 3)
    CONVOLUTIONS.append((name, {key: value for key, value in named.items() if key != "metadata"}))
    return torch.nn.functional.silu(x.float() * weight[:, -1]).to(x.dtype)


def causal_conv1d_fn(x, weight, bias, activation=None, conv_states=None, **named):
    assert x.shape[0] == WIDTH
    return _convolution("fn", x.T, conv_states, weight, activation, named).T


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, **named):
    named = {key: value for key, value in named.items() if key != "validate_data"}
    return _convolution("update", x, conv_state, weight, activation, named)


class MambaPrefillCheckpointExporter:
    def __init__(self, state_len: int) -> None:
        self.state_len, self.exported = state_len, []

    def export(self, checkpoint, *, raw_qkv, conv_state, cu_seqlens, **recurrent) -> None:
        self.exported.append((checkpoint, raw_qkv, conv_state, cu_seqlens, recurrent))


class ChunkGatedDeltaRule(CustomOp):
    def __init__(self) -> None:
        super().__init__()
        self.gdn_prefill_backend = "triton"

    def forward_native(
        self, q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, chunk_indices=None,
        chunk_offsets=None, use_qk_l2norm_in_kernel=True, core_attn_out=None, aiter_prefill_metadata=None,
    ):  # fmt: skip
        kernels.ran.append("forward_native")
        return sys.modules[OPERATORS].chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            core_attn_out=core_attn_out,
        )  # fmt: skip


class QwenGatedDeltaNetAttention(PluggableLayer):
    """vLLM's, but for projections and norm. States are pages of convolution and recurrence."""

    def __init__(self, vllm_config: SimpleNamespace, prefix: str = "layer") -> None:
        super().__init__()
        self.vllm_config, self.prefix, self.activation, self.tp_size = vllm_config, prefix, "silu", 2
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim = 2 * H, 2 * HV, K, V
        self.conv_kernel_size = 4
        draw = torch.Generator(torch.get_default_device()).manual_seed(3)
        self.conv1d = SimpleNamespace(weight=torch.rand(WIDTH, 1, 4, generator=draw) + 0.5, bias=None)
        self.A_log = nn.Parameter(torch.rand(HV, generator=draw), requires_grad=False)
        self.dt_bias = nn.Parameter(
            torch.rand(HV, generator=draw).to(vllm_config.model_config.dtype), requires_grad=False
        )
        self.chunk_gated_delta_rule = ChunkGatedDeltaRule()
        self._checkpoint_alignment: int | None = None
        self.warmed_up = False

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.vllm_config.model_config.dtype, torch.float32

    def bind(self, blocks: int, state: torch.dtype = torch.float32) -> Tensor:
        """A block is a page: the convolution's states, and behind them the recurrence's."""
        sizes = WIDTH * 3 * torch.float32.itemsize, HV * V * K * state.itemsize
        pages = torch.zeros(blocks, sum(sizes), dtype=torch.int8)
        draw = torch.Generator(torch.get_default_device()).manual_seed(5)
        pool = pages[:, sizes[0] :].view(state).view(-1, HV, V, K)
        pool.copy_(torch.randn(blocks, HV, V, K, generator=draw) / 4)
        self.kv_cache = (pages[:, : sizes[0]].view(torch.float32).view(-1, 3, WIDTH), pool)
        return pool

    def _warmup_prefill_kernels(self, qkv_or_qkvz: Tensor, v_dim: int) -> None:
        self.warmed_up = True

    def _can_use_fused_gdn_mtp_decode(self, attn_metadata: GDNAttentionMetadata) -> bool:
        return True

    def _forward_core(self, mixed_qkv, b, a, core_attn_out) -> None:
        ops, m = sys.modules[OPERATORS], (CONTEXT.attn_metadata or {}).get(self.prefix)
        if m is None:
            self._warmup_prefill_kernels(mixed_qkv, 0)
            return
        rows, a, b = (x[: m.num_actual_tokens] for x in (mixed_qkv, a, b))
        states, pool = self.kv_cache[0].transpose(-1, -2), self.kv_cache[1]
        weight, parameters = self.conv1d.weight[:, 0], {"A_log": self.A_log, "dt_bias": self.dt_bias}
        places = m.spec_token_indx, m.non_spec_token_indx
        if m.spec_sequence_masks is None or m.num_prefills == 0:
            places = (torch.arange(len(rows)),) * 2
        if m.spec_sequence_masks is not None:
            drafts, at = m.num_spec_decodes, places[0]
            x = causal_conv1d_update(
                rows[at], states, weight, None, "silu",
                conv_state_indices=m.spec_state_indices_tensor[:drafts, 0],
                num_accepted_tokens=m.num_accepted_tokens, query_start_loc=m.spec_query_start_loc,
                max_query_len=m.spec_state_indices_tensor.size(-1),
            )  # fmt: skip
            q, k, v = heads(x)
            o, _ = ops.fused_sigmoid_gating_delta_rule_update(
                **parameters, a=a[at], b=b[at], q=q, k=k, v=v, initial_state=pool,
                cu_seqlens=m.spec_query_start_loc[: drafts + 1], use_qk_l2norm_in_kernel=True,
                ssm_state_indices=m.spec_state_indices_tensor, num_accepted_tokens=m.num_accepted_tokens,
            )  # fmt: skip
            core_attn_out[at] = o[0].to(core_attn_out.dtype)
        slots = m.non_spec_state_indices_tensor
        if m.num_prefills == 0 and m.num_decodes > 0:
            x = causal_conv1d_update(
                rows, states, weight, None, "silu", conv_state_indices=slots[: len(rows)]
            )
            ops.fused_recurrent_gated_delta_rule_packed_decode(
                x, a, b, **parameters, scale=K**-0.5, initial_state=pool,
                out=core_attn_out[: len(rows)].unsqueeze(1), ssm_state_indices=slots[: len(rows)],
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        if m.num_prefills == 0:
            return
        at = places[1]
        x = causal_conv1d_fn(
            rows[at].T, weight, None, activation="silu", conv_states=states,
            has_initial_state=m.has_initial_state, cache_indices=slots,
            query_start_loc=m.non_spec_query_start_loc, metadata=m,
        ).T  # fmt: skip
        first = m.num_decode_tokens
        if first:
            q, k, v = heads(x[:first])
            o, _ = ops.fused_sigmoid_gating_delta_rule_update(
                **parameters, a=a[:first], b=b[:first], q=q, k=k, v=v, initial_state=pool,
                cu_seqlens=m.non_spec_query_start_loc[: m.num_decodes + 1], ssm_state_indices=slots,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            core_attn_out[:first] = o[0].to(core_attn_out.dtype)
        q, k, v = heads(x[first:])
        initial = pool[m.prefill_state_indices]
        initial[~m.prefill_has_initial_state] = 0
        o, final = self.chunk_gated_delta_rule(
            q=q, k=k, v=v, g=kernels.softplus_gate(a[at][first:], self.A_log, self.dt_bias)[None],
            beta=b[at][first:].float().sigmoid()[None], initial_state=initial, output_final_state=True,
            cu_seqlens=m.prefill_query_start_loc, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        pool[m.prefill_state_indices] = final.to(pool.dtype)
        core_attn_out[at[first:]] = o[0].to(core_attn_out.dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there afterwards, and its modules are imported where they are named."""
    _Replaceable.registry = {}
    kernels.ran.clear()
    CONVOLUTIONS.clear()
    own = globals()
    contents: dict[str, dict[str, Any]] = {
        OPERATORS: {name: own[name] for name in (
            "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule",
            "fused_recurrent_gated_delta_rule_packed_decode", "fused_sigmoid_gating_delta_rule_update",
        )},
        f"{OPERATORS}.kda": {
            name: own[name] for name in ("chunk_kda", "fused_recurrent_kda", "fused_recurrent_kda_fwd")
        },
        f"{KIMI}.ops.third_party.kda": _kimi(),
        f"{KIMI}.kda": {"_flashkda_prefill": _flashkda_prefill},
        f"{GLM}.ops.third_party.kda": _glm(),
        GDN_LAYER: {name: own[name] for name in (
            "ChunkGatedDeltaRule", "GDNAttentionMetadata", "MambaPrefillCheckpointExporter",
            "QwenGatedDeltaNetAttention", "causal_conv1d_fn", "causal_conv1d_update",
            "get_forward_context", "is_conv_state_dim_first",
        )},
        "vllm.model_executor.custom_op": {
            "CustomOp": CustomOp, "PluggableLayer": PluggableLayer, "op_registry_oot": _Replaceable.registry
        },
    }  # fmt: skip
    packages.install(monkeypatch, contents)
