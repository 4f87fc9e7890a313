# SPDX-License-Identifier: Apache-2.0
from ..lightning import linear_attention_decode

__all__ = ["linear_attention_decode"]
