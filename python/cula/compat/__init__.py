# SPDX-License-Identifier: Apache-2.0
"""Modules of other projects, and functions of engines, under their own names."""

from . import flash_kda, sglang, vllm

__all__ = ["flash_kda", "sglang", "vllm"]
