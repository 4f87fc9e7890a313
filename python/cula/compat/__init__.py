# SPDX-License-Identifier: Apache-2.0
"""Modules of other projects, and functions of engines, under their own names."""

from cula.compat import flash_kda, sglang, vllm

__all__ = ["flash_kda", "sglang", "vllm"]
