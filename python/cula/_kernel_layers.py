# SPDX-License-Identifier: Apache-2.0
"""Layers for `kernels.kernelize`: prefill and recurrence of the gated delta rule and of Kimi delta attention.
Those of the Hub's kernel (hub/layers.py), and of `cula.integrations.transformers.kernel_mapping`.

Their names and the parameters of `forward` are those of the functions in transformers (5.23) that they stand
for, and of the layers that transformers itself maps to them. query and key are `[B, T, H, K]`, value
`[B, T, HV, V]`, beta `[B, T, HV]`; g, the log decay, is `[B, T, HV]` of the gated delta rule and
`[B, T, HV, K]` of Kimi's; states are `[N, HV, K, V]`. A layer returns o, of value's shape and dtype, and the
final state in float32, or None. It takes any `chunk_size` and goes its own way.

Raise ValueError for a bad argument, and NotImplementedError for packed sequences without `seq_idx`: the
convolution in front of these layers would have mixed neighbouring sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from . import gdn, kda

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
]


def _lengths(given: Mapping[str, Any]) -> Tensor | None:
    """Where sequences of a packed batch begin. Kimi's layer hands the model's name for it on."""
    lengths: Tensor | None = given.get("cu_seqlens")
    if lengths is None:
        lengths = given.get("cu_seq_lens_q")
    if lengths is not None and given.get("seq_idx") is None:
        raise NotImplementedError(
            "packed sequences (cu_seqlens, cu_seq_lens_q) are taken with seq_idx only: without it the "
            "convolution in front of this layer mixes neighbouring sequences"
        )
    return lengths


def _state(initial_state: Tensor | None) -> Tensor | None:
    return None if initial_state is None else initial_state.float()


def _layer(of: type[nn.Module], name: str, doc: str) -> type[nn.Module]:
    of.__name__ = of.__qualname__ = name
    of.__doc__ = doc
    return of


def _over_prompts(name: str, run: Callable[..., Any], doc: str) -> type[nn.Module]:
    class Layer(nn.Module):
        has_backward = True
        can_torch_compile = True

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            chunk_size: int = 64,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            o, final_state, *_ = run(
                query, key, value, g, beta, initial_state=_state(initial_state),
                output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                cu_seqlens=_lengths(kwargs),
            )  # fmt: skip
            return o, final_state

    return _layer(Layer, name, doc)


def _token_after_token(name: str, run: Callable[..., Any], doc: str) -> type[nn.Module]:
    class Layer(nn.Module):
        has_backward = True
        can_torch_compile = True

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            o, final_state = run(
                query, key, value, g, beta=beta, initial_state=initial_state,
                output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                cu_seqlens=_lengths(kwargs),
            )  # fmt: skip
            return o, final_state

    return _layer(Layer, name, doc)


chunk_gated_delta_rule = _over_prompts(
    "chunk_gated_delta_rule",
    gdn.chunk_gated_delta_rule,
    "The gated delta rule over a prompt (Qwen3-Next, Qwen3.5, OLMo-hybrid).",
)
recurrent_gated_delta_rule = _token_after_token(
    "recurrent_gated_delta_rule",
    gdn.fused_recurrent_gated_delta_rule,
    "The gated delta rule token after token: a step of decode. The state is not written in place.",
)
chunk_kimi_delta_attention = _over_prompts(
    "chunk_kimi_delta_attention",
    kda.chunk_kda,
    "Kimi delta attention over a prompt (Kimi-Linear, GLM5-next).",
)
recurrent_kimi_delta_attention = _token_after_token(
    "recurrent_kimi_delta_attention",
    kda.fused_recurrent_kda,
    "Kimi delta attention token after token: a step of decode. The state is not written in place.",
)
