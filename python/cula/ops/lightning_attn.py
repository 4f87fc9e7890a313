# SPDX-License-Identifier: Apache-2.0
from ..lightning import LinearAttentionChunkwiseDecay, lightning_attn_fwd, lightning_attn_fwd_varlen

__all__ = ["LinearAttentionChunkwiseDecay", "lightning_attn_fwd", "lightning_attn_fwd_varlen"]
